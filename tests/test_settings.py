"""Settings: precedence, faults all at once, secrets that stay hidden."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from headrace.settings import RootSettings, SettingsError, describe, load, setting


@dataclasses.dataclass(frozen=True, slots=True)
class PumpSettings:
    section: ClassVar[str] = "pump"

    length_max: int = setting(1_000_000, "How many.", min=1)
    ratio: float = setting(0.2, "How much of it.", min=0, max=1)
    fast: bool = setting(False, "Whether to hurry.")
    mode: str = setting("plain", "Which way.", choices=("plain", "fancy"))
    secret: str = setting("", "Not for everybody.", secret=True)
    hosts: tuple[str, ...] = setting((), "Where to.")
    steps_s: tuple[float, ...] = setting((0.0, 5.0), "When.", min=0)
    limit: int | None = setting(None, "Nothing: no limit.", min=1)


@dataclasses.dataclass(frozen=True, slots=True)
class PairSettings:
    section: ClassVar[str] = "pump.pair"

    low: int = setting(1, "The lower one.")
    high: int = setting(2, "The upper one.")

    def faults(self) -> Iterator[tuple[str, str]]:
        if self.low > self.high:
            yield "low", "wanted at most pump.pair.high"


ALL = (RootSettings, PumpSettings, PairSettings)


def faults_of(**given: object) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(ALL, **given)  # type: ignore[arg-type]
    return [str(fault) for fault in caught.value.faults]


def test_without_anything_the_defaults_hold() -> None:
    settings = load(ALL)
    assert settings[RootSettings] == RootSettings()
    assert settings[PumpSettings].steps_s == (0.0, 5.0)
    assert settings.source("port") == "default"


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("port = 1\nhost = '1.1.1.1'\ndata = 'f'\n[pump]\nlength_max = 7\n")
    environ = {"HEADRACE_PORT": "2", "HEADRACE_HOST": "2.2.2.2", "HEADRACE_PUMP_RATIO": "0.5"}
    settings = load(ALL, flags={"port": 3, "workers": None}, environ=environ, file=file)
    root = settings[RootSettings]
    assert (root.port, root.host, root.data, root.workers) == (3, "2.2.2.2", "f", 1)
    assert (settings[PumpSettings].length_max, settings[PumpSettings].ratio) == (7, 0.5)
    sources = [settings.source(key) for key in ("port", "host", "data", "pump.ratio", "workers")]
    assert sources == ["--port", "HEADRACE_HOST", "headrace.toml", "HEADRACE_PUMP_RATIO", "default"]


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("FAST", "true", "fast", True),
        ("FAST", "Off", "fast", False),
        ("LENGTH_MAX", "2_000", "length_max", 2000),
        ("RATIO", "1", "ratio", 1.0),
        ("MODE", "fancy", "mode", "fancy"),
        ("HOSTS", "a, b,,c", "hosts", ("a", "b", "c")),
        ("STEPS_S", "0,1.5", "steps_s", (0.0, 1.5)),
        ("LIMIT", "9", "limit", 9),
    ],
)
def test_a_variable_becomes_the_type_of_its_field(name: str, text: str, field: str, value: object) -> None:
    found = getattr(load(ALL, environ={f"HEADRACE_PUMP_{name}": text})[PumpSettings], field)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("FAST", "maybe", "wanted bool"),
        ("LENGTH_MAX", "1e3", "wanted int, at least 1; this is not one"),
        ("LENGTH_MAX", "0", "wanted int, at least 1; it is out of range"),
        ("RATIO", "nan", "wanted float, 0 to 1; this is not one"),
        ("RATIO", "1.01", "out of range"),
        ("MODE", "fancyy", "wanted str, plain, fancy; did you mean fancy?"),
        ("STEPS_S", "1,x", "wanted list of float, at least 0; this is not one"),
        ("STEPS_S", "1,-1", "out of range"),
    ],
)
def test_a_wrong_variable_is_a_fault_with_key_value_and_what_is_wanted(name: str, text: str, says: str) -> None:
    (fault,) = faults_of(environ={f"HEADRACE_PUMP_{name}": text})
    assert fault.startswith(f"pump.{name.lower()} = {text} (HEADRACE_PUMP_{name})")
    assert says in fault


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("prot = 1\nworkers = '2'\n[pump]\nratio = 3\nfast = 1\n[bump]\nx = 1\n")
    environ = {"HEADRACE_PUMP_LENGHT_MAX": "1", "HEADRACE_PUMP_LIMIT": "0"}
    told = "\n".join(faults_of(flags={"port": "x", "hots": 1}, environ=environ, file=file))
    assert "LENGHT_MAX (environment): there is no such setting; did you mean HEADRACE_PUMP_LENGTH_MAX?" in told
    assert "prot (own.toml): there is no such setting; did you mean port?" in told
    assert "hots (flag): there is no such setting; did you mean host?" in told
    assert "bump.x (own.toml)" in told
    assert "port = x (--port): wanted int, 0 to 65535; this is not one" in told
    assert "pump.limit = 0 (HEADRACE_PUMP_LIMIT)" in told
    assert "pump.ratio = 3 (own.toml)" in told
    assert "pump.fast = 1 (own.toml)" in told
    assert told.count("\n") == 8, told


def test_text_is_a_number_in_a_variable_but_not_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("workers = '2'")
    assert load(ALL, environ={"HEADRACE_WORKERS": "2"})[RootSettings].workers == 2
    assert faults_of(file=file) == ["workers = 2 (headrace.toml): wanted int, 1 to 256; write it without quotes"]


def test_what_two_fields_say_together_is_checked_too() -> None:
    told = faults_of(flags={"pump.pair.low": 5}, environ={"HEADRACE_PORT": "x"})
    assert told[1] == "pump.pair.low = 5 (--pump-pair-low): wanted at most pump.pair.high"


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load(ALL, environ={"HEADRACE_PORT": "", "HEADRACE_HOST": ""})[RootSettings] == RootSettings()


def test_private_and_other_known_names_are_no_faults() -> None:
    load(ALL, environ={"HEADRACE__PIPE": "3", "HEADRACE_KAFKA_HOME": "/opt/kafka", "PATH": "/bin"})


def test_a_missing_or_broken_file_is_a_fault_and_not_a_default(tmp_path: Path) -> None:
    assert "wanted a readable file" in faults_of(file=tmp_path / "none.toml")[0]
    broken = tmp_path / "broken.toml"
    broken.write_text("port = \n")
    assert "wanted TOML" in faults_of(environ={"HEADRACE_CONFIG": str(broken)})[0]


def test_the_file_of_the_working_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "headrace.toml").write_text("port = 9000")
    monkeypatch.chdir(tmp_path)
    assert load(ALL)[RootSettings].port == 9000


def test_a_secret_is_shown_nowhere(tmp_path: Path) -> None:
    settings = load(ALL, environ={"HEADRACE_PUMP_SECRET": "hush"})
    assert settings[PumpSettings].secret == "hush"
    shown = repr(settings) + repr(settings[PumpSettings]) + str(settings.values()) + str(describe(ALL))
    assert "hush" not in shown
    file = tmp_path / "headrace.toml"
    file.write_text("pump.secret = ['hush']")
    assert "hush" not in faults_of(file=file)[0]


def test_what_was_set_is_handed_to_a_child_as_variables() -> None:
    given = {"HEADRACE_PUMP_SECRET": "hush", "HEADRACE_PUMP_STEPS_S": "0,1", "HEADRACE_PUMP_FAST": "yes"}
    settings = load(ALL, flags={"port": 9000, "pump.limit": 4}, environ=given)
    again = load(ALL, environ=settings.environ())
    assert [again[kind] for kind in ALL] == [settings[kind] for kind in ALL]
    assert "HEADRACE_HOST" not in settings.environ()


def test_every_setting_is_described() -> None:
    rows = {row.key: row for row in describe(ALL)}
    assert rows["pump.length_max"].environ == "HEADRACE_PUMP_LENGTH_MAX"
    assert (rows["pump.ratio"].type, rows["pump.ratio"].allowed) == ("float", "0 to 1")
    assert (rows["pump.limit"].type, rows["pump.limit"].default) == ("int or nothing", "")
    assert rows["pump.steps_s"].default == "0.0,5.0"
    assert rows["log_level"].allowed == "debug, info, warning, error"


def test_the_database_stands_in_the_data_folder_unless_told_otherwise() -> None:
    assert RootSettings(data="d").broker_url == "sqlite:///d/headrace.db"
    assert RootSettings(store="memory://").store_url == "memory://"


def test_a_field_of_a_type_that_settings_lack_is_refused_at_once() -> None:
    @dataclasses.dataclass(frozen=True)
    class Odd:
        section: ClassVar[str] = "odd"
        table: dict[str, str] = setting(None, "No.")  # noqa: RUF009

    with pytest.raises(TypeError, match=r"Odd\.table"):
        load([Odd])
