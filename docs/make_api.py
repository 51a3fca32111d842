"""Writes docs/api.md from the comments of coatcheck.proto: `python docs/make_api.py`. A test compares the two."""

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
# Field numbers in descriptor.proto. The path of a comment consists of them and of indices.
_MESSAGES, _ENUMS, _SERVICES, _METHODS, _FIELDS, _VALUES = 4, 5, 6, 2, 2, 2
_TITLE = """# The API

Generated from [proto/stubs/coatcheck.proto](../proto/stubs/coatcheck.proto) by `python docs/make_api.py`. Package:
`coatcheck.v1`. The router refuses unknown fields.
"""


def describe() -> str:
    """The text of docs/api.md."""
    file = _descriptor()
    comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
    return "\n".join([_TITLE, *_services(file, comments), *_messages(file, comments), *_enums(file, comments)])


def _descriptor() -> FileDescriptorProto:
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "set"
        include = f"-Icoatcheck/proto={ROOT / 'proto'}"
        flags = ["--include_source_info", f"--descriptor_set_out={output}"]
        if protoc.main(["protoc", include, *flags, _SOURCE]):
            sys.exit("protoc has failed")
        return FileDescriptorSet.FromString(output.read_bytes()).file[0]


Comments = dict[tuple[int, ...], str]


def _services(file: FileDescriptorProto, comments: Comments) -> Iterator[str]:
    for number, service in enumerate(file.service):
        yield f"## Service {service.name}\n"
        yield from _paragraph(comments, _SERVICES, number)
        yield "| method | request | response | description |\n|---|---|---|---|"
        for index, method in enumerate(service.method):
            response = ("a stream of " if method.server_streaming else "") + _link(method.output_type)
            text = _line(comments, _SERVICES, number, _METHODS, index)
            yield f"| `{method.name}` | {_link(method.input_type)} | {response} | {text} |"
        yield ""


def _messages(file: FileDescriptorProto, comments: Comments) -> Iterator[str]:
    for number, message in enumerate(file.message_type):
        yield f"## {message.name}\n"
        yield from _paragraph(comments, _MESSAGES, number)
        if not message.field:
            yield "No fields.\n"
            continue
        yield "| field | type | description |\n|---|---|---|"
        for index, field in enumerate(message.field):
            text = _line(comments, _MESSAGES, number, _FIELDS, index)
            yield f"| `{field.name}` | {_type(message, field)} | {text} |"
        yield ""


def _enums(file: FileDescriptorProto, comments: Comments) -> Iterator[str]:
    for number, enum in enumerate(file.enum_type):
        yield f"## {enum.name}\n"
        yield from _paragraph(comments, _ENUMS, number)
        yield "| value | description |\n|---|---|"
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


def _paragraph(comments: Comments, *path: int) -> Iterator[str]:
    if text := _line(comments, *path):
        yield f"{text}\n"


def _line(comments: Comments, *path: int) -> str:
    return " ".join(comments.get(path, "").split()).replace("|", "\\|")


if __name__ == "__main__":
    (ROOT / "docs" / "api.md").write_text(describe())
