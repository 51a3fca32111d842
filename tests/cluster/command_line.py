"""run_here: a `coatcheck` command run in the tests' own process, because a process of its own takes a second.
flags_of: the flags of a command."""

from dataclasses import dataclass
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from coatcheck.cluster.cli import build_app


@dataclass(frozen=True)
class CommandResult:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


def run_here(*arguments: str, stdin: str = "", environment: dict[str, str] | None = None) -> CommandResult:
    """Run `coatcheck ARGUMENTS` to its end. Not for a command that installs signal handlers, such as `serve`."""
    app = build_app(arguments)
    done = CliRunner().invoke(app, list(arguments), input=stdin, env=environment, prog_name="coatcheck")
    return CommandResult(done.exit_code, done.stdout, done.stderr)


def command_of(name: str) -> Any:
    """The subcommand as Typer has built it."""
    app: Any = get_command(build_app([name]))
    return app.commands[name]


def flags_of(command: str) -> set[str]:
    """Each flag that `coatcheck COMMAND --help` lists."""
    params = command_of(command).params
    return {"--help", *(flag for param in params for flag in (*param.opts, *param.secondary_opts))}
