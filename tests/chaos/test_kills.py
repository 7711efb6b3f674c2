"""Killed at any instruction: nobody twice, nobody lost, and no more repeats than was said."""

import random
from collections.abc import Callable

import pytest

from chaos.conftest import LONG, Begin

KILLS = 100 if LONG else 10
ROUNDS = 8 if LONG else 1
KILLED = -9


async def test_killed_at_random_moments(begin: Begin, figure: Callable[[str], None]) -> None:
    """Each run is killed after a random number of requests, the next one goes on."""
    trial = await begin(KILLS * 220, first_503=0.02, accept_then_cut=0.01, latency_s=(0.0, 0.2))
    chance = random.Random(20)
    allowed, deaths = 0, 0
    for _ in range(KILLS):
        before = (await trial.mail.stats())["requests"]
        # So many requests in flight that the bound means something.
        run = await trial.start(SEND_CONCURRENCY=100)
        allowed += (await run.event("run_started"))["repeats_at_most"]
        kill_at = before + chance.choice((0, 1, *(chance.randrange(250) for _ in range(6))))
        await trial.mail.until(lambda stats, at=kill_at: stats["requests"] >= at)
        run.kill()
        deaths += (await run.wait()).code == KILLED
    # The long form leaves most of its rows to this run.
    end = await (await trial.start()).wait(KILLS * 5)
    found, stats = await trial.reckon(), await trial.mail.stats()
    cut = stats["by_fault"].get("cut", 0)
    assert deaths == KILLS
    assert found["failed"] == 0
    assert found["in_doubt"] <= KILLS // 20, found
    assert end.code == (2 if found["in_doubt"] else 0)
    repeats = stats["repeats_absorbed"] - cut
    assert repeats <= allowed
    figure(
        f"{KILLS} kills, {found.total()} rows: 0 twice, 0 lost, {found['in_doubt']} in doubt;"
        f" {repeats} repeats absorbed, {allowed} allowed"
    )


POINTS = (
    "before_claim",
    "inside_claim",
    "after_claim",
    "half_sent",
    "answered",
    "before_record",
    "inside_record",
    "after_record",
)
BEFORE_ANY_REQUEST = ("before_claim", "inside_claim", "after_claim")


async def test_killed_at_named_points(begin: Begin, figure: Callable[[str], None]) -> None:
    """One campaign, one run killed at each point, several times in the long form."""
    chance = random.Random(3)
    trial = await begin(ROUNDS * len(POINTS) * 60, latency_s=0.02)
    for point in POINTS * ROUNDS:
        before = (await trial.mail.stats())["requests"]
        nth = 1 if point in BEFORE_ANY_REQUEST else chance.randrange(1, 4)
        end = await trial.run(
            {"at": point, "nth": nth, "seed": chance.random()}, BATCH_SIZE=30, MAIL_RATE_PER_S=200
        )
        assert end.code == KILLED, f"{point}: {end}"
        if point in BEFORE_ANY_REQUEST:
            assert (await trial.mail.stats())["requests"] == before, point
        await trial.reckon(done=False)
    end = await trial.run(BATCH_SIZE=30)
    assert end.code == 0, end
    found, stats = await trial.reckon(), await trial.mail.stats()
    assert set(found) == {"sent"}
    figure(
        f"{len(POINTS)} points x {ROUNDS}, {found.total()} rows: 0 twice, 0 lost,"
        f" {stats['repeats_absorbed']} repeats absorbed"
    )


@pytest.mark.parametrize("member", [13, 1, 60] if LONG else [13])
async def test_a_row_that_kills_the_process_costs_itself(
    begin: Begin, figure: Callable[[str], None], member: int
) -> None:
    trial = await begin(60)
    deaths = 0
    while (end := await trial.run({"at": "poison", "member": member}, BATCH_SIZE=20)).code < 0:
        deaths += 1
        assert deaths <= 8, "the campaign does not get past the row"
        await trial.time_passes()
    assert end.code == 2
    assert await trial.reckon() == {"sent": 59, "in_doubt": 1}
    (row,) = [row for row in await trial.rows() if row["state"] == "in_doubt"]
    assert (row["member_id"], row["reason"]) == (member, "lost_too_often")
    figure(f"member {member}: {deaths} deaths, 1 in doubt, 59 sent")
