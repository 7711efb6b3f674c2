"""The floors: loops that send the bytes of a mail and do nothing else, each in its own process.

    python -m bench.floor '{"kind": "aiohttp", "url": ..., "rate_per_s": 500, "seconds": 10}'

Kinds: `aiohttp`, a bare aiohttp loop; `httpx`, `AsyncClient.send` with the product's transport;
`provider`, the product's provider without queue, database and log. With a rate, requests begin at
absolute slots, and a slot that was missed is left out; without, each of the workers sends its next
mail as soon as it has its answer.
"""

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import uvloop

from bench.ground import ROOT
from bench.measure import most_in_any_second, own_cpu_s, pin
from bench.transport import bare_aiohttp, httpx_client, provider

KINDS = {"aiohttp": bare_aiohttp, "httpx": httpx_client, "provider": provider}
WARM_UP_S = 1.0
_LATE_S = 0.03


class Loop:
    """Workers that share one row of slots."""

    def __init__(self, post: Any, rate_per_s: float | None, until: float) -> None:
        self._post = post
        self._spacing_s = 1 / rate_per_s if rate_per_s else 0.0
        self._next_at = time.monotonic()
        self._until = until
        self.begun: list[float] = []
        self.failed = 0

    async def work(self) -> None:
        while await self._slot():
            self.begun.append(time.monotonic())
            try:
                await self._post()
            except (OSError, TypeError, ValueError):
                self.failed += 1

    async def _slot(self) -> bool:
        if not self._spacing_s:
            return time.monotonic() < self._until
        while True:
            now, slot_at = time.monotonic(), self._next_at
            if slot_at >= self._until:
                return False
            self._next_at = max(slot_at, now - _LATE_S) + self._spacing_s
            if slot_at >= now - _LATE_S:
                await asyncio.sleep(slot_at - now)
                return True


async def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Send for so many seconds after a second of warming up; CPU a message, and the times."""
    post, close = await KINDS[asked["kind"]](asked["url"], asked["workers"])
    loop = Loop(post, asked.get("rate_per_s"), time.monotonic() + WARM_UP_S + asked["seconds"])
    async with asyncio.TaskGroup() as group:
        for _ in range(asked["workers"]):
            group.create_task(loop.work())
        await asyncio.sleep(WARM_UP_S)
        cpu, wall, before = own_cpu_s(), time.monotonic(), len(loop.begun)
        await asyncio.sleep(max(0.0, asked["seconds"] - 0.05))
        cpu, wall = own_cpu_s() - cpu, time.monotonic() - wall
        count = len(loop.begun) - before
    await close()
    return {
        "cpu_us": cpu / count * 1e6,
        "per_s": count / wall,
        "most_in_any_second": most_in_any_second(loop.begun),
        "failed_share": loop.failed / len(loop.begun),
    }


def start(core: int | None = None, **asked: Any) -> dict[str, Any]:
    """One measurement in a fresh interpreter, on one core if asked."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.floor", json.dumps(asked)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    if core is not None:
        pin(process.pid, core)
    out, _ = process.communicate(timeout=asked["seconds"] + 60)
    if process.returncode:
        raise SystemExit(f"the floor {asked['kind']} failed")
    return json.loads(out)


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(json.loads(sys.argv[1])))))
