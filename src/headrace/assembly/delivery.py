"""The delivery service: sends the outbox."""

from __future__ import annotations

import asyncio
from random import SystemRandom

from headrace.assembly.instance import Instance, beside, first_of, opened_store, report_for_ever
from headrace.services.delivery import Delivery
from headrace.services.delivery_settings import DeliverySettings
from headrace.sinks import open_sinks
from headrace.sinks.webhook import WebhookSettings, secrets_of

__all__ = ["delivery"]


async def delivery(instance: Instance) -> int:
    """Run until told to stop; return the exit code."""
    settings, life, logs = instance.settings, instance.life, instance.logs
    webhook = settings[WebhookSettings]
    async with opened_store(settings, instance.clock) as store:
        secrets = secrets_of(webhook, await store.secret("webhook"))
        sinks = open_sinks(webhook, webhook_secrets=secrets)
        service = Delivery(
            store,
            sinks,
            settings[DeliverySettings],
            clock=instance.clock,
            metrics=instance.metrics,
            logs=logs,
            rng=SystemRandom(),
            tracer=instance.tracer,
        )
        running = asyncio.create_task(service.run())
        async with beside(report_for_ever(instance, store)):
            logs.say("ready", service=instance.service)
            life.ready()
            await first_of(running, life.stopping.wait())
            logs.say("stopping", service=instance.service, reason=life.reason or "the loop ended")
            stopping = asyncio.create_task(service.stop())
            await first_of(stopping, life.hastened.wait())
            if not running.done():
                running.cancel()
            await asyncio.gather(running, stopping, return_exceptions=True)
        await sinks.close()
    return 0 if life.stopping.is_set() else 1
