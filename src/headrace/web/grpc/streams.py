"""Calls with many requests or many answers: inference in a stream, health to watch, reflection."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from headrace.errors import Cancelled, HeadraceError, InvalidRequest, ModelNotFound, VersionNotFound
from headrace.services.statuses import HTTP
from headrace.web.exchange import Exchange
from headrace.web.grpc.calls import Calls, Endpoint, code_of, text_of
from headrace.web.grpc.codec import set_parameter
from headrace.web.grpc.messages import Method, messages
from headrace.web.grpc.service import infer
from headrace.web.site import Site

__all__ = ["check", "reflect", "stream_infer", "watch"]

#: Requests of one stream that may be unanswered; more are not read until one is.
IN_FLIGHT_MAX = 256
#: How often a watched service is looked at.
WATCH_S = 0.25

_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3
_NOT_FOUND, _UNIMPLEMENTED = 5, 12


async def stream_infer(calls: Calls, method: Method, context: Any) -> None:
    """Answer the requests of a stream in the order in which they are done; a failure ends one, not the stream."""
    if any(key == "idempotency-key" for key, _ in context.invocation_metadata()):
        error = InvalidRequest(
            "An Idempotency-Key stands for one request, and a stream has many; call ModelInfer with it",
            details={"header": "Idempotency-Key"},
        )
        await context.abort(code_of(error), text_of(error), ())
    await _InferStream(calls, method, context).run()
    await calls.end_stream(context)


class _InferStream:
    """One stream: reads ahead within bounds, writes one answer at a time."""

    def __init__(self, calls: Calls, method: Method, context: Any) -> None:
        self._calls, self._context = calls, context
        self._endpoint = Endpoint(method, infer, kind="inference")
        self._room = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        number = 0
        try:
            while (data := await self._calls.receive(self._context)) is not None:
                number += 1
                await self._room.acquire()
                task = asyncio.create_task(self._answer(data, number))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            # Only where the caller has gone is anything left.
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, data: bytes, number: int) -> None:
        calls, context = self._calls, self._context
        exchange = calls.enter(self._endpoint.method.path, "inference", context, number)
        try:
            work = calls.work(self._endpoint, exchange, data)
            reply = await calls.outcome(exchange, context, work)
            response = self._failure(exchange, data) if reply is None else self._success(reply)
            async with self._writing:
                await context.write(response.SerializeToString())
        except grpc.aio.BaseError:
            if exchange.error is None:
                exchange.error = Cancelled("The client cancelled the call")
                exchange.status = HTTP[exchange.error.code]
        finally:
            self._room.release()
            calls.app.leave(exchange)

    @staticmethod
    def _success(reply: bytes) -> Any:
        response = messages()["inference.ModelStreamInferResponse"]()
        response.infer_response.ParseFromString(reply)
        # Triton says so of every answer, and perf_analyzer waits for it: one request has one answer.
        set_parameter(response.infer_response.parameters["triton_final_response"], True)
        return response

    def _failure(self, exchange: Exchange, data: bytes) -> Any:
        """Return the answer that tells an error, with what tells the caller whose error it is."""
        error = exchange.error
        assert error is not None
        response = messages()["inference.ModelStreamInferResponse"](error_message=text_of(error) or error.code)
        response.infer_response.model_name = exchange.model
        set_parameter(response.infer_response.parameters["code"], error.code)
        try:
            response.infer_response.id = self._endpoint.method.request.FromString(data).id
        except DecodeError:
            pass  # it is what the error says
        return response


# -- health ---------------------------------------------------------------------------------------------------


def _status(site: Site, service: str) -> int:
    """Return how a service does: "" and the services here are the whole, `MODEL` and `MODEL/VERSION` are models."""
    if service in ("", *messages().services):
        return _NOT_SERVING if site.reasons_not_ready() else _SERVING
    name, _, version = service.partition("/")
    try:
        state = site.model(name, version or None)
    except (ModelNotFound, VersionNotFound):
        return _SERVICE_UNKNOWN
    return _SERVING if state.ready and not site.draining else _NOT_SERVING


async def check(site: Site, exchange: Exchange, message: Any) -> Any:
    """Answer grpc.health.v1's Check. Raises ModelNotFound for what is neither a service nor a model."""
    status = _status(site, message.service)
    if status == _SERVICE_UNKNOWN:
        raise ModelNotFound("There is no such service or model")
    return messages()["grpc.health.v1.HealthCheckResponse"](status=status)


async def watch(calls: Calls, method: Method, data: bytes, context: Any) -> None:
    """Tell how a service does, and again whenever that changes."""
    exchange = calls.enter(method.path, "", context)
    told: int | None = None
    try:
        try:
            service = method.request.FromString(data).service
        except DecodeError:
            exchange.error = InvalidRequest("The message cannot be read")
            exchange.status = HTTP[exchange.error.code]
            await context.abort(code_of(exchange.error), text_of(exchange.error), calls.trailer(exchange))
        told = _status(calls.site, service)
        await context.write(method.response(status=told).SerializeToString())
        exchange.status = 200
    finally:
        # What is only watched holds up no stop, and its length says nothing about us.
        calls.app.leave(exchange)
    while not calls.closing.is_set():
        try:
            async with asyncio.timeout(WATCH_S):
                await calls.closing.wait()
        except TimeoutError:
            pass
        if (status := _status(calls.site, service)) != told:
            told = status
            await context.write(method.response(status=told).SerializeToString())
    await calls.end_stream(context)


# -- reflection -----------------------------------------------------------------------------------------------


async def reflect(calls: Calls, method: Method, context: Any) -> None:
    """Describe the services, so that grpcurl and its like need no files."""
    exchange = calls.enter(method.path, "", context)
    exchange.status = 200
    calls.app.leave(exchange)
    while (data := await calls.receive(context)) is not None:
        try:
            request = method.request.FromString(data)
        except DecodeError:
            error: HeadraceError = InvalidRequest("The message cannot be read")
            await context.abort(code_of(error), text_of(error), ())
        await context.write(_describe(method, request).SerializeToString())
    await calls.end_stream(context)


def _describe(method: Method, request: Any) -> Any:
    response = method.response(valid_host=request.host, original_request=request)
    pool, choice = messages().pool, request.WhichOneof("message_request")
    try:
        if choice == "list_services":
            for name in messages().services:
                response.list_services_response.service.add(name=name)
        elif choice == "file_by_filename":
            file = pool.FindFileByName(request.file_by_filename)
            response.file_descriptor_response.file_descriptor_proto.append(file.serialized_pb)
        elif choice == "file_containing_symbol":
            file = pool.FindFileContainingSymbol(request.file_containing_symbol)
            response.file_descriptor_response.file_descriptor_proto.append(file.serialized_pb)
        elif choice == "all_extension_numbers_of_type":
            # proto3 has no extensions, so every type that there is has none.
            pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
            response.all_extension_numbers_response.base_type_name = request.all_extension_numbers_of_type
        elif choice == "file_containing_extension":
            raise KeyError("there are no extensions")
        else:
            response.error_response.error_code = _UNIMPLEMENTED
            response.error_response.error_message = "there is nothing to describe in this request"
    except KeyError:
        response.error_response.error_code = _NOT_FOUND
        response.error_response.error_message = "there is no such name here; list_services says what there is"
    return response
