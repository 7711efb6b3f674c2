"""`sender status --watch`: until nothing is open, or Ctrl-C; what it draws, prints and survives."""

import asyncio
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from typing import Any

import pytest
from chaos.proxy import proxy_to
from conftest import add_targets
from psycopg import AsyncConnection
from rich.console import Console
from typer.testing import CliRunner

from sender import cli, reading, settings, watching
from sender.errors import CampaignError
from sender.settings import CampaignSettings
from sender.watching import Lines, Objects, Show, screen, watch

SENT = "UPDATE campaign_targets SET state = 'sent', sent_at = now()"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_EVERY_S", 0.05)
    monkeypatch.setattr(reading, "_PATIENCE_S", 0.1)
    for name in settings.all_names():
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(f"{name}_FILE", raising=False)


def of(dsn: str) -> CampaignSettings:
    return CampaignSettings.load({"DB_DSN": dsn, "CAMPAIGN_ID": "c"})


class Seen:
    """Passes on what it is shown, and lets a test wait for it."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self.looks, self.aways = asyncio.Semaphore(0), asyncio.Semaphore(0)

    def look(self, found: Any) -> None:
        self._show.look(found)
        self.looks.release()

    def away(self, campaign: str, why: str) -> None:
        self._show.away(campaign, why)
        self.aways.release()


async def done_after(dsn: str, conn: AsyncConnection, show: Show, looks: int = 3) -> None:
    """Watch three open rows, which are sent after some looks."""
    await add_targets(conn, "c", 3)
    seen = Seen(show)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(watch(of(dsn), seen))
        for _ in range(looks):
            await seen.looks.acquire()
        await conn.execute(SENT)


async def test_it_ends_when_no_row_is_open_and_prints_a_line_a_round(
    dsn: str, conn: AsyncConnection
) -> None:
    with redirect_stdout(io.StringIO()) as out:
        await done_after(dsn, conn, Lines())
    lines = out.getvalue().splitlines()
    assert len(lines) >= 4
    assert all(re.match(r"\d\d:\d\d:\d\dZ  campaign c ", line) for line in lines)
    assert "open, nothing is running: 0 of 3 sent (0.0%), 3 open" in lines[0]
    assert "done: 3 of 3 sent (100.0%), 0 open" in lines[-1]


async def test_programs_get_an_object_a_line(dsn: str, conn: AsyncConnection) -> None:
    with redirect_stdout(io.StringIO()) as out:
        await done_after(dsn, conn, Objects())
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [told[0]["open"], told[-1]["open"]] == [3, 0]
    assert {"at", "campaign", "sent", "total", "next_due"} <= told[-1].keys()


async def test_a_terminal_is_drawn_on_in_place(dsn: str, conn: AsyncConnection) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with screen(console) as show:
        await done_after(dsn, conn, show)
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    assert "\x1b[1A\x1b[2K" in drawn  # up a line, and it is empty
    last = drawn.rpartition("\x1b[2K")[2]
    assert "campaign c: done" in last
    assert "total               3" in last


async def test_a_database_that_is_away_is_told_and_waited_for(
    dsn: str, conn: AsyncConnection
) -> None:
    await add_targets(conn, "c", 3)
    out, screen_out = io.StringIO(), io.StringIO()
    console = Console(file=screen_out, force_terminal=True, width=200)
    async with proxy_to(dsn) as (proxy, through):
        for show in (Lines(), Objects()):
            with redirect_stdout(out):
                await away_and_back(through, conn, proxy, Seen(show))
            await conn.execute("UPDATE campaign_targets SET state = 'pending', sent_at = NULL")
        with screen(console) as show:
            await away_and_back(through, conn, proxy, Seen(show))
    text = out.getvalue()
    assert "campaign c cannot be seen, asking again: the database could not be reached" in text
    assert '"campaign": "c", "away": "the database could not be reached' in text
    drawn = screen_out.getvalue()
    before = drawn.partition("cannot be seen, asking again")[0].rpartition("\x1b[2K")[2]
    assert "total               3" in before  # what was seen last is still there


async def away_and_back(dsn: str, conn: AsyncConnection, proxy: Any, seen: Seen) -> None:
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(watch(of(dsn), seen))
        await seen.looks.acquire()
        proxy.refuse()
        await seen.aways.acquire()
        proxy.hear()
        while not seen.looks.locked():
            await seen.looks.acquire()
        await seen.looks.acquire()
        await conn.execute(SENT)


async def test_what_no_time_mends_ends_it(dsn: str) -> None:
    with pytest.raises(CampaignError):
        await watch(of(dsn), Lines())


async def test_the_command_ends_with_0(dsn: str, conn: AsyncConnection) -> None:
    await add_targets(conn, "c", 1, state="failed")
    env = {"DB_DSN": dsn, "CAMPAIGN_ID": "c"}
    for more in ([], ["--json"]):
        command = ["status", "--watch", *more]
        ended = await asyncio.to_thread(CliRunner().invoke, cli.app, command, env=env)
        assert (ended.exit_code, ended.stderr, ended.stdout.count("\n")) == (0, "", 1)


def begun(dsn: str, out: int) -> subprocess.Popen[bytes]:
    env = {**os.environ, "DB_DSN": dsn, "CAMPAIGN_ID": "c", "TERM": "xterm"}
    command = [sys.executable, "-m", "sender", "status", "--watch"]
    return subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.PIPE)


@pytest.mark.slow
async def test_ctrl_c_ends_it_with_0(dsn: str) -> None:
    await add_targets(dsn, "c", 3)
    ours, theirs = pty.openpty()
    try:
        for out in (subprocess.PIPE, theirs):
            with begun(dsn, out) as process:
                assert process.stderr
                reads = process.stdout.fileno() if process.stdout else ours
                said = b""
                while b"nothing is running" not in said:
                    said += await asyncio.to_thread(os.read, reads, 1024)
                process.send_signal(signal.SIGINT)
                assert process.wait(20) == 0
                assert process.stderr.read() == b""
    finally:
        for end in (ours, theirs):
            with suppress(OSError):
                os.close(end)
