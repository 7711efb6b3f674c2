"""Several runs at once, some of them asleep: whoever holds a key requests it, nobody else."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import psycopg
import pytest

from chaos.conftest import Begin
from chaos.harness import CAMPAIGN, PATIENCE_S, QUICK, SAID, Run, Trial

RUNS = 10
ROWS = 10_000
ROWS_HELD = 160


async def test_ten_runs_at_one_barrier(begin: Begin, figure: Callable[[str], None]) -> None:
    trial = await begin(ROWS, far=True)
    # A barrier is waited for longer than the application would be.
    await trial.alter("ALTER ROLE sender IN DATABASE {} SET lock_timeout = 0")
    async with await psycopg.AsyncConnection.connect(trial.dsn) as barrier:
        await barrier.execute("LOCK TABLE campaigns IN ACCESS EXCLUSIVE MODE")
        runs = [await trial.start(MAIL_RATE_PER_S=1500, LEASE_S=20) for _ in range(RUNS)]
        waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database()"
        await trial.until(f"{waiting} AND wait_event_type = 'Lock' HAVING count(*) = {RUNS}")
        await barrier.commit()
    ends = [await run.wait(2 * PATIENCE_S) for run in runs]
    assert [end.code for end in ends] == [0] * RUNS
    assert await trial.reckon() == {"sent": ROWS}
    stats = await trial.mail.stats()
    assert stats["requests"] == stats["keys_seen"] == ROWS
    shares = sorted(end.last["requests"] for end in ends)
    figure(f"{ROWS} rows, {RUNS} runs: {stats['keys_seen']} keys, 0 twice; {shares} each")


async def sleeps(trial: Trial, run: Run) -> None:
    """Put a run to sleep with requests in flight."""
    await trial.mail.until(lambda s: s["deliveries"] >= 60 and s["in_flight"] >= 20)
    run.freeze()


async def by_another(trial: Trial) -> Mapping[str, Any]:
    """Let another run take everything over and end."""
    end = await trial.run(MAIL_RATE_PER_S=300)
    assert end.code == 0, end
    return await trial.mail.stats()


async def test_woken_after_its_lease_it_sends_and_writes_nothing_more(
    begin: Begin, figure: Callable[[str], None]
) -> None:
    trial = await begin(600, latency_s=0.3)
    zombie = await trial.start(MAIL_RATE_PER_S=100)
    await sleeps(trial, zombie)
    before = await by_another(trial)
    rows = await trial.rows()
    zombie.thaw()
    end = await zombie.wait()
    assert await trial.rows() == rows, "it wrote"
    after = await trial.mail.stats()
    assert after["requests"] == before["requests"], "it sent"
    assert end.code == 0
    told = sum(line["rows"] for line in zombie.told("writes_refused"))
    assert end.last["refused_writes"] == told > 0
    assert await trial.reckon() == {"sent": 600}
    figure(f"0 requests, 0 rows written after waking, {told} writes refused and told")


async def test_woken_while_another_is_at_work(begin: Begin, figure: Callable[[str], None]) -> None:
    trial = await begin(900, latency_s=0.2)
    zombie = await trial.start(MAIL_RATE_PER_S=150)
    await sleeps(trial, zombie)
    other = await trial.start(MAIL_RATE_PER_S=150)
    # Until the other one has rows that the first one lost.
    await trial.until(
        "SELECT 1 FROM campaign_batches WHERE lost_claims > 0 AND campaign_id = %s", CAMPAIGN
    )
    zombie.thaw()
    assert [(await run.wait()).code for run in (zombie, other)] == [0, 0]
    assert await trial.reckon() == {"sent": 900}
    keys = Counter(key for _, key, _ in await trial.mail.requests())
    repeats = sum(n - 1 for n in keys.values())
    # What was in flight or unrecorded when it fell asleep, nothing that it only held.
    assert repeats <= 100
    figure(f"900 rows, {repeats} keys asked again, each absorbed")


@pytest.mark.parametrize("leases", [2])
async def test_a_loop_that_stood_still_longer_than_its_lease(
    begin: Begin, figure: Callable[[str], None], leases: int
) -> None:
    trial = await begin(400, latency_s=0.3)
    stuck = await trial.start(
        {"at": "blocked_loop", "nth": 60, "seconds": 4.0 * leases}, MAIL_RATE_PER_S=100
    )
    await trial.mail.until(lambda s: s["deliveries"] >= 60)
    other = asyncio.create_task(trial.run(MAIL_RATE_PER_S=300))
    assert [(await stuck.wait()).code, (await other).code] == [0, 0]
    assert await trial.reckon() == {"sent": 400}
    keys = Counter(key for _, key, _ in await trial.mail.requests())
    repeats = sum(n - 1 for n in keys.values())
    assert repeats <= 60
    figure(f"stood still for {leases} leases: {repeats} keys asked again, each absorbed")


async def test_rows_that_wait_longer_than_their_lease_stay_with_their_run(
    begin: Begin, figure: Callable[[str], None]
) -> None:
    """The provider is slower than was thought; a lease is kept by who works on it."""
    trial = await begin(ROWS_HELD, latency_s=0.6)
    runs = [await trial.start(MAIL_RATE_PER_S=500, SEND_CONCURRENCY=16) for _ in range(2)]
    assert [(await run.wait()).code for run in runs] == [0, 0]
    assert await trial.reckon() == {"sent": ROWS_HELD}
    stats = await trial.mail.stats()
    assert stats["requests"] == stats["keys_seen"] == ROWS_HELD
    (row,) = await trial.sql("SELECT max(sent_at) - min(sent_at) AS time FROM campaign_targets")
    took_s = row["time"].total_seconds()
    assert took_s > float(QUICK["LEASE_S"])
    assert sum(len(run.told("lease_lost")) for run in runs) == 0
    figure(f"leases of 4 s, {took_s:.1f} s of work: {ROWS_HELD} keys asked once")


async def test_rows_loaded_late_handed_back_and_requeued_are_found_by_whoever_runs(
    begin: Begin, figure: Callable[[str], None]
) -> None:
    trial = await begin(400, by_member=dict.fromkeys((3, 5, 8), ("422",)), latency_s=0.1)
    leaves = await trial.start(MAIL_RATE_PER_S=100)
    stays = await trial.start(MAIL_RATE_PER_S=100)
    await trial.until("SELECT 1 FROM campaign_targets WHERE state = 'failed' HAVING count(*) = 3")
    leaves.stop()
    await trial.load(50, first=150_000)
    await trial.load(50, first=-50)
    assert "3 rows" in await trial.command("requeue", *SAID, "--all")
    assert ((await leaves.wait()).code, (await stays.wait()).code) == (1, 0)
    assert await trial.reckon() == {"sent": 500}
    stats = await trial.mail.stats()
    assert stats["requests"] == 503
    assert stats["repeats_absorbed"] == 0
    figure("100 loaded late, 3 requeued, one run of two left: 500 sent, 0 asked twice")


async def test_paused_and_resumed_while_the_provider_closes_connections(
    begin: Begin, figure: Callable[[str], None]
) -> None:
    trial = await begin(600, requests_per_connection=5, latency_s=0.1)
    for pauses in range(1, 4):
        run = await trial.start(MAIL_RATE_PER_S=150)
        await trial.mail.until(lambda stats, enough=100 * pauses: stats["deliveries"] >= enough)
        await trial.command("pause", *SAID)
        end = await run.wait()
        assert (end.code, "paused" in end.last["reason"]) == (0, True)
        assert await trial.free()
        await trial.command("resume", *SAID)
    assert (await trial.run()).code == 0
    assert await trial.reckon() == {"sent": 600}
    stats = await trial.mail.stats()
    assert stats["requests"] == stats["keys_seen"] == 600
    assert (await trial.run()).last["requests"] == 0
    figure(
        "3 times paused and resumed, a connection closed after 5 answers: 600 keys, 600 requests;"
        " a start after the end: 0 requests"
    )
