"""`sender run` with one thing happening to it at a named moment. The program itself has no hooks.

    python runner.py '{"at": "after_claim", "nth": 2}'

Everything is patched from outside before the program starts; see `PLANS` for the moments and
`TWEAKS` for constants that a trial compresses.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from sender import __main__, breaker, locks, run, settings
from sender.pipeline import pacer
from sender.providers import transport
from sender.providers.http import HttpProvider
from sender.store import PostgresStore


def die() -> None:
    """What the kernel does to a process that took too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


class Counter:
    """True at the nth call, once."""

    def __init__(self, nth: int) -> None:
        self._left = nth

    def __call__(self) -> bool:
        self._left -= 1
        return self._left == 0


def around(owner: type, name: str, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Call something before and after an async method; `after` gets the result first."""
    method = getattr(owner, name)

    async def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = await method(self, *args, **kwargs)
        after(result, *args, **kwargs)
        return result

    setattr(owner, name, wrapped)


def nothing(*_: object, **__: object) -> None:
    """The other side of `around`."""


def soon(plan: dict[str, Any]) -> None:
    """Die within a few milliseconds: somewhere inside the statement that begins now."""
    within = plan.get("within_s", 0.003)
    asyncio.get_running_loop().call_later(random.Random(plan["seed"]).random() * within, die)


# --- Moments --------------------------------------------------------------------------------------


def before_claim(plan: dict[str, Any]) -> None:
    now = Counter(plan["nth"])
    around(PostgresStore, "claim_batch", lambda *_: die() if now() else None, nothing)


def inside_claim(plan: dict[str, Any]) -> None:
    now = Counter(plan["nth"])
    around(PostgresStore, "claim_batch", lambda *_: soon(plan) if now() else None, nothing)


def after_claim(plan: dict[str, Any]) -> None:
    now = Counter(plan["nth"])
    around(PostgresStore, "claim_batch", nothing, lambda r, *_: die() if r[0] and now() else None)


def half_sent(plan: dict[str, Any]) -> None:
    now = Counter(plan["nth"])
    send = transport.GatedRequest.send

    async def wrapped(self: Any, conn: Any) -> Any:
        if now():
            sock = conn.protocol.transport.get_extra_info("socket")
            os.write(sock.fileno(), b"POST /mail HTTP/1.1\r\nHost: x\r\nContent-Le")
            die()
        return await send(self, conn)

    transport.GatedRequest.send = wrapped  # type: ignore[method-assign]


def answered(plan: dict[str, Any]) -> None:
    now = Counter(plan["nth"])
    around(HttpProvider, "send", nothing, lambda r, *_: die() if r is not None and now() else None)


def before_record(plan: dict[str, Any]) -> None:
    now = Counter(plan["nth"])
    around(
        PostgresStore, "finish", lambda outcomes, _: die() if outcomes and now() else None, nothing
    )


def inside_record(plan: dict[str, Any]) -> None:
    now = Counter(plan["nth"])
    around(
        PostgresStore,
        "finish",
        lambda outcomes, _: soon(plan) if outcomes and now() else None,
        nothing,
    )


def after_record(plan: dict[str, Any]) -> None:
    now = Counter(plan["nth"])
    around(
        PostgresStore,
        "finish",
        nothing,
        lambda _, outcomes, __: die() if outcomes and now() else None,
    )


def poison(plan: dict[str, Any]) -> None:
    """A row whose mail kills the process that renders it."""
    around(
        HttpProvider, "send", lambda t, _: die() if t.member_id == plan["member"] else None, nothing
    )


def blocked_loop(plan: dict[str, Any]) -> None:
    """The loop stands still for a while, with requests in flight and answers unread."""
    now = Counter(plan["nth"])
    around(
        HttpProvider,
        "send",
        nothing,
        lambda r, *_: time.sleep(plan["seconds"]) if r is not None and now() else None,
    )


def wall_clock_jumps(plan: dict[str, Any]) -> None:
    """Python's wall clock is off by `seconds` from the nth request on."""
    now = Counter(plan["nth"])
    wall = time.time

    def jump(*_: object) -> None:
        if now():
            time.time = lambda: wall() + plan["seconds"]

    around(HttpProvider, "send", jump, nothing)


def stopped_before_it_listens(plan: dict[str, Any]) -> None:
    """SIGTERM while the program still reads its settings."""
    load = settings.load_run

    def stopped() -> settings.RunSettings:
        os.kill(os.getpid(), signal.SIGTERM)
        return load()

    settings.load_run = stopped


def mistaken(plan: dict[str, Any]) -> None:
    """An error of the program's own, in its first statement."""

    async def mistake(_: object) -> bool:
        raise TypeError("a mistake")

    PostgresStore.open_campaign = mistake  # type: ignore[method-assign]


def held_at_the_end(plan: dict[str, Any]) -> None:
    """The loop stands still for ever while the rows are counted."""
    around(PostgresStore, "counts", lambda *_: time.sleep(3600), nothing)


PLANS: dict[str, Callable[[dict[str, Any]], None]] = {
    plan.__name__: plan
    for plan in (
        before_claim,
        inside_claim,
        after_claim,
        half_sent,
        answered,
        before_record,
        inside_record,
        after_record,
        poison,
        blocked_loop,
        wall_clock_jumps,
        stopped_before_it_listens,
        mistaken,
        held_at_the_end,
    )
}

TWEAKS: dict[str, tuple[object, str]] = {
    "start_patience_s": (run, "_START_PATIENCE_S"),
    "locks_s": (locks, "LOCKS_S"),
    "probe_every_s": (breaker, "_PROBE_EVERY_S"),
    "breaker_patience_s": (pacer, "_BREAKER_PATIENCE_S"),
}


def main() -> None:
    plan: dict[str, Any] = {"nth": 1, "seed": 0, **json.loads(sys.argv[1])}
    for name, (module, constant) in TWEAKS.items():
        if name in plan:
            assert hasattr(module, constant), constant
            setattr(module, constant, plan[name])
    if "at" in plan:
        PLANS[plan["at"]](plan)
    sys.argv = ["sender", "run"]
    __main__.main()


if __name__ == "__main__":
    main()
