"""What CI holds against a change that costs: ratios inside one process, never seconds.

    python -m bench.guard cpu | memory

`cpu`: CPU a message of the pipeline with the real provider, and of the provider alone, against a
bare aiohttp loop, all in turn against one local server. `memory`: how much resident memory the
pipeline gains between a campaign and one of ten times its size, and what it leaves in reference
cycles. Prints JSON.
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import uvloop

from bench.endless import EndlessStore
from bench.measure import memory_mib
from bench.transport import Opened, ServerProcess, bare_aiohttp, provider
from sender.domain import Accepted, Answer, Target
from sender.pipeline import Pipeline, PipelineConfig, Stop
from sender.ports import Gate, Provider
from sender.providers import open_provider
from sender.retry import RetryPolicy

MESSAGES = 1_200
ROUNDS = 3
CONNECTIONS = 64
FEW, MANY = 5_000, 50_000
_NO_LIMIT_PER_S = 20_000.0
_RETRY = RetryPolicy(max_attempts=5, base_s=30, cap_s=600, usable_s=86_000)


class _Config(PipelineConfig):
    """Without a limit, but with no more rows in hand than at one."""

    @property
    def rows_in_hand(self) -> int:
        return 2_000


async def pipeline(store: EndlessStore, provider: Provider, concurrency: int) -> None:
    """A whole run over `store`, without a limit."""
    config = _Config(
        campaign="spring",
        limit_per_s=_NO_LIMIT_PER_S,
        concurrency=concurrency,
        lease_s=90,
        retry=_RETRY,
    )
    await Pipeline(store, provider, lambda _: None, config, Stop()).run()
    await provider.aclose()


# --- CPU ------------------------------------------------------------------------------------------


async def _closed_loop(open_: Callable[[str, int], Awaitable[Opened]], url: str) -> None:
    post, close = await open_(url, CONNECTIONS)
    left = MESSAGES

    async def work() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await post()

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(work())
    await close()


async def _whole(url: str) -> None:
    store = EndlessStore(MESSAGES)
    http = open_provider(
        "http",
        url=url,
        api_key="k",
        campaign_id="spring",
        connect_timeout_s=30,
        read_timeout_s=30,
        concurrency=CONNECTIONS,
    )
    await pipeline(store, http, CONNECTIONS)
    if store.taken != MESSAGES:
        raise SystemExit(f"{store.taken} of {MESSAGES} messages went through")


def cpu() -> dict[str, Any]:
    """Ratios to the bare loop, of the least that each needed in a few rounds taken in turn.

    The least: neighbours on the machine only ever add.
    """
    kinds: dict[str, Callable[[str], Awaitable[None]]] = {
        "bare": partial(_closed_loop, bare_aiohttp),
        "provider": partial(_closed_loop, provider),
        "pipeline": _whole,
    }
    least = dict.fromkeys(kinds, float("inf"))
    with ServerProcess(0.0) as url:
        for _ in range(ROUNDS):
            for name, kind in kinds.items():
                begun = time.process_time()
                uvloop.run(kind(url))  # pyright: ignore[reportArgumentType]
                least[name] = min(least[name], time.process_time() - begun)
    return {name: spent / least["bare"] for name, spent in least.items()}


# --- memory ---------------------------------------------------------------------------------------


class _Yes:
    async def send(self, target: Target, gate: Gate) -> Answer | None:
        await asyncio.sleep(0)
        return Accepted() if gate() else None

    async def aclose(self) -> None: ...


async def _grow() -> dict[str, Any]:
    found: list[float] = []
    cycles = 0
    gc.disable()
    for rows in (FEW, MANY):
        gc.collect()
        store = EndlessStore(rows)
        await pipeline(store, _Yes(), 500)
        found.append(memory_mib()["now"])
        cycles = gc.collect()
    return {"grown_mib": found[1] - found[0], "objects_in_cycles": cycles}


def memory() -> dict[str, Any]:
    """What a campaign of 50,000 targets leaves behind, without a collection on the way.

    MiB above a campaign of 5,000, and objects that only a collection could free: a run makes so few
    others that collections are rare, and what waits for one is memory for nothing.
    """
    return uvloop.run(_grow())


if __name__ == "__main__":
    print(json.dumps({"cpu": cpu, "memory": memory}[sys.argv[1]]()))
