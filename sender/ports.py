"""The seams where I/O happens: Protocols that the pipeline is written against."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from sender.domain import Answer, Control, Counts, Fate, Lease, Outcome, State, Target
from sender.events import Event


class StoreUnavailable(Exception):
    """The store could not do it now and nothing is known to be written; try the same again.

    The text is the error's kind and SQLSTATE, fit for a log.
    """


class StoreLocked(StoreUnavailable):
    """Somebody else holds a lock that the statement needs and did not give it up in time."""


@dataclass(slots=True, frozen=True)
class Settled:
    """A row that the store itself settled (put in doubt), for the log."""

    member_id: int
    state: State
    attempts: int
    reason: str


@dataclass(slots=True, frozen=True)
class Look:
    """What one look saw, and the slots it reserved.

    Attributes:
        asked_at: when it was asked, monotonic seconds; its age counts from here.
        control: what a person wants of the campaign.
        lost: claim ids of batches that are not held any more.
        ready: rows that may be mailed; slots were reserved for just these if `starts_at` is set.
        starts_at: monotonic time of the first slot, or None if none was reserved: the shared clock
            is too far ahead or blocked.
        ahead_s: how far ahead the account's clock stood before, in seconds.
        blocked_s: seconds the provider wants the account to wait; not positive if it does not.
    """

    asked_at: float
    control: Control
    lost: frozenset[UUID]
    ready: frozenset[Target]
    starts_at: float | None
    ahead_s: float
    blocked_s: float


@dataclass(slots=True, frozen=True)
class Recorded:
    """What a finish wrote.

    Attributes:
        taken: outcomes that were written; the others were refused by the fence.
        held: claim ids of batches that carried our fence.
        until: the new end of leases that are kept, monotonic seconds.
    """

    taken: Sequence[Outcome]
    held: frozenset[UUID]
    until: float


@dataclass(slots=True, frozen=True)
class Due:
    """When something can be claimed.

    Attributes:
        in_s: seconds until the next row or batch is free, 0 if now, None if nothing is known of.
    """

    control: Control
    in_s: float | None
    open_batches: int


@dataclass(slots=True, frozen=True)
class Remaining:
    """An estimate of what is done and what is left, from the queue."""

    done: int
    open_rows: int


class TargetStore(Protocol):
    """The ledger and the queue. Every method may raise `StoreUnavailable`."""

    async def build(self) -> int:
        """Put open rows that no batch covers into batches; returns how many were made."""
        ...

    async def claim_batch(self) -> tuple[Lease | None, list[Settled]]:
        """Lease the next batch, if any; also the rows put in doubt on the way."""
        ...

    async def claim_due(self) -> tuple[Lease | None, list[Settled]]:
        """Lease single rows that are due again; also the rows put in doubt on the way."""
        ...

    async def look(self, targets: Sequence[Target]) -> Look:
        """See which rows may still be mailed and reserve slots for them."""
        ...

    async def block(self, seconds: float) -> None:
        """Make all processes of the account wait."""
        ...

    async def finish(self, outcomes: Sequence[Outcome], fates: Mapping[Lease, Fate]) -> Recorded:
        """Write outcomes and their leases' fate, under the fence.

        Raises `StoreLocked` if a row is locked by somebody else for long.
        """
        ...

    async def locked(self, targets: Sequence[Target]) -> frozenset[Target]:
        """Which of the rows somebody else has locked just now."""
        ...

    async def extend(self, leases: Sequence[Lease], again: Sequence[Target]) -> frozenset[UUID]:
        """Renew leases; returns those that are still held."""
        ...

    async def sweep(self) -> list[Settled]:
        """Settle what nobody may claim any more."""
        ...

    async def adopt(self) -> int:
        """Make unreachable open rows due."""
        ...

    async def control(self) -> Control:
        """What a person wants of the campaign."""
        ...

    async def due(self) -> Due:
        """When the next row can be claimed."""
        ...

    async def counts(self) -> Counts:
        """Count the ledger."""
        ...

    async def remaining(self) -> Remaining:
        """Estimate what is left."""
        ...


class Provider(Protocol):
    """Sends one mail as one request. Touches no database.

    `send` never raises for anything the network or the provider does: each becomes an `Answer`.
    """

    async def send(self, target: Target, gate: "Gate") -> Answer | None:
        """Send the mail of `target` once.

        Args:
            target: the row; its address has been checked.
            gate: asked once more when a connection is in hand and before the first byte leaves.

        Returns:
            The answer, or None if the gate closed and nothing was sent.
        """
        ...

    async def aclose(self) -> None:
        """Close idle connections."""
        ...


class Gate(Protocol):
    """Says whether a request may still begin: the last look is young and the lease held."""

    def __call__(self) -> bool:
        """True while the request may begin. Cheap and synchronous."""
        ...


class Observer(Protocol):
    """Receives every event after the fact it tells is durable."""

    def __call__(self, event: Event) -> None:
        """Take the event; must neither block nor raise."""
        ...
