"""The preparation: loads each version once, away from everything else, and writes its card.

A model that breaks its process breaks only this one; `up` then starts another for the rest.
"""

from __future__ import annotations

import asyncio
import os

from headrace.assembly.inference import SKIP, find_models, host_of
from headrace.assembly.instance import Instance, first_of
from headrace.models.cards import CardBook
from headrace.settings import RootSettings

__all__ = ["prepare"]


async def prepare(instance: Instance) -> int:
    """Load and unload every version that is not skipped, saying which before and after."""
    skipped = set(os.environ.get(SKIP, "").split(","))
    host = host_of(instance, CardBook(instance.settings[RootSettings].data))
    for artifact in find_models(instance).artifacts:
        key = f"{artifact.name}/{artifact.version}"
        if key in skipped:
            continue
        instance.life.say(loading=key)
        loading = asyncio.create_task(host.load([artifact]))
        await first_of(loading, instance.life.stopping.wait())
        if not loading.done():
            return 1
        loading.result()
        instance.life.say(loaded=key)
        await host.unload(artifact.name, artifact.version, timeout_s=1.0)
    return 0
