"""The trials behind PgBouncer in transaction mode, under the sender's own role.

Every run here reaches the database through it alone, and so did the migrations of that database.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import LiteralString, cast

import psycopg
import pytest
from conftest import ROLES

from chaos import test_kills, test_opt_out
from chaos.bouncer import POOL_SIZE, Bouncer, find_pgbouncer
from chaos.conftest import LONG, Begin
from chaos.harness import CAMPAIGN, patience
from chaos.test_database import ROWS, at_work, came_through, nothing_was_sent
from sender.dev.postgres import EmbeddedPostgres

KILLS = 100 if LONG else 5
AWAY_S = 30.0 if LONG else 2.0
RUNS, ROWS_OF_TEN = 10, 10_000 if LONG else 3_000


@pytest.fixture(scope="session")
def bouncer(postgres: EmbeddedPostgres) -> Iterator[Bouncer]:
    program = find_pgbouncer()
    if program is None:
        pytest.skip("pgbouncer is not installed (Debian: apt-get install pgbouncer)")
    with Bouncer(program, postgres.port) as bouncer:
        yield bouncer


def command(*words: str, dsn: str) -> str:
    """Run a command of ours to its end; returns what it printed."""
    ran = ended(*words, dsn=dsn)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def ended(*words: str, dsn: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sender", *words],
        env={"PATH": os.environ["PATH"], "DB_DSN": dsn, "CAMPAIGN_ID": CAMPAIGN},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def as_administrator(dsn: str, text: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(cast("LiteralString", text))


@pytest.fixture(scope="session")
def template(postgres: EmbeddedPostgres, bouncer: Bouncer) -> str:
    """A database whose migrations went through the bouncer, as their own role."""
    as_administrator(postgres.dsn, "CREATE DATABASE bouncer_template")
    dsn = postgres.dsn_of("bouncer_template")
    migrated_through(bouncer, dsn)
    # Its idle sessions would be in the way of the clones.
    bouncer.kill()
    bouncer.start()
    return "bouncer_template"


def migrated_through(bouncer: Bouncer, dsn: str) -> str:
    """Migrate as RUNBOOK.md says, roles before and after; returns what was told."""
    as_administrator(dsn, ROLES.read_text())
    told = command("migrate", dsn=bouncer.to(dsn, "sender_owner"))
    as_administrator(dsn, ROLES.read_text())
    return told


@pytest.fixture
def run_dsn(dsn: str, bouncer: Bouncer) -> str:
    return bouncer.to(dsn, "sender")


async def transactions(bouncer: Bouncer, dsn: str) -> int:
    """How many of the sender's went through, all of them in transaction mode."""
    pools = await bouncer.of("SHOW POOLS", dsn)
    assert {pool["pool_mode"] for pool in pools if pool["user"] == "sender"} == {"transaction"}
    (stats,) = await bouncer.of("SHOW STATS", dsn)
    return int(stats["total_xact_count"])


# --- The trials of the others ---------------------------------------------------------------------


async def test_killed_at_named_points_behind_pgbouncer(
    begin: Begin, figure: Callable[[str], None], bouncer: Bouncer, dsn: str
) -> None:
    await test_kills.test_killed_at_named_points(begin, figure)
    assert await transactions(bouncer, dsn) > 100


async def test_killed_at_random_moments_behind_pgbouncer(
    begin: Begin,
    figure: Callable[[str], None],
    bouncer: Bouncer,
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(test_kills, "KILLS", KILLS)
    await test_kills.test_killed_at_random_moments(begin, figure)
    assert await transactions(bouncer, dsn) > 100


async def test_opted_out_during_the_run_behind_pgbouncer(
    begin: Begin, figure: Callable[[str], None], bouncer: Bouncer, dsn: str
) -> None:
    await test_opt_out.test_opted_out_during_the_run(begin, figure, "full rate")
    assert await transactions(bouncer, dsn) > 100


async def test_ten_runs_let_in_at_once_by_pgbouncer(
    begin: Begin, figure: Callable[[str], None], bouncer: Bouncer, dsn: str, run_dsn: str
) -> None:
    """Ten runs of up to four connections each share four sessions of the server."""
    trial = await begin(ROWS_OF_TEN, far=True)
    async with closed(bouncer, run_dsn):
        runs = [await trial.start(MAIL_RATE_PER_S=1500, LEASE_S=20) for _ in range(RUNS)]
        async with patience("ten runs at the door", lambda: "".join(r.tail() for r in runs)):
            while sum(pool["cl_waiting"] for pool in await bouncer.of("SHOW POOLS", dsn)) < RUNS:
                await asyncio.sleep(0.05)
    await trial.mail.until(lambda stats: stats["deliveries"] >= ROWS_OF_TEN / 4)
    clients = [c for c in await bouncer.of("SHOW CLIENTS", dsn) if c["user"] == "sender"]
    servers = await bouncer.of("SHOW SERVERS", dsn)
    assert len(clients) >= RUNS > POOL_SIZE >= len(servers)
    assert [(await run.wait()).code for run in runs] == [0] * RUNS
    assert await trial.reckon() == {"sent": ROWS_OF_TEN}
    stats = await trial.mail.stats()
    assert stats["requests"] == stats["keys_seen"] == ROWS_OF_TEN
    figure(
        f"{ROWS_OF_TEN} rows, {RUNS} runs: {stats['keys_seen']} keys, 0 twice;"
        f" {len(clients)} clients, {len(servers)} sessions"
    )


@asynccontextmanager
async def closed(bouncer: Bouncer, run_dsn: str) -> AsyncIterator[None]:
    """Let nobody through; who connects gets in, as others did before, and then waits."""
    async with await psycopg.AsyncConnection.connect(run_dsn) as before:
        await before.execute("SELECT")
    await bouncer.tell("PAUSE")
    try:
        yield
    finally:
        await bouncer.tell("RESUME")


# --- What only a pooler can do --------------------------------------------------------------------


async def test_a_table_of_old_is_migrated_through_pgbouncer(
    begin: Begin, figure: Callable[[str], None], bouncer: Bouncer, bare_dsn: str
) -> None:
    """The table people have, some of it sent by the program before."""
    as_administrator(
        bare_dsn,
        "CREATE TABLE campaign_targets (campaign_id text, member_id bigint, email text,"
        " sent_at timestamptz, PRIMARY KEY (campaign_id, member_id));"
        " INSERT INTO campaign_targets SELECT 'spring', n, 'member' || n || '@example.com',"
        " CASE WHEN n <= 20 THEN now() END FROM generate_series(1, 60) n;",
    )
    as_administrator(bare_dsn, ROLES.read_text())
    as_administrator(bare_dsn, "ALTER TABLE campaign_targets OWNER TO sender_owner")
    await asyncio.to_thread(migrated_through, bouncer, bare_dsn)
    owner = bouncer.to(bare_dsn, "sender_owner")
    assert "nothing to do" in command("migrate", "--plan", dsn=owner)
    trial = await begin(0, dsn=bare_dsn)
    end = await trial.run(DB_DSN=bouncer.to(bare_dsn, "sender"))
    assert (end.code, end.last["sent"], end.last["requests"]) == (0, 60, 40)
    told = command("status", "--json", dsn=bouncer.to(bare_dsn, "sender_reader"))
    assert json.loads(told)["sent"] == 60
    by = ("--by", "oncall", "--why", "a trial")
    command("pause", *by, dsn=bouncer.to(bare_dsn, "sender"))
    assert await trial.sql("SELECT 1 FROM campaigns WHERE control = 'paused'")
    assert await transactions(bouncer, bare_dsn) > 20
    figure("60 rows, 20 of them sent before: migrated, 40 sent")


async def test_a_locked_table_is_told_behind_it_and_no_limit_stays(
    begin: Begin, figure: Callable[[str], None], bouncer: Bouncer, dsn: str
) -> None:
    trial = await begin(3)
    by = ("--by", "oncall", "--why", "a trial")
    commands = (("status",), ("failures",), ("requeue", "--all", *by))
    where = bouncer.to(dsn, "postgres")  # who has no limit of its own, unlike the role `sender`
    await asyncio.to_thread(command, "pause", *by, dsn=where)
    async with await psycopg.AsyncConnection.connect(dsn) as other:
        await other.execute("LOCK TABLE campaign_targets")
        for words in commands:
            ran = await asyncio.to_thread(ended, *words, dsn=where)
            assert ran.returncode == 1
            assert f"campaign_targets is locked by pid {other.info.backend_pid} " in ran.stderr
        await asyncio.to_thread(command, "cancel", *by, dsn=where)
    assert await trial.sql("SELECT 1 FROM campaigns WHERE control = 'cancelled'")
    for words in commands:
        await asyncio.to_thread(command, *words, dsn=where)
    async with await psycopg.AsyncConnection.connect(where, autocommit=True) as shared:
        assert await (await shared.execute("SHOW lock_timeout")).fetchone() == ("0",)
    figure(f"{len(commands)} commands gave up and named who; the campaign was cancelled meanwhile")


async def test_pgbouncer_gives_up_its_sessions_and_is_killed(
    begin: Begin, figure: Callable[[str], None], bouncer: Bouncer, dsn: str
) -> None:
    trial = await begin(ROWS, latency_s=0.1)
    run = await at_work(trial)
    sessions: set[int] = set()
    for _ in range(5):
        sessions |= {server["remote_pid"] for server in await bouncer.of("SHOW SERVERS", dsn)}
        await bouncer.tell("RECONNECT")
        await asyncio.sleep(0.3)
    assert len(sessions) > POOL_SIZE
    assert not run.told("database_away"), "the sessions were given up in between"
    bouncer.kill()
    await run.event("database_away")
    bouncer.start()
    back = await run.event("database_back")
    await came_through(trial, run)
    assert await transactions(bouncer, dsn) > 20
    figure(
        f"{len(sessions)} sessions, killed and away for {back['after_s']:.1f} s:"
        " 0 twice, 0 lost, 0 repeats"
    )


async def test_pgbouncer_lets_nobody_through(
    begin: Begin, figure: Callable[[str], None], bouncer: Bouncer, dsn: str, run_dsn: str
) -> None:
    trial = await begin(ROWS, latency_s=0.3)
    run = await at_work(trial, MAIL_RATE_PER_S=300)
    async with closed(bouncer, run_dsn):
        since = time.monotonic()
        await asyncio.sleep(AWAY_S)
        late = await nothing_was_sent(trial, since, time.monotonic())
    await came_through(trial, run)
    assert await transactions(bouncer, dsn) > 20
    figure(f"PAUSE for {AWAY_S:g} s: {late} requests of claimed rows, then none; 0 repeats after")


async def test_others_hold_every_session_of_pgbouncer(
    begin: Begin, figure: Callable[[str], None], bouncer: Bouncer, dsn: str
) -> None:
    """It sends away who waits for one too long."""
    trial = await begin(ROWS, latency_s=0.3)
    run = await at_work(trial, MAIL_RATE_PER_S=300)
    async with impatient(bouncer), AsyncExitStack() as stack:
        for _ in range(POOL_SIZE):
            other = await psycopg.AsyncConnection.connect(bouncer.to(dsn, "member_api"))
            await stack.enter_async_context(other)
            await other.execute("SELECT")
        since = time.monotonic()
        away = await run.event("database_away")
        await asyncio.sleep(1)
        late = await nothing_was_sent(trial, since, time.monotonic())
    await came_through(trial, run)
    assert await transactions(bouncer, dsn) > 20
    figure(f"{away['error']}: {late} requests of claimed rows, then none; 0 repeats after")


@asynccontextmanager
async def impatient(bouncer: Bouncer) -> AsyncIterator[None]:
    """Send those away who wait for a session longer than a second."""
    await bouncer.tell("SET query_wait_timeout = 1")
    try:
        yield
    finally:
        await bouncer.tell("SET query_wait_timeout = 120")
