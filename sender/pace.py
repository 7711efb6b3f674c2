"""The pace: when a reserved slot may be used, and how many permits may leave together.

The slots themselves are reserved in PostgreSQL (`queries.look.LOOK`), one clock for all processes
of an account, which take turns. A slot is absolute and expires: a row that missed it reserves anew,
so time lost in one process is never made up for in another's slots.
"""

from collections import deque
from typing import Final

from aiolimiter import AsyncLimiter

LOOK_VALID_S: Final = 0.5
"""A request begins only on a look at its row younger than this."""

AHEAD_S: Final = 0.2
"""No slot is reserved while the shared clock is further ahead than this."""

_CHUNK_S: Final = 0.15
_REFILL_S: Final = 0.15
_SAME_S: Final = 0.05
_LONGEST_GAP_S: Final = 0.5
_ROUNDS: Final = 3
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

    def is_missed(self, slot_at: float, now: float) -> bool:
        """Whether a slot is past and must not be used any more."""
        return now - slot_at > _LATE_S

    async def leave(self) -> None:
        """Wait until one more request may leave."""
        await self._limiter.acquire()


class Turns:
    """When a process reserves again, so that the processes of one account do so in turn.

    Without it each of four processes asks for the next slots, three of them in vain (36 looks a
    second instead of 8, for an eighth of a second of slots each). The slots that others took
    between two reservations of this process say how long a round is. The shortest of the last
    rounds is believed, so that slots are rarely left to somebody who is gone; who comes late
    believes in nobody. All times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._gaps_s = deque([0.0] * _ROUNDS, maxlen=_ROUNDS)
        self._ends_at: float | None = None

    def took(self, now: float, starts_at: float, ends_at: float) -> None:
        """Note slots that were reserved, from the first one to the end of the last one."""
        gap_s = 0.0 if self._ends_at is None else starts_at - self._ends_at
        if starts_at - now < _SAME_S:
            # The account's clock was hardly ahead: the others did not take their turns.
            self._gaps_s.extend([0.0] * _ROUNDS)
        else:
            # What is smaller is the difference between two readings of the clocks.
            self._gaps_s.append(gap_s if gap_s >= _SAME_S else 0.0)
        self._ends_at = ends_at

    def next_at(self) -> float:
        """When new slots are wanted: before those of the round end."""
        if self._ends_at is None:
            return 0.0
        return self._ends_at + min(*self._gaps_s, _LONGEST_GAP_S) - _REFILL_S
