"""A ledger without a database: so many targets, all of them free, every write taken.

What is left of a run is the pipeline itself. Implements `ports.TargetStore`.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from uuid import UUID, uuid4

from sender.domain import Control, Counts, Fate, Lease, Outcome, Target
from sender.ports import Due, Look, Recorded, Remaining, Settled

_BATCH = 125
_LEASE_S = 90.0


class EndlessStore:
    """Hands out members 1 to `rows` in batches.

    Attributes:
        taken: outcomes written so far.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._next = 1
        self._batch_no = 0
        self.taken = 0

    async def build(self) -> int:
        return 0

    async def claim_batch(self) -> tuple[Lease | None, list[Settled]]:
        if self._next > self._rows:
            return None, []
        now = time.monotonic()
        self._batch_no += 1
        lease = Lease(uuid4(), self._batch_no, datetime.now(UTC), now, now + _LEASE_S)
        members = range(self._next, min(self._next + _BATCH, self._rows + 1))
        self._next = members.stop
        lease.targets = [
            Target(n, f"member-{n}@example.org", None, 0, 0, None, float("inf"), lease)
            for n in members
        ]
        lease.unsettled.update(lease.targets)
        return lease, []

    async def claim_due(self) -> tuple[Lease | None, list[Settled]]:
        return None, []

    async def look(self, targets: Sequence[Target]) -> Look:
        now = time.monotonic()
        return Look(now, Control.RUN, frozenset(), frozenset(targets), now, 0.0, 0.0)

    async def block(self, seconds: float) -> None: ...

    async def finish(self, outcomes: Sequence[Outcome], fates: Mapping[Lease, Fate]) -> Recorded:
        self.taken += len(outcomes)
        held = frozenset(lease.claim_id for lease in fates)
        return Recorded(outcomes, held, time.monotonic() + _LEASE_S)

    async def locked(self, targets: Sequence[Target]) -> frozenset[Target]:
        return frozenset()

    async def extend(self, leases: Sequence[Lease], again: Sequence[Target]) -> frozenset[UUID]:
        return frozenset(lease.claim_id for lease in leases)

    async def sweep(self) -> list[Settled]:
        return []

    async def adopt(self) -> int:
        return 0

    async def control(self) -> Control:
        return Control.RUN

    async def due(self) -> Due:
        return Due(Control.RUN, None, 0)

    async def counts(self) -> Counts:
        return Counts(sent=self.taken, pending=self._rows - self.taken)

    async def remaining(self) -> Remaining:
        return Remaining(self.taken, self._rows - self.taken)
