"""The protocol's messages, made from `protos/*.proto` in a descriptor pool of our own.

protobuf lets a process have the package `inference` once in its default pool: generated stubs of ours would clash
with those of tritonclient, mlserver and KServe, and nobody could import headrace beside them. Stubs would also tie us
to the protobuf release that made them. So the files are read here; the reader knows as much of the language as they
use (messages, enums, oneofs, maps, services), and a test compares every field with tritonclient's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["INFERENCE", "Messages", "Method", "messages"]

#: The service that clients of the protocol call.
INFERENCE = "inference.GRPCInferenceService"

_FILES = ("inference", "health", "reflection")
_FOLDER = Path(__file__).parent / "protos"
_TOKEN = re.compile(r'"[^"]*"|[\w.]+|[{}=;<>,()]')
_COMMENT = re.compile(r"//[^\n]*")
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_FIELD, f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")
}


@dataclass(frozen=True, slots=True)
class Method:
    """One method of a service; `path` is what goes over the wire."""

    path: str
    name: str
    request: Any
    response: Any
    client_streams: bool
    server_streams: bool


class Messages:
    """All message classes by their full names, and the methods of all services."""

    def __init__(self) -> None:
        """Read the files."""
        self.pool = descriptor_pool.DescriptorPool()
        self.services: list[str] = []
        texts = {f"{name}.proto": (_FOLDER / f"{name}.proto").read_text("utf-8") for name in _FILES}
        reflection = texts["reflection.proto"]
        texts["reflection_alpha.proto"] = reflection.replace("grpc.reflection.v1;", "grpc.reflection.v1alpha;")
        for name, text in texts.items():
            file = _Reader(text).file(f"headrace/{name}")
            self.pool.AddSerializedFile(file.SerializeToString())
            self.services += [f"{file.package}.{service.name}" for service in file.service]

    def __getitem__(self, name: str) -> Any:
        """Return the class of a message. Raises KeyError for one that there is not."""
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(name))

    def methods(self, service: str) -> dict[str, Method]:
        """Return the methods of a service by their names."""
        found = self.pool.FindServiceByName(service)
        return {
            method.name: Method(
                f"/{service}/{method.name}",
                method.name,
                message_factory.GetMessageClass(method.input_type),
                message_factory.GetMessageClass(method.output_type),
                method.client_streaming,
                method.server_streaming,
            )
            for method in found.methods
        }


@cache
def messages() -> Messages:
    """Return the messages; they are made once, on first use."""
    return Messages()


class _Reader:
    """Reads one file of the subset that ours are written in."""

    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(_COMMENT.sub("", text))
        self._at = 0

    def file(self, name: str) -> Any:
        file = descriptor_pb2.FileDescriptorProto(name=name, syntax="proto3")
        while self._at < len(self._tokens):
            word = self._next()
            if word == "syntax":
                self._skip("=", '"proto3"', ";")
            elif word == "package":
                file.package = self._next()
                self._skip(";")
            elif word == "message":
                self._message(file.message_type.add())
            elif word == "enum":
                self._enum(file.enum_type.add())
            elif word == "service":
                self._service(file.service.add())
            else:
                raise ValueError(f"{name}: {word} is not understood here")
        _resolve(file)
        return file

    def _next(self) -> str:
        self._at += 1
        return str(self._tokens[self._at - 1])

    def _skip(self, *expected: str) -> None:
        for want in expected:
            if (found := self._next()) != want:
                raise ValueError(f"expected {want}, got {found}")

    def _until_brace(self) -> bool:
        if self._tokens[self._at] != "}":
            return True
        self._at += 1
        return False

    def _message(self, message: Any) -> None:
        message.name = self._next()
        self._skip("{")
        while self._until_brace():
            word = self._next()
            if word == "message":
                self._message(message.nested_type.add())
            elif word == "enum":
                self._enum(message.enum_type.add())
            elif word == "oneof":
                message.oneof_decl.add(name=self._next())
                self._skip("{")
                while self._until_brace():
                    self._field(message, self._next()).oneof_index = len(message.oneof_decl) - 1
            elif word == "map":
                self._map(message)
            else:
                self._field(message, word)

    def _field(self, message: Any, word: str) -> Any:
        field = message.field.add(label=_FIELD.LABEL_OPTIONAL)
        if word == "repeated":
            field.label, word = _FIELD.LABEL_REPEATED, self._next()
        _set_type(field, word)
        field.name = self._next()
        self._skip("=")
        field.number = int(self._next())
        self._skip(";")
        return field

    def _map(self, message: Any) -> None:
        """Read `map<K, V> name = 1;`, which on the wire is a repeated message of two fields."""
        self._skip("<")
        key = self._next()
        self._skip(",")
        value = self._next()
        self._skip(">")
        entry = message.nested_type.add()
        for number, (name, word) in enumerate((("key", key), ("value", value)), 1):
            _set_type(entry.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL), word)
        entry.options.map_entry = True
        name = self._next()
        entry.name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
        self._skip("=")
        field = message.field.add(name=name, number=int(self._next()), label=_FIELD.LABEL_REPEATED)
        field.type_name = entry.name
        self._skip(";")

    def _enum(self, enum: Any) -> None:
        enum.name = self._next()
        self._skip("{")
        while self._until_brace():
            value = enum.value.add(name=self._next())
            self._skip("=")
            value.number = int(self._next())
            self._skip(";")

    def _service(self, service: Any) -> None:
        service.name = self._next()
        self._skip("{")
        while self._until_brace():
            self._skip("rpc")
            method = service.method.add(name=self._next())
            method.client_streaming, method.input_type = self._side()
            self._skip("returns")
            method.server_streaming, method.output_type = self._side()
            self._skip(";")

    def _side(self) -> tuple[bool, str]:
        self._skip("(")
        word = self._next()
        streams = word == "stream"
        word = self._next() if streams else word
        self._skip(")")
        return streams, word


def _set_type(field: Any, word: str) -> None:
    if word in _SCALARS:
        field.type = _SCALARS[word]
    else:
        field.type_name = word


def _resolve(file: Any) -> None:
    """Write the full name of every type that a field or a method names, looking from the inside out."""
    kinds: dict[str, int] = {}

    def note(scope: str, message: Any) -> None:
        name = f"{scope}.{message.name}"
        kinds[name] = _FIELD.TYPE_MESSAGE
        kinds.update({f"{name}.{enum.name}": _FIELD.TYPE_ENUM for enum in message.enum_type})
        for nested in message.nested_type:
            note(name, nested)

    def find(scope: str, word: str) -> str:
        while scope:
            if f"{scope}.{word}" in kinds:
                return f"{scope}.{word}"
            scope = scope.rpartition(".")[0]
        raise ValueError(f"{file.name}: there is no type {word}")

    def mend(scope: str, message: Any) -> None:
        name = f"{scope}.{message.name}"
        for field in message.field:
            if field.type_name:
                field.type_name = find(name, field.type_name)
                field.type = kinds[field.type_name]
        for nested in message.nested_type:
            mend(name, nested)

    package = f".{file.package}"
    kinds.update({f"{package}.{enum.name}": _FIELD.TYPE_ENUM for enum in file.enum_type})
    for message in file.message_type:
        note(package, message)
    for message in file.message_type:
        mend(package, message)
    for service in file.service:
        for method in service.method:
            method.input_type = find(package, method.input_type)
            method.output_type = find(package, method.output_type)
