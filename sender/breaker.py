"""The breaker: stops asking a provider that fails, and tells when to try it. Pure, clock injected.

Only the provider's own failures open it (5xx, time-outs, cut or refused connections, answers that
make no sense); refusals of a recipient and 429 do not.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from sender.domain import Answer, NotSent, Unavailable, Unknown

_WINDOW: Final = 50
_FAILURES_IN_WINDOW: Final = 25
_FAILURES_IN_A_ROW: Final = 10
_PROBE_EVERY_S: Final = 10.0
_RAMP_S: Final = 4.0
_RAMP_FROM: Final = 0.1
_REFUSED_TO_STOP: Final = 100
_SUSPICION_FROM: Final = 20
_SUSPECTED_AT_MOST: Final = 200


def is_provider_failure(answer: Answer) -> bool:
    """Whether this answer counts for the breaker (contract: table of answers)."""
    return isinstance(answer, Unavailable | Unknown | NotSent)


@dataclass(slots=True)
class Breaker:
    """Closed, or open since a moment. All times are monotonic seconds.

    Attributes:
        opened_at: since when it is open, or None.
    """

    opened_at: float | None = None
    _recent: deque[bool] = field(default_factory=lambda: deque[bool](maxlen=_WINDOW))
    _failures: int = 0
    _in_a_row: int = 0
    _next_probe_at: float = 0.0
    _closed_at: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether requests other than probes are held back."""
        return self.opened_at is not None

    def record(self, *, failed: bool, now: float) -> bool:
        """Count an answer of an ordinary request; True if it opened the breaker."""
        if self.is_open:
            return False
        if len(self._recent) == _WINDOW and self._recent[0]:
            self._failures -= 1
        self._recent.append(failed)
        self._failures += failed
        self._in_a_row = self._in_a_row + 1 if failed else 0
        if self._in_a_row < _FAILURES_IN_A_ROW and self._failures < _FAILURES_IN_WINDOW:
            return False
        self.opened_at = now
        self._next_probe_at = now + _PROBE_EVERY_S
        return True

    def may_probe(self, now: float) -> bool:
        """True at most once every ten seconds while open: one request may be tried."""
        if not self.is_open or now < self._next_probe_at:
            return False
        self._next_probe_at = now + _PROBE_EVERY_S
        return True

    def next_probe_in_s(self, now: float) -> float:
        """Seconds until a probe is due; 0 if closed or due now."""
        return max(0.0, self._next_probe_at - now) if self.is_open else 0.0

    def probed(self, *, failed: bool, now: float) -> float | None:
        """Take a probe's answer; returns for how long it was open if that closed it."""
        if self.opened_at is None or failed:
            return None
        was_open_s = now - self.opened_at
        self.opened_at = None
        self._closed_at = now
        self._recent.clear()
        self._failures = self._in_a_row = 0
        return was_open_s

    def share(self, now: float) -> float:
        """The part of the full rate to use, 0 to 1: nothing while open, then a ramp of 4 s."""
        if self.is_open:
            return 0.0
        if self._closed_at is None or now - self._closed_at >= _RAMP_S:
            return 1.0
        return _RAMP_FROM + (1 - _RAMP_FROM) * (now - self._closed_at) / _RAMP_S


@dataclass(slots=True)
class RefusalWatch:
    """Tells when the provider refuses so many recipients that a person must look.

    At least half of the last 200 answers permanent: not the members are wrong, the campaign is.
    """

    _recent: deque[bool] = field(default_factory=lambda: deque[bool](maxlen=200))
    _refused: int = 0

    def record(self, *, refused: bool) -> bool:
        """Count an answer; True if the run must stop."""
        if len(self._recent) == self._recent.maxlen and self._recent[0]:
            self._refused -= 1
        self._recent.append(refused)
        self._refused += refused
        return self._refused >= _REFUSED_TO_STOP

    def allowance(self, in_flight: int) -> int | None:
        """How many more requests may begin while most answers are refusals; None if they are not.

        What is in flight when the stop comes is refused too, so a suspicion holds new requests back
        until it is settled either way.
        """
        if len(self._recent) < _SUSPICION_FROM or 2 * self._refused < len(self._recent):
            return None
        return max(0, _SUSPECTED_AT_MOST - self._refused - in_flight)
