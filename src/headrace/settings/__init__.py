"""Settings: how they are found and checked. Each room declares its own frozen section beside its code.

A section is a frozen dataclass whose fields are made with `setting()` and whose class attribute `section` says
where it stands: `"ingest"`, or `""` for the root. Its names follow from that: `queue_length_max` of `ingest` is
`HEADRACE_INGEST_QUEUE_LENGTH_MAX` in the environment and `queue_length_max` under `[ingest]` in the file.
Flag > environment > file > default. Every fault is found in one go and none is guessed away.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from headrace.settings.fields import PREFIX, Field, fields_of, setting, show, to_text

__all__ = [
    "FILE_NAME",
    "OTHER_NAMES",
    "PRIVATE_PREFIX",
    "Fault",
    "RootSettings",
    "Row",
    "Section",
    "Settings",
    "SettingsError",
    "describe",
    "load",
    "setting",
]

#: Read from the working directory where no `--config` and no HEADRACE_CONFIG names another.
FILE_NAME = "headrace.toml"

#: Names in the environment that are ours without being settings.
OTHER_NAMES = frozenset({"HEADRACE_CONFIG", "HEADRACE_CRASH_AT", "HEADRACE_KAFKA_HOME"})

#: Names between our own processes (a parent telling its child a file descriptor); never a fault.
PRIVATE_PREFIX = "HEADRACE__"


class Section(Protocol):
    """A frozen dataclass of settings; `section` is its path ("" is the root).

    It may have a method `faults()` that yields (field, what is wrong) for what one field alone cannot tell.
    """

    section: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


S = TypeVar("S", bound=Section)


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: which key, where it came from, what it was and what is wanted."""

    key: str
    source: str
    value: str
    wanted: str

    def __str__(self) -> str:
        shown = f" = {self.value}" if self.value else ""
        return f"{self.key}{shown} ({self.source}): {self.wanted}"


class SettingsError(Exception):
    """The settings are wrong; every fault is listed. Not an error of the wire: nothing has started yet."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


@dataclasses.dataclass(frozen=True, slots=True)
class RootSettings:
    """What every service needs to know."""

    section: ClassVar[str] = ""

    data: str = setting("data", "Folder for everything that is kept on this machine.")
    broker: str = setting("", "Where topics live: an URL. Empty: `sqlite:///{data}/headrace.db`.")
    store: str = setting("", "Where results live: an URL. Empty: `sqlite:///{data}/headrace.db`.")
    host: str = setting("127.0.0.1", "Address that the data listener binds.")
    port: int = setting(8000, "Port of the data listener; 0 takes a free one.", min=0, max=65535)
    grpc_port: int | None = setting(
        None, "Port of the gRPC listener, at the same address; 0 takes a free one, nothing: no gRPC.", min=0, max=65535
    )
    admin_port: int = setting(0, "Port of the admin listener, on loopback; 0: none.", min=0, max=65535)
    workers: int = setting(1, "Runners (serve) or inference processes (up).", min=1, max=256)
    model_path: str = setting(".", "Folder that relative paths of models start from.")
    log_level: str = setting(
        "info", "Least serious log line that is written.", choices=("debug", "info", "warning", "error")
    )

    @property
    def broker_url(self) -> str:
        """Return the broker's URL, the default one included."""
        return self.broker or f"sqlite:///{self.data}/headrace.db"

    @property
    def store_url(self) -> str:
        """Return the store's URL, the default one included."""
        return self.store or f"sqlite:///{self.data}/headrace.db"


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One setting, as the documentation and `headrace check` show it."""

    key: str
    environ: str
    type: str
    default: str
    #: Range or choices; "" where anything of the type will do.
    allowed: str
    doc: str
    secret: bool


class Settings:
    """The sections by their type: `settings[RootSettings].port`. Immutable."""

    def __init__(self, sections: Mapping[type[Any], Any], sources: Mapping[str, str]) -> None:
        self._sections = dict(sections)
        self._sources = dict(sources)

    def __getitem__(self, kind: type[S]) -> S:
        found: S = self._sections[kind]
        return found

    def __contains__(self, kind: object) -> bool:
        return kind in self._sections

    def __repr__(self) -> str:
        return f"Settings({', '.join(repr(section) for section in self._sections.values())})"

    def source(self, key: str) -> str:
        """Return where the value of a dotted key came from: a flag, a variable, the file's name or "default"."""
        return self._sources.get(key, "default")

    def values(self) -> list[tuple[str, str, str]]:
        """Return (key, value, source) of every setting in declared order; secrets are hidden."""
        return [
            (field.key, show(getattr(section, field.name), field.secret), self.source(field.key))
            for kind, section in self._sections.items()
            for field in fields_of(kind)
        ]

    def environ(self) -> dict[str, str]:
        """Return the variables that give a child process the same settings; secrets are in it."""
        return {
            field.environ: to_text(getattr(section, field.name))
            for kind, section in self._sections.items()
            for field in fields_of(kind)
            if self.source(field.key) != "default"
        }


def load(
    sections: Sequence[type[Any]],
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | str | None = None,
) -> Settings:
    """Find and check every setting of `sections`. Raises SettingsError with all faults at once.

    `flags` has dotted keys (`port`, `ingest.wait_s`), None meaning not given. `file` None means HEADRACE_CONFIG,
    else `headrace.toml` in the working directory if it is there. Hand in every section that exists, also in a
    service that needs two of them: an unknown key is a fault, and one environment serves all services.
    """
    variables = dict(environ or {})
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    faults: list[Fault] = []
    tree, file_name = _read_file(file, variables, faults)
    known = {field.key: field for kind in sections for field in fields_of(kind)}
    written = _flatten(tree, {field.section for field in known.values()})
    _find_unknown(known, given, variables, written, file_name, faults)

    sources: dict[str, str] = {}
    made: dict[type[Any], Any] = {}
    for kind in sections:
        values: dict[str, Any] = {}
        before = len(faults)
        for field in fields_of(kind):
            found = _look(field, given, variables, written, file_name)
            if found is None:
                continue
            raw, source = found
            value, wanted = field.parse(raw, typed=source == file_name)
            if wanted:
                faults.append(Fault(field.key, source, show(raw, field.secret), f"{field.wanted()}{wanted}"))
            else:
                values[field.name] = value
                sources[field.key] = source
        made[kind] = kind(**values)
        if len(faults) == before and hasattr(kind, "faults"):
            for name, wanted in made[kind].faults():
                field = next(field for field in fields_of(kind) if field.name == name)
                shown = show(getattr(made[kind], name), field.secret)
                faults.append(Fault(field.key, sources.get(field.key, "default"), shown, wanted))
    if faults:
        raise SettingsError(faults)
    return Settings(made, sources)


def describe(sections: Sequence[type[Any]]) -> list[Row]:
    """Return one row for each setting, in declared order; what docs/settings.md is made of."""
    return [
        Row(
            key=field.key,
            environ=field.environ,
            type=field.type_name,
            default=show(field.default, field.secret),
            allowed=field.allowed(),
            doc=field.doc,
            secret=field.secret,
        )
        for kind in sections
        for field in fields_of(kind)
    ]


# -- where values come from -------------------------------------------------------------------------------


def _read_file(
    file: Path | str | None, variables: Mapping[str, str], faults: list[Fault]
) -> tuple[dict[str, Any], str]:
    named = file or variables.get("HEADRACE_CONFIG")
    path = Path(named or FILE_NAME)
    if not named and not path.is_file():
        return {}, FILE_NAME
    source = "--config" if file else "HEADRACE_CONFIG" if named else "working directory"
    try:
        return tomllib.loads(path.read_text("utf-8")), path.name
    except OSError as error:
        faults.append(Fault("config", source, str(path), f"wanted a readable file; {error.strerror}"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        faults.append(Fault("config", source, str(path), f"wanted TOML; {error}"))
    return {}, path.name


def _flatten(tree: Mapping[str, Any], sections: Collection[str], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{path}.{name}" if path else name
        if isinstance(value, Mapping):
            flat |= _flatten(value, sections, key) or ({} if key in sections else {key: value})
        else:
            flat[key] = value
    return flat


def _look(
    field: Field,
    flags: Mapping[str, Any],
    variables: Mapping[str, str],
    written: Mapping[str, Any],
    file_name: str,
) -> tuple[Any, str] | None:
    if field.key in flags:
        return flags[field.key], f"--{field.key.replace('.', '-').replace('_', '-')}"
    # An empty variable is one that nobody filled in (compose files do that), so it counts as not set.
    if variables.get(field.environ, "") != "":
        return variables[field.environ], field.environ
    if field.key in written:
        return written[field.key], file_name
    return None


def _find_unknown(
    known: Mapping[str, Field],
    flags: Mapping[str, Any],
    variables: Mapping[str, str],
    written: Mapping[str, Any],
    file_name: str,
    faults: list[Fault],
) -> None:
    environs = {field.environ for field in known.values()}
    ours = {name for name in variables if name.startswith(PREFIX) and not name.startswith(PRIVATE_PREFIX)}
    groups: tuple[tuple[str, set[str], Collection[str]], ...] = (
        ("environment", ours - environs - OTHER_NAMES, environs),
        (file_name, written.keys() - known.keys(), known),
        ("flag", flags.keys() - known.keys(), known),
    )
    for source, names, legal in groups:
        faults.extend(
            Fault(name, source, "", f"there is no such setting{_nearest(name, legal)}") for name in sorted(names)
        )


def _nearest(name: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
