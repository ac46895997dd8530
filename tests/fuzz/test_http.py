"""Whatever is sent: an answer in time, never a fault of ours, and memory that does not grow.

`FUZZ_REQUESTS=100000 FUZZ_SEED=1 pytest tests/fuzz` is the long run.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path

import aiohttp
import psutil
import pytest
from yarl import URL

from fuzz.requests import Requests
from journeys.served import every_datatype, served

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "3000"))
SEED = int(os.environ.get("FUZZ_SEED", "20"))
CALLERS = 16
ANSWER_S_MAX = 20.0
#: The allocator keeps some of what the largest bodies took; a leak of one small body a request would be far more.
GROWTH_BYTES_MAX = 48 * 1024 * 1024

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + REQUESTS // 50)]


async def test_nothing_that_is_sent_is_a_fault_of_ours_or_hangs_or_leaks(tmp_path: Path) -> None:
    statuses: Counter[int] = Counter()
    faults: list[str] = []
    sizes: list[int] = []
    line = Requests(SEED)
    sent = 0

    with served(tmp_path, *every_datatype(tmp_path), flags=("--log-level", "warning")) as server:
        process = psutil.Process(server.process.pid)

        async def caller(session: aiohttp.ClientSession) -> None:
            nonlocal sent
            while sent < REQUESTS:
                number, sent = sent, sent + 1
                one = line.next()
                url = URL(server.url + one.path, encoded=True)
                async with session.request(one.method, url, data=one.body, headers=one.headers) as answer:
                    body = await answer.read()
                statuses[answer.status] += 1
                if answer.status >= 500:
                    faults.append(f"request {number}: {answer.status} {one} {body[:300]!r}")
                if number % 500 == 0:
                    sizes.append(process.memory_info().rss)

        timeout = aiohttp.ClientTimeout(total=ANSWER_S_MAX)
        async with aiohttp.ClientSession(
            timeout=timeout, auto_decompress=False, skip_auto_headers=["Content-Type"]
        ) as session:
            await asyncio.gather(*(caller(session) for _ in range(CALLERS)))
            async with session.get(server.url + "/v2/health/ready") as answer:
                assert answer.status == 200
    shown = [round(size / 2**20) for size in sizes]
    print(f"{REQUESTS} requests, seed {SEED}: {dict(sorted(statuses.items()))}; RSS in MiB {shown[:3]} … {shown[-3:]}")
    assert not faults, "\n".join(faults[:5])
    assert sum(statuses.values()) == REQUESTS
    assert statuses[200] > REQUESTS // 10, "most were refused before they reached a model: that tests little"
    # The first third fills caches and pools; then it has to stay flat.
    settled = sizes[len(sizes) // 3 :]
    assert max(settled[len(settled) // 2 :]) - max(settled[: len(settled) // 2]) < GROWTH_BYTES_MAX, shown
