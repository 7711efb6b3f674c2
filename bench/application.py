"""An application at work on `campaign_targets`, and how long each of its statements took.

    python -m bench.application '{"dsn": ..., "rows": ..., "readers": 4, "writers": 2}'

Says `ready` and works until its standard input ends, then prints a line a statement kind as JSON:
when each began (the machine's monotonic clock), what it took, and how long of that the server says
it waited for a lock. Writers have members of their own, so no lock is one of another's.
"""

import asyncio
import json
import re
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

import psycopg
import uvloop
from psycopg import AsyncConnection

from bench.ground import CAMPAIGN

READ = "SELECT email, sent_at FROM campaign_targets WHERE campaign_id = %s AND member_id = %s"
OPT_OUT = (
    "UPDATE campaign_targets SET opted_out_at = CASE WHEN opted_out_at IS NULL THEN now() END"
    " WHERE campaign_id = %s AND member_id = %s"
)
READS_PER_S = 50.0  # by each reader
WRITES_PER_S = 25.0  # by each writer
# The server tells its own client of each wait above a millisecond, when the lock is there.
_TELL_WAITS = "SET client_min_messages = log; SET log_lock_waits = on; SET deadlock_timeout = '1ms'"
_WAITED = re.compile(r"acquired .* after (\d+\.\d+) ms")
_STRIDE = 7919  # a prime: members in no order, none of them twice soon


class Samples:
    """What the statements of one kind took; times in seconds and milliseconds."""

    def __init__(self) -> None:
        self.at = array("d")
        self.ms = array("d")
        self.lock_ms = array("d")

    def told(self) -> dict[str, list[float]]:
        return {"at": list(self.at), "ms": list(self.ms), "lock_ms": list(self.lock_ms)}


class Client:
    """One connection that repeats one statement."""

    def __init__(self, conn: AsyncConnection[Any], samples: Samples, over: asyncio.Event) -> None:
        self._conn = conn
        self._over = over
        self._samples = samples
        self._lock_ms = 0.0
        conn.add_notice_handler(self._hear)

    def _hear(self, notice: psycopg.errors.Diagnostic) -> None:
        if waited := _WAITED.search(notice.message_primary or ""):
            self._lock_ms += float(waited[1])

    async def work(self, text: str, member: Callable[[int], int], per_s: float) -> None:
        """Run the statement `per_s` times a second until it is over."""
        turn = 0
        while not self._over.is_set():
            turn += 1
            began, self._lock_ms = time.monotonic(), 0.0
            await self._conn.execute(text.encode(), (CAMPAIGN, member(turn)))
            took = time.monotonic() - began
            self._samples.at.append(began)
            self._samples.ms.append(took * 1e3)
            self._samples.lock_ms.append(self._lock_ms)
            await asyncio.sleep(max(0.0, 1 / per_s - took))


def _member(rows: int, clients: int, client: int) -> Callable[[int], int]:
    """Members that no other of the `clients` touches; 1 is left to the open transaction."""
    slots = (rows - 1) // clients
    return lambda turn: 2 + client + clients * (turn * _STRIDE % slots)


async def run(asked: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    samples = {"read": Samples(), "opt out": Samples()}
    over = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []
    for kind, text, clients, per_s in (
        ("read", READ, asked["readers"], READS_PER_S),
        ("opt out", OPT_OUT, asked["writers"], WRITES_PER_S),
    ):
        for number in range(clients):
            conn = await AsyncConnection.connect(
                asked["dsn"], autocommit=True, application_name="application"
            )
            await conn.execute(_TELL_WAITS)
            client = Client(conn, samples[kind], over)
            work = client.work(text, _member(asked["rows"], clients, number), per_s)
            tasks.append(asyncio.create_task(work))
    print("ready", flush=True)
    end = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    # None of them ends before, but by an error.
    await asyncio.wait([end, *tasks], return_when=asyncio.FIRST_COMPLETED)
    over.set()
    await asyncio.gather(*tasks)
    return {kind: one.told() for kind, one in samples.items()}


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(json.loads(sys.argv[1])))))
