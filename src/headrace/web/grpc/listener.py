"""The gRPC listener: one bound address, every method behind one handler, and an end in order with HTTP's."""

from __future__ import annotations

from typing import Any

import grpc

from headrace.errors import HeadraceError
from headrace.services.statuses import HTTP
from headrace.web.app import App
from headrace.web.grpc.calls import Calls, Endpoint, code_of, text_of
from headrace.web.grpc.messages import INFERENCE, Method, messages
from headrace.web.grpc.service import endpoints, refuse_unknown
from headrace.web.grpc.streams import check, reflect, stream_infer, watch
from headrace.web.server import CannotListen, probe

__all__ = ["GrpcListener"]

#: How long the connections of callers may take to close once nothing is in progress.
_LEAVE_S = 0.25


class GrpcListener:
    """An application on gRPC, beside its HTTP listener: one stops with the other (`server.Companion`)."""

    def __init__(self, app: App, host: str, port: int) -> None:
        """Hold what to serve; nothing is bound yet."""
        self.app = app
        self.host = host
        #: The port asked for; after `start` the one that is bound.
        self.port = port
        self._calls: Calls
        self._server: Any = None

    async def start(self) -> None:
        """Bind and serve. Raises CannotListen."""
        settings = self.app.site.settings
        self._calls = Calls(self.app)
        server = grpc.aio.server(
            options=[
                # One limit for both protocols (A34); what is larger is refused by its length, unread.
                ("grpc.max_receive_message_length", settings.body_bytes_max),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", settings.head_bytes_max),
                ("grpc.absolute_max_metadata_size", settings.head_bytes_max),
                # Two servers on one port would each get some of the calls.
                ("grpc.so_reuseport", 0),
            ]
        )
        server.add_generic_rpc_handlers((_Handlers(self._calls),))
        host = f"[{self.host}]" if ":" in self.host else self.host or "[::]"
        try:
            bound = server.add_insecure_port(f"{host}:{self.port}")
        except RuntimeError as error:
            # What it says is long and does not say why; the system does.
            probe(self.host, self.port)
            raise CannotListen(f"cannot listen on {self.host}:{self.port} for gRPC") from error
        self.port = int(bound)
        await server.start()
        self._server = server

    def close(self) -> None:
        """Let streams come to their end. New calls are refused by the application, which says so properly.

        Core, told to stop, would cancel what is on its way, and a caller takes CANCELLED for its own doing.
        """
        if self._server is not None:
            self._calls.closing.set()

    async def end(self) -> None:
        """Cut what is still in progress, and let go of the address."""
        if self._server is not None:
            self.close()
            # Callers that are told to go elsewhere close their connections by themselves, if they are let.
            await self._server.stop(_LEAVE_S)


class _Handlers:
    """Finds the handler of a method (`grpc.GenericRpcHandler`)."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._handlers: dict[str, Any] = {}
        for endpoint in endpoints():
            self._handlers[endpoint.method.path] = self._unary(endpoint)
        all_messages = messages()
        stream = all_messages.methods(INFERENCE)["ModelStreamInfer"]
        self._handlers[stream.path] = self._stream(stream, stream_infer)
        health = all_messages.methods("grpc.health.v1.Health")
        self._handlers[health["Check"].path] = self._unary(Endpoint(health["Check"], check, always=True))
        self._handlers[health["Watch"].path] = self._watch(health["Watch"])
        for name in all_messages.services:
            if "reflection" in name:
                info = all_messages.methods(name)["ServerReflectionInfo"]
                self._handlers[info.path] = self._stream(info, reflect)

    def service(self, details: Any) -> Any:
        """Return the handler of a method, for what is not here too: its error says what is."""
        return self._handlers.get(details.method) or self._unknown(details.method)

    def _unary(self, endpoint: Endpoint) -> Any:
        calls = self._calls

        async def handle(_: Any, context: Any) -> bytes:
            return await calls.unary(endpoint, context)

        # On the wire this is a call like any other. Here it begins with its head, and not with its whole body: so
        # one that is still being sent counts as in progress, and what will be refused is not read first.
        return grpc.stream_unary_rpc_method_handler(handle)

    def _stream(self, method: Method, function: Any) -> Any:
        calls = self._calls

        async def handle(_: Any, context: Any) -> None:
            await function(calls, method, context)

        return grpc.stream_stream_rpc_method_handler(handle)

    def _watch(self, method: Method) -> Any:
        calls = self._calls

        async def handle(data: bytes, context: Any) -> None:
            await watch(calls, method, data, context)

        return grpc.unary_stream_rpc_method_handler(handle)

    def _unknown(self, path: str) -> Any:
        calls = self._calls

        async def handle(_: Any, context: Any) -> None:
            exchange = calls.enter("", "", context)
            try:
                error: HeadraceError = refuse_unknown(path)
                exchange.error, exchange.status = error, HTTP[error.code]
                await context.abort(code_of(error), text_of(error), calls.trailer(exchange))
            finally:
                calls.app.leave(exchange)

        # A stream of requests is the form that every call has on the wire.
        return grpc.stream_stream_rpc_method_handler(handle)
