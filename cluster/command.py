"""Command: help written as people write it (PROMPT where Typer has `{prompt}`, flags without `<bool>`), and failures.

Whatever goes wrong ends as one line on stderr that begins with `error: `, with 2 where a word of the command or a
setting is wrong, and with 1 for what the world refuses.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from ..proto.errors import CoatcheckError, InvalidConfig, InvalidModel

# Typer's root of what is written wrongly: of click's, or of its own copy of that, as its version has it.
_WRONG_USAGE: Final[Any] = typer.BadParameter.__base__


class Command(TyperCommand):
    """One subcommand."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


class CommandGroup(TyperGroup):
    """`coatcheck` itself."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        run = partial(super().main, args, prog_name, complete_var, False, windows_expand_args, **extra)
        if not standalone_mode:
            return run()
        try:
            code = run()
        except CoatcheckError as error:
            code = fail(str(error), 2 if isinstance(error, InvalidConfig | InvalidModel) else 1)
        except _WRONG_USAGE as error:
            code = fail(_in_words(error), 2)
        sys.exit(code)

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))


def fail(message: str, code: int) -> int:
    """Says it in one line, whatever a library has to say; gives back `code`."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _in_words(error: Any) -> str:
    said = error.format_message().removesuffix(".").removeprefix("Invalid value: ").replace("Value error, ", "")
    command = f"{error.ctx.command_path} --help" if error.ctx else "coatcheck --help"
    return f"{said[:1].lower()}{said[1:]}; see `{command}`"


def _plain(params: list[Any]) -> list[Any]:
    for param in params:
        if param.param_type_name == "argument":
            param.metavar = param.metavar or param.name.upper()
        elif getattr(param, "is_flag", False):
            param.metavar = ""
    return params
