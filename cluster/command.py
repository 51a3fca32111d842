"""CommandGroup and Command: Typer's classes with readable help, error messages of one line, and exit codes.

Help shows PROMPT instead of Typer's `{prompt}`, and flags without `<bool>`.

A command that fails prints one line on stderr that begins with `error: `. Its exit code:

    2    the command line, a setting, a file or the request is wrong: the same command fails again
    1    anything else, such as: no server answers, the server is full, the key does not allow it, a disk is full
    130  Ctrl-C

`coatcheck serve` exits with 0 after SIGINT or SIGTERM if it has printed its `ready:` line, else with 130.
"""

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from coatcheck.proto.errors import CoatcheckError, InvalidConfig, InvalidModel, InvalidRequest, NotFound

# The base class of usage errors: click's, or that of Typer's copy of click, depending on Typer's version.
_CLICK_ERROR: Final[Any] = typer.BadParameter.__base__
# Errors that the user must correct, found by this process or by the server.
_USAGE_ERRORS: Final = (InvalidConfig, InvalidModel, InvalidRequest, NotFound)

# Min similarity (difflib's ratio) between an unknown flag and a flag that is suggested for it. Click's own 0.6 suggests
# --router-resource for --trust-remote-code.
_NEAR_MISS: Final = 0.8
_NEVER_SUGGESTED: Final = frozenset({"--insecure"})

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2


class Command(TyperCommand):
    """A subcommand with readable help."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _set_metavars(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_flag("--lora-modules", args))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


def repeat_flag(flag: str, arguments: Sequence[str]) -> list[str]:
    """`arguments` with `flag` before each of its values, as Typer requires: `--flag a=x b=y` has two values.

    After the first value, the words that contain = or begin with { are further values. So MODEL may follow them.
    """
    words: list[str] = []
    for index, word in enumerate(arguments):
        if word == "--":
            return [*words, *arguments[index:]]
        follows_value = words[-2:-1] == [flag] or "".join(words[-1:]).startswith(f"{flag}=")
        if follows_value and ("=" in word or word.startswith("{")) and not word.startswith("-"):
            words.append(flag)
        words.append(word)
    return words


class CommandGroup(TyperGroup):
    """The `coatcheck` command: prints errors in one line and sets the exit code."""

    def main(self, *arguments: Any, standalone_mode: bool = True, **options: Any) -> Any:
        run = partial(super().main, *arguments, **{**options, "standalone_mode": False})
        if not standalone_mode:
            return run()
        try:
            code = run()
            sys.stdout.flush()  # here a full disk is an error line; at interpreter exit it would be a traceback
        except CoatcheckError as error:
            code = fail(str(error), EXIT_USAGE if isinstance(error, _USAGE_ERRORS) else EXIT_FAILED)
        except _CLICK_ERROR as error:
            code = fail(_usage_message(error), EXIT_USAGE)
        except UnicodeError as error:
            code = fail(_encoding_message(error), EXIT_USAGE)
        except BrokenPipeError:  # the reader closed the pipe, as `| head` does
            code = EXIT_FAILED
            _discard_stdout()
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            code = fail(f"{where}{error.strerror or error}", EXIT_FAILED)
            _discard_stdout()
        sys.exit(code)

    def get_params(self, ctx: Any) -> list[Any]:
        return _set_metavars(super().get_params(ctx))


def fail(message: str, code: int) -> int:
    """Print `message` as one line, even if it contains line breaks. Return `code`."""
    with contextlib.suppress(OSError):  # the exit code says it too
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _usage_message(error: Any) -> str:
    if getattr(error, "option_name", None) and getattr(error, "possibilities", None):  # a NoSuchOption
        near = difflib.get_close_matches(error.option_name, error.possibilities, cutoff=_NEAR_MISS)
        error.possibilities = [flag for flag in near if flag not in _NEVER_SUGGESTED]
    message = error.format_message().removesuffix(".").removeprefix("Invalid value: ").replace("Value error, ", "")
    if (value := _refused_value(error)) is not None:
        is_nan = isinstance(value, str) and value.strip().lower().lstrip("+-") == "nan"  # fails any bound
        message = re.sub("Input should .*", f"{value} is not a number", message) if is_nan else message
        message = message.replace("Input should", f"{value!r} should")
    command = f"{error.ctx.command_path} --help" if error.ctx else "coatcheck --help"
    return f"{message[:1].lower()}{message[1:]}; see `{command}`"


def _refused_value(error: Any) -> Any:
    """The value that a usage error is about; None if Typer does not tell. Typer checks bounds with pydantic."""
    cause = error.__cause__
    return cause.errors()[0].get("input") if hasattr(cause, "errors") else None


def _encoding_message(error: UnicodeError) -> str:
    if not isinstance(error, UnicodeEncodeError | UnicodeDecodeError):
        return str(error)
    return (
        f"the text {error.object[max(0, error.start - 20) : error.end + 20]!r} is not valid UTF-8; encode it as UTF-8"
    )


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null if it cannot be written, so that Python's flush at exit succeeds."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _set_metavars(params: list[Any]) -> list[Any]:
    """Show an argument as PROMPT, and a flag without a value as the flag alone. Return `params`."""
    for param in params:
        if param.param_type_name == "argument":
            param.metavar = param.metavar or param.name.upper()
        elif getattr(param, "is_flag", False):
            param.metavar = ""
    return params
