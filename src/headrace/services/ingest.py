"""Ingest: the door of the long road. Validates, stamps an id, publishes; answers only when the message is durable.

It needs no ML library: what a model takes and gives stands on its card.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence

import msgspec

from headrace.brokers.base import Broker
from headrace.clock import Clock
from headrace.errors import Expired, HeadraceError, IdempotencyConflict, ModelUnavailable, Overloaded, RequestNotFound
from headrace.message import Message, Result, keyed_id, new_id
from headrace.services.catalog import Catalog
from headrace.services.door import Accepted, Call, ModelState
from headrace.services.publisher import Publisher
from headrace.services.rendering import answer_of, error_of
from headrace.services.results import Results
from headrace.services.settings import IngestSettings
from headrace.services.watch import Watch
from headrace.stores.base import Store
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.trace import Tracer, parse_traceparent
from headrace.tensor import InferAnswer, InferRequest, Signature, digest_inputs, encode_request

__all__ = ["Ingest", "IngestSettings"]


class Ingest:
    """Accepts requests (`door.Door`)."""

    def __init__(
        self,
        broker: Broker,
        store: Store,
        catalog: Catalog,
        results: Results,
        secret: bytes,
        settings: IngestSettings,
        *,
        check_destination: Callable[[str], None],
        clock: Clock,
        metrics: Metrics,
        logs: Logs,
        tracer: Tracer,
    ) -> None:
        """Prepare. `check_destination` raises InvalidRequest for what no sink can ever send to.

        `secret` is what ids are made with: `Store.secret("ids")`, the same in every process of a deployment.
        """
        self._broker, self._catalog, self._results, self._secret = broker, catalog, results, secret
        self._settings, self._check_destination = settings, check_destination
        self._clock, self._logs, self._tracer = clock, logs, tracer
        self._talks = logs.enabled("debug")
        self._publisher = Publisher(
            broker, attempts_max=settings.publish_attempts, clock=clock, metrics=metrics, logs=logs
        )
        self.watch = Watch(broker, store, catalog, clock=clock, metrics=metrics, logs=logs)
        self._accepted = metrics.counter("headrace_accepted_total")
        self._repeated = metrics.counter("headrace_repeated_keys_total")
        self._rejected = metrics.counter("headrace_rejected_total")

    @property
    def requests(self) -> Results:
        """Return the accepted requests."""
        return self._results

    def models(self) -> Sequence[ModelState]:
        """Return every version known; the same object until something changes."""
        return self._catalog.models()

    def model(self, name: str, version: str | None = None) -> ModelState:
        """Return a version, or the one that would be picked. Raises ModelNotFound, VersionNotFound."""
        return self._catalog.model(name, version)

    def ready(self) -> Sequence[str]:
        """Return the reasons for not being ready; empty means ready."""
        return self.watch.reasons()

    async def run(self) -> None:
        """Watch what this depends on, until cancelled; readiness comes from here."""
        await self.watch.run()

    async def close(self) -> None:
        """Return when every message that was handed to the broker has its outcome; then stop reading results."""
        await self._publisher.close()
        await self._results.close()

    async def answer(self, request: InferRequest, call: Call) -> InferAnswer | Accepted:
        """Accept a request, and wait for its result as long as the call says. Raises HeadraceError.

        Once `call.accepted_id` is set the message is durable, whatever is raised after that.
        """
        try:
            message = self._message(request, call)
            feed = self._results.feed
            waits = call.wait_s is None or call.wait_s > 0
            if waits:
                # Before publishing: a result that is there at once must not be missed.
                await feed.open()
                coming = feed.join(message.id)
            try:
                repeated = await self._accept(message, call)
                if not waits:
                    return Accepted(message.id, message.model)
                return await self._wait(request, call, message, coming, repeated)
            finally:
                if waits:
                    feed.leave(message.id, coming)
        except HeadraceError as error:
            if call.accepted_id is None:
                self._rejected(error.code).add()
            raise

    # -- accepting ------------------------------------------------------------------------------------------

    def _message(self, request: InferRequest, call: Call) -> Message:
        state = self._catalog.model(request.model, request.version)
        call.model_version = state.version
        signature = self._signature(state)
        signature.check(request.inputs, request.output_names)
        for destination in call.destinations:
            self._check_destination(destination)
        now_ms = self._clock.now_ms()
        payload, header_length = encode_request(request)
        return Message(
            id=new_id(now_ms, self._secret) if call.key is None else keyed_id(call.key, self._secret),
            model=state.name,
            version=request.version,
            signature=signature.digest,
            accepted_at_ms=now_ms,
            expires_at_ms=None if call.deadline_s is None else now_ms + int(call.deadline_s * 1000),
            destinations=call.destinations,
            request_id=call.request_id,
            client_id=request.id,
            traceparent=call.traceparent,
            tracestate=call.tracestate,
            fingerprint=None if call.key is None else _fingerprint(request, call),
            header_length=header_length,
            payload=payload,
        )

    def _signature(self, state: ModelState) -> Signature:
        if state.signature is None or not state.ready:
            raise ModelUnavailable(
                f"model {state.name!r} version {state.version}: {state.reason}",
                details={"model": state.name, "version": state.version, "reason": state.reason},
            )
        return state.signature

    async def _accept(self, message: Message, call: Call) -> bool:
        """Publish; return whether the message was there before, under its key. Raises what refuses it."""
        trace = parse_traceparent(message.traceparent, message.tracestate)
        with self._tracer.span("message_published", trace, id=message.id, model=message.model) as span:
            message = msgspec.structs.replace(message, traceparent=span.context.traceparent)
            drain = self.watch.drain(message.model)
            try:
                receipt = await self._publisher.publish(message.model, message)
                repeated = receipt.already_present and message.fingerprint is not None
                if repeated and await self._outlived(message, receipt.fingerprint):
                    receipt = await self._publisher.publish(message.model, message)
                    repeated = False
            except Overloaded as error:
                error.retry_after_s = drain.send_away()
                raise
        call.accepted_id = message.id
        if repeated:
            self._repeated(message.model).add()
        elif not receipt.already_present:
            drain.accepted()
            self._accepted(message.model).add()
        if self._talks:
            self._logs.say("accepted", id=message.id, model=message.model, request_id=message.request_id)
        return repeated

    async def _outlived(self, message: Message, fingerprint: str | None) -> bool:
        """Return whether a key is remembered whose request has left; it is forgotten then.

        Raises IdempotencyConflict where the key stands for another request.
        """
        if fingerprint is None:
            fingerprint = (await self._broker.fingerprints([message.id])).get(message.id)
        try:
            await self._results.state(message.id)
        except (Expired, RequestNotFound):
            # Its retention ended and nobody came to forget the key. To promise a result now would be a lie.
            await self._broker.forget([message.id], 0)
            return True
        if fingerprint is not None and fingerprint != message.fingerprint:
            raise IdempotencyConflict(details={"header": "Idempotency-Key"})
        return False

    # -- waiting --------------------------------------------------------------------------------------------

    async def _wait(
        self, request: InferRequest, call: Call, message: Message, coming: asyncio.Future[Result], repeated: bool
    ) -> InferAnswer | Accepted:
        wait_s = self._settings.wait_s if call.wait_s is None else call.wait_s
        if call.deadline_s is not None:
            wait_s = min(wait_s, call.deadline_s)
        # A key's result may have been there before we began to wait.
        result = await self._results.state(message.id) if repeated else None
        if result is None:
            result = await self._results.wait(message.id, coming, wait_s)
        call.queue_time_ms = float(self._clock.now_ms() - message.accepted_at_ms)
        if result is None:
            return Accepted(message.id, message.model, deadline_passed=call.wait_s is None)
        call.model_version = result.model_version or call.model_version
        if result.error is not None:
            raise error_of(result.error)
        answer = answer_of(result)
        # Of two callers with one key each gets its own id back.
        answer.id = request.id
        return answer


def _fingerprint(request: InferRequest, call: Call) -> str:
    """Return a digest that is equal where tensors, model, version, parameters and destinations are."""
    asked = [request.model, request.version, digest_inputs(request), call.destinations]
    return hashlib.blake2b(msgspec.json.encode(asked), digest_size=16).hexdigest()
