"""Opted out at t: no request to that member later than t + 1 s."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping

import pytest
from psycopg import AsyncConnection

from chaos.conftest import Begin
from chaos.harness import CAMPAIGN

ROWS, OPT_OUTS = 3000, 500
CASES: Mapping[str, tuple[dict[str, object], dict[str, object]]] = {
    "full rate": ({"MAIL_RATE_PER_S": 500}, {}),
    "answers after 2 s": (
        {"MAIL_RATE_PER_S": 300, "MAIL_READ_TIMEOUT_S": 5, "LEASE_S": 15, "SHUTDOWN_GRACE_S": 10},
        {"latency_s": 2.0},
    ),
    "retries": (
        {"MAIL_RATE_PER_S": 400, "RETRY_BACKOFF_BASE_S": 1, "RETRY_BACKOFF_CAP_S": 1},
        {"first_503": 0.25},
    ),
}
NEXT = """
    SELECT member_id FROM campaign_targets
    WHERE campaign_id = %s AND state IN ('pending', 'sending') AND sent_at IS NULL
      AND opted_out_at IS NULL AND attempts = %s
    ORDER BY member_id LIMIT 400
"""


@pytest.mark.parametrize("case", CASES)
async def test_opted_out_during_the_run(
    begin: Begin, figure: Callable[[str], None], case: str
) -> None:
    env, options = CASES[case]
    trial = await begin(ROWS, far=True, **options)
    chance, at = random.Random(11), dict[int, float]()
    run = await trial.start(**env)
    await trial.mail.until(lambda stats: stats["deliveries"] >= 200)
    attempts = 1 if case == "retries" else 0
    async with await AsyncConnection.connect(trial.dsn, autocommit=True) as members:
        while len(at) < OPT_OUTS and run.is_running:
            cursor = await members.execute(NEXT, (CAMPAIGN, attempts))
            soon = [row[0] for row in await cursor.fetchall()]
            for member in chance.sample(soon, min(20, len(soon))):
                await members.execute(
                    "UPDATE campaign_targets SET opted_out_at = clock_timestamp()"
                    " WHERE campaign_id = %s AND member_id = %s",
                    (CAMPAIGN, member),
                )
                at[member] = time.monotonic()
            await asyncio.sleep(0.1)
    end = await run.wait()
    assert end.code == 0, end
    assert len(at) > OPT_OUTS / 2
    last: dict[int, float] = {}
    for moment, key, _ in await trial.mail.requests():
        last[int((key or ":0").rpartition(":")[2])] = moment
    late = sorted(max(0.0, last.get(member, 0.0) - told) for member, told in at.items())
    asked = sum(x > 0 for x in late)
    p99 = late[int(0.99 * len(late))]
    assert late[-1] < 1.0
    assert p99 < 0.3
    found = await trial.reckon()
    figure(
        f"{len(at)} opt-outs at {env['MAIL_RATE_PER_S']}/s: {found['skipped']} skipped, {asked}"
        f" asked after it, p99 {p99 * 1000:.0f} ms, latest {late[-1] * 1000:.0f} ms"
    )
