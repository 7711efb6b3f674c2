"""One process that takes a campaign through the database and sends nothing.

    python -m bench.drain '{"dsn": ..., "kind": "ours", ...}'

Says `ready`, waits for a line, and prints its figures as JSON. Statements follow each other as in a
run at 500/s: a claim is 125 rows, a look 75, a finish 200; rows that are due again are asked for
every half second, and the sweep and the progress every ten.
"""

import asyncio
import json
import sys
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import uvloop

from bench.ground import CAMPAIGN
from bench.measure import cpu_ns, own_cpu_s, percentile
from bench.usual import UsualQueue
from sender import database as database_module
from sender.database import Database
from sender.domain import Fate, Lease, Outcome, State, Target
from sender.store import PostgresStore, StoreConfig

ACCOUNT = "bench"
LOOK_ROWS = 75
FINISH_ROWS = 200
DUE_EVERY = 250
SWEEP_EVERY = 5_000
PARTS = 10
LEASE_S = 10.0
"""A minute and a half, in a time that goes some ten to twenty times as fast as at 500/s."""


class Clock:
    """Times statements: wall, and CPU of the one server process that runs them all."""

    def __init__(self, backend: int, rows: int) -> None:
        self._backend = backend
        self._rows = rows
        self.done = 0
        self._wall: dict[str, array[float]] = {}
        self._cpu: dict[str, array[float]] = {}
        self._at: dict[str, array[int]] = {}

    async def time[T](self, kind: str, statement: Awaitable[T]) -> T:
        """Run a statement and note what it took, in milliseconds, and how far the campaign was."""
        cpu, wall = cpu_ns(self._backend), time.perf_counter()
        result = await statement
        wall, cpu = time.perf_counter() - wall, cpu_ns(self._backend) - cpu
        part = min(PARTS - 1, self.done * PARTS // self._rows)
        self._wall.setdefault(kind, array("d")).append(wall * 1e3)
        self._cpu.setdefault(kind, array("d")).append(cpu / 1e6)
        self._at.setdefault(kind, array("b")).append(part)
        return result

    def figures(self) -> dict[str, Any]:
        """By kind of statement: how many, CPU of all, and percentiles by tenth of the campaign."""
        return {
            kind: {
                "statements": len(wall),
                "cpu_s": sum(self._cpu[kind]) / 1e3,
                "parts": [self._part(kind, part) for part in range(PARTS)],
            }
            for kind, wall in self._wall.items()
        }

    def _part(self, kind: str, part: int) -> dict[str, float | None]:
        of = [i for i, at in enumerate(self._at[kind]) if at == part]
        found: dict[str, float | None] = {}
        for name, series in (("wall", self._wall[kind]), ("cpu", self._cpu[kind])):
            values = [series[i] for i in of]
            found[f"{name}_p50_ms"] = percentile(values, 0.5) if values else None
            found[f"{name}_p99_ms"] = percentile(values, 0.99) if values else None
        return found


class Ours:
    """Claim, look and finish through `PostgresStore`."""

    def __init__(self, store: PostgresStore, clock: Clock, errors_percent: float) -> None:
        self._store = store
        self._clock = clock
        self._errors = errors_percent / 100
        self._failing = 0.0
        self._waiting: deque[Target] = deque()
        self._leases: set[Lease] = set()
        self._outcomes: list[Outcome] = []
        self._refused = 0

    async def drain(self) -> None:
        """Until there is nothing left to claim."""
        async for lease in self._claims():
            self._leases.add(lease)
            self._waiting.extend(lease.targets)
            while len(self._waiting) >= LOOK_ROWS:
                await self._send(LOOK_ROWS)
        if self._refused:
            raise SystemExit(f"{self._refused} outcomes refused: that is not what is measured here")

    async def _claims(self) -> AsyncIterator[Lease]:
        due_at = sweep_at = 0
        while True:
            claimed = self._clock.done + len(self._waiting)
            lease = None
            if claimed >= due_at:
                due_at = claimed + DUE_EVERY
                lease, _ = await self._clock.time("claim due", self._store.claim_due())
            if lease is None:
                lease, _ = await self._clock.time("claim", self._store.claim_batch())
            if claimed >= sweep_at:
                sweep_at = claimed + SWEEP_EVERY
                await self._clock.time("other", self._store.sweep())
                await self._clock.time("other", self._store.remaining())
            if lease is not None:
                yield lease
            elif self._waiting or self._outcomes:
                await self._send(LOOK_ROWS)
                await self._finish()
            else:
                lease, _ = await self._clock.time("claim due", self._store.claim_due())
                if lease is None:
                    return
                yield lease

    async def _send(self, count: int) -> None:
        targets = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        if not targets:
            return
        look = await self._clock.time("look", self._store.look(targets))
        for target in targets:
            target.lease.unsettled.discard(target)
            if target in look.ready:
                self._outcomes.append(self._outcome(target))
                self._clock.done += 1
        if len(self._outcomes) >= FINISH_ROWS:
            await self._finish()

    def _outcome(self, target: Target) -> Outcome:
        """An acceptance, or now and then a 503 that is due again at once."""
        self._failing += self._errors if target.lease.batch_no is not None else 0.0
        if self._failing < 1:
            return Outcome(target, State.SENT, charged=True)
        self._failing -= 1
        self._clock.done -= 1
        used_at = target.lease.claimed_at
        return Outcome(target, State.PENDING, True, False, 0.0, used_at, "http_503")

    async def _finish(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        touched = {o.target.lease for o in outcomes}
        touched.update(lease for lease in self._leases if not lease.unsettled)
        fates = {lease: Fate.KEEP if lease.unsettled else Fate.DONE for lease in touched}
        recorded = await self._clock.time("finish", self._store.finish(outcomes, fates))
        self._refused += len(outcomes) - len(recorded.taken)
        self._leases -= {lease for lease, fate in fates.items() if fate is Fate.DONE}


async def drain_usual(queue: UsualQueue, clock: Clock, errors_percent: float) -> None:
    """Claim and finish until there is nothing left."""
    failing = 0.0
    while True:
        claim, ids = await clock.time("claim", queue.claim())
        if not ids:
            return
        failed: list[bool] = []
        for _ in ids:
            failing += errors_percent / 100
            failed.append(failing >= 1)
            failing -= failed[-1]
        await clock.time("finish", queue.finish(claim, ids, failed))
        clock.done += len(ids) - sum(failed)


async def sample_usual(queue: UsualQueue, clock: Clock, rows: int, samples: int) -> None:
    """A few claims and finishes in each tenth; the rest of it is brought about cheaply."""
    for part in range(PARTS):
        clock.done = done = part * rows // PARTS
        for _ in range(samples):
            claim, ids = await clock.time("claim", queue.claim())
            await clock.time("finish", queue.finish(claim, ids, [False] * len(ids)))
        end = (part + 1) * rows // PARTS
        while done < end:
            await queue.advance(done + 1, min(done + 5_000, end))
            done += 5_000
    clock.done = rows


def _store_config(asked: dict[str, Any]) -> StoreConfig:
    return StoreConfig(
        dsn=asked["dsn"],
        campaign=asked.get("campaign", CAMPAIGN),
        account=ACCOUNT,
        rate_per_s=1e9,
        batch_size=asked["batch"],
        lease_s=LEASE_S,
        usable_s=86_000.0,
        pace_ahead_s=0.2,
    )


async def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Do it; returns the figures."""
    ours = asked["kind"] == "ours"
    database_module._POOL_SIZE = 1  # statements follow each other: one server process runs them
    store = PostgresStore(_store_config(asked))
    async with store if ours else Database(asked["dsn"]) as opened:
        database: Database = opened._database if isinstance(opened, PostgresStore) else opened
        backend = (await database.one("SELECT pg_backend_pid() AS pid", {})).pid
        clock = Clock(backend, asked["rows"] // asked["processes"])
        if ours:
            await store.open_campaign()
            work = Ours(store, clock, asked["errors_percent"]).drain()
        else:
            queue = UsualQueue(database, CAMPAIGN, asked["batch"])
            work = (
                sample_usual(queue, clock, asked["rows"], asked["samples"])
                if asked.get("samples")
                else drain_usual(queue, clock, asked["errors_percent"])
            )
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        cpu = own_cpu_s()
        await work
        if (await database.one("SELECT pg_backend_pid() AS pid", {})).pid != backend:
            raise SystemExit("the connection changed: CPU by statement cannot be told")
        return {"done": clock.done, "client_cpu_s": own_cpu_s() - cpu, **clock.figures()}


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(json.loads(sys.argv[1])))))
