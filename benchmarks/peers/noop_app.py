"""The limit of a Python ASGI server: the body is parsed and a fixed answer returned."""

import json

import msgspec

ANSWER = json.dumps({"prediction": [[0.5] * 10]}).encode()
HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())],
}
decode = msgspec.json.Decoder(dict[str, list[list[float]]]).decode


async def app(scope, receive, send):
    message = await receive()
    body = message["body"]
    while message.get("more_body"):
        message = await receive()
        body += message["body"]
    decode(body)
    await send(HEAD)
    await send({"type": "http.response.body", "body": ANSWER})
