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
    await trial.mail.control(latency_s=0)
    assert (await trial.run()).code == 0
    assert await trial.reckon() == {"sent": 2000}
    stats = await trial.mail.stats()
    assert stats["requests"] == stats["keys_seen"]
    figure(f"{asked} in flight, exit 1 after {took:.1f} s of 20 s, all recorded, 0 asked again")
