"""The finisher over a real ledger: nothing it was given is lost, nothing is closed too early."""

import asyncio
import time
from dataclasses import replace

import psycopg
import pytest
from conftest import add_targets
from ledger import CAMPAIGN, claim, due, expire, ids, states
from ledger import stores as stores

from sender import queries
from sender.domain import Counts, Outcome, State
from sender.events import (
    DatabaseAway,
    DatabaseBack,
    Event,
    OutcomesAbandoned,
    RowsLocked,
    WritesRefused,
)
from sender.pipeline.finisher import Finisher
from sender.pipeline.state import PipelineConfig, StoreHealth, Traffic
from sender.ports import StoreUnavailable
from sender.retry import RetryPolicy
from sender.store import PostgresStore

CONFIG = PipelineConfig(
    campaign=CAMPAIGN,
    limit_per_s=500.0,
    concurrency=10,
    lease_s=60.0,
    retry=RetryPolicy(max_attempts=3, base_s=1.0, cap_s=1.0, usable_s=3600.0),
    flush_s=0.01,
)


class Desk:
    """A finisher that runs, and what it told."""

    def __init__(self, store: PostgresStore, config: PipelineConfig = CONFIG) -> None:
        self.events: list[Event] = []
        self.traffic = Traffic()
        health = StoreHealth(self.events.append)
        self.finisher = Finisher(store, self.events.append, config, self.traffic, health)

    def told(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    async def __aenter__(self) -> "Desk":
        self._run = asyncio.create_task(self.finisher.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.finisher.close()
        async with asyncio.timeout(20):
            await self._run


async def opened(conn, stores, rows: int) -> PostgresStore:
    await add_targets(conn, CAMPAIGN, rows)
    store = await stores.open()
    await store.build()
    return store


async def test_what_is_settled_while_a_write_runs_is_written_by_the_next(conn, stores):
    store = await opened(conn, stores, 3)
    lease = await claim(store)
    begun, go_on, finish = asyncio.Event(), asyncio.Event(), store.finish

    async def slow(outcomes, fates):
        begun.set()
        await go_on.wait()
        return await finish(outcomes, fates)

    store.finish = slow
    first, second, third = lease.targets
    async with Desk(store) as desk:
        desk.finisher.hold(lease)
        desk.finisher.settle(Outcome(first, State.SENT))
        await begun.wait()
        desk.finisher.settle(Outcome(second, State.SENT))
        desk.finisher.settle(Outcome(third, State.SENT))
        go_on.set()
    assert await store.counts() == Counts(sent=3)
    assert (desk.traffic.accepted, desk.finisher.rows_in_hand) == (3, 0)
    assert not desk.told(WritesRefused)


async def test_a_batch_is_open_until_its_last_row_is_settled(conn, stores):
    store = await opened(conn, stores, 2)
    lease = await claim(store)
    done = "SELECT done_at IS NOT NULL FROM campaign_batches"
    async with Desk(store) as desk:
        desk.finisher.hold(lease)
        desk.finisher.settle(Outcome(lease.targets[0], State.SENT))
        async with asyncio.timeout(10):
            while desk.finisher.rows_in_hand > 1:
                await desk.finisher.written()
        assert await (await conn.execute(done)).fetchone() == (False,)
        desk.finisher.settle(Outcome(lease.targets[1], State.SENT))
    assert await (await conn.execute(done)).fetchone() == (True,)


async def test_outcomes_wait_for_company_and_not_for_what_will_not_come(conn, stores):
    """A write has a fixed price: it is paid for 0.4 seconds of the limit, or at the end.

    Nothing here waits for the patience of an hour: a write happens for its reason, or never.
    """
    patient = replace(CONFIG, limit_per_s=8.0, flush_s=3600.0)
    assert patient.rows_a_write == 3
    store = await opened(conn, stores, 7)
    lease = await claim(store)
    written, finish = [], store.finish

    async def heard(outcomes, fates):
        written.append([o.target.member_id for o in outcomes])
        return await finish(outcomes, fates)

    store.finish = heard
    async with Desk(store, patient) as desk:
        desk.finisher.hold(lease)
        for row, target in enumerate(lease.targets, 1):
            desk.finisher.settle(Outcome(target, State.SENT))
            async with asyncio.timeout(10):
                while row in (3, 6, 7) and desk.finisher.outcomes_in_hand:
                    await desk.finisher.written()
        assert written == [[1, 2, 3], [4, 5, 6], [7]]
    assert await store.counts() == Counts(sent=7)


async def test_what_is_left_is_written_when_the_other_rows_are_handed_back(conn, stores):
    store = await opened(conn, stores, 3)
    lease = await claim(store)
    async with Desk(store, replace(CONFIG, flush_s=3600.0)) as desk:
        desk.finisher.hold(lease)
        desk.finisher.settle(Outcome(lease.targets[0], State.SENT))
        desk.finisher.hand_back(lease.targets[1:])
        async with asyncio.timeout(10):
            while desk.finisher.rows_in_hand:
                await desk.finisher.written()
    assert await store.counts() == Counts(sent=1, pending=2)


async def test_leases_are_extended_while_outcomes_wait(conn, stores):
    await add_targets(conn, CAMPAIGN, 3)
    store = await stores.open(lease_s=1.0)
    await store.build()
    lease = await claim(store)
    extended, extend = asyncio.Event(), store.extend

    async def heard(*args):
        held = await extend(*args)
        extended.set()
        return held

    store.extend = heard
    async with Desk(store, replace(CONFIG, lease_s=1.0, flush_s=3600.0)) as desk:
        desk.finisher.hold(lease)
        async with asyncio.timeout(10):
            await extended.wait()
        assert lease.until > time.monotonic()


async def test_rows_handed_back_are_free_at_once(conn, stores):
    store = await opened(conn, stores, 3)
    lease = await claim(store)
    async with Desk(store) as desk:
        desk.finisher.hold(lease)
        desk.finisher.settle(Outcome(lease.targets[0], State.SENT))
        desk.finisher.hand_back(lease.targets[1:])
    other = await stores.open()
    assert ids(await claim(other)) == [2, 3]


async def test_single_rows_handed_back_are_due_at_once_and_as_they_were(conn, stores):
    await add_targets(conn, CAMPAIGN, 1, not_before="2020-01-01", attempts=2, reason="http_503")
    store = await stores.open()
    lease = await due(store)
    async with Desk(store) as desk:
        desk.finisher.hold(lease)
        desk.finisher.hand_back(lease.targets)
    again = await due(await stores.open())
    assert [(t.attempts, t.key_used_at) for t in again.targets] == [(2, None)]
    cursor = await conn.execute("SELECT reason FROM campaign_targets")
    assert await cursor.fetchone() == ("http_503",)


async def test_outcomes_are_kept_while_the_store_is_away_and_written_when_it_is_back(conn, stores):
    store = await opened(conn, stores, 2)
    lease = await claim(store)
    finish, failures, behind = store.finish, iter(range(3)), []

    async def away(outcomes, fates):
        if next(failures, None) is not None:
            raise StoreUnavailable("OperationalError")
        behind.append(desk.finisher.is_behind)
        return await finish(outcomes, fates)

    store.finish = away
    async with Desk(store) as desk:
        desk.finisher.hold(lease)
        for target in lease.targets:
            desk.finisher.settle(Outcome(target, State.SENT))
    assert await store.counts() == Counts(sent=2)
    assert behind == [True]
    assert not desk.finisher.is_behind
    assert [len(desk.told(kind)) for kind in (DatabaseAway, DatabaseBack)] == [1, 1]


async def test_what_could_not_be_written_is_told(conn, stores):
    store = await opened(conn, stores, 2)
    lease = await claim(store)
    tried = asyncio.Event()

    async def away(outcomes, fates):
        tried.set()
        raise StoreUnavailable("OperationalError")

    store.finish = away
    desk = Desk(store)
    run = asyncio.create_task(desk.finisher.run())
    desk.finisher.hold(lease)
    desk.finisher.settle(Outcome(lease.targets[0], State.SENT))
    await tried.wait()
    desk.finisher.settle(Outcome(lease.targets[1], State.SENT))
    run.cancel()
    await asyncio.wait([run])
    desk.finisher.abandon()
    assert desk.told(OutcomesAbandoned) == [OutcomesAbandoned(CAMPAIGN, 2)]


async def test_refused_writes_are_counted_and_told(conn, stores):
    store = await opened(conn, stores, 2)
    lost = await claim(store)
    await expire(conn)
    await claim(await stores.open())
    async with Desk(store) as desk:
        desk.finisher.hold(lost)
        for target in lost.targets:
            desk.finisher.settle(Outcome(target, State.SENT))
    assert await states(conn) == {1: "pending", 2: "pending"}
    assert (desk.traffic.accepted, desk.traffic.refused_writes) == (0, 2)
    assert desk.told(WritesRefused) == [WritesRefused(CAMPAIGN, 2)]


@pytest.fixture
def impatient(monkeypatch) -> None:
    """A finish that waits 50 ms for a locked row instead of two seconds."""
    text = queries.record.FINISH
    assert "set_config('lock_timeout', '2s', true)" in text
    monkeypatch.setattr(queries.record, "FINISH", text.replace("'2s'", "'50ms'"))


async def settled(conn, desk: Desk, expected: dict[int, str]) -> None:
    """Wait until the ledger says so."""
    async with asyncio.timeout(10):
        while await states(conn) != expected:
            await desk.finisher.written()


LOCK = "SELECT FROM campaign_targets WHERE member_id = %s FOR UPDATE"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("single", [False, True], ids=["batch", "single rows"])
async def test_a_row_locked_by_the_application_keeps_only_its_own_outcome(
    dsn, conn, stores, single
):
    await add_targets(conn, CAMPAIGN, 3, **({"not_before": "2020-01-01"} if single else {}))
    store = await stores.open()
    await store.build()
    lease = await (due(store) if single else claim(store))
    async with (
        await psycopg.AsyncConnection.connect(dsn) as application,
        Desk(store) as desk,
    ):
        await application.execute(LOCK, (2,))
        desk.finisher.hold(lease)
        for target in list(lease.targets):
            desk.finisher.settle(Outcome(target, State.SENT))
        waits = "sending" if single else "pending"
        await settled(conn, desk, {1: "sent", 2: waits, 3: "sent"})
        assert (desk.finisher.rows_in_hand, desk.finisher.outcomes_in_hand) == (1, 1)
        assert not desk.finisher.is_behind
        await application.rollback()
        await settled(conn, desk, {1: "sent", 2: "sent", 3: "sent"})
    assert await store.counts() == Counts(sent=3)
    assert desk.told(RowsLocked) == [RowsLocked(CAMPAIGN, 1)]
    assert not desk.told(WritesRefused)
    assert not desk.told(DatabaseAway)
    assert (desk.traffic.accepted, desk.finisher.rows_in_hand) == (3, 0)
    open_batches = "SELECT count(*) FROM campaign_batches WHERE done_at IS NULL"
    assert await (await conn.execute(open_batches)).fetchone() == (0,)


@pytest.mark.usefixtures("impatient")
async def test_a_batch_with_a_locked_row_stays_leased(dsn, conn, stores):
    store = await opened(conn, stores, 2)
    lease = await claim(store)
    async with (
        await psycopg.AsyncConnection.connect(dsn) as application,
        Desk(store) as desk,
    ):
        await application.execute(LOCK, (1,))
        desk.finisher.hold(lease)
        for target in list(lease.targets):
            desk.finisher.settle(Outcome(target, State.SENT))
        await settled(conn, desk, {1: "pending", 2: "sent"})
        other = await stores.open()
        await other.build()
        assert (await other.claim_batch())[0] is None
        await application.rollback()
    assert await states(conn) == {1: "sent", 2: "sent"}


@pytest.mark.usefixtures("impatient")
async def test_what_is_settled_while_a_locked_row_is_waited_for_is_written_by_the_next(
    dsn, conn, stores
):
    store = await opened(conn, stores, 3)
    lease = await claim(store)
    first, second, _ = lease.targets
    locked = store.locked

    async def slow(targets):
        found = await locked(targets)
        for target in lease.unsettled - {first, second}:
            desk.finisher.settle(Outcome(target, State.SENT))
        return found

    store.locked = slow
    async with (
        await psycopg.AsyncConnection.connect(dsn) as application,
        Desk(store) as desk,
    ):
        await application.execute(LOCK, (1,))
        desk.finisher.hold(lease)
        desk.finisher.settle(Outcome(first, State.SENT))
        desk.finisher.settle(Outcome(second, State.SENT))
        await settled(conn, desk, {1: "pending", 2: "sent", 3: "sent"})
        await application.rollback()
    assert await states(conn) == {1: "sent", 2: "sent", 3: "sent"}
    assert not desk.told(WritesRefused)


@pytest.mark.usefixtures("impatient")
async def test_an_outcome_of_a_locked_row_that_was_deleted_is_refused_not_kept(dsn, conn, stores):
    store = await opened(conn, stores, 2)
    lease = await claim(store)
    async with (
        await psycopg.AsyncConnection.connect(dsn) as application,
        Desk(store) as desk,
    ):
        await application.execute("DELETE FROM campaign_targets WHERE member_id = 1")
        desk.finisher.hold(lease)
        for target in list(lease.targets):
            desk.finisher.settle(Outcome(target, State.SENT))
        await settled(conn, desk, {1: "pending", 2: "sent"})
        await application.commit()
    assert await states(conn) == {2: "sent"}
    assert desk.told(WritesRefused) == [WritesRefused(CAMPAIGN, 1)]


@pytest.mark.usefixtures("impatient")
async def test_outcomes_of_locked_rows_that_are_given_up_are_told(dsn, conn, stores):
    store = await opened(conn, stores, 2)
    lease = await claim(store)
    async with await psycopg.AsyncConnection.connect(dsn) as application:
        await application.execute(LOCK, (1,))
        desk = Desk(store)
        run = asyncio.create_task(desk.finisher.run())
        desk.finisher.hold(lease)
        for target in list(lease.targets):
            desk.finisher.settle(Outcome(target, State.SENT))
        await settled(conn, desk, {1: "pending", 2: "sent"})
        desk.finisher.close()
        await desk.finisher.written()
        await desk.finisher.written()
        assert not desk.finisher.ended.is_set()
        run.cancel()
        await asyncio.wait([run])
    desk.finisher.abandon()
    assert desk.told(OutcomesAbandoned) == [OutcomesAbandoned(CAMPAIGN, 1)]
