"""The pace: when a reserved slot may be used, and how many permits may leave together.

The slots themselves are reserved in PostgreSQL (`queries.LOOK`), one clock for all processes of an
account. A slot is absolute and expires: a row that missed it reserves anew, so time lost in one
process is never made up for in another's slots.
"""

from typing import Final

from aiolimiter import AsyncLimiter

LOOK_VALID_S: Final = 0.5
"""A request begins only on a look at its row younger than this."""

AHEAD_S: Final = 0.2
"""No slot is reserved while the shared clock is further ahead than this."""

_CHUNK_S: Final = 0.125
_REFILL_S: Final = 0.1
_BURST_S: Final = 0.01
_LATE_S: Final = 0.03
_HEADROOM: Final = 1.05
_NO_SLACK_BELOW: Final = 20.0


class Pace:
    """The pace of one process inside the account's shared one.

    Attributes:
        rate_per_s: the rate slots are reserved at. Below 20/s it is one per cent under the limit:
            there a single early arrival is more than the few per cent that limits forgive.
        chunk: rows to reserve slots for at once.
    """

    def __init__(self, limit_per_s: float) -> None:
        slow = limit_per_s < _NO_SLACK_BELOW
        self.rate_per_s = limit_per_s * 0.99 if slow else limit_per_s
        self.chunk = max(1, int(limit_per_s * _CHUNK_S))
        # Two at least where slots are dense: a limiter of one credits no late wake-up, falls behind
        # the slots a little each time, and ends with every slot waited for and then missed.
        burst = max(1 if slow else 2, round(limit_per_s * _BURST_S))
        # The slots bound the average; this bounds what may leave together after a stall.
        self._limiter = AsyncLimiter(burst, burst / (limit_per_s * _HEADROOM))

    @property
    def spacing_s(self) -> float:
        """Seconds between two slots."""
        return 1 / self.rate_per_s

    @property
    def refill_s(self) -> float:
        """New slots are reserved when those in hand end within this many seconds."""
        return _REFILL_S

    def is_missed(self, slot_at: float, now: float) -> bool:
        """Whether a slot is past and must not be used any more."""
        return now - slot_at > _LATE_S

    async def leave(self) -> None:
        """Wait until one more request may leave."""
        await self._limiter.acquire()
