"""Settings: a pydantic model whose fields are a command's flags, the keys of its YAML file and the rows of its table.

A field is written once, with `setting(panel, description, default, **bounds)`. From the fields come

    the flags        with_flags(ServeConfig), a decorator of the Typer command
    the values       ServeConfig.build(flags, file), which refuses unknown names and wrong values
    --help           the description and the default
    docs/settings.md the description and the default; a test compares them
"""

import difflib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, get_args

import typer
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from coatcheck.proto.errors import InvalidConfig


def setting(panel: str, description: str, default: Any, *, in_words: str = "", metavar: str = "", **bounds: Any) -> Any:
    """A field of Settings.

    panel: the heading in --help. in_words: the default in --help and docs/settings.md, if str(default) is not clear.
    metavar: for a flag that takes several values: what --help shows for them. The field gets a list.
    """
    extra: dict[str, Any] = {"panel": panel, "in_words": in_words, "metavar": metavar}
    return Field(default, description=description, json_schema_extra=extra, **bounds)


class Settings(BaseModel):
    """Base class of the settings of a command. Frozen; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @classmethod
    def build(cls, flags: dict[str, Any], file: Path | None = None) -> Self:
        """The settings of `file`, overridden by `flags`. A flag that is None or empty was not given.

        Raises InvalidConfig. Its message names each wrong setting, and the file if the value came from there.
        """
        settings = read_settings(file.expanduser()) if file else {}
        given = {name: value for name, value in flags.items() if value not in (None, [], ())}
        settings |= given
        for name in settings:
            if name not in cls.model_fields:
                raise InvalidConfig(f"{file}: unknown setting {name!r}; {_suggest(name, list(cls.model_fields))}")
        try:
            return cls(**settings)
        except ValidationError as error:
            messages = []
            for item in error.errors():
                is_from_file = file is not None and _setting_name(item) not in given
                messages.append(f"{file}: {_describe_error(item)}" if is_from_file else _describe_error(item))
            raise InvalidConfig("; ".join(messages)) from None

    @model_validator(mode="before")
    @classmethod
    def _refuse_switches_as_values(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """YAML's true is 1 to pydantic: `groups: true` would be one group."""
        switches = {name for name, field in cls.model_fields.items() if field.annotation is bool}
        for name, value in settings.items():
            if isinstance(value, bool) and name in cls.model_fields.keys() - switches:
                raise ValueError(f"{name.replace('_', '-')} is {value}; it is not a switch: give it a value")
        return settings


def with_flags(settings: type[Settings]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a Typer command so that its **flags hold one flag for each field of `settings`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters
        parameters = [
            *(_parameter(name, field, has_file="config" in own) for name, field in settings.model_fields.items()),
            *(parameter for parameter in own.values() if parameter.kind is not parameter.VAR_KEYWORD),
        ]
        return set_parameters(command, parameters)

    return decorate


def set_parameters(command: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """Make Typer see `parameters` instead of the command's own. Return `command`."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameter(name: str, field: FieldInfo, *, has_file: bool) -> inspect.Parameter:
    """The Typer parameter of a field: an argument if the setting is required, else an option.

    `has_file`: the command has --config, so that a required setting may be in the file instead.
    """
    kind: Any = _flag_type(field)
    if field.is_required():
        option: Any = typer.Argument(help=field.description)
    else:
        names = [flag_name(name)] if field.default is False else []  # Typer would add --no-NAME
        text = str(field.description)
        if kind is not bool:
            text += f" Default: {default_in_words(field)}."
        text = text.replace("[", r"\[")  # rich reads [otel] as a style
        metavar = _extra(field)["metavar"] or None
        option = typer.Option(*names, help=text, rich_help_panel=_extra(field)["panel"], metavar=metavar)
    default: Any = inspect.Parameter.empty if field.is_required() and not has_file else None
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def flag_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _flag_type(field: FieldInfo) -> Any:
    """The type to which Typer converts the flag's value: str if a validator of the field parses the text."""
    if not field.is_required() and _extra(field)["metavar"]:
        return list[str]
    if any(isinstance(item, BeforeValidator) for item in field.metadata):
        return str
    # Of a union also its members, of a Literal its values, and of Annotated its type.
    members = get_args(field.annotation)
    values = (field.annotation, *members, *(getattr(member, "__origin__", None) for member in members))
    for kind in (bool, int, float):
        if kind in values or any(isinstance(value, kind) for value in values):
            return kind
    return str


def default_in_words(field: FieldInfo) -> str:
    """The default of a setting as --help and docs/settings.md show it."""
    if text := _extra(field)["in_words"]:
        return text
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    if field.default is None:
        return "none"
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


def _extra(field: FieldInfo) -> dict[str, str]:
    assert isinstance(field.json_schema_extra, dict), "a setting is written with setting()"
    return {name: str(value) for name, value in field.json_schema_extra.items()}


def read_settings(file: Path) -> dict[str, Any]:
    """The settings of a YAML file. Dashes in names become underscores. Raises InvalidConfig, also for a name that the
    file has twice."""
    import yaml  # only a command with --config needs it

    try:
        text = file.read_text()
        loaded, written = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise InvalidConfig(f"{file}: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a number with thousands of digits
        raise InvalidConfig(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if loaded is None:
        return {}
    if not (isinstance(loaded, dict) and isinstance(written, yaml.MappingNode)):
        raise InvalidConfig(f"{file} must hold settings, one `name: value` a line")
    lines: dict[str, int] = {}
    for key, _ in written.value:
        name, line = str(key.value).replace("-", "_"), key.start_mark.line + 1
        if name in lines:  # YAML's parser would take the last one
            raise InvalidConfig(f"{file}: {key.value} is in line {lines[name]} and again in line {line}; leave one out")
        lines[name] = line
    return {str(name).replace("-", "_"): value for name, value in loaded.items()}


def _suggest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"


def _describe_error(item: Any) -> str:
    """The message for one of pydantic's errors. The setting has the name of its flag."""
    message = str(item["msg"]).removeprefix("Value error, ").replace("Input should", "it should")
    if not item["loc"]:
        return message
    name = _setting_name(item).replace("_", "-")
    if item["type"] == "missing":
        return f"no {name} given; pass {name.upper()} or set it in --config"
    if item["input"] is None:  # `name:` in a YAML file
        return f"{name} has no value; give it one, or leave it out"
    return f"{name} is {item['input']!r}; {message}"


def _setting_name(item: Any) -> str:
    return str(item["loc"][0]) if item["loc"] else ""
