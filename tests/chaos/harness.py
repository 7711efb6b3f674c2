"""What a trial is made of: a migrated database, rows, a provider, runs, and the reckoning.

Trials wait for events (log lines, requests, rows), never for time.
"""

import asyncio
import json
import os
import signal
import sys
from asyncio import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, LiteralString

import aiohttp
from conftest import add_targets, as_role
from psycopg import AsyncConnection, IsolationLevel, sql
from psycopg.rows import dict_row
from typer.testing import CliRunner

from sender import cli, queries
from sender.dev.fake_provider import FakeOptions, FakeProvider, start_process, stop_process
from sender.domain import Counts

CAMPAIGN = "spring"
PATIENCE_S = 60.0
SAID = ("--by", "a trial", "--why", "to see what becomes of it")
RUNNER = Path(__file__).with_name("runner.py")

# Real ratios, small enough to wait for.
QUICK = {
    "CAMPAIGN_ID": CAMPAIGN,
    "LOG_FORMAT": "json",
    "MAIL_CONNECT_TIMEOUT_S": "1",
    "MAIL_READ_TIMEOUT_S": "1",
    "LEASE_S": "4",
    "SHUTDOWN_GRACE_S": "4",
    "RETRY_BACKOFF_BASE_S": "0.2",
    "RETRY_BACKOFF_CAP_S": "0.8",
    "DEADLINE_S": "120",
}


@asynccontextmanager
async def patience(
    what: str, tell: Callable[[], str], seconds: float = PATIENCE_S
) -> AsyncIterator[None]:
    """Fail with what is known instead of hanging."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise AssertionError(f"waited {seconds:g} s for {what}\n{tell()}") from None


# --- The provider ---------------------------------------------------------------------------------


class Near:
    """The provider in this loop: for trials with few requests a second."""

    def __init__(self, fake: FakeProvider) -> None:
        self.fake = fake
        self.url = fake.url

    async def control(self, **changes: object) -> None:
        self.fake.control(**changes)

    async def stats(self) -> Mapping[str, Any]:
        return self.fake.stats()

    async def deliveries(self) -> dict[int, int]:
        return self.fake.deliveries(CAMPAIGN)

    async def requests(self, member_id: int | None = None) -> list[tuple[float, str | None, int]]:
        return self.fake.requests(member_id)

    async def until(self, condition: Callable[[Mapping[str, Any]], bool]) -> None:
        async with patience("the provider", lambda: str(self.fake.stats())):
            await self.fake.until(lambda state: condition(state.stats()))


class Apart:
    """The provider in a process of its own: for trials in which the rate matters."""

    def __init__(self, url: str, client: aiohttp.ClientSession) -> None:
        self.url = url
        self._client = client

    async def _get(self, path: str) -> Any:
        async with self._client.get(path) as answer:
            return await answer.json()

    async def control(self, **changes: object) -> None:
        async with self._client.post("/control", json=changes) as answer:
            assert answer.status == 200, await answer.text()

    async def stats(self) -> Mapping[str, Any]:
        return await self._get("/stats")

    async def deliveries(self) -> dict[int, int]:
        found = await self._get(f"/deliveries?template={CAMPAIGN}")
        return {int(member): count for member, count in found.items()}

    async def requests(self, member_id: int | None = None) -> list[tuple[float, str | None, int]]:
        query = "" if member_id is None else f"?member_id={member_id}"
        return [tuple(row) for row in await self._get(f"/requests{query}")]

    async def until(self, condition: Callable[[Mapping[str, Any]], bool]) -> None:
        async with patience("the provider", lambda: "apart"):
            while not condition(await self.stats()):
                await asyncio.sleep(0.02)


type Mail = Near | Apart


@asynccontextmanager
async def near(**options: Any) -> AsyncIterator[Near]:
    async with FakeProvider(FakeOptions(**options)) as fake:
        yield Near(fake)


@asynccontextmanager
async def apart(**options: Any) -> AsyncIterator[Apart]:
    process, url = await asyncio.to_thread(start_process, FakeOptions(**options))
    try:
        async with aiohttp.ClientSession(url.rpartition("/")[0]) as client:
            yield Apart(url, client)
    finally:
        await asyncio.to_thread(stop_process, process)


# --- One run --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended.

    Attributes:
        code: the exit code; negative for a signal.
        last: the last log line, or an empty one.
        stderr: everything it wrote there.
    """

    code: int
    last: Mapping[str, Any]
    stderr: str

    @property
    def counts(self) -> Counts:
        return Counts(**{f.name: self.last[f.name] for f in fields(Counts)})


class Run:
    """A running `sender run`."""

    def __init__(self, process: subprocess.Process) -> None:
        self._process = process
        self.lines: list[dict[str, Any]] = []
        self.text: list[str] = []
        self._more = asyncio.Event()
        self._ended = False
        self._stderr = b""
        self._readers = [
            asyncio.create_task(self._read_lines()),
            asyncio.create_task(self._read_stderr()),
        ]

    async def _read_lines(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.text.append(line.decode())
            # A killed process may leave half a line behind.
            if line.endswith(b"}\n"):
                self.lines.append(json.loads(line))
            self._wake()
        self._ended = True
        self._wake()

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        self._stderr = await self._process.stderr.read()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    def told(self, name: str) -> list[dict[str, Any]]:
        """The lines of one event so far."""
        return [line for line in self.lines if line["event"] == name]

    def tail(self) -> str:
        return "".join(self.text[-15:]) + self._stderr.decode()[-3000:]

    async def event(
        self, name: str, where: Callable[[dict[str, Any]], bool] = lambda _: True
    ) -> dict[str, Any]:
        """Wait for a log line."""
        async with patience(f"the event {name}", self.tail):
            while True:
                more = self._more
                if found := next((x for x in self.told(name) if where(x)), None):
                    return found
                assert not self._ended, f"ended without {name}\n{self.tail()}"
                await more.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            self._process.send_signal(number)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self._signal(number)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    async def wait(self, within_s: float = PATIENCE_S) -> End:
        """Wait for its end."""
        async with patience("the end of a run", self.tail, within_s):
            code = await self._process.wait()
            await asyncio.gather(*self._readers)
        last = self.lines[-1] if self.lines else {}
        return End(code, last, self._stderr.decode())

    async def close(self) -> None:
        self.kill()
        await self._process.wait()
        await asyncio.gather(*self._readers)


# --- One trial ------------------------------------------------------------------------------------


class Trial:
    """A database, a provider and the runs between them.

    Attributes:
        dsn: where the trial looks and loads, as an administrator.
        preload: more environment for the runs that are started from now on, for the loader.
        run_dsn: what the runs are given; if nothing else is said, as the role of the sender.
    """

    def __init__(self, dsn: str, mail: Mail, run_dsn: str | None = None) -> None:
        self.dsn = dsn
        self.run_dsn = run_dsn or as_role(dsn, "sender")
        self.mail = mail
        self.preload: Mapping[str, str] = {}
        self.runs: list[Run] = []

    async def load(self, n: int, *, first: int = 1, **columns: object) -> None:
        await add_targets(self.dsn, CAMPAIGN, n, first=first, **columns)

    async def start(self, plan: Mapping[str, object] | None = None, **env: object) -> Run:
        """Start a run; with a `plan` for `runner.py`, something happens to it."""
        command = ["-m", "sender", "run"] if plan is None else [str(RUNNER), json.dumps(plan)]
        settings = {**QUICK, "DB_DSN": self.run_dsn, "MAIL_URL": self.mail.url, **env}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            env={
                "PATH": os.environ["PATH"],
                **self.preload,
                **{name: str(value) for name, value in settings.items() if value is not None},
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        run = Run(process)
        self.runs.append(run)
        return run

    async def run(self, plan: Mapping[str, object] | None = None, **env: object) -> End:
        """Start a run and wait for its end."""
        return await (await self.start(plan, **env)).wait()

    async def command(self, *arguments: str) -> str:
        """Give a command of the program as the sender's role; returns what it printed.

        In this process: what a person does at a run is tried here, not the start of a command.
        """
        env = {"DB_DSN": self.run_dsn, "CAMPAIGN_ID": CAMPAIGN}
        ended = await asyncio.to_thread(CliRunner().invoke, cli.app, arguments, env=env)
        assert ended.exit_code == 0, ended.stderr
        return ended.stdout

    async def close(self) -> None:
        for run in self.runs:
            await run.close()

    # --- the database -----------------------------------------------------------------------------

    async def sql(self, query: LiteralString, *values: object) -> list[dict[str, Any]]:
        """Run one statement on a connection of its own."""
        async with await AsyncConnection.connect(
            self.dsn, autocommit=True, row_factory=dict_row
        ) as conn:
            cursor = await conn.execute(query, values or None)
            return await cursor.fetchall() if cursor.description else []

    async def alter(self, statement: LiteralString) -> None:
        """Run a statement that has the name of this database in it."""
        async with await AsyncConnection.connect(self.dsn, autocommit=True) as conn:
            name = sql.Identifier(conn.info.dbname)
            await conn.execute(sql.SQL(statement).format(name))

    async def time_passes(self) -> None:
        """Leases of runs that have died end."""
        await self.sql(
            "UPDATE campaign_batches SET lease_until = clock_timestamp() WHERE claim_id IS NOT NULL"
        )
        await self.sql(
            "UPDATE campaign_targets SET lease_until = clock_timestamp(),"
            " not_before = clock_timestamp() WHERE state = 'sending'"
        )

    async def until(self, query: LiteralString, *values: object) -> None:
        """Wait until a query answers with a row."""
        async with patience(query, lambda: "".join(run.tail() for run in self.runs)):
            while not await self.sql(query, *values):
                await asyncio.sleep(0.02)

    async def ledger(self) -> tuple[list[dict[str, Any]], Counts]:
        """The rows, and what the program counts, at one moment.

        The server may be at the last statement of a run that was killed.
        """
        async with await AsyncConnection.connect(self.dsn, row_factory=dict_row) as conn:
            await conn.set_isolation_level(IsolationLevel.REPEATABLE_READ)
            cursor = await conn.execute(
                "SELECT *, opted_out_at IS NOT NULL AS opted_out FROM campaign_targets"
                " WHERE campaign_id = %s ORDER BY member_id",
                [CAMPAIGN],
            )
            rows = await cursor.fetchall()
            cursor = await conn.execute(queries.ledger.COUNTS, {"campaign": CAMPAIGN})
            (counts,) = await cursor.fetchall()
        return rows, Counts(**counts)

    async def counts(self) -> Counts:
        return (await self.ledger())[1]

    async def rows(self) -> list[dict[str, Any]]:
        return (await self.ledger())[0]

    async def free(self) -> bool:
        """Whether no row is claimed: no batch leased, no row sending."""
        found = await self.sql(
            "SELECT (SELECT count(*) FROM campaign_batches WHERE claim_id IS NOT NULL)"
            " + (SELECT count(*) FROM campaign_targets WHERE state = 'sending') AS n"
        )
        return found[0]["n"] == 0

    # --- the reckoning ----------------------------------------------------------------------------

    async def reckon(self, *, done: bool = True) -> Counter[str]:
        """Nobody twice, nobody lost, and the ledger tells what the provider did.

        Args:
            done: also no row is open.

        Returns:
            How many rows there are of each state.
        """
        mails, stats = await self.mail.deliveries(), await self.mail.stats()
        rows, counts = await self.ledger()
        twice = {member: n for member, n in mails.items() if n > 1}
        assert not twice, f"mailed twice: {twice}"
        assert stats["delivered_twice"] == 0
        assert stats["body_mismatch"] == 0
        assert counts.total == len(rows)
        found: Counter[str] = Counter()
        for row in rows:
            member, delivered = row["member_id"], row["member_id"] in mails
            state = "sent" if row["sent_at"] else row["state"]
            if state == "pending" and row["opted_out"]:
                state = "skipped"
            found[state] += 1
            if state == "sent":
                assert delivered, f"{member} is sent in the ledger only"
            elif state == "failed":
                assert not delivered, f"{member} failed, but has the mail: {row}"
                assert row["reason"], row
            elif done:
                assert state in ("skipped", "in_doubt"), f"open: {row}"
                assert state == "in_doubt" or not delivered, row
        assert found == +Counter({f.name: getattr(counts, f.name) for f in fields(Counts)})
        return found


@asynccontextmanager
async def trial_of(dsn: str, mail: Mail, run_dsn: str | None = None) -> AsyncIterator[Trial]:
    trial = Trial(dsn, mail, run_dsn)
    try:
        yield trial
    finally:
        await trial.close()
