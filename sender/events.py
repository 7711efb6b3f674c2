"""The one catalogue of events. Every log line and metric of a run is made from one of these.

An event tells a fact that is already durable or already true. It never holds an address, a key or a
password: rows are named by campaign and member id. `name` and `level` are what the log shows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from sender.domain import Counts, State

type Level = Literal["info", "warning", "error"]


@dataclass(slots=True, frozen=True)
class Event:
    """Base of all events."""

    name: ClassVar[str] = "event"
    level: ClassVar[Level] = "info"


@dataclass(slots=True, frozen=True)
class RunStarted(Event):
    """A run begins. `settings` holds no secret; `repeats_at_most` is the bound after a kill."""

    name: ClassVar[str] = "run_started"
    campaign: str
    version: str
    settings: Mapping[str, object]
    repeats_at_most: int


@dataclass(slots=True, frozen=True)
class BatchesBuilt(Event):
    """Open rows that no batch covered were put into `batches` new ones."""

    name: ClassVar[str] = "batches_built"
    campaign: str
    batches: int


@dataclass(slots=True, frozen=True)
class Progress(Event):
    """Every ten seconds. Counts are the campaign's, the rest is this process's.

    Attributes:
        done: rows with a final outcome, of all processes.
        remaining: open rows, estimated from the batches.
        rate_per_s: accepted by this process since the last progress.
        eta_s: seconds to the end at the campaign's present rate, or None if unknown.
        in_flight: requests of this process without an answer.
        waiting: why nothing is being sent, or empty.
    """

    name: ClassVar[str] = "progress"
    campaign: str
    accepted: int
    done: int
    remaining: int
    rate_per_s: float
    eta_s: float | None
    in_flight: int
    waiting: str


@dataclass(slots=True, frozen=True)
class TargetSettled(Event):
    """An outcome other than sent was recorded for a row."""

    name: ClassVar[str] = "target_settled"
    level: ClassVar[Level] = "warning"
    campaign: str
    member_id: int
    state: State
    attempts: int
    reason: str


@dataclass(slots=True, frozen=True)
class TargetDeferred(Event):
    """A row stays open and is due again in `delay_s`. One of many; logged at debug by default."""

    name: ClassVar[str] = "target_deferred"
    campaign: str
    member_id: int
    attempts: int
    delay_s: float
    reason: str


@dataclass(slots=True, frozen=True)
class AttemptBroke(Event):
    """The provider's code failed on a row; its outcome is unknown. `error` is a class name."""

    name: ClassVar[str] = "attempt_broke"
    level: ClassVar[Level] = "error"
    campaign: str
    member_id: int
    error: str


@dataclass(slots=True, frozen=True)
class WritesRefused(Event):
    """The fence refused outcomes: another run holds those rows now."""

    name: ClassVar[str] = "writes_refused"
    level: ClassVar[Level] = "warning"
    campaign: str
    rows: int


@dataclass(slots=True, frozen=True)
class RowsLocked(Event):
    """The application holds locks on rows whose outcomes are known: those are written later."""

    name: ClassVar[str] = "rows_locked"
    level: ClassVar[Level] = "warning"
    campaign: str
    rows: int


@dataclass(slots=True, frozen=True)
class LeaseLost(Event):
    """Claimed rows were dropped unsent: their lease had ended or another run holds them."""

    name: ClassVar[str] = "lease_lost"
    level: ClassVar[Level] = "warning"
    campaign: str
    rows: int


@dataclass(slots=True, frozen=True)
class AccountPaused(Event):
    """The provider asked the whole account to wait (429)."""

    name: ClassVar[str] = "account_paused"
    level: ClassVar[Level] = "warning"
    seconds: float
    reason: str


@dataclass(slots=True, frozen=True)
class PaceClamped(Event):
    """The shared clock stood `ahead_s` in the future (the database clock jumped) and was reset."""

    name: ClassVar[str] = "pace_clamped"
    level: ClassVar[Level] = "warning"
    ahead_s: float


@dataclass(slots=True, frozen=True)
class BreakerOpened(Event):
    """The provider fails; rows wait in the table and one probe is sent now and then."""

    name: ClassVar[str] = "breaker_opened"
    level: ClassVar[Level] = "warning"
    reason: str


@dataclass(slots=True, frozen=True)
class BreakerClosed(Event):
    """The provider answers again."""

    name: ClassVar[str] = "breaker_closed"
    after_s: float


@dataclass(slots=True, frozen=True)
class DatabaseAway(Event):
    """The database does not answer; outcomes are kept and nothing new is sent."""

    name: ClassVar[str] = "database_away"
    level: ClassVar[Level] = "warning"
    error: str


@dataclass(slots=True, frozen=True)
class DatabaseBack(Event):
    """The database answers again."""

    name: ClassVar[str] = "database_back"
    after_s: float


@dataclass(slots=True, frozen=True)
class Waiting(Event):
    """Open rows exist but none may be claimed yet."""

    name: ClassVar[str] = "waiting"
    campaign: str
    open_rows: int
    reason: str
    seconds: float


@dataclass(slots=True, frozen=True)
class Stopping(Event):
    """No new row is claimed from now on; what is in flight ends."""

    name: ClassVar[str] = "stopping"
    reason: str
    in_flight: int


@dataclass(slots=True, frozen=True)
class OutcomesAbandoned(Event):
    """The run ended with outcomes it could not write; the same keys absorb the repeats."""

    name: ClassVar[str] = "outcomes_abandoned"
    level: ClassVar[Level] = "error"
    campaign: str
    rows: int


@dataclass(slots=True, frozen=True)
class RunEnded(Event):
    """The last line of a run: why it ended and where the campaign stands.

    Attributes:
        counts: the ledger at the end, or None if the database could not be asked.
        requests: requests this process began.
        accepted: outcomes this process recorded as sent.
    """

    name: ClassVar[str] = "run_ended"
    campaign: str
    exit_code: int
    reason: str
    counts: Counts | None
    requests: int
    accepted: int
    refused_writes: int
    seconds: float
