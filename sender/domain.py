"""The words of the product: targets, leases, answers, decisions. Standard library only.

Owns the closed unions that an attempt moves through. Must never do I/O.
"""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from uuid import UUID


class State(StrEnum):
    """What `campaign_targets.state` may hold."""

    PENDING = "pending"
    SENDING = "sending"
    SENT = "sent"
    FAILED = "failed"
    IN_DOUBT = "in_doubt"


class Fate(StrEnum):
    """What a finish does with a leased batch."""

    KEEP = "keep"
    DONE = "done"
    RELEASE = "release"


class Control(StrEnum):
    """What a person wants of a campaign (`campaigns.control`)."""

    RUN = "run"
    PAUSED = "paused"
    CANCELLED = "cancelled"


def idempotency_key(campaign_id: str, member_id: int) -> str:
    """The key of a member's mail: equal for every attempt, by every process, for ever."""
    return f"{campaign_id}:{member_id}"


def content_hash(email: str | None, variables: str | None) -> bytes:
    """Fingerprint of what the row contributes to the request body.

    Equal to the SQL expression in `queries.shared.CONTENT_HASH`; a row whose fingerprint changed
    while its outcome is open must not be sent under the old key.

    Args:
        email: the address as stored.
        variables: the row's `vars` as PostgreSQL prints jsonb, or None.

    Returns:
        32 bytes (SHA-256).
    """
    return sha256(f"{email or ''}\n{variables or ''}".encode()).digest()


@dataclass(slots=True, eq=False)
class Target:
    """One claimed row: a member to mail.

    Attributes:
        member_id: the row's key inside its campaign.
        email: the address as stored; may be broken or None.
        variables: JSON text for the body's `vars`, or None.
        attempts: charged attempts so far.
        unknowns: how many of the charged attempts ended without a known answer.
        key_used_at: since when the key may have reached the provider, as found at the claim
            (database clock), or None if it surely never did.
        key_until: until when, on this process's monotonic clock, a request may repeat the key;
            infinite while the key surely never left.
        lease: the lease that holds it.
    """

    member_id: int
    email: str | None
    variables: str | None
    attempts: int
    unknowns: int
    key_used_at: datetime | None
    key_until: float
    lease: "Lease"


@dataclass(slots=True, eq=False)
class Lease:
    """What one claim took: a batch, or single rows that are due again.

    Attributes:
        claim_id: the fence; new for every claim, compared by every write.
        batch_no: the batch, or None for single rows.
        claimed_at: the claim's moment on the database clock.
        first_use_at: the claim on this process's monotonic clock: no request of it began earlier.
        until: the lease's end on this process's monotonic clock; conservative, because it is
            counted from before the statement was sent.
        found_key_used_at: the batch's stamp before this claim, restored by a release.
        targets: the rows taken.
        unsettled: those of them that are neither settled nor handed back nor skipped.
        released: rows of it were handed back unsent, so the batch is released, not closed.
        company: how many rows may be in hand beside it. It was lost so often that its row may be
            what kills the process, and a death costs all that are in hand.
    """

    claim_id: UUID
    batch_no: int | None
    claimed_at: datetime
    first_use_at: float
    until: float
    found_key_used_at: datetime | None = None
    targets: list[Target] = field(default_factory=list)
    unsettled: set[Target] = field(default_factory=set)
    released: bool = False
    company: float = float("inf")


# --- What a provider can answer: one class for each line of the table of answers ------------------


@dataclass(slots=True, frozen=True)
class Accepted:
    """The provider took the mail."""


@dataclass(slots=True, frozen=True)
class Refused:
    """Permanent failure of this recipient; never repeated. The key is free again."""

    reason: str


@dataclass(slots=True, frozen=True)
class Deferred:
    """Try later with the same key, uncharged; the key may be in use (408, 409, 425)."""

    reason: str


@dataclass(slots=True, frozen=True)
class Throttled:
    """Too fast for the account (429), uncharged; nothing was learnt about the key.

    Attributes:
        retry_after_s: seconds the provider asks all of the account to wait, or None.
    """

    reason: str
    retry_after_s: float | None = None


@dataclass(slots=True, frozen=True)
class Unavailable:
    """The provider failed (5xx) and said so; charged unless the breaker is open."""

    reason: str


@dataclass(slots=True, frozen=True)
class Unknown:
    """Nobody knows whether the mail was taken: time-out, cut, unreadable; charged."""

    reason: str


@dataclass(slots=True, frozen=True)
class NotSent:
    """The request surely never left (refused, unresolved, TLS refused); uncharged."""

    reason: str


@dataclass(slots=True, frozen=True)
class AccountStopped:
    """The provider refuses the account or the request as such; the run must stop."""

    reason: str


type Answer = (
    Accepted | Refused | Deferred | Throttled | Unavailable | Unknown | NotSent | AccountStopped
)


# --- What is written for a row -------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Outcome:
    """The settled end of one claimed row, ready to be recorded.

    Attributes:
        target: the row.
        state: SENT, FAILED, IN_DOUBT, or PENDING when the row stays open.
        charged: whether an attempt is counted.
        unknown: whether that attempt ended without a known answer.
        delay_s: for PENDING, seconds until the row is due again.
        key_used_at: since when the key may have been used, or None if it surely was not.
        reason: short text for people, without addresses; empty for SENT.
    """

    target: Target
    state: State
    charged: bool = False
    unknown: bool = False
    delay_s: float = 0.0
    key_used_at: datetime | None = None
    reason: str = ""


@dataclass(slots=True, frozen=True)
class Counts:
    """Where a campaign stands; `total` is always the sum of the others.

    Attributes:
        skipped: opted out and pending; never mailed, not remaining.
    """

    sent: int = 0
    failed: int = 0
    in_doubt: int = 0
    skipped: int = 0
    pending: int = 0
    sending: int = 0

    @property
    def total(self) -> int:
        """All rows of the campaign."""
        return self.sent + self.failed + self.in_doubt + self.skipped + self.pending + self.sending

    @property
    def open(self) -> int:
        """Rows that still have to be mailed."""
        return self.pending + self.sending
