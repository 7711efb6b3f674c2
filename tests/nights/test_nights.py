"""Three nights of a CronJob as its manifest has it, with everything going wrong that can.

pytest tests/nights -m chaos
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from nights.season import Season, season
from sender.dev.postgres import EmbeddedPostgres

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

# --- Three nights ---------------------------------------------------------------------------------

# More than a night can do, fewer than two.
ROWS = 800
REFUSED, OPTED_OUT = {7, 77}, range(ROWS - 19, ROWS + 1)
# Accepted and cut off, or refused for now, at the first request; early in the night, and never so
# many together that it looks like an outage.
STUMBLING = dict.fromkeys(range(5, 100, 10), ("cut",)) | dict.fromkeys(range(2, 150, 10), ("503",))


async def a_night_of_killed_pods(nights: Season) -> None:
    """One pod runs out of memory, one is evicted, and a second Job runs beside the first."""
    job = await nights.night(0)
    await nights.delivered(60)
    (await job.pod(1)).kill()
    second = await job.pod(2)
    await nights.delivered(40)
    await second.evict()
    double = nights.cron.create()
    assert nights.cron.on_schedule() is None
    await nights.trial.sql(
        "UPDATE campaign_targets SET opted_out_at = now() WHERE member_id = ANY(%s)",
        list(OPTED_OUT),
    )
    assert await nights.ends(job, double) == ["DeadlineExceeded", "DeadlineExceeded"]
    first = [(pod.exit_code, pod.disrupted) for pod in job.pods]
    assert first[:2] == [(137, False), (1, True)]


async def a_night_without_a_provider(nights: Season) -> None:
    """Nobody listens from the first minute to the last."""
    await nights.trial.mail.control(outage="refuse")
    job = await nights.night(1)
    assert await nights.ends(job) == ["DeadlineExceeded"]
    assert {pod.exit_code for pod in job.pods if pod.run.lines} == {1}
    await nights.trial.mail.control(outage=None)


async def a_night_with_a_database_restart(nights: Season, server: EmbeddedPostgres) -> None:
    """The database crashes and recovers, with two Jobs at work."""
    job = await nights.night(2)
    double = nights.cron.create()
    await nights.delivered(60)
    await asyncio.to_thread(server.restart, immediate=True)
    await nights.ends(job, double)


async def more_nights_if_the_machine_is_slow(nights: Season) -> None:
    """Also if the last one ended in the middle of what it had to do."""
    day = 3
    last = nights.cron.jobs[-1].end
    while (await nights.trial.counts()).open or last.reason == "DeadlineExceeded":
        assert day < 6, "it does not get on"
        job = await nights.night(day)
        await nights.ends(job)
        last, day = job.end, day + 1


async def test_three_nights(
    server: EmbeddedPostgres, tmp_path: Path, factor: float, figure: Callable[[str], None]
) -> None:
    script = STUMBLING | dict.fromkeys(REFUSED, "422")
    async with season(
        server, tmp_path, "nights", factor, latency_s=(0.02, 0.1), by_member=script
    ) as nights:
        await nights.trial.load(ROWS)
        await a_night_of_killed_pods(nights)
        after_one = await nights.trial.counts()
        assert after_one.open > 100, "the first night did all of it"
        await a_night_without_a_provider(nights)
        assert (await nights.trial.counts()).sent == after_one.sent
        await a_night_with_a_database_restart(nights, server)
        await more_nights_if_the_machine_is_slow(nights)
        doubt = await nights.needs_doubt()
        told = nights.cron.jobs[-1].end.reason
        assert told == ("PodFailurePolicy" if doubt else "")
        found = await nights.trial.reckon()
        assert (found.total(), found["skipped"]) == (ROWS, len(OPTED_OUT))
        # A machine so busy that the grace ran out may leave a row unsettled at the end of a night.
        killed = sum(pod.killed for job in nights.cron.jobs for pod in job.pods)
        assert found["in_doubt"] == doubt
        assert doubt == 0 or killed > 1, "in doubt without need"
        assert 0 <= len(REFUSED) - found["failed"] <= doubt
        stats = await nights.trial.mail.stats()
        pods = sum(len(job.pods) for job in nights.cron.jobs)
        figure(
            f"{ROWS} rows, 1 : {factor:.0f}, {len(nights.cron.jobs)} Jobs, {pods} pods: 0 twice,"
            f" 0 lost, {doubt} in doubt, {stats['repeats_absorbed']} repeats absorbed"
        )


# --- A night of 503 -------------------------------------------------------------------------------

FEW = 120


async def a_night_of_503(nights: Season) -> set[int]:
    """The provider answers, but with 503 only; returns whom it was asked about."""
    await nights.trial.load(FEW)
    await nights.trial.mail.control(outage="503")
    job = await nights.night(0)
    assert await nights.ends(job) == ["DeadlineExceeded"]
    await nights.trial.mail.control(outage=None)
    return await nights.requested()


async def by_hand_the_same_day(nights: Season) -> str:
    """Inside the window the same keys absorb what the provider may have sent."""
    asked = await a_night_of_503(nights)
    await nights.calendar.wait_until(0.5, nights.trial)
    assert await nights.ends(nights.cron.create()) == [""]
    assert await nights.trial.reckon() == {"sent": FEW}
    return f"{len(asked)} answered 503, half a day later all sent"


async def by_schedule_a_day_later(nights: Season) -> str:
    """After 503 a key may have been used: past the window it is not used again."""
    asked = await a_night_of_503(nights)
    assert await nights.ends(await nights.night(1)) == ["PodFailurePolicy"]
    doubt = await nights.needs_doubt()
    assert 0 < doubt <= len(asked)
    assert await nights.trial.reckon() == {"sent": FEW - doubt, "in_doubt": doubt}
    return f"{len(asked)} answered 503, a day later {doubt} in doubt"


async def test_a_night_of_503(
    server: EmbeddedPostgres, tmp_path: Path, factor: float, figure: Callable[[str], None]
) -> None:
    async def tell(name: str, goes_on: Callable[[Season], Awaitable[str]]) -> str:
        (tmp_path / name).mkdir()
        async with season(server, tmp_path / name, name, 1.5 * factor) as nights:
            return await goes_on(nights)

    told = await asyncio.gather(
        tell("same_day", by_hand_the_same_day), tell("day_later", by_schedule_a_day_later)
    )
    figure(f"{FEW} rows each: {'; '.join(told)}")
