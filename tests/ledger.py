"""What tests of the ledger share: stores on one database, and short words for its steps."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from conftest import as_role
from psycopg import AsyncConnection

from sender.domain import Fate, Lease, Outcome, State, Target
from sender.store import PostgresStore, StoreConfig

CAMPAIGN = "spring"


def config(dsn: str, **changes: object) -> StoreConfig:
    values = {
        "dsn": dsn,
        "campaign": CAMPAIGN,
        "account": "acct",
        "rate_per_s": 500.0,
        "batch_size": 10,
        "lease_s": 60.0,
        "usable_s": 3600.0,
        "pace_ahead_s": 0.25,
        **changes,
    }
    return StoreConfig(**values)


class Stores:
    """Opens stores that are closed at the end of the test."""

    def __init__(self, dsn: str, stack: AsyncExitStack) -> None:
        self._dsn, self._stack = dsn, stack

    async def open(self, role: str = "sender", **changes: object) -> PostgresStore:
        store = PostgresStore(config(as_role(self._dsn, role), **changes))
        await self._stack.enter_async_context(store)
        assert await store.open_campaign()
        return store


@pytest.fixture
async def stores(dsn: str) -> AsyncIterator[Stores]:
    async with AsyncExitStack() as stack:
        yield Stores(dsn, stack)


def ids(lease: Lease | None) -> list[int]:
    return [] if lease is None else [t.member_id for t in lease.targets]


async def claim(store: PostgresStore) -> Lease:
    lease, _ = await store.claim_batch()
    assert lease is not None
    return lease


async def due(store: PostgresStore) -> Lease:
    lease, _ = await store.claim_due()
    assert lease is not None
    return lease


def settle(target: Target, state: State = State.SENT, **values: object) -> Outcome:
    target.lease.unsettled.discard(target)
    return Outcome(target, state, **values)


async def finish(store: PostgresStore, *outcomes: Outcome) -> list[int]:
    leases = {o.target.lease for o in outcomes}
    fates = {x: Fate.KEEP if x.unsettled else Fate.DONE for x in leases}
    recorded = await store.finish(outcomes, fates)
    return sorted(o.target.member_id for o in recorded.taken)


async def states(conn: AsyncConnection) -> dict[int, str]:
    cursor = await conn.execute("SELECT member_id, state FROM campaign_targets ORDER BY 1")
    return dict(await cursor.fetchall())


async def expire(conn: AsyncConnection) -> None:
    await conn.execute("UPDATE campaign_batches SET lease_until = now() - interval '1 s'")
    await conn.execute(
        "UPDATE campaign_targets SET lease_until = now() - interval '1 s',"
        " not_before = now() - interval '1 s' WHERE state = 'sending'"
    )
