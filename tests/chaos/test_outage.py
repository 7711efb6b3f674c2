"""The provider away: nobody fails by it, rows wait in the table, and the rate comes back."""

import asyncio
import time
from collections.abc import Callable

import pytest

from chaos.conftest import LONG, Begin
from chaos.harness import Trial

# Enough for the ramp and a second at the full rate after it.
ROWS, RATE = 700, 100
# Everything that lasts is divided by this: an outage of 40 s, a probe each 10 s, time-outs.
FACTOR = 10.0
PROBE_S = 10 / FACTOR
OUTAGE_S = (600 if LONG else 40) / FACTOR
COMPRESSED = {
    "MAIL_RATE_PER_S": RATE,
    "SEND_CONCURRENCY": 100,
    "MAIL_CONNECT_TIMEOUT_S": 0.4,
    "MAIL_READ_TIMEOUT_S": 0.5,
    "LEASE_S": 90 / FACTOR,
    "RETRY_BACKOFF_BASE_S": 3 / FACTOR * 3,
    "RETRY_BACKOFF_CAP_S": 60 / FACTOR,
    "DEADLINE_S": 300,
}
PLAN = {"probe_every_s": PROBE_S, "breaker_patience_s": 5 / FACTOR}
RAMPED_S = 5.0
THROTTLED_ROWS = 500


async def accepted_between(trial: Trial, since: float, until: float) -> int:
    requests = await trial.mail.requests()
    return sum(status == 200 and since < at <= until for at, _, status in requests)


@pytest.mark.parametrize("kind", ["503", "reset", "hang", "refuse"])
async def test_an_outage(begin: Begin, figure: Callable[[str], None], kind: str) -> None:
    trial = await begin(ROWS)
    run = await trial.start(PLAN, **COMPRESSED)
    await trial.mail.until(lambda stats: stats["deliveries"] >= 100)
    await trial.mail.control(outage=kind)
    began = time.monotonic()
    await run.event("breaker_opened")
    opened = time.monotonic()
    in_flight = sum(at > began for at, _, _ in await trial.mail.requests())
    await trial.until(
        "SELECT 1 WHERE NOT EXISTS (SELECT FROM campaign_targets WHERE state = 'sending')"
        " AND (SELECT count(*) FROM campaign_batches WHERE lease_until IS NOT NULL"
        "      AND done_at IS NULL) <= 1"
    )
    handed_back_s = time.monotonic() - opened
    await asyncio.sleep(max(0.0, OUTAGE_S - (time.monotonic() - began)))
    asked = sum(at > began for at, _, _ in await trial.mail.requests()) - in_flight
    ended = time.monotonic()
    await trial.mail.control(outage=None)
    await run.event("breaker_closed")
    closed = time.monotonic()
    await asyncio.sleep(RAMPED_S)
    rate = await accepted_between(trial, closed + RAMPED_S - 1, closed + RAMPED_S)
    end = await run.wait()
    assert end.code == 0, end
    assert await trial.reckon() == {"sent": ROWS}
    # Probes, and one that was on its way when it opened.
    assert asked <= (ended - opened) / PROBE_S + 2
    assert closed - ended <= PROBE_S + 1.5
    assert handed_back_s <= OUTAGE_S
    assert rate >= 0.8 * RATE
    most = max(row["attempts"] for row in await trial.rows())
    figure(
        f"{kind} for {OUTAGE_S:g} s (x {FACTOR:g}): 0 failed, {asked} probes, handed back after"
        f" {handed_back_s:.1f} s, {rate}/s of {RATE} 5 s after the return, charged at most {most}"
    )


async def test_too_many_requests_for_a_minute(begin: Begin, figure: Callable[[str], None]) -> None:
    wait_s, lasts_s = 1.0, 6.0
    trial = await begin(THROTTLED_ROWS, retry_after=wait_s, latency_s=0.02)
    runs = [await trial.start(PLAN, **COMPRESSED) for _ in range(2)]
    await trial.mail.until(lambda stats: stats["deliveries"] >= 60)
    await trial.mail.control(throttle=True)
    await asyncio.sleep(lasts_s)
    await trial.mail.control(throttle=False)
    assert [(await run.wait()).code for run in runs] == [0, 0]
    assert await trial.reckon() == {"sent": THROTTLED_ROWS}
    rows = await trial.rows()
    assert {(row["attempts"], row["key_used_at"]) for row in rows} == {(0, None)}
    requests = await trial.mail.requests()
    refused = [at for at, _, status in requests if status == 429]
    # Requests come in bursts: what was on its way when the first 429 of a round was told.
    rounds = [refused[0]]
    for at in refused:
        if at - rounds[-1] > wait_s * 0.9:
            rounds.append(at)
    early = [
        at - begun for begun in rounds for at, _, _ in requests if 0.7 < at - begun < wait_s * 0.95
    ]
    assert early == []
    assert len(refused) <= len(rounds) * 0.7 * RATE
    figure(
        f"429 for {lasts_s:g} s, Retry-After {wait_s:g} s, 2 runs: {len(refused)} answers in"
        f" {len(rounds)} rounds, 0 charged, nobody asked before the time"
    )
