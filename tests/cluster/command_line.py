"""run_here: a `coatcheck` command run in the tests' own process, because a process of its own takes a second."""

from dataclasses import dataclass

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
