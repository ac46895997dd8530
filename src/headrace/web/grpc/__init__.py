"""The Open Inference Protocol over gRPC, on the same door, limits, errors and access log as HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.web.app import App
from headrace.web.server import CannotListen

if TYPE_CHECKING:
    from headrace.web.grpc.listener import GrpcListener

__all__ = ["grpc_fault", "grpc_listener"]


def grpc_fault() -> str:
    """Return why there can be no gRPC here, with the line that installs it; "" where there can."""
    try:
        import headrace.web.grpc.listener  # noqa: F401
    except ModuleNotFoundError:
        return "gRPC is not installed; run: pip install 'headrace[grpc]'"
    return ""


def grpc_listener(app: App, host: str, port: int) -> GrpcListener:
    """Return the listener, not bound yet. Raises CannotListen where the libraries are not installed."""
    if fault := grpc_fault():
        raise CannotListen(fault)
    from headrace.web.grpc.listener import GrpcListener

    return GrpcListener(app, host, port)
