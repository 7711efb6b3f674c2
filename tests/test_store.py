"""The ledger and the queue on a real PostgreSQL: claims, fences, looks, finishes, sweeps."""

import asyncio
from itertools import pairwise

import pytest
from conftest import add_targets
from ledger import CAMPAIGN, claim, config, due, expire, finish, ids, settle, states
from ledger import stores as stores
from psycopg import AsyncConnection

from sender.domain import Control, Counts, Fate, State
from sender.ports import StoreUnavailable
from sender.store import PostgresStore


async def test_every_row_is_claimed_once_in_batches(conn, stores):
    await add_targets(conn, CAMPAIGN, 25)
    store = await stores.open()
    assert await store.build() == 3
    taken = [ids(await claim(store)) for _ in range(3)]
    assert taken == [list(range(1, 11)), list(range(11, 21)), list(range(21, 26))]
    assert await store.claim_batch() == (None, [])


async def test_a_campaign_without_rows_is_told(dsn):
    async with PostgresStore(config(dsn)) as store:
        assert not await store.open_campaign()


async def test_sent_and_opted_out_rows_are_never_claimed(conn, stores):
    await add_targets(conn, CAMPAIGN, 6)
    await conn.execute("UPDATE campaign_targets SET sent_at = now() WHERE member_id = 2")
    await conn.execute("UPDATE campaign_targets SET opted_out_at = now() WHERE member_id = 3")
    store = await stores.open()
    await store.build()
    await conn.execute("UPDATE campaign_targets SET sent_at = now() WHERE member_id = 4")
    await conn.execute("UPDATE campaign_targets SET opted_out_at = now() WHERE member_id = 5")
    assert ids(await claim(store)) == [1, 6]


@pytest.mark.parametrize("single", [False, True], ids=["a batch", "single rows"])
async def test_a_claim_whose_answer_was_cut_off_is_free_at_once(conn, stores, single):
    """It was carried out for nobody: neither its own process nor another waits for its lease."""
    await add_targets(conn, CAMPAIGN, 8, **({"not_before": "2020-01-01"} if single else {}))
    store, other = await stores.open(), await stores.open()
    await store.build()
    ask, take = store._database.all, due if single else claim

    async def cut_off(query, values):
        await ask(query, values)
        raise StoreUnavailable("OperationalError")

    store._database.all = cut_off
    with pytest.raises(StoreUnavailable):
        await take(store)
    store._database.all = ask
    assert await other.claim_due() == await other.claim_batch() == (None, [])
    assert (await store.claim_batch() if single else await store.claim_due()) == (None, [])
    assert ids(await take(other)) == list(range(1, 9))
    assert await store.claim_due() == await store.claim_batch() == (None, [])


async def test_two_builders_at_once_cover_each_row_once(conn, stores):
    await add_targets(conn, CAMPAIGN, 200)
    both = [await stores.open(), await stores.open()]
    for _ in range(5):
        await asyncio.gather(*(store.build() for store in both))
    cursor = await conn.execute("SELECT lo, hi FROM campaign_batches ORDER BY lo")
    ranges = await cursor.fetchall()
    assert [lo for lo, _ in ranges] == list(range(1, 201, 10))
    assert sum(hi - lo + 1 for lo, hi in ranges) == 200


async def test_rows_loaded_late_are_covered_without_overlap(conn, stores):
    await add_targets(conn, CAMPAIGN, 30, first=100)
    store = await stores.open()
    await store.build()
    await add_targets(conn, CAMPAIGN, 30, first=1)
    await add_targets(conn, CAMPAIGN, 5, first=500)
    await store.build()
    assert await store.build() == 0
    seen = []
    while (lease := (await store.claim_batch())[0]) is not None:
        seen += ids(lease)
    assert sorted(seen) == [*range(1, 31), *range(100, 130), *range(500, 505)]


async def test_a_late_row_inside_an_open_range_is_claimed_or_built_again(conn, stores):
    await add_targets(conn, CAMPAIGN, 5, first=10)
    store = await stores.open()
    await store.build()
    lease = await claim(store)
    await conn.execute(
        "INSERT INTO campaign_targets (campaign_id, member_id, email) VALUES (%s, 9, 'a@b.c')",
        [CAMPAIGN],
    )
    await conn.execute("UPDATE campaign_targets SET member_id = 100 WHERE member_id = 12")
    await finish(store, *(settle(t) for t in lease.targets if t.member_id != 12))
    await store.finish([], {lease: Fate.DONE})
    await store.build()
    late = [*ids(await claim(store)), *ids((await store.claim_batch())[0])]
    assert sorted(late) == [9, 100]


async def test_higher_priority_goes_first(conn, stores):
    await add_targets(conn, CAMPAIGN, 10, priority=lambda m: 5 if m % 2 else 0)
    store = await stores.open(batch_size=5)
    await store.build()
    assert ids(await claim(store)) == [1, 3, 5, 7, 9]
    assert ids(await claim(store)) == [2, 4, 6, 8, 10]


async def test_claims_do_not_wait_for_each_other(dsn, conn, stores):
    await add_targets(conn, CAMPAIGN, 20)
    store = await stores.open()
    await store.build()
    async with await AsyncConnection.connect(dsn) as other:
        await other.execute("SELECT FROM campaign_batches WHERE batch_no = 1 FOR UPDATE")
        async with asyncio.timeout(5):
            assert ids(await claim(store)) == list(range(11, 21))


async def test_due_claims_do_not_wait_for_the_application(dsn, conn, stores):
    await add_targets(conn, CAMPAIGN, 2, not_before="2020-01-01")
    store = await stores.open()
    async with await AsyncConnection.connect(dsn) as other:
        await other.execute("SELECT FROM campaign_targets WHERE member_id = 1 FOR UPDATE")
        async with asyncio.timeout(5):
            assert ids(await due(store)) == [2]


async def test_a_lost_batch_is_claimed_again_under_a_new_fence(conn, stores):
    await add_targets(conn, CAMPAIGN, 10)
    dead, alive = await stores.open(), await stores.open()
    await dead.build()
    lost = await claim(dead)
    assert (await alive.claim_batch())[0] is None
    await expire(conn)
    again = await claim(alive)
    assert ids(again) == ids(lost)
    assert again.claim_id != lost.claim_id
    assert all(t.key_used_at is not None for t in again.targets)
    # The late write of the first holder is refused, the second's is taken.
    assert await finish(dead, *(settle(t) for t in lost.targets)) == []
    assert await finish(alive, *(settle(t) for t in again.targets)) == ids(again)


async def test_a_batch_that_comes_free_behind_the_cursor_does_not_wait_for_the_end(conn, stores):
    await add_targets(conn, CAMPAIGN, 50)
    dead, alive = await stores.open(), await stores.open()
    await dead.build()
    assert (await claim(dead)).batch_no == 1
    assert (await claim(alive)).batch_no == 2
    await conn.execute("UPDATE campaign_batches SET lease_until = now() WHERE batch_no = 1")
    assert (await claim(alive)).batch_no == 3
    alive._after_since -= 30
    assert (await claim(alive)).batch_no == 1
    assert (await claim(alive)).batch_no == 4


async def test_a_lost_single_row_comes_back_and_the_late_write_is_refused(conn, stores):
    await add_targets(conn, CAMPAIGN, 1, not_before="2020-01-01")
    dead, alive = await stores.open(), await stores.open()
    lost = await due(dead)
    assert (await alive.claim_due())[0] is None
    await expire(conn)
    again = await due(alive)
    assert again.targets[0].key_used_at is not None
    assert await finish(dead, settle(lost.targets[0])) == []
    assert await states(conn) == {1: "sending"}
    assert await finish(alive, settle(again.targets[0])) == [1]
    assert await states(conn) == {1: "sent"}


async def test_outcomes_of_a_batch_are_written_as_they_say(conn, stores):
    await add_targets(conn, CAMPAIGN, 5)
    store = await stores.open()
    await store.build()
    lease = await claim(store)
    a, b, c, d, e = lease.targets
    taken = await finish(
        store,
        settle(a),
        settle(b, State.FAILED, reason="http_422"),
        settle(c, State.IN_DOUBT, charged=True, unknown=True, key_used_at=lease.claimed_at),
        settle(
            d,
            State.PENDING,
            charged=True,
            unknown=True,
            delay_s=0.0,
            key_used_at=lease.claimed_at,
            reason="timeout_answer",
        ),
        settle(e, State.PENDING, delay_s=3600.0, reason="http_429"),
    )
    assert taken == [1, 2, 3, 4, 5]
    cursor = await conn.execute(
        "SELECT state, attempts, unknowns, reason, sent_at IS NOT NULL, key_used_at IS NOT NULL,"
        " content_hash IS NOT NULL, not_before > now() FROM campaign_targets ORDER BY member_id"
    )
    assert await cursor.fetchall() == [
        ("sent", 0, 0, None, True, False, False, None),
        ("failed", 0, 0, "http_422", False, False, False, None),
        ("in_doubt", 1, 1, None, False, True, True, None),
        ("pending", 1, 1, "timeout_answer", False, True, True, False),
        ("pending", 0, 0, "http_429", False, False, False, True),
    ]
    assert await store.counts() == Counts(sent=1, failed=1, in_doubt=1, pending=2)
    retry = await due(store)
    assert [(t.member_id, t.attempts, t.unknowns) for t in retry.targets] == [(4, 1, 1)]
    assert retry.targets[0].key_used_at == lease.claimed_at


async def test_a_partial_finish_keeps_the_batch_and_a_release_frees_the_rest(conn, stores):
    await add_targets(conn, CAMPAIGN, 6)
    store, other = await stores.open(), await stores.open()
    await store.build()
    lease = await claim(store)
    await finish(store, *(settle(t) for t in lease.targets[:2]))
    assert (await other.claim_batch())[0] is None
    await store.finish([], {lease: Fate.RELEASE})
    rest = await claim(other)
    assert ids(rest) == [3, 4, 5, 6]
    # Nothing of the rest was requested, so their keys are as new.
    assert rest.found_key_used_at is None
    assert all(t.key_used_at is None for t in rest.targets)


async def test_a_release_restores_the_stamp_of_an_earlier_lost_claim(conn, stores):
    await add_targets(conn, CAMPAIGN, 3)
    store = await stores.open()
    await store.build()
    lost = await claim(store)
    await expire(conn)
    second = await claim(store)
    assert second.found_key_used_at is not None
    await store.finish([], {second: Fate.RELEASE})
    third = await claim(store)
    assert third.found_key_used_at == second.found_key_used_at
    assert lost.found_key_used_at is None


async def test_a_row_sent_by_the_old_program_meanwhile_is_not_written(conn, stores):
    await add_targets(conn, CAMPAIGN, 2)
    store = await stores.open()
    await store.build()
    lease = await claim(store)
    await conn.execute("UPDATE campaign_targets SET sent_at = '2020-01-01' WHERE member_id = 1")
    assert await finish(store, *(settle(t) for t in lease.targets)) == [2]


async def test_an_accepted_answer_settles_a_doubt_even_without_the_fence(conn, stores):
    await add_targets(conn, CAMPAIGN, 2)
    store = await stores.open()
    await store.build()
    lease = await claim(store)
    await expire(conn)
    await conn.execute("UPDATE campaign_batches SET key_used_at = now() - interval '2 h'")
    assert {s.member_id for s in await store.sweep()} == {1, 2}
    assert await states(conn) == {1: "in_doubt", 2: "in_doubt"}
    assert await finish(store, settle(lease.targets[0])) == [1]
    assert await finish(store, settle(lease.targets[1], State.FAILED, reason="x")) == []
    assert await states(conn) == {1: "sent", 2: "in_doubt"}


# --- the look -------------------------------------------------------------------------------------


async def test_the_look_names_only_rows_that_may_be_mailed(conn, stores):
    await add_targets(conn, CAMPAIGN, 8)
    await add_targets(conn, CAMPAIGN, 3, first=100, not_before="2020-01-01")
    store = await stores.open()
    await store.build()
    batch, single = await claim(store), await due(store)
    targets = [*batch.targets, *single.targets]
    assert len((await store.look(targets)).ready) == 11
    await conn.execute(
        "UPDATE campaign_targets SET opted_out_at = now() WHERE member_id IN (1, 100)"
    )
    await conn.execute("UPDATE campaign_targets SET sent_at = now() WHERE member_id IN (2, 101)")
    await conn.execute("DELETE FROM campaign_targets WHERE member_id = 3")
    look = await store.look(targets)
    assert sorted(t.member_id for t in look.ready) == [4, 5, 6, 7, 8, 102]
    assert look.lost == frozenset()
    assert look.starts_at is not None


async def test_the_look_tells_lost_leases(conn, stores):
    await add_targets(conn, CAMPAIGN, 4)
    await add_targets(conn, CAMPAIGN, 2, first=100, not_before="2020-01-01")
    store = await stores.open()
    await store.build()
    batch, single = await claim(store), await due(store)
    await expire(conn)
    look = await store.look([*batch.targets, *single.targets])
    assert look.lost == {batch.claim_id}
    assert not look.ready & set(single.targets)


async def test_the_look_tells_a_pause_and_reserves_nothing(conn, stores):
    await add_targets(conn, CAMPAIGN, 4)
    store = await stores.open()
    await store.build()
    lease = await claim(store)
    await conn.execute("UPDATE campaigns SET control = 'paused'")
    look = await store.look(lease.targets)
    assert (look.control, look.starts_at) == (Control.PAUSED, None)


# --- pace -----------------------------------------------------------------------------------------


async def test_slots_of_two_processes_never_overlap(conn, stores):
    await add_targets(conn, CAMPAIGN, 400)
    both = [await stores.open(rate_per_s=50.0) for _ in range(2)]
    await both[0].build()
    slots = []
    for _ in range(10):
        for store in both:
            lease = await claim(store)
            look = await store.look(lease.targets[:2])
            if look.starts_at is not None:
                slots.append(look.starts_at)
    assert len(slots) >= 6
    slots.sort()
    # Each took two slots of 20 ms; conversions between the clocks cost at most a few of them.
    assert all(b - a > 0.03 for a, b in pairwise(slots))
    # And nothing was reserved further ahead than allowed.
    assert look.ahead_s <= 0.25 + 0.04


async def test_a_blocked_account_gets_no_slots_in_any_process(conn, stores):
    await add_targets(conn, CAMPAIGN, 20)
    one, two = await stores.open(), await stores.open()
    await one.build()
    lease = await claim(two)
    await one.block(30.0)
    look = await two.look(lease.targets)
    assert look.starts_at is None
    assert 29 < look.blocked_s <= 30
    await one.block(1.0)
    assert (await two.look(lease.targets)).blocked_s > 25


@pytest.mark.parametrize("column", ["next_free_at", "blocked_until"])
async def test_a_clock_far_ahead_is_ignored(conn, stores, column):
    await add_targets(conn, CAMPAIGN, 20)
    store = await stores.open()
    await store.build()
    lease = await claim(store)
    await conn.execute(f"UPDATE provider_accounts SET {column} = now() + interval '1 h'")
    look = await store.look(lease.targets)
    assert look.starts_at is not None
    if column == "next_free_at":
        assert look.ahead_s > 3500
        assert (await store.look(lease.targets)).ahead_s < 1


# --- doubt ----------------------------------------------------------------------------------------


async def test_keys_too_old_are_never_claimed_and_the_sweep_puts_them_in_doubt(conn, stores):
    await add_targets(conn, CAMPAIGN, 15)
    await add_targets(
        conn, CAMPAIGN, 2, first=100, not_before="2020-01-01", key_used_at="2020-01-01"
    )
    store = await stores.open()
    await store.build()
    await claim(store)
    await expire(conn)
    await conn.execute(
        "UPDATE campaign_batches SET key_used_at = now() - interval '2 h' WHERE batch_no = 1"
    )
    assert ids(await claim(store)) == [11, 12, 13, 14, 15]
    assert (await store.claim_batch())[0] is None
    assert (await store.claim_due())[0] is None
    swept = await store.sweep()
    assert {s.member_id for s in swept} == {*range(1, 11), 100, 101}
    assert {s.reason for s in swept} == {"key_too_old"}
    assert await store.counts() == Counts(pending=5, in_doubt=12)


async def test_rows_that_a_lost_claim_did_not_take_do_not_age(conn, stores):
    await add_targets(conn, CAMPAIGN, 2, first=1)
    await add_targets(conn, CAMPAIGN, 1, first=9)
    store = await stores.open()
    await store.build()
    await claim(store)
    await add_targets(conn, CAMPAIGN, 1, first=5)
    await expire(conn)
    await conn.execute("UPDATE campaign_batches SET key_used_at = now() - interval '2 h'")
    assert {s.member_id for s in await store.sweep()} == {1, 2, 9}
    await store.build()
    late = await claim(store)
    assert [(t.member_id, t.key_used_at) for t in late.targets] == [(5, None)]


async def test_an_address_that_changes_while_a_batch_is_lost_puts_the_row_in_doubt(conn, stores):
    await add_targets(conn, CAMPAIGN, 3)
    store = await stores.open()
    await store.build()
    await claim(store)
    await conn.execute("UPDATE campaign_targets SET email = 'new@example.com' WHERE member_id = 2")
    await conn.execute(
        "INSERT INTO campaign_targets (campaign_id, member_id, email) VALUES (%s, 4, 'd@e.f')",
        [CAMPAIGN],
    )
    await conn.execute("UPDATE campaign_batches SET hi = 4")
    await expire(conn)
    lease, changed = await store.claim_batch()
    assert ids(lease) == [1, 3]
    assert [(c.member_id, c.reason) for c in changed] == [(2, "changed_while_open")]
    assert all(t.key_used_at is not None for t in lease.targets)
    # The one loaded since was surely never sent: a later build covers it, as new.
    await finish(store, *(settle(t) for t in lease.targets))
    await store.build()
    late = await claim(store)
    assert [(t.member_id, t.key_used_at) for t in late.targets] == [(4, None)]


async def test_an_address_that_changes_before_a_retry_puts_the_row_in_doubt(conn, stores):
    await add_targets(conn, CAMPAIGN, 3)
    store = await stores.open()
    await store.build()
    lease = await claim(store)
    used = {"key_used_at": lease.claimed_at, "charged": True}
    await finish(
        store,
        settle(lease.targets[0], State.PENDING, **used),
        settle(lease.targets[1], State.PENDING, **used),
        settle(lease.targets[2], State.PENDING),
    )
    await conn.execute("UPDATE campaign_targets SET email = 'new@example.com' WHERE member_id > 1")
    again, changed = await store.claim_due()
    assert sorted(ids(again)) == [1, 3]
    assert [c.member_id for c in changed] == [2]


async def test_a_batch_lost_three_times_is_split_and_a_poison_row_costs_itself(conn, stores):
    await add_targets(conn, CAMPAIGN, 3)
    store = await stores.open()
    await store.build()
    for _ in range(3):
        assert len(ids(await claim(store))) == 3
        await expire(conn)
    assert (await store.claim_batch())[0] is None
    await store.sweep()
    first, second, third = [await claim(store) for _ in range(3)]
    assert [ids(x) for x in (first, second, third)] == [[1], [2], [3]]
    await finish(store, settle(first.targets[0]), settle(third.targets[0]))
    await expire(conn)
    assert ids(await claim(store)) == [2]
    await expire(conn)
    assert (await store.claim_batch())[0] is None
    assert [(s.member_id, s.reason) for s in await store.sweep()] == [(2, "lost_too_often")]
    assert await store.counts() == Counts(sent=2, in_doubt=1)


async def test_single_rows_lost_together_are_claimed_alone(conn, stores):
    await add_targets(conn, CAMPAIGN, 3, not_before="2020-01-01")
    store = await stores.open()
    for _ in range(3):
        assert len(ids(await due(store))) == 3
        await expire(conn)
    for _ in range(2):
        lease = await due(store)
        assert len(ids(lease)) == 1
        await finish(store, settle(lease.targets[0]))
    (poison,) = ids(await due(store))
    await expire(conn)
    assert ids(await due(store)) == [poison]
    await expire(conn)
    assert (await store.claim_due())[0] is None
    assert [(s.member_id, s.reason) for s in await store.sweep()] == [(poison, "lost_too_often")]


async def test_who_opts_out_while_a_single_claim_is_lost_is_skipped(conn, stores):
    await add_targets(conn, CAMPAIGN, 1, not_before="2020-01-01")
    store = await stores.open()
    await due(store)
    await conn.execute("UPDATE campaign_targets SET opted_out_at = now()")
    await expire(conn)
    assert await store.sweep() == []
    assert await store.counts() == Counts(skipped=1)


async def test_rows_left_sending_by_something_else_are_adopted(conn, stores):
    await add_targets(conn, CAMPAIGN, 2, state="sending")
    store = await stores.open()
    assert await store.build() == 0
    assert await store.adopt() == 2
    assert sorted(ids(await due(store))) == [1, 2]


# --- extend, due, counts --------------------------------------------------------------------------


async def test_only_held_leases_are_extended(conn, stores):
    await add_targets(conn, CAMPAIGN, 20)
    await add_targets(conn, CAMPAIGN, 2, first=100, not_before="2020-01-01")
    store, other = await stores.open(), await stores.open()
    await store.build()
    one, two, single = await claim(store), await claim(store), await due(store)
    await conn.execute(
        "UPDATE campaign_batches SET lease_until = now() - interval '1 s' WHERE batch_no = %s",
        [one.batch_no],
    )
    assert ids(await claim(other)) == ids(one)
    held = await store.extend([one, two, single], single.targets)
    assert held == {two.claim_id, single.claim_id}
    assert one.until == 0.0


async def test_due_tells_when_something_is_free(conn, stores):
    await add_targets(conn, CAMPAIGN, 5)
    store = await stores.open()
    assert (await store.due()).in_s is None
    await store.build()
    assert (await store.due()).in_s == 0.0
    lease = await claim(store)
    assert 50 < (await store.due()).in_s <= 60
    await finish(store, *(settle(t, State.PENDING, delay_s=20.0) for t in lease.targets))
    assert 15 < (await store.due()).in_s <= 20


async def test_remaining_follows_the_queue(conn, stores):
    await add_targets(conn, CAMPAIGN, 20)
    store = await stores.open()
    await store.build()
    lease = await claim(store)
    done = [settle(t) for t in lease.targets[:6]]
    later = [settle(t, State.PENDING, delay_s=20.0) for t in lease.targets[6:]]
    await finish(store, *done, *later)
    remaining = await store.remaining()
    assert (remaining.done, remaining.open_rows) == (6, 14)


@pytest.mark.parametrize(
    ("instant", "is_due"),
    [("-infinity", True), ("0500-01-01 BC", True), ("infinity", False), ("20000-01-01", False)],
)
async def test_instants_that_no_calendar_of_ours_has_are_due_or_not(conn, stores, instant, is_due):
    await add_targets(conn, CAMPAIGN, 1, not_before=instant)
    await add_targets(conn, CAMPAIGN, 2, first=10, not_before="2020-01-01")
    store = await stores.open(batch_size=1)
    seen = []
    while (lease := (await store.claim_due())[0]) is not None:
        seen += ids(lease)
    assert sorted(seen) == ([1, 10, 11] if is_due else [10, 11])
    assert (await store.due()).in_s is not None


@pytest.mark.parametrize("others_are_due", [True, False])
async def test_rows_before_the_low_water_mark_are_swept_in_time(conn, stores, others_are_due):
    """Each sixth sweep is whole; each one is as soon as nothing is found due."""
    await add_targets(conn, CAMPAIGN, 5, not_before="2025-01-01")
    store = await stores.open()
    assert await store.sweep() == []
    assert ids(await due(store)) == [1, 2, 3, 4, 5]
    await add_targets(conn, CAMPAIGN, 1, first=9, not_before="2024-01-01", key_used_at="2024-01-01")
    if not others_are_due:
        assert await store.claim_due() == (None, [])
    swept = [[row.member_id for row in await store.sweep()] for _ in range(6)]
    assert swept == ([[], [], [], [], [], [9]] if others_are_due else [[9], [], [], [], [], []])


async def test_an_estimate_knows_of_rows_before_the_low_water_mark(conn, stores):
    await add_targets(conn, CAMPAIGN, 5, not_before="2025-01-01")
    await add_targets(
        conn, CAMPAIGN, 2, first=8, not_before="2024-01-01", opted_out_at="2024-01-01"
    )
    store = await stores.open()
    assert ids(await due(store)) == [1, 2, 3, 4, 5]
    assert [(await store.remaining()).open_rows for _ in range(8)] == [7] * 8
