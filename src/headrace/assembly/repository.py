"""Loading and unloading on request: the MODEL words of this process, read again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.errors import ModelLoadFailed, ModelNotFound
from headrace.models.host import ModelHost
from headrace.models.registry import Resolution, is_name

__all__ = ["HostRepository"]


class HostRepository:
    """The models of a host (`web.admin.Repository`). One change at a time: the next one waits."""

    def __init__(self, host: ModelHost, find: Callable[[], Resolution]) -> None:
        """Load into `host` what `find` finds; it reads folders and is called on a thread."""
        self._host = host
        self._find = find
        self._turn = asyncio.Lock()

    async def load(self, name: str) -> None:
        """Load every version that is there now, then let go of those that are there no more.

        Raises ModelNotFound, ModelLoadFailed. What serves goes on serving where its new files cannot be loaded.
        """
        async with self._turn:
            found = await asyncio.to_thread(self._find)
            faults = [fault.error for fault in found.faults if fault.name == name]
            artifacts = [artifact for artifact in found.artifacts if artifact.name == name]
            if not artifacts and not faults:
                raise ModelNotFound(
                    "This process was not started with such a model",
                    details={"expected": sorted({artifact.name for artifact in found.artifacts})},
                )
            await self._host.load(artifacts)
            if faults:
                raise faults[0]
            kept = {artifact.version for artifact in artifacts}
            for hosted in self._host.named(name):
                if hosted.artifact.version not in kept:
                    await self._host.unload(name, hosted.artifact.version)
            failed = [hosted for hosted in self._host.named(name) if hosted.error is not None]
            if failed:
                raise failed[0].error or ModelLoadFailed()

    async def unload(self, name: str) -> None:
        """Unload every version of a model. Raises ModelNotFound."""
        async with self._turn:
            versions = [hosted.artifact.version for hosted in self._host.named(name)]
            if not versions:
                shown = {"model": name} if is_name(name) else {}
                raise ModelNotFound("No version of such a model is loaded", details=shown)
            await asyncio.gather(*(self._host.unload(name, version) for version in versions))
