"""The database away, slow or in the way: what was accepted is kept and written when it is back."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import psycopg
import pytest
from psycopg import sql

from chaos.conftest import LONG, Begin
from chaos.harness import PATIENCE_S, Run, Trial
from chaos.proxy import proxy_to
from sender.dev.postgres import EmbeddedPostgres
from sender.migrate import migrate

ROWS, RATE = 600, 150
AWAY_S = 30.0 if LONG else 3.0
# A look is valid for half a second; the rest is the machine's.
LAST_REQUESTS_S = 1.0


@pytest.fixture
def own() -> "AsyncIterator[EmbeddedPostgres]":
    """A server of this trial's own, which loses nothing that it confirmed."""
    settings = {"synchronous_commit": "on"}
    with EmbeddedPostgres(durable=False, tcp=True, settings=settings) as server:
        migrate(server.dsn)
        yield server


async def at_work(trial: Trial, **env: object) -> Run:
    """A run in the middle of the campaign."""
    settings = {"MAIL_RATE_PER_S": RATE, "LEASE_S": 60, **env}
    run = await trial.start(**settings)
    await trial.mail.until(lambda stats: stats["deliveries"] >= 150)
    return run


async def nothing_was_sent(trial: Trial, since: float, until: float) -> int:
    """How many requests came after the database went, and none of them late."""
    times = [at - since for at, _, _ in await trial.mail.requests() if since < at < until]
    assert not times or max(times) < LAST_REQUESTS_S, f"sent without a look: {max(times):.2f} s"
    return len(times)


async def came_through(trial: Trial, run: Run) -> None:
    """All sent, none asked twice: every accepted outcome was kept and written."""
    end = await run.wait()
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
    trial = await begin(ROWS, dsn=own.dsn, latency_s=0.5)
    run = await at_work(trial)
    since = time.monotonic()
    await asyncio.to_thread(own.stop, immediate=True)
    await run.event("database_away")
    await asyncio.sleep(AWAY_S)
    late = await nothing_was_sent(trial, since, time.monotonic())
    await asyncio.to_thread(own.start)
    await came_through(trial, run)
    figure(f"away for {AWAY_S:g} s: {late} requests of claimed rows, then none; 0 repeats after")


@pytest.mark.parametrize("then", ["hears again", "is cut", "refuses"] if LONG else ["is cut"])
async def test_a_database_gone_deaf(
    begin: Begin, dsn: str, figure: Callable[[str], None], then: str
) -> None:
    async with AsyncExitStack() as stack:
        proxy, through = await stack.enter_async_context(proxy_to(dsn))
        trial = await begin(ROWS, latency_s=0.3)
        run = await at_work(trial, DB_DSN=through)
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
        run = await at_work(trial, DB_DSN=through, SHUTDOWN_GRACE_S=5)
        proxy.go_deaf()
        since = time.monotonic()
        run.stop()
        end = await run.wait(30)
        took = time.monotonic() - since
        assert end.code == 1
        assert took < 5 + 1.5  # the contract's grace, and a busy machine
        proxy.cut()
        proxy.hear()
        await trial.sql(
            "UPDATE campaign_batches SET lease_until = now() WHERE claim_id IS NOT NULL"
        )
        assert (await trial.run()).code == 0
        assert await trial.reckon() == {"sent": ROWS}
        figure(f"exit 1 after {took:.1f} s of 5 s grace; 0 twice, 0 lost")


async def test_read_only(begin: Begin, figure: Callable[[str], None]) -> None:
    trial = await begin(ROWS, latency_s=0.1)
    run = await at_work(trial)
    name = (await trial.sql("SELECT current_database() AS name"))[0]["name"]

    async def read_only(value: str) -> None:
        async with await psycopg.AsyncConnection.connect(trial.dsn, autocommit=True) as conn:
            await conn.execute("SET default_transaction_read_only = off")
            await conn.execute(
                sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = {}").format(
                    sql.Identifier(name), sql.SQL(value)
                )
            )
            await conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name = 'sender'"
            )

    since = time.monotonic()
    await read_only("on")
    # Told once as it begins: of the connections cut, or of a statement refused (25006).
    told = await run.event("database_away")
    await asyncio.sleep(2)
    assert not run.told("database_back")
    late = await nothing_was_sent(trial, since, time.monotonic())
    await read_only("off")
    await came_through(trial, run)
    figure(f"read-only ({told['error']}): {late} requests, then none; 0 repeats")


WAITING = """
    SELECT 1 FROM pg_stat_activity WHERE datname = current_database()
    AND application_name = 'sender' AND wait_event_type = 'Lock'
"""


async def test_a_deadlock_with_an_application_that_locks_in_the_other_order(
    begin: Begin, figure: Callable[[str], None]
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
                # Each tenth row first; when the run waits for one, it has those before.
                await api.execute(
                    "SELECT 1 FROM campaign_targets WHERE member_id % 10 = 0 AND sent_at IS NULL"
                    " FOR UPDATE"
                )
                await trial.until(WAITING)
                await api.execute(
                    "UPDATE campaign_targets SET opted_out_at = NULL"
                    " WHERE member_id % 10 > 0 AND sent_at IS NULL"
                )
            await asyncio.sleep(0.2)
    await came_through(trial, run)
    seen = await trial.sql(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    )
    deadlocks = seen[0]["deadlocks"]
    figure(f"{deadlocks} deadlocks lost (40P01) in {tries} tries: 0 twice, 0 lost, 0 repeats")


async def test_row_locks_of_the_application_are_waited_for_and_yielded_to(
    begin: Begin, figure: Callable[[str], None]
) -> None:
    trial = await begin(ROWS, latency_s=0.05)
    run = await at_work(trial)
    async with await psycopg.AsyncConnection.connect(trial.dsn) as api:
        await api.execute(
            "SELECT 1 FROM campaign_targets WHERE member_id % 10 = 0 AND sent_at IS NULL FOR UPDATE"
        )
        since = time.monotonic()
        told = await run.event("database_away", lambda line: "55P03" in line["error"])
        waited = time.monotonic() - since
        await asyncio.sleep(3)
        await api.rollback()
    await came_through(trial, run)
    assert waited < PATIENCE_S
    figure(f"{told['error']} after {waited:.1f} s, tried again: 0 twice, 0 lost, 0 repeats")
