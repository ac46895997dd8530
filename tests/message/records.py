"""Messages and results of every kind, for the tests of this room."""

from __future__ import annotations

from hypothesis import strategies as st

from headrace.message import ErrorRecord, Message, Result

TIMES = st.integers(0, 4_102_444_800_000)
#: What may stand in an attribute: anything printable.
TEXT = st.text(st.characters(categories=["L", "M", "N", "P", "S"], include_characters=" "), max_size=12)
TRACES = st.none() | st.builds(
    "00-{:032x}-{:016x}-{:02x}".format,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.integers(0, 255),
)
DETAILS = st.dictionaries(
    TEXT, st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXT | st.lists(TEXT, max_size=2), max_size=2
)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    payload = draw(st.binary(max_size=64))
    traceparent = draw(TRACES)
    return Message(
        id=draw(TEXT),
        model=draw(TEXT),
        version=draw(st.none() | TEXT),
        signature=draw(TEXT),
        accepted_at_ms=draw(TIMES),
        expires_at_ms=draw(st.none() | TIMES),
        destinations=tuple(draw(st.lists(TEXT, max_size=3, unique=True))),
        request_id=draw(TEXT),
        client_id=draw(st.none() | TEXT),
        traceparent=traceparent,
        tracestate=draw(st.sampled_from([None, "a=1", "a=1,b@c=d e"])) if traceparent else None,
        fingerprint=draw(st.none() | TEXT),
        replay_of=draw(st.none() | TEXT),
        header_length=draw(st.integers(0, len(payload))),
        payload=payload,
    )


@st.composite
def results(draw: st.DrawFn) -> Result:
    error = draw(st.none() | st.builds(ErrorRecord, code=TEXT, message=st.text(max_size=20), details=DETAILS))
    payload = b"" if error else draw(st.binary(max_size=64))
    return Result(
        id=draw(TEXT),
        model=draw(TEXT),
        model_version=draw(TEXT),
        accepted_at_ms=draw(TIMES),
        finished_at_ms=draw(TIMES),
        attempts=draw(st.integers(0, 10**6)),
        request_id=draw(TEXT),
        client_id=draw(st.none() | TEXT),
        traceparent=draw(TRACES),
        error=error,
        header_length=draw(st.integers(0, len(payload))),
        payload=payload,
    )


#: A message with everything set, and one with as little as possible.
FULL_MESSAGE = Message(
    id="06hhgq2g03j92y6eng5wmr46tkghg6pj",
    model="fraud",
    version="2",
    signature="5d41402abc4b2a76b9719d911017c592",
    accepted_at_ms=1_800_000_000_001,
    expires_at_ms=1_800_000_060_000,
    destinations=("https://example.com/hook", "https://example.com/ü?a=1"),
    request_id="r-1",
    client_id='a "quoted" 猫 %',
    traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    tracestate="vendor=1",
    fingerprint="f" * 64,
    replay_of="06hhgq2g03j92y6eng5wmr46tkghg6pk",
    header_length=2,
    payload=b"{}\x00\xff",
)
BARE_MESSAGE = Message(id="a", model="m", signature="s", accepted_at_ms=0, header_length=0, payload=b"")
FULL_RESULT = Result(
    id=FULL_MESSAGE.id,
    model="fraud",
    model_version="2",
    accepted_at_ms=1_800_000_000_001,
    finished_at_ms=1_800_000_000_950,
    attempts=2,
    request_id="r-1",
    client_id='a "quoted" 猫 %',
    traceparent=FULL_MESSAGE.traceparent,
    header_length=2,
    payload=b"{}\x00\xff",
)
FAILED_RESULT = Result(
    id="a",
    model="m",
    model_version="",
    accepted_at_ms=0,
    finished_at_ms=1,
    attempts=3,
    error=ErrorRecord(code="model_failed", message="it broke", details={"file": "model.onnx"}),
)
