"""Seeded HTTP requests: good ones, mutated ones and noise, for every route that takes a body."""

from __future__ import annotations

import base64
import gzip
import json
import random
import zlib
from dataclasses import dataclass, field
from typing import Any

DATATYPES = "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 BF16 BYTES".split()
LENGTH = "Inference-Header-Content-Length"
_SIZES = dict(zip(DATATYPES, [1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 2, 0], strict=True))
_ODD: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 2**64, 10**400, 1e308, -0.0, "", "x", "\u0000", "猫", "a" * 3000, [], {}, [[]],
    [None], {"b64": "AA=="}, {"b64": "!"}, {"b64": 1}, "NaN", {"name": "x"}, [[[[[[1]]]]]],
]  # fmt: skip
_TOKENS = [
    b"NaN",
    b"Infinity",
    b"1e999",
    b"-",
    b'"\\ud800"',
    b"\xff\xfe",
    b"\x00",
    b"[" * 2000,
    b"{" * 500,
    b"null",
    b",",
    b"\\",
]
_TYPES = [
    "application/json", "application/octet-stream", "text/plain", "multipart/form-data; boundary=b",
    "application/x-www-form-urlencoded", "application/json; charset=utf-16", "", "image/png", "*/*", ";;;",
]  # fmt: skip


@dataclass
class Request:
    """One request, as it goes over the wire."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


class Requests:
    """An endless line of requests; the same seed gives the same line."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def next(self) -> Request:
        rng = self._rng
        request = rng.choice([self._oip, self._oip, self._oip_binary, self._oip_binary, self._v1, self._predict,
                              self._torchserve, self._other])()  # fmt: skip
        if rng.random() < 0.5:
            request.body = self._mutated(request.body)
        if rng.random() < 0.2:
            self._headers(request)
        if rng.random() < 0.1:
            self._compress(request)
        if rng.random() < 0.3:
            request.headers["Accept-Encoding"] = rng.choice(["gzip", "deflate", "gzip;q=0, *", "br", ";q=x,,", "*;q=2"])
        return request

    # -- good ones ----------------------------------------------------------------------------------------

    def _value(self, datatype: str) -> Any:
        rng = self._rng
        if rng.random() < 0.03:
            return rng.choice(_ODD)
        if datatype == "BYTES":
            return rng.choice(["", "a", "crème 猫", "x" * rng.randrange(100)])
        if datatype == "BOOL":
            return rng.random() < 0.5
        if datatype.startswith(("FP", "BF")):
            return rng.choice([0.0, -1.5, rng.gauss(0, 1e3), 1])
        return rng.randrange(0, 100)

    def _shape(self) -> list[int]:
        rng = self._rng
        shape = [rng.randrange(0, 6), 2]
        if rng.random() < 0.1:
            shape = [rng.choice([-1, 0, 1, 3, 2**31, 2**62, 2**64]) for _ in range(rng.randrange(0, 40))]
        return shape

    def _count(self, shape: list[int]) -> int:
        count = 1
        for one in shape:
            count = min(abs(count * one), 64)
        return count

    def _path(self, datatype: str) -> str:
        rng = self._rng
        model = datatype.lower() if rng.random() < 0.95 else rng.choice(["", "..", "none", "%00", "a" * 200, "%ff"])
        version = rng.choice(["", "", "", "", "/versions/1", "/versions/1", "/versions/2", "/versions/%2e"])
        return f"/v2/models/{model}{version}/infer"

    def _frame(self, tensor: dict[str, Any]) -> dict[str, Any]:
        rng = self._rng
        body: dict[str, Any] = {"inputs": [tensor] * (2 if rng.random() < 0.03 else 1)}
        if rng.random() < 0.3:
            body["id"] = rng.choice(["a", "", "x" * 200, "\n", 5])
        if rng.random() < 0.3:
            body["parameters"] = rng.choice([{}, {"binary_data_output": True}, {"binary_data_output": 1}, {"k": _ODD}])
        if rng.random() < 0.3:
            flag = rng.choice([True, False, None, 1])
            body["outputs"] = [{"name": rng.choice(["y", "y", "z"]), "parameters": {"binary_data": flag}}]
        if rng.random() < 0.1:
            body[rng.choice(["inputs", "outputs", "id", "parameters", "extra"])] = rng.choice(_ODD)
        return body

    def _oip(self) -> Request:
        rng = self._rng
        datatype, shape = rng.choice(DATATYPES), self._shape()
        data: Any = [self._value(datatype) for _ in range(self._count(shape))]
        if len(shape) == 2 and rng.random() < 0.5:
            data = [data[at : at + 2] for at in range(0, len(data), 2)]
        tensor = {"name": "x", "shape": shape, "datatype": datatype, "data": data}
        if rng.random() < 0.1:
            tensor[rng.choice(list(tensor))] = rng.choice(_ODD)
        return Request("POST", self._path(datatype), json.dumps(self._frame(tensor)).encode())

    def _oip_binary(self) -> Request:
        rng = self._rng
        datatype, shape = rng.choice(DATATYPES), self._shape()
        count = self._count(shape)
        if datatype == "BYTES":
            parts = [rng.randbytes(rng.randrange(20)) for _ in range(count)]
            raw = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        else:
            raw = rng.randbytes(count * _SIZES[datatype])
        if rng.random() < 0.1:
            return Request("POST", self._path(datatype), raw, {LENGTH: "0"})
        size = len(raw) if rng.random() < 0.9 else rng.choice([-1, 0, 2**40, 2**70, None, "4"])
        tensor = {"name": "x", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": size}}
        head = json.dumps(self._frame(tensor)).encode()
        length = str(len(head)) if rng.random() < 0.9 else rng.choice(["", "-1", "x", "999999", "0", "9" * 40])
        return Request("POST", self._path(datatype), head + raw, {LENGTH: length})

    def _v1(self) -> Request:
        rng = self._rng
        datatype = rng.choice(DATATYPES)
        rows: list[Any] = [[self._value(datatype), self._value(datatype)] for _ in range(rng.randrange(4))]
        if datatype == "BYTES" and rng.random() < 0.5:
            rows = [[{"b64": base64.b64encode(rng.randbytes(5)).decode()}, "a"] for _ in rows]
        form = rng.randrange(4)
        body: Any = [{"instances": rows}, {"inputs": rows}, {"instances": [{"x": row} for row in rows]},
                     {"inputs": {"x": rows}}][form]  # fmt: skip
        if rng.random() < 0.1:
            body[rng.choice(["instances", "inputs", "signature_name"])] = rng.choice(_ODD)
        version = rng.choice(["", "", "", "/versions/1", "/versions/1", "/versions/9"])
        return Request("POST", f"/v1/models/{datatype.lower()}{version}:predict", json.dumps(body).encode())

    def _predict(self) -> Request:
        rng = self._rng
        datatype = rng.choice(DATATYPES)
        rows = [[self._value(datatype), self._value(datatype)] for _ in range(rng.randrange(4))]
        body = json.dumps({"data": rng.choice([rows, {"x": rows}, rng.choice(_ODD)])}).encode()
        return Request("POST", rng.choice(["/predict", f"/predict/{datatype.lower()}"]), body)

    def _torchserve(self) -> Request:
        rng = self._rng
        datatype = rng.choice(DATATYPES)
        content = rng.choice([b"[[1,2]]", b'{"data":[[1,2]]}', rng.randbytes(rng.randrange(64)), b"", b"[["])
        headers = {"Content-Type": rng.choice(_TYPES)}
        if headers["Content-Type"].startswith("multipart"):
            name = rng.choice([b"data", b"body", b"other"])
            content = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n--b--\r\n' % (name, content)
        path = f"/predictions/{datatype.lower()}{rng.choice(['', '/1', '/x'])}"
        return Request(rng.choice(["POST", "PUT"]), path, content, headers)

    def _other(self) -> Request:
        rng = self._rng
        path = rng.choice([
            "/v2", "/v2/models/fp32", "/v2/models/fp32/config", "/v2/models/stats", "/v2/models/fp32/stats",
            "/v2/repository/index", "/v2/repository/models/fp32/load", "/v1/models", "/v1/models/fp32", "/ping",
            "/health", "/metrics", "/openapi.json", "/docs", "/requests/x", "/results?limit=%ff",
            "/v2/models/%ff/ready", "//", "/v2/models/" + "a/" * 50,
        ])  # fmt: skip
        method = rng.choice(["GET", "GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
        body = b"" if method in ("GET", "HEAD") else json.dumps(rng.choice(_ODD)).encode()
        return Request(method, path, body)

    # -- bad ones -----------------------------------------------------------------------------------------

    def _mutated(self, body: bytes) -> bytes:
        rng = self._rng
        data = bytearray(body)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data) + 1)
            kind = rng.randrange(6)
            if kind == 0 and at < len(data):
                data[at] = rng.randrange(256)
            elif kind == 1:
                data[at:at] = rng.choice(_TOKENS)
            elif kind == 2:
                del data[at : at + rng.randrange(1, 20)]
            elif kind == 3:
                del data[at:]
            elif kind == 4:
                data[at:at] = data[at : at + 30]
            else:
                data[at : at + 1] = rng.choice([b"[", b"]", b"{", b"}", b'"', b"9" * 25, b"-1", b"1e5"])
        return bytes(data)

    def _headers(self, request: Request) -> None:
        rng = self._rng
        name = rng.choice(["Content-Type", "Prefer", "Idempotency-Key", "Webhook-URL", "Request-Timeout",
                           "X-Request-Id", "traceparent", "Content-Encoding", LENGTH])  # fmt: skip
        request.headers[name] = rng.choice([*_TYPES, "respond-async", "wait=0", '"k', "gzip", "br", "1", "-1", "30",
                                            "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "http://x/"])  # fmt: skip

    def _compress(self, request: Request) -> None:
        rng = self._rng
        name = rng.choice(["gzip", "deflate"])
        packed = gzip.compress(request.body) if name == "gzip" else zlib.compress(request.body)
        request.body = self._mutated(packed) if rng.random() < 0.3 else packed
        request.headers["Content-Encoding"] = name
