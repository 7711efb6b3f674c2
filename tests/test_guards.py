"""One test for each guard that keeps a promise. `tests/mutations` removes the guards in turn.

Each test is about one guard and red without it; everything else about it may be tested elsewhere.
"""

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime
from uuid import uuid4

import psycopg
import pytest
from conftest import add_targets, as_role
from ledger import CAMPAIGN, claim, due, expire, finish, ids, settle, states
from ledger import stores as stores
from psycopg import AsyncConnection
from psycopg.errors import LockNotAvailable

from sender import queries
from sender.actions import Author
from sender.breaker import Breaker, RefusalWatch, is_provider_failure
from sender.dev.fake_options import FakeOptions
from sender.dev.fake_provider import FakeProvider
from sender.domain import (
    Accepted,
    Answer,
    Control,
    Counts,
    Fate,
    Lease,
    Refused,
    State,
    Target,
    Throttled,
    Unavailable,
)
from sender.errors import CampaignError
from sender.pipeline import Pipeline, PipelineConfig, Stop, StopReason
from sender.ports import Gate
from sender.providers.http import HttpProvider, request_body
from sender.retry import Circumstances, RetryPolicy, decide
from sender.settings import CampaignSettings
from sender.settling import REQUEUE, RESOLVE, Settling
from sender.settling import settle as settle_rows
from sender.steering import steer

POLICY = RetryPolicy(max_attempts=3, base_s=0.01, cap_s=0.02, usable_s=3600.0)
NOW = Circumstances(now=0.0, uncharged=False, jitter=0.0)
SIZES = PipelineConfig(
    campaign=CAMPAIGN, limit_per_s=500.0, concurrency=50, lease_s=30.0, retry=POLICY
)


def a_target(**values: object) -> Target:
    lease = Lease(uuid4(), 1, datetime.now(UTC), 0.0, 1e9)
    known = {
        "member_id": 7,
        "email": "seven@example.com",
        "variables": None,
        "attempts": 0,
        "unknowns": 0,
        "key_used_at": None,
        "key_until": float("inf"),
        "lease": lease,
    }
    return Target(**{**known, **values})


class Answers:
    """A provider that answers each request at once with the next answer; asks the gate first."""

    def __init__(self, *answers: Answer) -> None:
        self.answers, self.asked = list(answers), []
        self.before = self.after = lambda: None

    async def send(self, target: Target, gate: Gate) -> Answer | None:
        self.before()
        if not gate():
            return None
        self.asked.append(target.member_id)
        self.after()
        return self.answers.pop(0) if self.answers else Accepted()

    async def aclose(self) -> None:
        pass


# --- claims ---------------------------------------------------------------------------------------


async def test_a_batch_claim_waits_for_nobody(dsn, conn, stores):
    await add_targets(conn, CAMPAIGN, 20)
    store = await stores.open()
    await store.build()
    async with await AsyncConnection.connect(dsn) as other, asyncio.timeout(5):
        await other.execute("SELECT FROM campaign_batches WHERE batch_no = 1 FOR UPDATE")
        assert ids(await claim(store)) == list(range(11, 21))


async def test_a_claim_of_due_rows_waits_for_nobody(dsn, conn, stores):
    await add_targets(conn, CAMPAIGN, 2, not_before="2020-01-01")
    store = await stores.open()
    async with await AsyncConnection.connect(dsn) as other, asyncio.timeout(5):
        await other.execute("SELECT FROM campaign_targets WHERE member_id = 1 FOR UPDATE")
        assert ids(await due(store)) == [2]


async def test_a_leased_batch_is_not_claimed(conn, stores):
    await add_targets(conn, CAMPAIGN, 5)
    store, other = await stores.open(), await stores.open()
    await store.build()
    await claim(store)
    assert (await other.claim_batch())[0] is None


async def test_a_row_with_sent_at_is_not_claimed(conn, stores):
    await add_targets(conn, CAMPAIGN, 2)
    store = await stores.open()
    await store.build()
    await conn.execute("UPDATE campaign_targets SET sent_at = now() WHERE member_id = 1")
    assert ids(await claim(store)) == [2]


async def test_a_row_opted_out_is_not_claimed(conn, stores):
    await add_targets(conn, CAMPAIGN, 2)
    store = await stores.open()
    await store.build()
    await conn.execute("UPDATE campaign_targets SET opted_out_at = now() WHERE member_id = 1")
    assert ids(await claim(store)) == [2]


async def test_a_due_row_opted_out_is_not_claimed(conn, stores):
    await add_targets(conn, CAMPAIGN, 2, not_before="2020-01-01")
    store = await stores.open()
    await conn.execute("UPDATE campaign_targets SET opted_out_at = now() WHERE member_id = 1")
    assert ids(await due(store)) == [2]


async def test_a_batch_whose_keys_are_too_old_is_not_claimed(conn, stores):
    await add_targets(conn, CAMPAIGN, 5)
    store = await stores.open()
    await store.build()
    await claim(store)
    await expire(conn)
    await conn.execute("UPDATE campaign_batches SET key_used_at = now() - interval '2 h'")
    assert (await store.claim_batch())[0] is None


async def test_a_due_row_whose_key_is_too_old_is_not_claimed(conn, stores):
    old = datetime.now(UTC).replace(year=2020)
    await add_targets(conn, CAMPAIGN, 1, not_before="2020-01-01", key_used_at=old)
    store = await stores.open()
    assert (await store.claim_due())[0] is None


# --- fences ---------------------------------------------------------------------------------------


async def test_a_late_finish_of_a_lost_batch_writes_nothing(conn, stores):
    await add_targets(conn, CAMPAIGN, 2)
    zombie, other = await stores.open(), await stores.open()
    await zombie.build()
    lost = await claim(zombie)
    await expire(conn)
    await claim(other)
    assert await finish(zombie, *(settle(t) for t in lost.targets)) == []
    assert await states(conn) == {1: "pending", 2: "pending"}


async def test_a_late_finish_of_a_lost_row_writes_nothing(conn, stores):
    await add_targets(conn, CAMPAIGN, 1, not_before="2020-01-01")
    zombie, other = await stores.open(), await stores.open()
    lost = await due(zombie)
    await expire(conn)
    await due(other)
    assert await finish(zombie, settle(lost.targets[0])) == []
    assert await states(conn) == {1: "sending"}


@pytest.mark.parametrize("late", [State.SENT, State.FAILED])
async def test_an_answer_to_a_lost_claim_is_not_written_under_the_next_one(conn, stores, late):
    """One process lost a batch and claimed it again; one finish brings answers of both claims."""
    await add_targets(conn, CAMPAIGN, 2)
    store = await stores.open()
    await store.build()
    lost = await claim(store)
    await expire(conn)
    again = await claim(store)
    outcomes = settle(lost.targets[0], late), settle(again.targets[1])
    assert await finish(store, *outcomes) == [2]
    assert await states(conn) == {1: "pending", 2: "sent"}


async def test_a_lost_batch_is_not_extended(conn, stores):
    await add_targets(conn, CAMPAIGN, 2)
    zombie, other = await stores.open(), await stores.open()
    await zombie.build()
    lost = await claim(zombie)
    await expire(conn)
    await claim(other)
    assert await zombie.extend([lost], []) == frozenset()


async def test_a_lost_row_is_not_extended(conn, stores):
    await add_targets(conn, CAMPAIGN, 1, not_before="2020-01-01")
    zombie, other = await stores.open(), await stores.open()
    lost = await due(zombie)
    await expire(conn)
    await due(other)
    assert await zombie.extend([lost], lost.targets) == frozenset()


async def test_a_row_locked_by_the_application_keeps_no_lease_from_being_extended(
    dsn, conn, stores
):
    await add_targets(conn, CAMPAIGN, 3, not_before="2020-01-01")
    store = await stores.open()
    lease = await due(store)
    left = "SELECT member_id FROM campaign_targets WHERE lease_until > now() + interval '20 s'"
    await conn.execute("UPDATE campaign_targets SET lease_until = now() + interval '10 s'")
    async with await psycopg.AsyncConnection.connect(dsn) as application:
        await application.execute("SELECT FROM campaign_targets WHERE member_id = 2 FOR UPDATE")
        assert await store.extend([lease], lease.targets) == {lease.claim_id}
        assert await (await conn.execute(left)).fetchall() == [(1,), (3,)]


# --- the look -------------------------------------------------------------------------------------


async def test_the_look_sees_an_opt_out(conn, stores):
    await add_targets(conn, CAMPAIGN, 1)
    await add_targets(conn, CAMPAIGN, 1, first=100, not_before="2020-01-01")
    store = await stores.open()
    await store.build()
    targets = [*(await claim(store)).targets, *(await due(store)).targets]
    assert {t.member_id for t in (await store.look(targets)).ready} == {1, 100}
    await conn.execute("UPDATE campaign_targets SET opted_out_at = now()")
    assert not (await store.look(targets)).ready


async def test_no_request_begins_under_a_key_that_grew_too_old_in_the_queue(conn, stores):
    await add_targets(conn, CAMPAIGN, 3)
    store = await stores.open()
    await store.build()
    await claim(store)
    await expire(conn)
    provider, stop = Answers(), Stop()
    claim_batch = store.claim_batch

    async def claimed_just_in_time():
        lease, changed = await claim_batch()
        for target in lease.targets if lease else []:
            target.key_until = time.monotonic() - 1
        return lease, changed

    store.claim_batch = claimed_just_in_time
    async with asyncio.timeout(20):
        await Pipeline(store, provider, lambda _: None, SIZES, stop).run()
    assert provider.asked == []
    assert await store.counts() == Counts(in_doubt=3)


# --- keys and bodies ------------------------------------------------------------------------------


async def test_every_attempt_of_a_member_carries_the_same_key_and_body(dsn, conn, stores):
    await add_targets(conn, CAMPAIGN, 5, vars=lambda m: f'{{"name": "m{m}"}}')
    store = await stores.open()
    async with FakeProvider(FakeOptions(accept_then_cut=1.0)) as fake, asyncio.timeout(20):
        provider = HttpProvider(
            url=fake.url,
            api_key=None,
            campaign_id=CAMPAIGN,
            connect_timeout_s=2,
            read_timeout_s=5,
            concurrency=10,
        )
        await Pipeline(store, provider, lambda _: None, SIZES, Stop()).run()
        await provider.aclose()
        stats = fake.stats()
        assert set(fake.deliveries(CAMPAIGN).values()) == {1}
        assert (stats["repeats_absorbed"], stats["body_mismatch"]) == (5, 0)


def test_the_body_is_the_same_to_the_byte_in_every_version():
    body = request_body(a_target(variables='{"b": 1.10, "a": "é"}'), "spring")
    assert (
        body
        == (
            '{"to":"seven@example.com","member_id":7,"template":"spring",'
            '"vars":{"b": 1.10, "a": "é"}}'
        ).encode()
    )


# --- charging and releasing -----------------------------------------------------------------------


def test_a_429_costs_no_attempt():
    outcome = decide(Throttled("http_429", 1.0), a_target(attempts=2), POLICY, NOW)
    assert (outcome.state, outcome.charged) == (State.PENDING, False)


def test_a_failing_provider_costs_no_attempt_while_the_breaker_is_open():
    target = a_target(attempts=2)
    is_open = Circumstances(now=0.0, uncharged=True, jitter=0.0)
    assert decide(Unavailable("http_503"), target, POLICY, NOW).state is State.FAILED
    assert decide(Unavailable("http_503"), target, POLICY, is_open).state is State.PENDING


async def test_a_release_leaves_attempts_and_keys_as_they_were_found(conn, stores):
    await add_targets(conn, CAMPAIGN, 2)
    await add_targets(conn, CAMPAIGN, 1, first=100, not_before="2020-01-01", attempts=1)
    store = await stores.open()
    await store.build()
    batch, single = await claim(store), await due(store)
    handed_back = settle(single.targets[0], State.PENDING)
    await store.finish([handed_back], {batch: Fate.RELEASE, single: Fate.DONE})
    cursor = await conn.execute("SELECT key_used_at, claimed_ids FROM campaign_batches")
    assert await cursor.fetchall() == [(None, None)]
    cursor = await conn.execute(
        "SELECT attempts, key_used_at, content_hash FROM campaign_targets WHERE member_id = 100"
    )
    assert await cursor.fetchall() == [(1, None, None)]


def test_refusals_and_throttling_do_not_open_the_breaker():
    breaker = Breaker()
    for answer in [Refused("http_422"), Throttled("http_429")] * 100:
        breaker.record(failed=is_provider_failure(answer), now=0.0)
    assert not breaker.is_open


def test_the_run_stops_when_all_is_refused():
    watch = RefusalWatch()
    assert sum(not watch.record(refused=True) for _ in range(200)) == 99


# --- pace -----------------------------------------------------------------------------------------


async def test_two_processes_share_one_pace(conn, stores):
    await add_targets(conn, CAMPAIGN, 20)
    one, two = await stores.open(rate_per_s=10.0), await stores.open(rate_per_s=10.0)
    await one.build()
    mine, others = await claim(one), await claim(two)
    first = await one.look(mine.targets[:2])
    second = await two.look(others.targets[:2])
    # Two slots of a tenth of a second are taken; the other process's begin after them.
    assert second.starts_at - first.starts_at > 0.15


@pytest.mark.slow
async def test_a_slot_that_was_missed_is_not_used(conn, stores):
    """After a stall its rows are looked at again and get new slots."""
    await add_targets(conn, CAMPAIGN, 400)
    store = await stores.open(batch_size=100)
    provider, slots, late = Answers(), {}, []
    look = store.look

    async def noted_look(targets):
        seen = await look(targets)
        ready = [t.member_id for t in targets if t in seen.ready]
        slots.update({m: (seen.starts_at or 0.0) + i / 500 for i, m in enumerate(ready)})
        return seen

    def begun() -> None:
        late.append(time.monotonic() - slots[provider.asked[-1]])

    store.look, provider.after = noted_look, begun
    loop = asyncio.get_running_loop()
    for at in (0.3, 0.6):
        loop.call_later(at, time.sleep, 0.15)
    async with asyncio.timeout(20):
        await Pipeline(store, provider, lambda _: None, SIZES, Stop()).run()
    assert len(late) == 400
    # A stall may catch the few permits that were just given; the other 75 slots were lost.
    assert sum(s > 0.06 for s in late) <= 20


async def test_a_kill_repeats_no_more_than_was_told(conn, stores):
    """However long the store takes to write: what is out and what is not recorded is bounded."""
    await add_targets(conn, CAMPAIGN, 200)
    store, provider, stop = await stores.open(batch_size=100), Answers(), Stop()
    sizes = replace(SIZES, limit_per_s=200.0, concurrency=5, flush_rows=10, flush_s=0.1)
    at_bound, write, finish = asyncio.Event(), asyncio.Event(), store.finish

    async def slow(outcomes, fates):
        await write.wait()
        return await finish(outcomes, fates)

    def begun() -> None:
        if len(provider.asked) == sizes.repeats_at_most:
            at_bound.set()

    store.finish, provider.after = slow, begun
    async with asyncio.timeout(20):
        running = asyncio.create_task(Pipeline(store, provider, lambda _: None, sizes, stop).run())
        await at_bound.wait()
        await asyncio.sleep(0.5)  # time for 100 more
        assert len(provider.asked) == sizes.repeats_at_most == 65
        write.set()
        await running
    assert sorted(provider.asked) == list(range(1, 201))


# --- what people say ------------------------------------------------------------------------------


async def say(conn: AsyncConnection, wish: Control) -> None:
    await conn.execute("UPDATE campaigns SET control = %s", [wish])


@pytest.mark.parametrize("wish", [Control.PAUSED, Control.CANCELLED])
async def test_the_look_reserves_no_slot_once_the_campaign_is_held(conn, stores, wish):
    await add_targets(conn, CAMPAIGN, 2)
    store = await stores.open()
    await store.build()
    lease = await claim(store)
    await say(conn, wish)
    look = await store.look(lease.targets)
    assert (look.control, look.starts_at) == (wish, None)


@pytest.mark.parametrize("wish", [Control.PAUSED, Control.CANCELLED])
async def test_a_campaign_that_is_held_stops_the_run(conn, stores, wish):
    await add_targets(conn, CAMPAIGN, 2)
    store, provider, stop = await stores.open(), Answers(), Stop()
    await say(conn, wish)
    async with asyncio.timeout(10):
        await Pipeline(store, provider, lambda _: None, SIZES, stop).run()
    assert (stop.reason, provider.asked) == (StopReason[wish.name], [])


async def test_a_pause_is_obeyed_while_the_provider_asked_to_wait(conn, stores):
    """Nothing is looked at then, and with a full queue nothing is claimed either."""
    await add_targets(conn, CAMPAIGN, 1000)
    store = await stores.open(batch_size=100)
    provider, stop = Answers(Throttled("http_429", 300.0)), Stop()
    sizes = replace(SIZES, limit_per_s=100.0, concurrency=1)  # no slot is left over
    looked, look = asyncio.Event(), store.look

    async def noted_look(targets):
        seen = await look(targets)
        if seen.blocked_s > 0:
            looked.set()
        return seen

    store.look = noted_look
    running = asyncio.create_task(Pipeline(store, provider, lambda _: None, sizes, stop).run())
    async with asyncio.timeout(20):
        await looked.wait()
    await say(conn, Control.PAUSED)
    async with asyncio.timeout(10):
        await running
    assert stop.reason is StopReason.PAUSED


OLD = datetime(2020, 1, 1, tzinfo=UTC)
ANN = Author("Ann", "asked the provider")


async def settled(dsn: str, way: Settling, *members: int) -> int:
    settings = CampaignSettings.load({"DB_DSN": as_role(dsn, "sender"), "CAMPAIGN_ID": CAMPAIGN})
    return (await settle_rows(settings, way, ANN, members)).settled


async def records(conn: AsyncConnection) -> list[tuple[object, ...]]:
    cursor = await conn.execute(
        "SELECT action, member_id, by_whom, before ->> 'reason' FROM campaign_actions ORDER BY 1, 2"
    )
    return await cursor.fetchall()


async def test_people_settle_rows_of_their_state_only(dsn, conn):
    for member, state in enumerate(State, 1):
        await add_targets(conn, CAMPAIGN, 1, first=member, state=state)
    before = await states(conn)
    failed = list(State).index(State.FAILED) + 1
    doubt = list(State).index(State.IN_DOUBT) + 1
    others = [member for member in before if member not in (failed, doubt)]
    assert await settled(dsn, REQUEUE, *others, doubt) == 0
    assert await settled(dsn, RESOLVE["pending"], *others, failed) == 0
    assert await states(conn) == before


async def test_people_settle_no_row_that_was_sent(dsn, conn):
    """Its state may not have been filled in yet, or was written by the old program."""
    await add_targets(conn, CAMPAIGN, 1, state="in_doubt", sent_at=OLD)
    assert await settled(dsn, RESOLVE["pending"], 1) == 0
    cursor = await conn.execute("SELECT sent_at FROM campaign_targets")
    assert await cursor.fetchall() == [(OLD,)]


async def test_each_row_that_people_settle_has_its_record(dsn, conn):
    await add_targets(conn, CAMPAIGN, 2, state="in_doubt", reason="timeout")
    await add_targets(conn, CAMPAIGN, 1, first=3, state="failed", reason="http_422")
    await settled(dsn, RESOLVE["sent"], 1)
    await settled(dsn, RESOLVE["pending"], 2)
    await settled(dsn, REQUEUE, 3)
    assert await records(conn) == [
        ("requeue", 3, "Ann", "http_422"),
        ("resolve_pending", 2, "Ann", "timeout"),
        ("resolve_sent", 1, "Ann", "timeout"),
    ]


async def test_a_requeued_row_keeps_the_age_of_its_key(dsn, conn):
    await add_targets(conn, CAMPAIGN, 1, state="failed", key_used_at=OLD)
    assert await settled(dsn, REQUEUE, 1) == 1
    cursor = await conn.execute("SELECT state, key_used_at FROM campaign_targets")
    assert await cursor.fetchall() == [("pending", OLD)]


async def test_a_row_failed_by_a_failing_provider_is_not_requeued_into_a_second_mail(
    dsn, conn, stores
):
    """A 504 may hide a mail that went out; a 422 hides none."""
    await add_targets(conn, CAMPAIGN, 2, attempts=POLICY.max_attempts - 1)
    store = await stores.open()
    await store.build()
    lease = await claim(store)
    now = Circumstances(now=time.monotonic(), uncharged=False, jitter=0.0)
    answers = (Unavailable("http_504"), Refused("http_422"))
    outcomes = [
        decide(answer, target, POLICY, now)
        for answer, target in zip(answers, lease.targets, strict=True)
    ]
    await store.finish(outcomes, {lease: Fate.DONE})
    assert await states(conn) == {1: "failed", 2: "failed"}
    await conn.execute(
        "UPDATE campaign_targets"
        " SET key_used_at = key_used_at - interval '2 h', email = 'another@example.com'"
    )
    assert await settled(dsn, REQUEUE, 1, 2) == 2
    assert ids(await due(store)) == [2]
    await store.sweep()
    assert await states(conn) == {1: "in_doubt", 2: "sending"}


async def test_a_requeued_row_keeps_what_was_sent_under_its_key(dsn, conn, stores):
    used = datetime.now(UTC)
    await add_targets(
        conn, CAMPAIGN, 1, state="failed", key_used_at=used, content_hash=b"another mail"
    )
    store = await stores.open()
    assert await settled(dsn, REQUEUE, 1) == 1
    assert (await store.claim_due())[0] is None
    assert await states(conn) == {1: "in_doubt"}


async def test_a_requeued_row_has_all_its_attempts_again(dsn, conn, stores):
    await add_targets(conn, CAMPAIGN, 1, state="failed", attempts=5, unknowns=1, lost_claims=4)
    store = await stores.open()
    assert await settled(dsn, REQUEUE, 1) == 1
    (target,) = (await due(store)).targets
    assert (target.attempts, target.unknowns) == (0, 0)


async def test_a_row_resolved_as_pending_has_a_key_as_new(dsn, conn, stores):
    """The provider does not have the mail, so its key is free for whatever the row holds now."""
    await add_targets(
        conn, CAMPAIGN, 1, state="in_doubt", key_used_at=OLD, content_hash=b"another mail"
    )
    store = await stores.open()
    assert await settled(dsn, RESOLVE["pending"], 1) == 1
    assert ids(await due(store)) == [1]


async def test_a_row_lost_too_often_comes_back_alone(dsn, conn, stores):
    await add_targets(conn, CAMPAIGN, 1, state="in_doubt", reason="lost_too_often", lost_claims=5)
    await add_targets(conn, CAMPAIGN, 1, first=2, not_before=datetime.now(UTC))
    store = await stores.open()
    assert await settled(dsn, RESOLVE["pending"], 1) == 1
    assert [ids(await due(store)), ids(await due(store))] in ([[1], [2]], [[2], [1]])


async def test_a_cancelled_campaign_is_not_paused_and_what_was_done_is_recorded(dsn, conn):
    await add_targets(conn, CAMPAIGN, 1)
    settings = CampaignSettings.load({"DB_DSN": as_role(dsn, "sender"), "CAMPAIGN_ID": CAMPAIGN})
    await steer(settings, Control.CANCELLED, ANN)
    with pytest.raises(CampaignError, match="is cancelled by Ann"):
        await steer(settings, Control.PAUSED, ANN)
    cursor = await conn.execute("SELECT control FROM campaigns")
    assert await cursor.fetchall() == [("cancelled",)]
    cursor = await conn.execute("SELECT action, before ->> 'control' FROM campaign_actions")
    assert await cursor.fetchall() == [("cancel", "run")]


async def test_slots_in_hand_are_not_used_after_a_429(dsn, conn, stores):
    await add_targets(conn, CAMPAIGN, 400)
    store, stop, asked = await stores.open(batch_size=100), Stop(), []
    provider = Answers(*[Accepted()] * 30, Throttled("http_429", 60.0))

    async def block_at_once(seconds: float) -> None:
        """Like the store's own, but the loop stands still: nobody notices by the way."""
        with psycopg.connect(dsn, autocommit=True) as other:
            other.execute(queries.look.BLOCK, {"account": "acct", "seconds": seconds})
        asked.append(len(provider.asked))
        asyncio.get_running_loop().call_later(0.5, stop.stop_claiming, StopReason.DEADLINE)

    store.block = block_at_once
    async with asyncio.timeout(20):
        await Pipeline(store, provider, lambda _: None, SIZES, stop).run()
    # What had its permit already; a tenth of a second of slots would be 50.
    assert len(provider.asked) - asked[0] <= 10


# --- record ---------------------------------------------------------------------------------------


async def test_nothing_comes_between_an_answer_and_its_outcome(conn, stores):
    """The run is ended by force in the very moment the answer is there: it is still recorded."""
    await add_targets(conn, CAMPAIGN, 1)
    store = await stores.open()
    provider, stop = Answers(), Stop()
    provider.after = stop.stop_working
    async with asyncio.timeout(20):
        await Pipeline(store, provider, lambda _: None, SIZES, stop).run()
    assert await states(conn) == {1: "sent"}


async def test_nothing_is_claimed_while_a_lease_has_ended_with_answers_in_hand(conn, stores):
    """The store was away for longer than a lease: one answer was being written, one came since.

    A third is still to come, so that the second waits for company.
    """
    await add_targets(conn, CAMPAIGN, 3)
    store, provider = await stores.open(batch_size=1), Answers()
    writing, answered, written = asyncio.Event(), asyncio.Event(), asyncio.Event()
    finish_rows = store.finish

    async def slow_send(target: Target, gate: Gate) -> Answer | None:
        answer = await Answers.send(provider, target, gate)
        if answer is not None and target.member_id == 2:
            await writing.wait()
            answered.set()
        if answer is not None and target.member_id == 3:
            await written.wait()
        return answer

    async def slow_finish(outcomes, fates):
        if writing.is_set():
            recorded = await finish_rows(outcomes, fates)
            written.set()
            return recorded
        writing.set()
        await answered.wait()
        for lease in pipeline._finisher._leases:
            lease.until = 0.0
        await expire(conn)  # after the process knows: nothing may be claimed in between
        return await finish_rows(outcomes, fates)

    store.finish, provider.send = slow_finish, slow_send
    sizes = replace(SIZES, flush_s=1.0)  # longer than the producer waits between two claims
    pipeline = Pipeline(store, provider, lambda _: None, sizes, Stop())
    async with asyncio.timeout(20):
        await pipeline.run()
    assert sorted(provider.asked) == [1, 2, 3]


async def test_a_finish_locks_rows_in_the_order_of_their_ids(dsn, conn, stores):
    """Who locks in the same order, as the application does, never deadlocks with a finish."""
    await add_targets(conn, CAMPAIGN, 3)
    store = await stores.open()
    await store.build()
    lease = await claim(store)
    async with await AsyncConnection.connect(dsn) as application:
        await application.execute("SELECT FROM campaign_targets WHERE member_id = 1 FOR UPDATE")
        late = asyncio.ensure_future(finish(store, *(settle(t) for t in reversed(lease.targets))))
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        async with asyncio.timeout(10):
            while (await (await conn.execute(waiting)).fetchone())[0] == 0:
                await asyncio.sleep(0.01)
        try:
            await application.execute(
                "SELECT FROM campaign_targets WHERE member_id = 3 FOR UPDATE NOWAIT"
            )
        except LockNotAvailable:
            pytest.fail("the finish held row 3 while it waited for row 1")
        finally:
            await application.rollback()
            await late
