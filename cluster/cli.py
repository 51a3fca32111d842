"""The `coatcheck` command. A subcommand's module is imported when it is the one asked for, so that each starts fast."""

import importlib
import sys
from collections.abc import Sequence

import typer

# name -> module in this room with a function of that name
COMMANDS = {
    "serve": "serve",
    "generate": "generate",
    "status": "status",
    "drain": "status",
    "explain": "explain",
    "bench": "bench",
    "plan": "plan",
}


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The app with the subcommand that `arguments` begin with, or with all of them when they begin with none."""
    app = typer.Typer(
        help="Coatcheck: a distributed serving cluster for large language models.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_callback)  # with a callback, one subcommand alone stays a subcommand
    wanted = arguments[:1] if arguments and arguments[0] in COMMANDS else list(COMMANDS)
    for name in wanted:
        module = importlib.import_module(f".{COMMANDS[name]}", __package__)
        app.command(name)(getattr(module, name))
    return app


def main() -> None:
    """The console script."""
    build_app(sys.argv[1:])()


def _callback() -> None:
    """Coatcheck: a distributed serving cluster for large language models."""
