"""Clocks that jump: of the machine a run is on, and of the database."""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import prepare

from chaos.conftest import Begin
from chaos.harness import Near, Trial
from sender.dev.postgres import EmbeddedPostgres

HOUR_S = 3600
LIBFAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
with_faketime = pytest.mark.skipif(
    LIBFAKETIME is None, reason="faketime is missing: apt-get install faketime"
)


class Clock:
    """A wall clock that whoever is started with `env` sees, libraries included.

    Monotonic clocks stay right, as they do on a machine whose clock is set.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self.env = {
            "LD_PRELOAD": str(LIBFAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        self.set(0)

    def set(self, hours: int) -> None:
        """Jump to so many hours off the right time."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{hours * HOUR_S:+d}\n")
        new.rename(self._file)


@pytest.fixture
def clock() -> Iterator[Clock]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # the server is another user
        yield Clock(Path(folder))


def off_by_h(line: Mapping[str, Any]) -> int:
    """How many hours the wall clock of the run that wrote this line is off ours."""
    off = datetime.fromisoformat(line["timestamp"]) - datetime.now(UTC)
    return round(off.total_seconds() / HOUR_S)


# --- The machine ----------------------------------------------------------------------------------


@with_faketime
@pytest.mark.parametrize("hours", [1, -1])
async def test_the_wall_clock_of_the_machine_jumps(
    begin: Begin, clock: Clock, figure: Callable[[str], None], hours: int
) -> None:
    """In the middle of one run, before the start of another, and back before their end."""
    trial = await begin(600, first_503=0.05)
    trial.preload = clock.env
    run = await trial.start(MAIL_RATE_PER_S=200)
    assert off_by_h(await run.event("batches_built")) == 0
    await trial.mail.until(lambda stats: stats["deliveries"] >= 100)
    clock.set(hours)
    other = await trial.start(MAIL_RATE_PER_S=200)
    assert off_by_h(await other.event("run_started")) == hours, "the clock did not jump"
    await trial.mail.until(lambda stats: stats["deliveries"] >= 500)
    clock.set(0)
    ends = [await x.wait() for x in (run, other)]
    assert [end.code for end in ends] == [0, 0], ends
    assert await trial.reckon() == {"sent": 600}
    stats = await trial.mail.stats()
    assert stats["repeats_absorbed"] == 0
    assert {row["attempts"] for row in await trial.rows()} == {0, 1}
    figure(
        f"{hours:+d} h at 100 mails, back at 500, 2 runs: 600 sent in {ends[0].last['seconds']:.1f}"
        f" s, {stats['max_in_any_second']} in any second, 0 repeats"
    )


@pytest.mark.skipif(LIBFAKETIME is not None, reason="the machine's clock jumps as a whole instead")
@pytest.mark.parametrize("hours", [1, -1])
async def test_the_wall_clock_of_python_jumps(
    begin: Begin, figure: Callable[[str], None], hours: int
) -> None:
    trial = await begin(600, first_503=0.05)
    plan = {"at": "wall_clock_jumps", "nth": 100, "seconds": hours * HOUR_S}
    end = await trial.run(plan, MAIL_RATE_PER_S=200)
    assert end.code == 0, end
    assert await trial.reckon() == {"sent": 600}
    assert end.last["seconds"] < 60
    figure(f"{hours:+d} h at the 100th request: 600 sent in {end.last['seconds']:.1f} s")


# --- The database ---------------------------------------------------------------------------------


@pytest.fixture
def faked(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedPostgres]:
    """A server that lives by this clock."""
    with EmbeddedPostgres(durable=False, tcp=True) as server:
        server.stop()
        with monkeypatch.context() as patch:
            for name, value in clock.env.items():
                patch.setenv(name, value)
            server.start()
        prepare(server.dsn)
        yield server


@with_faketime
@pytest.mark.parametrize("hours", [1, -1])
async def test_the_clock_of_the_database_jumps(
    begin: Begin,
    clock: Clock,
    faked: EmbeddedPostgres,
    figure: Callable[[str], None],
    hours: int,
) -> None:
    """And back later: leases end before their time, and slots lie an hour ahead."""
    trial = await begin(600, dsn=faked.dsn, latency_s=0.1)
    runs = [await trial.start(MAIL_RATE_PER_S=150) for _ in range(2)]
    await trial.mail.until(lambda stats: stats["deliveries"] >= 150)
    clock.set(hours)
    (row,) = await trial.sql("SELECT clock_timestamp() AS timestamp")
    assert off_by_h({"timestamp": row["timestamp"].isoformat()}) == hours
    await trial.mail.until(lambda stats: stats["deliveries"] >= 400)
    clock.set(0)
    ends = [await run.wait() for run in runs]
    assert [end.code for end in ends] == [0, 0], ends
    assert await trial.reckon() == {"sent": 600}
    clamped = sum(len(run.told("pace_clamped")) for run in runs)
    assert clamped
    requests = sorted(at for at, _, _ in await trial.mail.requests())
    longest = max(b - a for a, b in itertools.pairwise(requests))
    stats = await trial.mail.stats()
    figure(
        f"{hours:+d} h at 150 mails, back at 400, 2 runs: pace clamped {clamped} times, longest gap"
        f" {longest * 1000:.0f} ms, {stats['max_in_any_second']} in any second,"
        f" {stats['repeats_absorbed']} repeats absorbed"
    )


async def peak(trial: Trial) -> int:
    return (await trial.mail.stats())["max_in_any_second"]


@pytest.mark.parametrize(
    "column",
    # A clock that jumps leads to the first of them; where none can be made to, it is written.
    ["next_free_at", "blocked_until"] if LIBFAKETIME is None else ["blocked_until"],
)
async def test_what_was_written_ahead_of_the_database_clock(
    begin: Begin, figure: Callable[[str], None], column: str
) -> None:
    """What was written an hour ahead of the clock stops nobody."""
    trial = await begin(400)
    assert isinstance(trial.mail, Near)
    run = await trial.start(MAIL_RATE_PER_S=100)
    await trial.mail.until(lambda stats: stats["deliveries"] >= 100)
    jump = {
        "next_free_at": "UPDATE provider_accounts SET next_free_at = now() + interval '1 h'",
        "blocked_until": "UPDATE provider_accounts SET blocked_until = now() + interval '1 h'",
    }
    await trial.sql(jump[column])
    since = time.monotonic()
    end = await run.wait()
    assert end.code == 0, end
    assert await trial.reckon() == {"sent": 400}
    if column == "next_free_at":
        assert run.told("pace_clamped")[0]["ahead_s"] > 3000
    gaps = [at for at, _, _ in await trial.mail.requests() if at > since]
    longest = max(b - a for a, b in zip([since, *gaps], gaps, strict=False))
    assert longest < 3
    figure(
        f"{column} 1 h ahead: longest gap {longest * 1000:.0f} ms, {await peak(trial)}/s at most"
    )


async def test_the_database_clock_jumps_forward_and_every_lease_ends(
    begin: Begin, figure: Callable[[str], None]
) -> None:
    trial = await begin(600, latency_s=0.1)
    runs = [await trial.start(MAIL_RATE_PER_S=150) for _ in range(2)]
    await trial.mail.until(lambda stats: stats["deliveries"] >= 100)
    for _ in range(3):
        await trial.sql(
            "UPDATE campaign_batches SET lease_until = now() - interval '1 s'"
            " WHERE claim_id IS NOT NULL AND done_at IS NULL"
        )
        await asyncio.sleep(0.4)
    assert [(await run.wait()).code for run in runs] == [0, 0]
    assert await trial.reckon() == {"sent": 600}
    stats = await trial.mail.stats()
    figure(f"all leases ended three times: 0 twice, {stats['repeats_absorbed']} repeats absorbed")
