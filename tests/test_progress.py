"""The progress bar: what it draws, what it survives, and where there is none."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from conftest import add_targets
from rich.console import Console

from sender.dev.fake_provider import FakeOptions, FakeProvider
from sender.ports import Remaining, StoreUnavailable
from sender.telemetry.progress import ProgressBar


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def drawn(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_it_shows_how_many_are_done_and_why_nothing_moves() -> None:
    console = terminal()
    with ProgressBar("c", console) as bar:
        bar.show(Remaining(0, 0))
        bar.show(Remaining(3, 7), "the provider fails")
    assert "3/10" in drawn(console)
    assert "the provider fails" in drawn(console)


class _Store:
    """Answers with what the calls in `answers` return or raise, the last one for ever."""

    def __init__(self, *answers: Callable[[], Remaining]) -> None:
        self._answers = list(answers)
        self.asked = anyio.Event()

    async def remaining(self) -> Remaining:
        self.asked.set()
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return answer()


def _away() -> Remaining:
    raise StoreUnavailable("away")


@pytest.mark.parametrize(
    ("answers", "last"),
    [
        ((lambda: Remaining(1, 9), lambda: Remaining(10, 0)), "10/10"),
        ((_away, lambda: Remaining(10, 0)), "10/10"),
        ((lambda: Remaining(1, 9), _away), "1/10"),
    ],
)
async def test_it_ends_with_where_the_run_ended(answers: Any, last: str) -> None:
    console, store = terminal(), _Store(*answers)
    with ProgressBar("c", console) as bar:
        async with anyio.create_task_group() as group:
            watch: Any = bar.watch
            group.start_soon(watch, store, SimpleNamespace(waiting=""))
            await store.asked.wait()
            group.cancel_scope.cancel()
    assert re.findall(r"\d+/10", drawn(console))[-1] == last


def _until_end(terminal: int) -> str:
    said = b""
    with suppress(OSError):  # how Linux tells that the other side is closed
        while chunk := os.read(terminal, 65_536):
            said += chunk
    return said.decode()


@pytest.mark.slow
async def test_sender_run_draws_on_a_terminal_and_logs_lines_elsewhere(dsn: str) -> None:
    async with FakeProvider(FakeOptions()) as provider:
        environ = {**os.environ, "DB_DSN": dsn, "MAIL_URL": provider.url, "TERM": "xterm"}
        command = [sys.executable, "-m", "sender", "run"]
        for campaign in ("shown", "logged"):
            await add_targets(dsn, campaign, 20)

        ours, theirs = pty.openpty()
        async with await anyio.open_process(
            command, env={**environ, "CAMPAIGN_ID": "shown"}, stdout=theirs, stderr=theirs
        ) as process:
            os.close(theirs)
            shown = await anyio.to_thread.run_sync(_until_end, ours)
            await process.wait()
        os.close(ours)
        assert process.returncode == 0
        assert "20/20" in shown
        assert "run_ended" in shown

        logged = await anyio.run_process(
            command, env={**environ, "CAMPAIGN_ID": "logged"}, stderr=subprocess.STDOUT
        )
        lines = [json.loads(line)["event"] for line in logged.stdout.splitlines()]
        assert (lines[0], lines[-1]) == ("run_started", "run_ended")
