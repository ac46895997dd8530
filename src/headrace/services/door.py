"""The door: what HTTP and gRPC are handed, whichever road lies behind it.

`services/short.py` puts a predictor behind it, `services/ingest.py` a topic. The comments are the contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from headrace.tensor import InferAnswer, InferRequest, Signature

__all__ = ["Accepted", "Call", "Door", "ModelState", "RequestView", "Requests"]


@dataclass(frozen=True, slots=True)
class ModelState:
    """One version of a model, as seen from outside."""

    name: str
    version: str
    #: The OIP platform, e.g. `onnx_onnxv1`; "" while unknown.
    platform: str
    #: None until it is known (loading, or failed to load).
    signature: Signature | None
    ready: bool
    #: Why it is not ready, for people and without absolute paths; "" when ready.
    reason: str = ""
    #: When this version was made or registered (wall clock); None if nobody knows.
    updated_at_ms: int | None = None


@dataclass(slots=True)
class Call:
    """What came around a request, and what the door notes about it on the way (the fields below the line)."""

    #: Correlation only, never identity.
    request_id: str
    traceparent: str | None = None
    tracestate: str | None = None
    #: Idempotency-Key, already unquoted and checked for length and characters.
    key: str | None = None
    #: None: no Prefer, wait as long as the service waits; 0: respond-async; N: `Prefer: wait=N`.
    wait_s: float | None = None
    #: Webhook-URL, in order, without duplicates, not yet checked against the sinks.
    destinations: tuple[str, ...] = ()
    #: Seconds from now after which nobody wants the answer any more (Request-Timeout).
    deadline_s: float | None = None

    # -- noted by the door ------------------------------------------------------------------------------
    #: Set the moment the message is durable. Whatever happens then, the answer carries its Location.
    accepted_id: str | None = None
    #: The version that answered, or was picked to; for headers and the log line of failures too.
    model_version: str = ""
    #: How long it waited for a runner (short road) or for the result (long road); None: it never waited.
    queue_time_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The message is durable and not answered yet."""

    id: str
    model: str
    #: True: a plain synchronous caller waited as long as we wait (504); False: it asked for this (202).
    deadline_passed: bool = False


@dataclass(frozen=True, slots=True)
class RequestView:
    """One accepted request, as /requests/{id}, /results, its event and its webhook show it."""

    id: str
    status: Literal["pending", "succeeded", "failed"]
    model: str
    #: "" while pending, and where no version was reached.
    model_version: str
    #: The whole request object, as JSON.
    body: bytes


class Requests(Protocol):
    """Accepted requests by id; only the long road has them."""

    async def look(self, id: str, wait_s: float) -> RequestView:
        """Return the state, waiting up to `wait_s` for a result. Cancelling the call ends the wait.

        Raises RequestNotFound (never accepted), Expired (retention is over), StoreUnavailable,
        BrokerUnavailable (never a false "pending").
        """

    async def cancel(self, id: str) -> RequestView:
        """Commit a failed result `cancelled` if there is none yet; return what is *the* result.

        Raises as `look` does.
        """

    async def pull(self, cursor: str, limit: int) -> tuple[list[RequestView], str]:
        """Return finished requests in commit order after `cursor` ("" is the beginning), and the next cursor.

        Raises InvalidRequest for a cursor we never gave, StoreUnavailable.
        """


class Door(Protocol):
    """The one way in."""

    @property
    def requests(self) -> Requests | None:
        """Return the accepted requests; None on the short road."""

    def models(self) -> Sequence[ModelState]:
        """Return every version known, failed and loading ones included, sorted by name and version.

        Called on every request: the same object is returned until something changes.
        """

    def model(self, name: str, version: str | None = None) -> ModelState:
        """Return a version; None is the one that would be picked now. Raises ModelNotFound, VersionNotFound.

        A model that is known but not ready is returned with its reason. One dictionary look-up.
        """

    def ready(self) -> Sequence[str]:
        """Return the reasons for not being ready; empty means ready. No model at all is a reason."""

    async def answer(self, request: InferRequest, call: Call) -> InferAnswer | Accepted:
        """Validate, then run or accept. Raises HeadraceError.

        Cancelling the call means that the client has gone: work that has not started is dropped on the short
        road; an accepted message stays accepted.
        """
