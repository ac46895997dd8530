"""One field of a section: how it is declared, named, read and shown."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["PREFIX", "Field", "fields_of", "setting", "show", "to_text"]

#: What the names of our environment variables begin with.
PREFIX = "HEADRACE_"

_HIDDEN = "(hidden)"
_VALUE_CHARS_MAX = 100


def setting(
    default: Any,
    doc: str,
    *,
    min: float | None = None,
    max: float | None = None,
    choices: Sequence[str] | None = None,
    secret: bool = False,
) -> Any:
    """Declare a field of a section; bounds are inclusive and hold for each item of a tuple.

    The field's annotation is its type: bool, int, float, str, a tuple of one of them, or any of these `| None`.
    """
    return dataclasses.field(
        default=default,
        repr=not secret,
        metadata={"doc": doc, "min": min, "max": max, "choices": choices, "secret": secret},
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One setting: its names, its type and what it may be."""

    section: str
    name: str
    item: type[Any]
    many: bool
    optional: bool
    default: Any
    doc: str
    min: float | None
    max: float | None
    choices: tuple[str, ...] | None
    secret: bool

    @property
    def key(self) -> str:
        """Return the dotted path."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def environ(self) -> str:
        """Return the name of its variable."""
        return PREFIX + self.key.replace(".", "_").upper()

    @property
    def type_name(self) -> str:
        """Return its type in words."""
        name = f"list of {self.item.__name__}" if self.many else self.item.__name__
        return f"{name} or nothing" if self.optional else name

    def allowed(self) -> str:
        """Return its range or choices in words; "" where there are none."""
        if self.choices:
            return ", ".join(self.choices)
        if self.min is not None and self.max is not None:
            return f"{self.min:g} to {self.max:g}" if self.max < 1e6 else f"{self.min} to {self.max}"
        if self.min is not None:
            return f"at least {self.min}"
        return f"at most {self.max}" if self.max is not None else ""

    def wanted(self) -> str:
        """Return what a fault says is wanted."""
        allowed = self.allowed()
        return f"wanted {self.type_name}" + (f", {allowed}" if allowed else "")

    def parse(self, raw: Any, *, typed: bool) -> tuple[Any, str]:
        """Return (value, "") or (None, why not).

        `typed`: it comes from TOML, which has types of its own; otherwise it may be text that spells the value.
        """
        if typed and isinstance(raw, str) and (self.many or self.item is not str):
            return None, "; write a list" if self.many else "; write it without quotes"
        if self.many:
            if isinstance(raw, str):
                raw = [part.strip() for part in raw.split(",") if part.strip()]
            if not isinstance(raw, list | tuple):
                return None, "; write a list"
            parsed = [self._one(part) for part in raw]
            wrong = next((why for _, why in parsed if why), "")
            return (None, wrong) if wrong else (tuple(value for value, _ in parsed), "")
        return self._one(raw)

    def _one(self, raw: Any) -> tuple[Any, str]:
        value = _PARSERS[self.item](raw)
        if value is None:
            return None, "; this is not one"
        if self.choices is not None and value not in self.choices:
            close = difflib.get_close_matches(str(value), self.choices, n=1)
            return None, f"; did you mean {close[0]}?" if close else "; it is not one of them"
        if self.item in (int, float) and not self._within(value):
            return None, "; it is out of range"
        return value, ""

    def _within(self, value: float) -> bool:
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)


def fields_of(kind: type[Any]) -> tuple[Field, ...]:
    """Return the fields of a section. Raises TypeError for one that is not made with `setting()`."""
    hints = typing.get_type_hints(kind)
    return tuple(_field(kind, field, hints[field.name]) for field in dataclasses.fields(kind))


def _field(kind: type[Any], field: dataclasses.Field[Any], hint: Any) -> Field:
    optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [part for part in typing.get_args(hint) if part is not type(None)]
        optional, hint = True, inner[0]
    many = typing.get_origin(hint) is tuple
    item = typing.get_args(hint)[0] if many else hint
    if item not in _PARSERS or "doc" not in field.metadata:
        raise TypeError(f"{kind.__name__}.{field.name}: declare it with setting() and a type that settings have")
    return Field(
        section=kind.section,
        name=field.name,
        item=item,
        many=many,
        optional=optional,
        default=field.default,
        doc=field.metadata["doc"],
        min=field.metadata["min"],
        max=field.metadata["max"],
        choices=tuple(field.metadata["choices"]) if field.metadata["choices"] else None,
        secret=field.metadata["secret"],
    )


_BOOLS = {"true": True, "yes": True, "on": True, "1": True} | dict.fromkeys(("false", "no", "off", "0"), False)


def _to_bool(raw: Any) -> bool | None:
    if isinstance(raw, bool):
        return raw
    return _BOOLS.get(raw.strip().lower()) if isinstance(raw, str) else None


def _to_int(raw: Any) -> int | None:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and re.fullmatch(r"\s*[+-]?[0-9][0-9_]{0,30}\s*", raw):
        return int(raw.replace("_", ""))
    return None


def _to_float(raw: Any) -> float | None:
    if isinstance(raw, str):
        try:
            raw = float(raw)
        except ValueError:
            return None
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not math.isfinite(raw):
        return None
    return float(raw)


def _to_str(raw: Any) -> str | None:
    # A line break or a NUL in a setting is an accident of quoting, and it would break whatever line it lands on.
    return raw if isinstance(raw, str) and not re.search(r"[\0\r\n]", raw) else None


_PARSERS: dict[type[Any], Callable[[Any], Any]] = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str}


def to_text(value: Any) -> str:
    """Return the text that a variable would hold for this value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(to_text(part) for part in value)
    return "" if value is None else str(value)


def show(value: Any, secret: bool) -> str:
    """Return a value for people: on one line, short, and hidden where it is a secret."""
    if secret:
        return _HIDDEN if value else ""
    shown = to_text(value) if isinstance(value, bool | tuple | None) else str(value)
    shown = shown if shown.isprintable() else ascii(shown)
    return shown if len(shown) <= _VALUE_CHARS_MAX else f"{shown[:_VALUE_CHARS_MAX]}…"
