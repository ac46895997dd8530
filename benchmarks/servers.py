"""The servers of the short road's benchmark: how each is installed, started, asked and understood."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kit

PEERS = kit.HERE / "peers"


@dataclass(frozen=True)
class Model:
    """One of the two models, with a row to ask it and its answer."""

    name: str
    sizes: tuple[int, ...]

    @property
    def path(self) -> Path:
        """Return its file, made on first use."""
        return kit.model(self.name, self.sizes)


#: What is measured with the first is everything but the model; the second takes about 5 ms for one row on one thread.
MODELS = {model.name: model for model in (Model("tiny", (128, 64, 10)), Model("medium", (256, 3072, 3072, 100)))}


def _rows(row: list[float]) -> Any:
    return {"data": [row]}


def _oip(row: list[float]) -> Any:
    return {"inputs": [{"name": "x", "shape": [1, len(row)], "datatype": "FP32", "data": row}]}


@dataclass(frozen=True)
class Server:
    """One way to serve a model."""

    #: (python of its environment, port) → command.
    argv: Callable[[str, int], Sequence[str]]
    packages: Sequence[str] = ()
    path: str = "/predict"
    body: Callable[[list[float]], Any] = _rows
    #: Decoded answer → the first row of the prediction; None: it answers nothing true.
    answer: Callable[[Any], list[float]] | None = field(default=lambda found: found["prediction"][0])
    environ: Mapping[str, str] = field(default_factory=dict)
    #: Written into its working folder before it starts.
    files: Callable[[int], Mapping[str, Any]] = field(default=lambda port: {})
    #: Whose environment it shares.
    home: str = ""


def _script(name: str, *flags: str) -> Callable[[str, int], Sequence[str]]:
    return lambda python, port: [python, str(PEERS / f"{name}_app.py"), *(flag.format(port=port) for flag in flags)]


def _uvicorn(app: str, *flags: str) -> Callable[[str, int], Sequence[str]]:
    return lambda python, port: [python, "-m", "uvicorn", f"{app}:app", "--port", str(port), *flags]


def _headrace(python: str, port: int) -> Sequence[str]:
    return [sys.executable, "-m", "headrace", "serve", f"model={os.environ['MODEL']}", "--port", str(port)]


def _bin(tool: str, *flags: str) -> Callable[[str, int], Sequence[str]]:
    return lambda python, port: [str(Path(python).parent / tool), *(flag.format(port=port) for flag in flags)]


def _mlserver(port: int) -> Mapping[str, Any]:
    ports = {"http_port": port, "grpc_port": port + 1, "metrics_port": port + 2}
    batching = {"max_batch_size": 16, "max_batch_time": 0.005}
    return {
        "settings.json": {"host": "127.0.0.1", "debug": False, **ports},
        "model-settings.json": {"name": "model", "implementation": "mlserver_app.Model", **batching},
    }


_OUTPUT = lambda found: found["outputs"][0]["data"]  # noqa: E731
_INFER = "/v2/models/model/infer"
_ONNX = ("onnxruntime", "numpy")
_MOSEC = _script("mosec", "--port", "{port}", "--address", "127.0.0.1")

SERVERS: dict[str, Server] = {
    "headrace": Server(_headrace),
    "headrace-oip": Server(_headrace, path=_INFER, body=_oip, answer=_OUTPUT),
    "naive": Server(_uvicorn("naive_app"), ("fastapi", "uvicorn[standard]", *_ONNX)),
    "mosec": Server(_MOSEC, ("mosec", *_ONNX)),
    "mosec-1ms": Server(_MOSEC, environ={"WAIT_MS": "1"}, home="mosec"),
    "litserve": Server(_script("litserve"), ("litserve", *_ONNX)),
    "bentoml": Server(
        _bin("bentoml", "serve", "bentoml_app:Service", "--host", "127.0.0.1", "--port", "{port}"),
        ("bentoml", *_ONNX),
        answer=lambda found: found[0],
        environ={"BENTOML_DO_NOT_TRACK": "True"},
    ),
    "triton": Server(_script("triton"), ("nvidia-pytriton", *_ONNX), path=_INFER, body=_oip, answer=_OUTPUT),
    "mlserver": Server(
        # Its latest release cannot start a worker on a newer uvloop.
        _bin("mlserver", "start", "."),
        ("mlserver", "uvloop<0.22", *_ONNX),
        path=_INFER,
        body=_oip,
        answer=_OUTPUT,
        files=_mlserver,
    ),
    "kserve": Server(
        _script("kserve"),
        ("kserve", *_ONNX),
        path="/v1/models/model:predict",
        body=lambda row: {"instances": [row]},
        answer=lambda found: found["predictions"][0],
    ),
    "ray": Server(_script("ray"), ("ray[serve]", *_ONNX), environ={"RAY_USAGE_STATS_ENABLED": "0"}),
    "noop": Server(
        _uvicorn("noop_app", "--no-access-log", "--log-level", "warning"),
        ("uvicorn[standard]", "msgspec"),
        answer=None,
    ),
}


def python_of(name: str) -> str:
    """Return the python of a server's environment."""
    server = SERVERS[name]
    home = server.home or name
    return kit.peer_python(home, *SERVERS[home].packages) if SERVERS[home].packages else sys.executable


class Started:
    """A server that runs, ready once it has given the right answer."""

    def __init__(self, name: str, model: Model) -> None:
        self.server, self.model, self.port = SERVERS[name], model, kit.free_port()
        self.folder = kit.HOME / "run" / name
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for file, content in self.server.files(self.port).items():
            (self.folder / file).write_text(json.dumps(content))
        os.environ["MODEL"] = str(model.path)
        python = python_of(name)
        environ = {
            **os.environ,
            "PYTHONPATH": str(PEERS),
            "PORT": str(self.port),
            "DIMENSION": str(model.sizes[0]),
            "OUTPUTS": str(model.sizes[-1]),
            "OMP_NUM_THREADS": "1",
            "LD_LIBRARY_PATH": _library_folder(python) if name == "triton" else "",
            **self.server.environ,
        }
        log = (kit.HOME / f"{name}.log").open("wb")
        argv = self.server.argv(python, self.port)
        # BentoML and uvicorn look for the application in the folder where they are started.
        cwd = self.folder if self.server.files(self.port) else PEERS
        self.process = subprocess.Popen(argv, cwd=cwd, env=environ, stdout=log, stderr=log)

    def close(self) -> None:
        """End it with all its children."""
        kit.stop(self.process)


def _library_folder(python: str) -> str:
    """Return where the libpython of an environment is; PyTriton's stub looks for it."""
    ask = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
