"""`sender demo`: the whole thing on this machine, a kill in the middle included.

Starts PostgreSQL and the strict fake provider, mails made-up members by the real `sender run`,
kills that with kill -9 when half of the mails are out, starts it again at once, and holds the
provider's record against the ledger, member by member. Owns all that it starts and removes it,
however it ends. Must never let the caller's own settings in: it would mail real members.

The rate held is told for each run apart, over its steady part, in requests a second as the provider
received them: that is what its limit counts, tries that got a 503 included. The first run's steady
part is from 1 s after its first request to the kill, the second's from 1 s after its first request
to the last first request for a member, without the wait for the killed run's leases, if there was
any: then, and afterwards, there is nothing to do but to wait.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import psycopg
from rich.console import Console

from sender.dev import demo_table
from sender.dev.demo_figures import Figures, Run, Told, rate_after, rate_until, tally
from sender.dev.demo_provider import DemoProvider, demo_provider
from sender.dev.demo_run import DemoRun
from sender.dev.demo_screen import Screen
from sender.dev.fake_options import FakeOptions
from sender.dev.postgres import EmbeddedPostgres
from sender.errors import SenderError
from sender.failures import STATES, failures
from sender.migrate import migrate
from sender.settings import CampaignSettings, all_names

CAMPAIGN: Final = "demo"
LIMIT_PER_S: Final = 500
LEASE_S: Final = 4.0
PROVIDER: Final = FakeOptions(
    limit_per_s=LIMIT_PER_S,
    headroom=0.05,
    latency_s=(0.1, 0.3),
    first_503=0.04,
    permanent_422=0.001,
    accept_then_cut=0.01,
)
# Short where the defaults are made for a night: a demo ends within a minute.
_SETTINGS: Final = {
    "CAMPAIGN_ID": CAMPAIGN,
    "MAIL_RATE_PER_S": str(LIMIT_PER_S),
    "MAIL_CONNECT_TIMEOUT_S": "0.5",
    "MAIL_READ_TIMEOUT_S": "1.5",
    "LEASE_S": str(LEASE_S),
    "RETRY_BACKOFF_BASE_S": "1",
    "RETRY_BACKOFF_CAP_S": "3",
    "LOG_FORMAT": "json",
}
_LOOK_EVERY_S: Final = 0.05
_SPARE_S: Final = 120.0
_ENDED_BY_ITSELF: Final = (0, 2)


def demo(targets: int, as_json: bool) -> int:
    """Show it; returns the exit code: 1 if anyone was mailed twice or lost, else 0.

    Args:
        targets: how many members to make up.
        as_json: print one JSON object on standard output and nothing else there.

    Raises:
        SenderError: the demo itself could not go on; all it had started is gone.
    """
    began_at = time.monotonic()
    with _without_own_settings(), _cleaning_up() as stack:
        screen = stack.enter_context(Screen(targets, apart=as_json))
        figures = _play(targets, screen, stack, began_at)
    if as_json:
        sys.stdout.write(json.dumps(figures.to_json(), indent=2) + "\n")
    else:
        demo_table.show(figures, Console(highlight=False))
    return figures.tally.exit_code


def _play(targets: int, screen: Screen, stack: ExitStack, began_at: float) -> Figures:
    screen.say(f"starting PostgreSQL, making up {targets:,} members")
    dsn = stack.enter_context(EmbeddedPostgres()).dsn
    _fill(dsn, targets)
    provider = stack.enter_context(demo_provider(PROVIDER))
    screen.say(f"provider at {provider.url}: at most {LIMIT_PER_S}/s, answers in 0.1 to 0.3 s")
    screen.say("  4 % get a 503 first, 0.1 % a 422 for good, 1 % the mail but no answer")
    settings = _SETTINGS | {
        "DB_DSN": dsn,
        "MAIL_URL": provider.url,
        "DEADLINE_S": str(_SPARE_S + 2 * targets / LIMIT_PER_S),
    }
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sender-demo-")))
    first = stack.enter_context(DemoRun(settings, logs / "first"))
    screen.say(f"sender run, with LEASE_S={LEASE_S:.0f} (else 90) and back-off from 1 s (else 30)")
    _kill_in_the_middle(first, provider, targets, screen)
    second = stack.enter_context(DemoRun(settings, logs / "second"))
    screen.say(f"sender run, again; what the first had in hand is free within {LEASE_S:.0f} s")
    while second.look():
        screen.show(provider.stats()["members_delivered"])
        time.sleep(_LOOK_EVERY_S)
    screen.show(provider.stats()["members_delivered"])
    return _figures(targets, dsn, provider, (first, second), began_at)


def _fill(dsn: str, targets: int) -> None:
    """Migrate and load, as `sender migrate` and somebody's own list would."""
    migrate(dsn)
    with psycopg.connect(dsn) as conn, conn.cursor() as cursor:
        columns = "COPY campaign_targets (campaign_id, member_id, email) FROM STDIN"
        with cursor.copy(columns) as copy:
            for member in range(1, targets + 1):
                copy.write_row((CAMPAIGN, member, f"member{member}@example.com"))


def _kill_in_the_middle(run: DemoRun, provider: DemoProvider, targets: int, screen: Screen) -> None:
    """Wait until half of the mails are out, then kill -9 the run."""
    delivered = 0
    while run.look() and delivered < targets / 2:
        time.sleep(_LOOK_EVERY_S)
        delivered = provider.stats()["members_delivered"]
        screen.show(delivered)
    if run.look():
        run.kill()
        screen.say(f"kill -9 after {delivered:,} mails")
    elif run.exit_code in _ENDED_BY_ITSELF:
        screen.say("it was done before it could be killed: take more --targets")
    else:
        raise SenderError(f"sender run ended with exit code {run.exit_code}:\n{run.tail()}")


# --- what happened --------------------------------------------------------------------------------


def _figures(
    targets: int, dsn: str, provider: DemoProvider, runs: Sequence[DemoRun], began_at: float
) -> Figures:
    first, second = runs
    requests = provider.requests()
    before = [request for request in requests if request[0] < second.began_at]
    after = requests[len(before) :]
    killed_at = first.ended_at or second.began_at
    rates = rate_until(before, killed_at), rate_after(after, before, killed_at + LEASE_S)
    stats = provider.stats()
    return Figures(
        members=targets,
        tally=tally(range(1, targets + 1), provider.mails(CAMPAIGN), asyncio.run(_not_sent(dsn))),
        repeats_absorbed=stats["repeats_absorbed"],
        most_in_any_second=stats["max_in_any_second"],
        refused_for_rate=stats["rate_limited"],
        limit_per_s=LIMIT_PER_S,
        lease_s=LEASE_S,
        runs=[
            Run(
                run.exit_code,
                run.end,
                round(run.seconds, 1),
                len(part),
                rate and round(rate, 1),
                run.peak_memory_mib and round(run.peak_memory_mib, 1),
            )
            for run, part, rate in zip(runs, (before, after), rates, strict=True)
        ],
        seconds=round(time.monotonic() - began_at, 1),
    )


async def _not_sent(dsn: str) -> dict[int, Told]:
    settings = CampaignSettings.load({"DB_DSN": dsn, "CAMPAIGN_ID": CAMPAIGN})
    return {
        found.member_id: Told(found.state, found.reason)
        async for found in failures(settings, STATES)
    }


# --- beginning and end ----------------------------------------------------------------------------


@contextmanager
def _without_own_settings() -> Generator[None]:
    """Take the caller's settings, and what libpq and HTTP read, out of the environment."""
    ours = {spelling for name in all_names() for spelling in (name, f"{name}_FILE")}
    kept = dict(os.environ)
    for name in kept:
        if name in ours or name.startswith("PG") or name.lower().endswith("_proxy"):
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(kept)


@contextmanager
def _cleaning_up() -> Generator[ExitStack]:
    """Remove everything at the end: of the demo, of an error, at Ctrl-C and at SIGTERM."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with ExitStack() as stack:
            try:
                yield stack
            except (psycopg.Error, OSError) as error:
                raise SenderError(f"the demo cannot go on: {error}") from error
            finally:
                for number in before:
                    signal.signal(number, signal.SIG_IGN)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
