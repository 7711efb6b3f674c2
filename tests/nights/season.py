"""What the nights are made of: a migrated database, a provider, a calendar and a CronJob."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from chaos.harness import Near, Run, Trial, trial_of
from conftest import as_role, prepare
from psycopg import AsyncConnection, sql

from nights.controller import CronJob, Job
from nights.days import Calendar
from nights.policy import FASTEST, Policy
from sender.dev.fake_provider import FakeOptions, FakeProvider
from sender.dev.postgres import EmbeddedPostgres

# Waits inside the program that are no settings, for runner.py.
TWEAKS = {"probe_every_s": 0.2, "breaker_patience_s": 0.2}
KEY = "a made-up key"
_preparing = Lock()
# In scaled time; the list takes longer than a night.
RATE_PER_S = 60 / FASTEST


class Season:
    """A migrated database, a provider, a calendar and a CronJob."""

    def __init__(self, trial: Trial, calendar: Calendar, cron: CronJob) -> None:
        self.usable_s = cron.policy.usable_window_s
        self.trial = trial
        self.calendar = calendar
        self.cron = cron

    async def delivered(self, more: int) -> None:
        """Wait for that many more mails, at most as long as a Job lives."""
        enough = (await self.trial.mail.stats())["deliveries"] + more
        delivered = asyncio.create_task(
            self.trial.mail.until(lambda stats: stats["deliveries"] >= enough)
        )
        ends = [job.ended for job in self.cron.jobs if job.is_active]
        await asyncio.wait([delivered, *ends], return_when=asyncio.FIRST_COMPLETED)
        if not delivered.done():
            delivered.cancel()
            tails = "\n".join(run.tail() for run in self.trial.runs)
            raise AssertionError(f"a Job ended before {more} more mails were delivered\n{tails}")

    async def night(self, day: float) -> Job:
        """The schedule has come: a Job."""
        if day:
            await self.calendar.wait_until(day, self.trial)
        job = self.cron.on_schedule()
        assert job is not None, "the night before has not ended"
        return job

    async def ends(self, *jobs: Job) -> list[str]:
        """Wait for the ends of Jobs and hear what they tell: no night is silent."""
        await asyncio.gather(*(job.ended for job in jobs))
        for job in jobs:
            for pod in job.pods:
                assert pod.killed or pod.told_its_end, pod.run.tail()
            if job.end.is_complete:
                counts = job.pods[-1].end.counts
                assert (counts.open, counts.in_doubt) == (0, 0), "open rows, and nobody was told"
        return [job.end.reason for job in jobs]

    async def needs_doubt(self) -> int:
        """How many rows are in doubt: only such whose key the provider may have forgotten."""
        rows = [row for row in await self.trial.rows() if row["state"] == "in_doubt"]
        for row in rows:
            assert row["reason"] == "key_too_old", row
            age_s = (row["outcome_at"] - row["key_used_at"]).total_seconds()
            assert age_s >= self.usable_s, f"in doubt after {age_s:.1f} s: {row}"
        return len(rows)

    async def requested(self) -> set[int]:
        """Members that the provider was asked about so far."""
        return {
            int(key.rpartition(":")[2]) for _, key, _ in await self.trial.mail.requests() if key
        }


@asynccontextmanager
async def season(
    server: EmbeddedPostgres, folder: Path, name: str, factor: float, **options: Any
) -> AsyncIterator[Season]:
    """Begin on the first day at the hour of the schedule."""
    policy = Policy.of_base(factor)
    dsn = server.dsn_of(name)
    async with await AsyncConnection.connect(server.dsn, autocommit=True) as admin:
        await admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    await asyncio.to_thread(_prepare_alone, dsn)
    (folder / "db-dsn").write_text(f"{as_role(dsn, 'sender')}\n")
    (folder / "mail-api-key").write_text(f"{KEY}\n")
    calendar = Calendar(policy.day_s)
    asked = FakeOptions(window_s=policy.day_s, api_key=KEY, **options)
    async with (
        FakeProvider(asked, clock=calendar.now) as fake,
        trial_of(dsn, Near(fake)) as trial,
    ):

        async def start_pod() -> Run:
            own = {
                "CAMPAIGN_ID": "spring",
                "MAIL_URL": fake.url,
                "MAIL_RATE_PER_S": RATE_PER_S * factor,
            }
            files = {
                "DB_DSN": None,
                "DB_DSN_FILE": folder / "db-dsn",
                "MAIL_API_KEY_FILE": folder / "mail-api-key",
            }
            return await trial.start(TWEAKS, **{**policy.env, **own, **files})

        yield Season(trial, calendar, CronJob(policy, start_pod))


def _prepare_alone(dsn: str) -> None:
    """Roles belong to the server, not to one of its databases: two must not make them at once."""
    with _preparing:
        prepare(dsn)
