"""Command: help written as people write it: PROMPT where Typer has `{prompt}`, and flags without `<bool>`."""

from typing import Any

from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    """One subcommand."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


class CommandGroup(TyperGroup):
    """`coatcheck` itself."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))


def _plain(params: list[Any]) -> list[Any]:
    for param in params:
        if param.param_type_name == "argument":
            param.metavar = param.metavar or param.name.upper()
        elif getattr(param, "is_flag", False):
            param.metavar = ""
    return params
