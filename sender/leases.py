"""Leases from the rows that a claim returns."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sender.domain import Lease, Target
from sender.queries.shared import LOST_TOGETHER

_SMALL_COMPANY: Final = 20


def lease_of_batch(
    rows: Sequence[Any], claim_id: UUID, asked_at: float, lease_s: float, usable_s: float
) -> Lease:
    """The lease of `CLAIM_BATCH`, one row at least; it may have no targets.

    Args:
        rows: as returned; the batch's columns are in each of them.
        claim_id: the fence it was claimed under.
        asked_at: monotonic seconds before the claim.
        lease_s: its length in seconds.
        usable_s: seconds after its first use during which a key may be repeated.
    """
    head = rows[0]
    lease = Lease(
        claim_id, head.batch_no, head.claimed_at, asked_at, asked_at + lease_s, head.found
    )
    lease.company = _company(head.lost_claims)
    key_until = _key_until(asked_at, head.key_age_s, usable_s)
    lease.targets = [
        _target(row, row.unknowns + (head.found is not None), head.found, key_until, lease)
        for row in rows
        if row.member_id is not None
    ]
    lease.unsettled.update(lease.targets)
    return lease


def lease_of_due(
    rows: Sequence[Any], claim_id: UUID, asked_at: float, lease_s: float, usable_s: float
) -> Lease:
    """The lease of rows that `CLAIM_DUE` took, one at least; arguments as of `lease_of_batch`."""
    lease = Lease(claim_id, None, rows[0].claimed_at, asked_at, asked_at + lease_s)
    lease.company = _company(max(row.lost_claims for row in rows))
    lease.targets = [
        _target(row, row.unknowns, row.found, _key_until(asked_at, row.key_age_s, usable_s), lease)
        for row in rows
    ]
    lease.unsettled.update(lease.targets)
    return lease


def batch_range(leases: Iterable[Lease]) -> dict[str, int]:
    """The numbers between which the leases' batches stand; an empty range if there are none."""
    numbers = [x.batch_no for x in leases if x.batch_no is not None]
    return {"first_batch": min(numbers, default=1), "last_batch": max(numbers, default=0)}


def _target(
    row: Any, unknowns: int, found: datetime | None, key_until: float, lease: Lease
) -> Target:
    return Target(
        row.member_id, row.email, row.vars, row.attempts, unknowns, found, key_until, lease
    )


def _key_until(asked_at: float, age_s: float | None, usable_s: float) -> float:
    return float("inf") if age_s is None else asked_at + usable_s - age_s


def _company(lost_claims: int) -> float:
    """How many rows may be in hand beside one that was lost this often.

    After the losses in its batch a row gets one more try in small company, so that a run of deaths
    with another cause costs little time, and then it goes alone.
    """
    together = int(LOST_TOGETHER)
    if lost_claims < together:
        return float("inf")
    return _SMALL_COMPANY if lost_claims == together else 0
