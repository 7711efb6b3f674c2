"""The fake provider's statistics: traffic in any sliding second, rates, answers, single requests.

Owns the counters behind `/stats`. Must never decide what a request gets.
"""

import time
from array import array
from collections import Counter, deque
from collections.abc import Container, Iterator

from sender.dev.fake_ledger import Ledger
from sender.dev.fake_stats import Stats

_FEWEST_FOR_A_RATE = 20


class SlidingSecond:
    """Events of the last second, exactly: those in `(now - 1, now]`.

    Attributes:
        peak: most events in any such interval so far.
    """

    def __init__(self) -> None:
        """Begin without events."""
        self.peak: int = 0
        self._times: deque[float] = deque()

    def count(self, now: float) -> int:
        """Events in the second up to `now`; `now` never goes back."""
        times = self._times
        while times and times[0] <= now - 1.0:
            times.popleft()
        return len(times)

    def add(self, now: float) -> None:
        """Note one event at `now`."""
        self._times.append(now)
        self.peak = max(self.peak, self.count(now))


class Wire:
    """What happens on the connections; counted by whoever serves them.

    Attributes:
        opened: connections accepted.
        open: connections open now.
        in_flight: mail requests without their answer yet.
        max_in_flight: most of them at one time.
        abandoned: requests whose client left before the answer was complete.
        malformed: requests that were no HTTP.
    """

    def __init__(self) -> None:
        """Begin at zero."""
        self.opened: int = 0
        self.open: int = 0
        self.in_flight: int = 0
        self.max_in_flight: int = 0
        self.abandoned: int = 0
        self.malformed: int = 0

    def begin(self) -> None:
        """A mail request came in."""
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)

    def reset(self) -> None:
        """Forget the past and keep what is open now."""
        self.opened = self.open
        self.max_in_flight = self.in_flight
        self.abandoned = self.malformed = 0


class Traffic:
    """Counters that `reset_stats` begins anew, and the record of single requests.

    Attributes:
        requests: mail requests received.
        repeats: repeats absorbed.
        mismatches: accepted keys that came again with another body.
        limited: 429 by the limit.
        throttled: 429 by the switch.
        received: every mail request.
        let_through: those the limit let by.
        accepted: mails delivered.
    """

    def __init__(self, now: float, wall: float, max_recorded: int) -> None:
        """Begin counting.

        Args:
            now: monotonic time.
            wall: Unix time at `now`.
            max_recorded: how many requests are kept at most.
        """
        self.requests: int = 0
        self.repeats: int = 0
        self.mismatches: int = 0
        self.limited: int = 0
        self.throttled: int = 0
        self.received: SlidingSecond = SlidingSecond()
        self.let_through: SlidingSecond = SlidingSecond()
        self.accepted: SlidingSecond = SlidingSecond()
        self._began: float = now
        self._wall: float = wall
        self._first: float | None = None
        self._last: float | None = None
        self._delivered: array[float] = array("d")
        self._by_status: Counter[int] = Counter()
        self._by_fault: Counter[str] = Counter()
        self._max_recorded: int = max_recorded
        self._times: array[float] = array("d")
        self._slots: array[int] = array("q")
        self._statuses: array[int] = array("H")

    def receive(self, now: float) -> None:
        """A mail request came in at `now`."""
        self.requests += 1
        self.received.add(now)
        self._last = now
        if self._first is None:
            self._first = now

    def deliver(self, now: float) -> None:
        """A mail was delivered at `now`."""
        self.accepted.add(now)
        self._delivered.append(now)

    def play(self, fault: str) -> None:
        """A fault of this kind is played."""
        self._by_fault[fault] += 1

    def answer(self, now: float, slot: int, status: int) -> None:
        """The request that came at `now` gets `status`."""
        self._by_status[status] += 1
        if len(self._times) < self._max_recorded:
            self._times.append(now)
            self._slots.append(slot)
            self._statuses.append(status)

    def recorded(self, slots: Container[int] | None = None) -> Iterator[tuple[float, int, int]]:
        """The requests kept, oldest first.

        Args:
            slots: only those of these slots, or None for all.

        Yields:
            Monotonic time of arrival, slot (NO_KEY without a key), status (NO_ANSWER without one).
        """
        for at, slot, status in zip(self._times, self._slots, self._statuses, strict=True):
            if slots is None or slot in slots:
                yield at, slot, status

    @property
    def steady_rate(self) -> float | None:
        """Mails delivered per second, without start and tail.

        With the n delivery times in order, from index `int(0.1 * (n - 1))` to `int(0.9 * (n - 1))`:
        the mails after the first of the two up to the second, divided by the time between them.
        None below 20 deliveries or when no time passed. Repeats and refusals do not count.
        """
        n = len(self._delivered)
        first, last = int(0.1 * (n - 1)), int(0.9 * (n - 1))
        if n < _FEWEST_FOR_A_RATE or self._delivered[last] <= self._delivered[first]:
            return None
        return (last - first) / (self._delivered[last] - self._delivered[first])

    def stats(self, ledger: Ledger, wire: Wire) -> Stats:
        """Everything as one dictionary.

        Args:
            ledger: the deliveries.
            wire: the connections.

        Returns:
            The statistics.
        """
        delivered = self._delivered
        return {
            "requests": self.requests,
            "accepted": len(delivered) + self.repeats,
            "deliveries": ledger.total,
            "members_delivered": ledger.once + ledger.more,
            "delivered_once": ledger.once,
            "delivered_twice": ledger.more,
            "keys_seen": len(ledger),
            "repeats_absorbed": self.repeats,
            "body_mismatch": self.mismatches,
            "rate_limited": self.limited,
            "throttled": self.throttled,
            "by_status": {str(s or "none"): n for s, n in sorted(self._by_status.items())},
            "by_fault": dict(sorted(self._by_fault.items())),
            "max_in_any_second": self.received.peak,
            "let_through_max_in_any_second": self.let_through.peak,
            "accepted_max_in_any_second": self.accepted.peak,
            "steady_rate_per_s": self.steady_rate,
            "started_at": self._wall,
            "first_request_at": self._unix(self._first),
            "last_request_at": self._unix(self._last),
            "first_request_s": self._since(self._first),
            "last_request_s": self._since(self._last),
            "first_delivery_s": self._since(delivered[0] if delivered else None),
            "last_delivery_s": self._since(delivered[-1] if delivered else None),
            "connections_opened": wire.opened,
            "open_connections": wire.open,
            "in_flight": wire.in_flight,
            "max_in_flight": wire.max_in_flight,
            "abandoned": wire.abandoned,
            "malformed": wire.malformed,
            "cpu_s": time.process_time(),
        }

    def _since(self, at: float | None) -> float | None:
        return None if at is None else at - self._began

    def _unix(self, at: float | None) -> float | None:
        return None if at is None else at - self._began + self._wall
