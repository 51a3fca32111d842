"""Writes docs/api.md from the .proto files' own comments: `python docs/make_api.py`. A test keeps it fresh."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
_SOURCE = "coatcheck/proto/stubs/coatcheck.proto"
# Field numbers within descriptor.proto, of which comments' paths are made.
_MESSAGES, _ENUMS, _SERVICES, _METHODS, _FIELDS, _VALUES = 4, 5, 6, 2, 2, 2
_TITLE = """# The API

Generated from [proto/stubs/coatcheck.proto](../proto/stubs/coatcheck.proto) by `python docs/make_api.py`. Package:
`coatcheck.v1`. The default of an optional scalar stands in its comment. Unknown fields are refused.
"""


def describe() -> str:
    """The page."""
    file = _descriptor()
    comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
    return "\n".join([_TITLE, *_services(file, comments), *_messages(file, comments), *_enums(file, comments)])


def _descriptor() -> FileDescriptorProto:
    with tempfile.TemporaryDirectory() as name:
        made = Path(name) / "set"
        include = f"-Icoatcheck/proto={ROOT / 'proto'}"
        flags = ["--include_source_info", f"--descriptor_set_out={made}"]
        if protoc.main(["protoc", include, *flags, _SOURCE]):
            sys.exit("protoc has failed")
        return FileDescriptorSet.FromString(made.read_bytes()).file[0]


Comments = dict[tuple[int, ...], str]


def _services(file: FileDescriptorProto, comments: Comments) -> Iterator[str]:
    for number, service in enumerate(file.service):
        yield f"## Service {service.name}\n"
        yield from _said(comments, _SERVICES, number)
        yield "| method | takes | gives | |\n|---|---|---|---|"
        for index, method in enumerate(service.method):
            gives = ("a stream of " if method.server_streaming else "") + _link(method.output_type)
            said = _line(comments, _SERVICES, number, _METHODS, index)
            yield f"| `{method.name}` | {_link(method.input_type)} | {gives} | {said} |"
        yield ""


def _messages(file: FileDescriptorProto, comments: Comments) -> Iterator[str]:
    for number, message in enumerate(file.message_type):
        yield f"## {message.name}\n"
        yield from _said(comments, _MESSAGES, number)
        if not message.field:
            yield "No fields.\n"
            continue
        yield "| field | type | |\n|---|---|---|"
        for index, field in enumerate(message.field):
            said = _line(comments, _MESSAGES, number, _FIELDS, index)
            yield f"| `{field.name}` | {_type(message, field)} | {said} |"
        yield ""


def _enums(file: FileDescriptorProto, comments: Comments) -> Iterator[str]:
    for number, enum in enumerate(file.enum_type):
        yield f"## {enum.name}\n"
        yield from _said(comments, _ENUMS, number)
        yield "| value | |\n|---|---|"
        yield from _values(enum, comments, number)
        yield ""


def _values(enum: EnumDescriptorProto, comments: Comments, number: int) -> Iterator[str]:
    for index, value in enumerate(enum.value):
        yield f"| `{value.name}` = {value.number} | {_line(comments, _ENUMS, number, _VALUES, index)} |"


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    nested = next((one for one in message.nested_type if field.type_name.endswith(f".{message.name}.{one.name}")), None)
    if nested is not None and nested.options.map_entry:
        return f"map from {_plain(nested.field[0])} to {_plain(nested.field[1])}"
    name = _plain(field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {name}"
    if field.proto3_optional:
        return f"optional {name}"
    if field.HasField("oneof_index"):
        return f"{name}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return name


def _plain(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _link(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _link(type_name: str) -> str:
    name = type_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"


def _said(comments: Comments, *path: int) -> Iterator[str]:
    if said := _line(comments, *path):
        yield f"{said}\n"


def _line(comments: Comments, *path: int) -> str:
    return " ".join(comments.get(path, "").split()).replace("|", "\\|")


if __name__ == "__main__":
    (ROOT / "docs" / "api.md").write_text(describe())
