"""SIGTERM with many slow requests in flight, at the time-outs people really have."""

import time
from collections.abc import Callable

from chaos.conftest import Begin
from chaos.harness import QUICK

DEFAULTS = dict.fromkeys(
    ("MAIL_CONNECT_TIMEOUT_S", "MAIL_READ_TIMEOUT_S", "LEASE_S", "SHUTDOWN_GRACE_S")
)


async def test_sigterm_with_200_requests_in_flight_at_5_s(
    begin: Begin, figure: Callable[[str], None]
) -> None:
    assert DEFAULTS.keys() <= QUICK.keys()
    # A little less than the time-out, which a loaded machine would reach.
    trial = await begin(2000, latency_s=4.6)
    run = await trial.start(MAIL_RATE_PER_S=150, **DEFAULTS)
    await trial.mail.until(lambda stats: stats["in_flight"] >= 200)
    since = time.monotonic()
    run.stop()
    end = await run.wait()
    took = time.monotonic() - since
    asked = (await trial.mail.stats())["requests"]
    assert end.code == 1
    assert took < 20
    assert await trial.free()
    assert (await trial.counts()).sent == asked >= 200
    assert {row["attempts"] for row in await trial.rows()} == {0}
    await trial.mail.control(latency_s=0)
    assert (await trial.run()).code == 0
    assert await trial.reckon() == {"sent": 2000}
    stats = await trial.mail.stats()
    assert stats["requests"] == stats["keys_seen"]
    figure(f"{asked} in flight, exit 1 after {took:.1f} s of 20 s, all recorded, 0 asked again")


async def test_a_second_sigterm_ends_it_now(begin: Begin, figure: Callable[[str], None]) -> None:
    trial = await begin(1000, latency_s=3.5)
    run = await trial.start(MAIL_RATE_PER_S=150, **DEFAULTS)
    await trial.mail.until(lambda stats: stats["in_flight"] >= 200)
    run.stop()
    await run.event("stopping")
    since = time.monotonic()
    run.stop()
    end = await run.wait()
    took = time.monotonic() - since
    left = (await trial.mail.stats())["requests"]
    assert end.code == 1
    # It had 20 s, and the last requests needed more than 3.
    assert took < 3
    await trial.mail.control(latency_s=0)
    await trial.time_passes()
    assert (await trial.run(MAIL_RATE_PER_S=500)).code == 0
    assert await trial.reckon() == {"sent": 1000}
    repeats = (await trial.mail.stats())["repeats_absorbed"]
    assert 0 < repeats <= run.told("run_started")[0]["repeats_at_most"]
    figure(
        f"{left} in flight, exit 1 after {took:.1f} s; {repeats} repeats absorbed, 0 twice, 0 lost"
    )


async def test_a_signal_after_the_end_was_told_changes_nothing(
    begin: Begin, figure: Callable[[str], None]
) -> None:
    trial = await begin(20)
    codes = []
    for _ in range(3):
        run = await trial.start()
        await run.event("run_ended")
        run.stop()
        codes.append((await run.wait()).code)
    assert codes == [0] * 3
    figure("exit 0 as the last line said, 3 of 3 times")
