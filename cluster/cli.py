"""The `coatcheck` command. Only the module of the given subcommand is imported, so that each one starts fast."""

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer

# Each subcommand's module in this package. The module has a function of the subcommand's name.
COMMANDS = {
    "serve": "commands.serve",
    "generate": "commands.generate",
    "status": "commands.status",
    "drain": "commands.status",
    "top": "commands.top",
    "restart": "commands.restart",
    "scale": "commands.scale",
    "explain": "commands.explain",
    "batch": "client.batch",
    "bench": "benchmark.bench",
    "plan": "planner.plan",
    "verify": "commands.verify",
    "convert": "commands.convert",
    "keys": "commands.keys",
    "doctor": "preflight.doctor",
    "logs": "commands.logs",
}


def build_app(arguments: Sequence[str]) -> "typer.Typer":
    """The app with the subcommand that `arguments` begin with, or with all subcommands."""
    import typer

    from coatcheck.cluster.command import Command, CommandGroup

    app = typer.Typer(
        cls=CommandGroup,
        help="Coatcheck: a distributed serving cluster for large language models.",
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    def start(
        version: Annotated[
            bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
        ] = False,
    ) -> None:
        """Coatcheck: a distributed serving cluster for large language models."""

    app.callback()(start)  # without a callback Typer would turn a single subcommand into the app
    wanted = arguments[:1] if arguments and arguments[0] in COMMANDS else list(COMMANDS)
    for name in wanted:
        module = importlib.import_module(f".{COMMANDS[name]}", __package__)
        app.command(name, cls=Command, epilog=getattr(module, "EPILOG", None))(getattr(module, name))
    return app


def main() -> None:
    """Run the command line: the entry point of the console script."""
    _open_closed_streams()
    # Ctrl-C ends the process at once, also during imports, until a command has something to clean up.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # gRPC reads this when it is imported. Its default level prints a line for each server that ends.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from coatcheck.cluster.early_process import start_early_process

    start_early_process(sys.argv[1:])
    from coatcheck.cluster.command import EXIT_USAGE, fail
    from coatcheck.cluster.flag_hints import find_hint

    arguments = sys.argv[1:] or ["--help"]
    if hint := find_hint(arguments):
        sys.exit(fail(hint, EXIT_USAGE))
    build_app(arguments)(arguments, prog_name="coatcheck")


def _open_closed_streams() -> None:
    """Open /dev/null as each standard stream that the caller has closed, as `>&-` does.

    Such a stream is None in Python, and a file or socket that is opened later would get its file descriptor, here and
    in child processes.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115  # open until the process ends
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _show_version(wanted: bool) -> None:
    if wanted:
        import typer

        from coatcheck import __version__

        print(f"coatcheck {__version__}")
        raise typer.Exit
