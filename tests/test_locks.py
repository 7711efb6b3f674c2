"""A table that somebody has locked as a whole: commands say who, and soon; pause needs no rows."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from conftest import add_targets
from psycopg import AsyncConnection, sql
from typer.testing import CliRunner

from sender import actions, cli, locks, settings

SAID = ("--by", "Ann", "--why", "a reason")
CHANGES = (["requeue", *SAID, "--all"], ["resolve", "--as", "sent", *SAID, "--member", "5"])
LOOKS = (["status"], ["status", "--json"], ["failures"], ["failures", "--csv"])


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LOCKS_S", 0.2)
    monkeypatch.setattr(actions, "_GLANCE_S", 0.1)
    for name in settings.all_names():
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(f"{name}_FILE", raising=False)


@pytest.fixture
async def env(dsn: str) -> Mapping[str, str]:
    """A campaign of open, failed and doubtful rows that never ran."""
    await add_targets(dsn, "c", 3)
    await add_targets(dsn, "c", 1, first=4, state="failed")
    await add_targets(dsn, "c", 1, first=5, state="in_doubt")
    return {"DB_DSN": dsn, "CAMPAIGN_ID": "c"}


@asynccontextmanager
async def locked(dsn: str, table: str, mode: str = "ACCESS EXCLUSIVE") -> AsyncIterator[int]:
    """Hold a table; gives the number of the process that does."""
    statement = sql.SQL("LOCK TABLE {} IN {} MODE").format(sql.Identifier(table), sql.SQL(mode))
    async with await AsyncConnection.connect(dsn, application_name="nightly report") as other:
        await other.execute(statement)
        yield other.info.backend_pid


async def ended(env: Mapping[str, str], *arguments: str) -> Any:
    """Give a command, which must not wait for the lock's end."""
    async with asyncio.timeout(20):
        return await asyncio.to_thread(CliRunner().invoke, cli.app, arguments, env=env)


@pytest.mark.parametrize("arguments", [*LOOKS, *CHANGES], ids=" ".join)
async def test_who_has_locked_the_rows_is_told_instead_of_waiting(
    env: Mapping[str, str], arguments: list[str]
) -> None:
    async with locked(env["DB_DSN"], "campaign_targets") as pid:
        end = await ended(env, *arguments)
    assert (end.exit_code, end.stdout) == (1, "")
    (line,) = end.stderr.splitlines()
    assert line.startswith(f"campaign_targets is locked by pid {pid} (postgres, nightly report); ")
    assert "end that transaction" in line
    assert (await ended(env, *arguments)).exit_code == 0


@pytest.mark.parametrize(
    ("table", "arguments"),
    [
        ("campaigns", ["status"]),
        ("campaigns", ["pause", *SAID]),
        ("campaign_actions", ["pause", *SAID]),
        ("sender_migrations", ["failures"]),
        ("sender_migrations", CHANGES[0]),
    ],
)
async def test_so_it_is_with_the_other_tables(
    env: Mapping[str, str], table: str, arguments: list[str]
) -> None:
    async with locked(env["DB_DSN"], table):
        end = await ended(env, *arguments)
    assert end.exit_code == 1
    assert end.stderr.startswith(f"{table} is locked by pid ")
    assert end.stderr.count("\n") == 1


async def test_whoever_stands_in_line_for_the_table_is_told_too(env: Mapping[str, str]) -> None:
    async with await AsyncConnection.connect(env["DB_DSN"]) as reader:
        await reader.execute("SELECT FROM campaign_targets")
        async with await AsyncConnection.connect(env["DB_DSN"], application_name="psql") as other:
            alter = "ALTER TABLE campaign_targets ADD COLUMN note text"
            altering = asyncio.create_task(other.execute(alter))
            waits = "SELECT FROM pg_locks WHERE NOT granted AND pid = %s"
            async with asyncio.timeout(20):
                while not await (await reader.execute(waits, [other.info.backend_pid])).fetchall():
                    await asyncio.sleep(0.01)
            end = await ended(env, "status")
            await reader.rollback()
            await altering
    assert end.exit_code == 1
    assert "(postgres, psql)" in end.stderr


async def test_rows_that_may_not_be_changed_now_can_be_looked_at(
    env: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sender.settling._LOCKS_PATIENCE_S", 0.3)
    async with locked(env["DB_DSN"], "campaign_targets", "SHARE"):
        assert (await ended(env, "status")).exit_code == 0
        end = await ended(env, "requeue", *SAID, "--all")
    assert end.exit_code == 1
    assert end.stderr.startswith("campaign_targets is locked by pid ")


@pytest.mark.parametrize("command", ["pause", "cancel", "resume"])
async def test_a_campaign_is_steered_while_its_rows_are_locked(
    env: Mapping[str, str], conn: AsyncConnection, command: str
) -> None:
    assert (await ended(env, "pause", *SAID)).exit_code == 0
    await conn.execute("UPDATE campaigns SET control = 'run'")
    async with locked(env["DB_DSN"], "campaign_targets"):
        end = await ended(env, command, *SAID)
    assert (end.exit_code, end.stderr) == (0, "")
    found = await (await conn.execute("SELECT control FROM campaigns")).fetchone()
    assert found == ({"pause": "paused", "cancel": "cancelled", "resume": "run"}[command],)


async def test_a_campaign_that_nobody_knows_is_not_steered_unseen(
    env: Mapping[str, str], conn: AsyncConnection
) -> None:
    async with locked(env["DB_DSN"], "campaign_targets"):
        end = await ended(env, "pause", *SAID)
    assert end.exit_code == 1
    assert "campaign_targets is locked by pid" in end.stderr
    assert await (await conn.execute("SELECT FROM campaigns")).fetchall() == []


async def test_check_tells_it_as_a_fault(env: Mapping[str, str]) -> None:
    async with locked(env["DB_DSN"], "campaign_targets"):
        end = await ended(env, "check", "--json")
    assert end.exit_code == 78
    (found,) = [
        finding["text"]
        for finding in json.loads(end.stdout)["findings"]
        if finding["verdict"] == "fault" and finding["subject"] == "database"
    ]
    assert found.startswith("campaign_targets is locked by pid ")
