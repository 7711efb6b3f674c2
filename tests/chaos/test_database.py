"""The database away, slow or in the way: what was accepted is kept and written when it is back."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import LiteralString

import psycopg
import pytest
from conftest import as_role, prepare

from chaos.conftest import LONG, Begin
from chaos.harness import Run, Trial, patience
from chaos.proxy import proxy_to
from sender.dev.postgres import EmbeddedPostgres

ROWS, RATE = 500, 150
AWAY_S = 30.0 if LONG else 3.0
FAILOVER_S = 180.0 if LONG else 6.0
# A look is valid for half a second; the rest is the machine's.
LAST_REQUESTS_S = 1.0
READ_ONLY, LOCKED = "25006 ERROR", "55P03 ERROR"


@pytest.fixture
def own() -> "AsyncIterator[EmbeddedPostgres]":
    """A server of this trial's own, which loses nothing that it confirmed."""
    settings = {
        "synchronous_commit": "on",
        # A short line for each refused statement, with its SQLSTATE.
        "log_line_prefix": "%e ",
        "log_min_error_statement": "panic",
    }
    with EmbeddedPostgres(durable=False, tcp=True, settings=settings) as server:
        prepare(server.dsn)
        yield server


async def at_work(trial: Trial, **env: object) -> Run:
    """A run in the middle of the campaign."""
    settings = {"MAIL_RATE_PER_S": RATE, "LEASE_S": 60, "DEADLINE_S": 600, **env}
    run = await trial.start(**settings)
    await trial.mail.until(lambda stats: stats["deliveries"] >= 150)
    return run


async def nothing_was_sent(trial: Trial, since: float, until: float) -> int:
    """How many requests came after the database went, and none of them late."""
    times = [at - since for at, _, _ in await trial.mail.requests() if since < at < until]
    assert not times or max(times) < LAST_REQUESTS_S, f"sent without a look: {max(times):.2f} s"
    return len(times)


async def came_through(trial: Trial, run: Run) -> None:
    """All sent, none asked twice: every accepted outcome was kept and written.

    A claim whose answer was cut off stays leased for a minute, to nobody.
    """
    end = await run.wait(120)
    assert end.code == 0, end
    assert await trial.reckon() == {"sent": ROWS}
    assert (await trial.mail.stats())["repeats_absorbed"] == 0
    assert {row["attempts"] for row in await trial.rows()} == {0}


async def test_connections_cut_again_and_again(begin: Begin, figure: Callable[[str], None]) -> None:
    trial = await begin(ROWS, latency_s=0.1)
    run = await at_work(trial)
    cut = 0
    for _ in range(40 if LONG else 12):
        found = await trial.sql(
            "SELECT count(pg_terminate_backend(pid)) AS n FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'sender'"
        )
        cut += found[0]["n"]
        await asyncio.sleep(0.15)
    assert cut > 5
    await came_through(trial, run)
    figure(f"{cut} connections cut, {ROWS} rows: 0 twice, 0 lost, 0 repeats")


async def test_a_server_that_restarts_at_once(
    begin: Begin, own: EmbeddedPostgres, figure: Callable[[str], None]
) -> None:
    trial = await begin(ROWS, dsn=own.dsn, latency_s=0.1)
    run = await at_work(trial)
    await asyncio.to_thread(own.restart, immediate=True)
    await run.event("database_back")
    await came_through(trial, run)
    away = run.told("database_back")[0]["after_s"]
    figure(f"restart by crash, away for {away:.1f} s: 0 twice, 0 lost, 0 repeats")


async def test_a_failover(
    begin: Begin, own: EmbeddedPostgres, figure: Callable[[str], None]
) -> None:
    """It outlasts the leases: what was answered is written before anything is claimed again."""
    trial = await begin(ROWS, dsn=own.dsn, latency_s=0.5)
    run = await at_work(trial, LEASE_S=5)
    since = time.monotonic()
    await asyncio.to_thread(own.stop, immediate=True)
    await run.event("database_away")
    await asyncio.sleep(FAILOVER_S)
    late = await nothing_was_sent(trial, since, time.monotonic())
    await asyncio.to_thread(own.start)
    await came_through(trial, run)
    figure(f"away for {FAILOVER_S:g} s: {late} requests of claimed rows, then none; 0 repeats")


@pytest.mark.parametrize("then", ["hears again", "is cut", "refuses"] if LONG else ["is cut"])
async def test_a_database_gone_deaf(
    begin: Begin, dsn: str, figure: Callable[[str], None], then: str
) -> None:
    async with AsyncExitStack() as stack:
        proxy, through = await stack.enter_async_context(proxy_to(dsn))
        trial = await begin(ROWS, latency_s=0.3)
        run = await at_work(trial, DB_DSN=as_role(through, "sender"))
        since = time.monotonic()
        proxy.go_deaf()
        await asyncio.sleep(AWAY_S)
        late = await nothing_was_sent(trial, since, time.monotonic())
        if then == "is cut":
            proxy.cut()
        elif then == "refuses":
            proxy.refuse()
            await run.event("database_away")
        proxy.hear()
        await came_through(trial, run)
        figure(f"deaf for {AWAY_S:g} s, then {then}: {late} requests, then none; 0 repeats")


async def test_sigterm_while_the_database_is_deaf(
    begin: Begin, dsn: str, figure: Callable[[str], None]
) -> None:
    async with AsyncExitStack() as stack:
        proxy, through = await stack.enter_async_context(proxy_to(dsn))
        trial = await begin(ROWS)
        run = await at_work(trial, DB_DSN=as_role(through, "sender"), SHUTDOWN_GRACE_S=5)
        proxy.go_deaf()
        since = time.monotonic()
        run.stop()
        end = await run.wait(30)
        took = time.monotonic() - since
        assert end.code == 1
        assert took < 5 + 1.5  # the contract's grace, and a busy machine
        proxy.cut()
        proxy.hear()
        await trial.time_passes()
        assert (await trial.run()).code == 0
        assert await trial.reckon() == {"sent": ROWS}
        figure(f"exit 1 after {took:.1f} s of 5 s grace; 0 twice, 0 lost")


# --- Read-only ------------------------------------------------------------------------------------


async def is_switched(trial: Trial, own: EmbeddedPostgres, on: bool) -> None:
    """Every session is read-only from its next statement on, or not any more; none is cut."""
    switch: dict[bool, LiteralString] = {
        True: "ALTER SYSTEM SET default_transaction_read_only = on",
        False: "ALTER SYSTEM RESET default_transaction_read_only",
    }
    await trial.sql(switch[on])
    await trial.sql("SELECT pg_reload_conf()")


async def is_a_standby(trial: Trial, own: EmbeddedPostgres, on: bool) -> None:
    """A failover as seen from outside: cut, answered by a standby, which is promoted then."""
    if on:
        (own._data / "standby.signal").touch()
        await asyncio.to_thread(own.restart, immediate=True)
    else:
        await trial.sql("SELECT pg_promote()")


@pytest.mark.parametrize("becomes", [is_switched, is_a_standby], ids=["switched", "standby"])
async def test_read_only(
    begin: Begin,
    own: EmbeddedPostgres,
    figure: Callable[[str], None],
    becomes: Callable[[Trial, EmbeddedPostgres, bool], Awaitable[None]],
) -> None:
    trial = await begin(ROWS, dsn=own.dsn, latency_s=0.1)
    run = await at_work(trial)
    since = time.monotonic()
    await becomes(trial, own, True)
    await run.event("database_away")
    async with patience("statements refused as read-only", lambda: own.log):
        while own.log.count(READ_ONLY) < 3:
            await asyncio.sleep(0.1)
    await asyncio.sleep(AWAY_S / 2)
    assert not run.told("database_back")
    late = await nothing_was_sent(trial, since, time.monotonic())
    refused = own.log.count(READ_ONLY)
    await becomes(trial, own, False)
    await run.event("database_back")
    await came_through(trial, run)
    figure(
        f"{refused} statements refused (25006): {late} requests of claimed rows, then none;"
        " 0 repeats after"
    )


@pytest.mark.parametrize("what", ["read-only", "locked"])
async def test_a_start_while_the_database_takes_no_writes(
    begin: Begin, own: EmbeddedPostgres, figure: Callable[[str], None], what: str
) -> None:
    """As in the middle of a failover, or of a migration: it is waited for, for half a minute."""
    trial = await begin(50, dsn=own.dsn)
    async with await psycopg.AsyncConnection.connect(own.dsn) as other:
        if what == "read-only":
            await is_switched(trial, own, True)
        else:
            await other.execute("LOCK TABLE campaigns IN ACCESS EXCLUSIVE MODE")
        refusal = {"read-only": READ_ONLY, "locked": LOCKED}[what]
        run = await trial.start()
        async with patience("a refusal at the start", lambda: own.log + run.tail()):
            while own.log.count(refusal) < 2:
                await asyncio.sleep(0.05)
        if what == "read-only":
            await is_switched(trial, own, False)
        await other.rollback()
    assert (await run.wait()).code == 0
    assert await trial.reckon() == {"sent": 50}
    figure(f"{own.log.count(refusal)} statements refused ({refusal[:5]}), then 50 sent")


# --- Locks of the application ---------------------------------------------------------------------

WAITING = """
    SELECT 1 FROM pg_stat_activity WHERE datname = current_database()
    AND application_name = 'sender' AND wait_event_type = 'Lock'
"""
# What the run has locked when it waits for one of the rows that the application has already.
OTHER_ORDER: Mapping[str, LiteralString] = {
    "one table": "UPDATE campaign_targets SET opted_out_at = NULL"
    " WHERE member_id % 10 > 0 AND sent_at IS NULL",
    "two tables": "UPDATE campaign_batches SET priority = priority WHERE done_at IS NULL",
}


@pytest.mark.parametrize("order", OTHER_ORDER if LONG else ["two tables"])
async def test_a_deadlock_with_an_application_that_locks_in_the_other_order(
    begin: Begin, figure: Callable[[str], None], order: str
) -> None:
    trial = await begin(ROWS, latency_s=0.05)
    run = await at_work(trial)
    tries = 0
    async with await psycopg.AsyncConnection.connect(trial.dsn, autocommit=True) as api:
        # The run looks for deadlocks first, so it is the run that loses.
        await api.execute("SET deadlock_timeout = '10s'")
        while not [x for x in run.told("database_away") if "40P01" in x["error"]]:
            tries += 1
            assert run.is_running, f"no deadlock in {tries} tries"
            async with api.transaction():
                await api.execute(
                    "SELECT 1 FROM campaign_targets WHERE member_id % 10 = 0 AND sent_at IS NULL"
                    " FOR UPDATE"
                )
                await trial.until(WAITING)
                await api.execute(OTHER_ORDER[order])
            await asyncio.sleep(0.2)
    await came_through(trial, run)
    seen = await trial.sql(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    )
    deadlocks = seen[0]["deadlocks"]
    assert deadlocks >= 1
    figure(f"{deadlocks} deadlocks lost (40P01) in {tries} tries: 0 twice, 0 lost, 0 repeats")


LOCK = "SELECT 1 FROM campaign_targets WHERE member_id % 10 = 0 AND sent_at IS NULL FOR UPDATE"
REST_IS_SENT = """
    SELECT 1 WHERE NOT EXISTS (
        SELECT FROM campaign_targets WHERE sent_at IS NULL AND member_id % 10 > 0)
"""


async def test_rows_that_the_application_has_locked_keep_only_their_own_outcomes(
    begin: Begin, figure: Callable[[str], None]
) -> None:
    trial = await begin(ROWS, latency_s=0.05)
    run = await at_work(trial)
    async with await psycopg.AsyncConnection.connect(trial.dsn) as api:
        locked = (await api.execute(LOCK)).rowcount
        await run.event("rows_locked")
        await trial.until(REST_IS_SENT)
        await api.rollback()
    await came_through(trial, run)
    assert not run.told("database_away")
    figure(f"{locked} of {ROWS} rows locked, the others recorded meanwhile: 0 lost, 0 repeats")


async def test_sigterm_while_the_application_has_rows_locked(
    begin: Begin, figure: Callable[[str], None]
) -> None:
    trial = await begin(ROWS, latency_s=0.05)
    run = await at_work(trial)
    async with await psycopg.AsyncConnection.connect(trial.dsn) as api:
        await api.execute(LOCK)
        await run.event("rows_locked")
        run.stop()
        end = await run.wait()
        assert end.code == 1, end
        (left,) = run.told("outcomes_abandoned")
        stats = await trial.mail.stats()
        assert (await trial.counts()).sent == stats["deliveries"] - left["rows"]
    await trial.time_passes()
    assert (await trial.run()).code == 0
    assert await trial.reckon() == {"sent": ROWS}
    repeats = (await trial.mail.stats())["repeats_absorbed"]
    assert repeats == left["rows"] <= 50
    figure(f"exit 1, all recorded but {repeats} of locked rows, whose repeats were absorbed")
