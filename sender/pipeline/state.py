"""What the parts of one pipeline share: its sizes, its counters, its breaker."""

import time
from dataclasses import dataclass, field

from sender.breaker import Breaker, RefusalWatch
from sender.domain import Target
from sender.events import DatabaseAway, DatabaseBack
from sender.ports import Observer, StoreUnavailable
from sender.retry import RetryPolicy

_COMPANY_S = 0.4
_WRITE_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """The sizes of a pipeline.

    Attributes:
        campaign: its id, for events.
        limit_per_s: the account's limit.
        concurrency: requests in flight at most.
        lease_s: length of a lease in seconds.
        retry: how often and how late a row is tried again.
        flush_rows: outcomes that are waited for at most before they are written together.
        flush_s: seconds an outcome waits at most to be written.
    """

    campaign: str
    limit_per_s: float
    concurrency: int
    lease_s: float
    retry: RetryPolicy
    flush_rows: int = 200
    flush_s: float = 1.0

    @property
    def rows_a_write(self) -> int:
        """Outcomes that are waited for before a write: 0.4 seconds of the limit at most.

        By rows and not by time: a write costs the server half as much for 4 rows as for 125, so
        several processes that share a limit would each pay for it again and again.
        """
        return min(self.flush_rows, max(1, int(self.limit_per_s * _COMPANY_S)))

    @property
    def queue_rows(self) -> int:
        """Rows the queue holds: half a second of the rate."""
        return max(1, int(self.limit_per_s / 2))

    @property
    def rows_in_hand(self) -> int:
        """Rows that may be claimed and not yet recorded; bounds memory and repeats."""
        return self.concurrency + 2 * self.queue_rows + self.flush_rows

    @property
    def repeats_at_most(self) -> int:
        """Mails a kill may cause to be requested again: in flight, or answered and not recorded."""
        held = self.flush_rows + int(self.limit_per_s * _WRITE_S)
        return self.concurrency + held


@dataclass(slots=True)
class Traffic:
    """Counters of one process.

    Attributes:
        permits_out: permits given to workers and not used up, requests in flight included.
        requests: requests begun.
        accepted: outcomes recorded as sent.
        refused_writes: outcomes the fence refused.
        waiting: why nothing is being sent, for people; empty if something is.
    """

    breaker: Breaker = field(default_factory=Breaker)
    refusals: RefusalWatch = field(default_factory=RefusalWatch)
    permits_out: int = 0
    in_flight: int = 0
    requests: int = 0
    accepted: int = 0
    refused_writes: int = 0
    waiting: str = ""
    block_s: float = 0.0
    """Seconds the provider asked to wait, not yet told to the other processes."""

    block_reason: str = ""


@dataclass(slots=True, eq=False)
class Permit:
    """Leave to send one mail now.

    Attributes:
        target: the row.
        looked_at: when the look at the row was asked, monotonic seconds.
        probe: the breaker's trial request.
    """

    target: Target
    looked_at: float
    probe: bool = False


class StoreHealth:
    """Whether the store answers, told once when it changes. Shared by all who ask it."""

    def __init__(self, observer: Observer) -> None:
        self._observe = observer
        self._away_since: float | None = None

    @property
    def is_away(self) -> bool:
        """Whether the last statement failed for want of the store."""
        return self._away_since is not None

    def away(self, error: StoreUnavailable) -> None:
        """Note that the store did not answer."""
        if self._away_since is None:
            self._away_since = time.monotonic()
            self._observe(DatabaseAway(str(error)))

    def back(self) -> None:
        """Note that the store answered."""
        if self._away_since is not None:
            self._observe(DatabaseBack(time.monotonic() - self._away_since))
            self._away_since = None
