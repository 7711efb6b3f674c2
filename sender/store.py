"""The ledger and the queue in PostgreSQL: build, claim, look, finish, extend, sweep, count.

Owns the mapping between rows and `domain` objects. Must never decide what an answer means. Each
method is one autocommit statement and raises `StoreUnavailable` if trying again can help.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, LiteralString, Self
from uuid import UUID, uuid4

from psycopg.errors import UniqueViolation

from sender import queries
from sender.arrays import id_array
from sender.database import Database
from sender.domain import Control, Counts, Fate, Lease, Outcome, State, Target
from sender.leases import batch_range, lease_of_batch, lease_of_due
from sender.ports import Due, Look, Recorded, Remaining, Settled, StoreUnavailable
from sender.records import Record

_LEDGER_TIMEOUT_S: Final = 300.0
_FROM_THE_START_EVERY_S: Final = 30.0
_LOW_WATER_RESET_S: Final = 60.0
_WHOLE_EVERY: Final = 6
_LONG_AGO: Final = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """What the store needs to know.

    Attributes:
        dsn: libpq URI or conninfo.
        campaign: whose rows.
        account: whose pace.
        rate_per_s: messages a second of the account.
        batch_size: rows a claim and a new batch hold at most.
        lease_s: length of a lease in seconds.
        usable_s: seconds after its first use during which a key may be repeated (window less
            margin); not positive if never.
        pace_ahead_s: how far in the future a slot may be reserved, in seconds.
    """

    dsn: str
    campaign: str
    account: str
    rate_per_s: float
    batch_size: int
    lease_s: float
    usable_s: float
    pace_ahead_s: float


class PostgresStore:
    """The `TargetStore` over an AsyncConnectionPool. Use as an async context manager."""

    def __init__(self, config: StoreConfig) -> None:
        self._config = config
        self._database = Database(config.dsn)
        self._after = 0
        self._after_since = time.monotonic()
        self._low_water = _LONG_AGO
        self._low_water_set_at = 0.0
        self._found_due = False
        self._sweeps = self._estimates = 0
        self._due_before = 0
        """Rows due again before the low-water mark: nobody may claim them, as after an opt-out."""
        self._cut_off: list[UUID] = []
        """Claims whose answers never came."""

    async def __aenter__(self) -> Self:
        await self._database.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._database.__aexit__(*exc)

    # --- start ------------------------------------------------------------------------------------

    async def open_campaign(self) -> bool:
        """Make the campaign's and the account's rows; False if the campaign has no targets."""
        key = {"campaign": self._config.campaign, "account": self._config.account}
        row = await self._database.one(queries.ledger.CAMPAIGN_EXISTS, key)
        if not row[0]:
            return False
        await self._database.run(queries.ledger.OPEN_CAMPAIGN, key)
        await self._database.run(queries.ledger.OPEN_ACCOUNT, key)
        return True

    async def build(self) -> int:
        """Put open rows that no open batch covers into batches.

        Returns:
            How many batches were made; 0 also if another run was making them at the same moment.
        """
        values = {"campaign": self._config.campaign, "size": self._config.batch_size}
        try:
            made = await self._database.run(
                queries.claim.BUILD, values, timeout_s=_LEDGER_TIMEOUT_S
            )
        except UniqueViolation:
            return 0
        self._after = 0
        return made

    # --- claim ------------------------------------------------------------------------------------

    async def claim_batch(self) -> tuple[Lease | None, list[Settled]]:
        """Take the next free batch.

        Returns:
            The lease, or None if no batch can be claimed now, and the rows that were put in doubt
            because they changed while open. A lease may have no targets: finish it.
        """
        await self._let_go()
        # Batches behind the cursor come free when another run's lease ends; they must not wait for
        # the end of the list, where their keys may be too old.
        now = time.monotonic()
        if now - self._after_since >= min(_FROM_THE_START_EVERY_S, self._config.lease_s):
            self._after, self._after_since = 0, now
        lease, changed = await self._claim_batch_after(self._after)
        if lease is None and self._after:
            self._after = 0
            lease, changed = await self._claim_batch_after(0)
        return lease, changed

    async def _claim_batch_after(self, after: int) -> tuple[Lease | None, list[Settled]]:
        config = self._config
        asked_at, claim_id = time.monotonic(), uuid4()
        rows = await self._claim(
            queries.claim.CLAIM_BATCH,
            {
                "campaign": config.campaign,
                "after": after,
                "usable_s": config.usable_s,
                "lease_s": config.lease_s,
                "size": config.batch_size,
            },
            claim_id,
        )
        if not rows:
            return None, []
        head = rows[0]
        self._after = head.batch_no
        lease = lease_of_batch(rows, claim_id, asked_at, config.lease_s, config.usable_s)
        changed = [Settled(m, State.IN_DOUBT, 0, "changed_while_open") for m in head.changed]
        return lease, changed

    async def claim_due(self) -> tuple[Lease | None, list[Settled]]:
        """Take single rows that are due again; returns as `claim_batch`."""
        await self._let_go()
        config = self._config
        asked_at, claim_id = time.monotonic(), uuid4()
        if asked_at - self._low_water_set_at > _LOW_WATER_RESET_S:
            self._low_water, self._low_water_set_at = _LONG_AGO, asked_at
        rows = await self._claim(
            queries.claim.CLAIM_DUE,
            {
                "campaign": config.campaign,
                "low_water": self._low_water,
                "usable_s": config.usable_s,
                "size": config.batch_size,
                "lease_s": config.lease_s,
            },
            claim_id,
        )
        changed = [
            Settled(row.member_id, State.IN_DOUBT, row.attempts, "changed_while_open")
            for row in rows
            if row.changed
        ]
        taken = [row for row in rows if not row.changed]
        self._found_due = bool(taken)
        if not taken:
            return None, changed
        # A thousandth less, for what a float cannot hold.
        self._low_water = min(row.due_at for row in rows) - 0.001
        lease = lease_of_due(taken, claim_id, asked_at, config.lease_s, config.usable_s)
        return lease, changed

    async def _claim(
        self, query: LiteralString, values: Mapping[str, object], claim_id: UUID
    ) -> list[Any]:
        try:
            return await self._database.all(query, {**values, "claim": claim_id})
        except StoreUnavailable:
            self._cut_off.append(claim_id)
            raise

    async def _let_go(self) -> None:
        """Free what claims took whose answers never came; nobody knows of those leases."""
        if self._cut_off:
            values = {"campaign": self._config.campaign, "claim_ids": self._cut_off}
            await self._database.run(queries.claim.LET_GO, values)
            self._cut_off = []

    # --- look and reserve -------------------------------------------------------------------------

    async def look(self, targets: Sequence[Target]) -> Look:
        """See which rows may still be mailed, and reserve slots of the shared pace for them."""
        fresh = [t.member_id for t in targets if t.lease.batch_no is not None]
        again = [t.member_id for t in targets if t.lease.batch_no is None]
        leases = {t.lease.claim_id: t.lease for t in targets}
        asked_at = time.monotonic()
        row = await self._database.one(
            queries.look.LOOK,
            {
                "campaign": self._config.campaign,
                "account": self._config.account,
                **batch_range(leases.values()),
                "claim_ids": list(leases),
                "fresh_ids": id_array(fresh),
                "again_ids": id_array(again),
                "rate": self._config.rate_per_s,
                "ahead_s": self._config.pace_ahead_s,
            },
        )
        answered_at = time.monotonic()
        held, fresh, again_held = set(row.held), set(row.fresh), set(row.again)
        batches = {x.claim_id for x in leases.values() if x.batch_no is not None}
        return Look(
            asked_at=asked_at,
            control=Control(row.control or "run"),
            lost=frozenset(batches - held),
            ready=frozenset(
                t
                for t in targets
                if (t.lease.claim_id in held and t.member_id in fresh)
                or (t.lease.batch_no is None and t.member_id in again_held)
            ),
            starts_at=None if row.starts_in_s is None else answered_at + row.starts_in_s,
            ahead_s=row.ahead_s or 0.0,
            blocked_s=row.blocked_s or 0.0,
        )

    async def block(self, seconds: float) -> None:
        """Make all processes of the account wait."""
        values = {"account": self._config.account, "seconds": seconds}
        await self._database.run(queries.look.BLOCK, values)

    # --- record -----------------------------------------------------------------------------------

    async def finish(self, outcomes: Sequence[Outcome], fates: Mapping[Lease, Fate]) -> Recorded:
        """Write outcomes and the fate of their batches, under the fence.

        Args:
            outcomes: settled rows.
            fates: what becomes of every lease the outcomes belong to, and of leases that end
                without an outcome.

        Returns:
            What was taken; the rest was refused because another run holds those rows.
        """
        record = Record.of(outcomes, fates)
        asked_at = time.monotonic()
        answer = await self._database.one(
            queries.record.FINISH,
            {
                "campaign": self._config.campaign,
                "lease_s": self._config.lease_s,
                **record.values(fates),
            },
        )
        return Recorded(
            taken=record.taken(answer),
            held=frozenset(x.claim_id for x in record.held(answer)),
            until=asked_at + self._config.lease_s,
        )

    async def locked(self, targets: Sequence[Target]) -> frozenset[Target]:
        """Which of the rows somebody else has locked just now."""
        row = await self._database.one(
            queries.record.LOCKED,
            {"campaign": self._config.campaign, "ids": id_array(t.member_id for t in targets)},
        )
        locked = set(row.locked)
        return frozenset(t for t in targets if t.member_id in locked)

    async def extend(self, leases: Sequence[Lease], again: Sequence[Target]) -> frozenset[UUID]:
        """Renew leases; returns the claim ids that are still held. Sets their `until`."""
        asked_at = time.monotonic()
        row = await self._database.one(
            queries.record.EXTEND,
            {
                "campaign": self._config.campaign,
                "lease_s": self._config.lease_s,
                **batch_range(leases),
                "claim_ids": [x.claim_id for x in leases],
                "again_ids": id_array(t.member_id for t in again),
            },
        )
        extended = frozenset(row.extended)
        for lease in leases:
            lease.until = asked_at + self._config.lease_s if lease.claim_id in extended else 0.0
        return extended

    # --- keep in order ----------------------------------------------------------------------------

    async def sweep(self) -> list[Settled]:
        """Settle what nobody may claim any more; returns the rows that were put in doubt.

        While rows are found due, those before the low-water mark are swept now and then only.
        """
        whole = not self._found_due or self._sweeps % _WHOLE_EVERY == 0
        self._sweeps += 1
        values = {
            "campaign": self._config.campaign,
            "usable_s": self._config.usable_s,
            "low_water": _LONG_AGO if whole else self._low_water,
        }
        # Another run may be splitting or building; the next sweep looks again.
        with suppress(UniqueViolation):
            await self._database.run(queries.sweep.SPLIT, values)
        doubted = [
            Settled(row.member_id, State.IN_DOUBT, row.attempts, row.reason)
            for row in await self._database.all(queries.sweep.SWEEP_BATCHES, values)
        ]
        doubted += [
            Settled(row.member_id, State.IN_DOUBT, row.attempts, row.reason)
            for row in await self._database.all(queries.sweep.SWEEP_DUE, values)
            if row.state == State.IN_DOUBT
        ]
        return doubted

    async def adopt(self) -> int:
        """Make rows due that are marked sending without a lease; returns how many."""
        values = {"campaign": self._config.campaign}
        return await self._database.run(queries.sweep.ADOPT, values, timeout_s=_LEDGER_TIMEOUT_S)

    # --- ask --------------------------------------------------------------------------------------

    async def control(self) -> Control:
        """What a person wants of the campaign."""
        row = await self._database.one(queries.ledger.CONTROL, {"campaign": self._config.campaign})
        return Control.RUN if row is None else Control(row.control)

    async def due(self) -> Due:
        """When the next row can be claimed."""
        row = await self._database.one(queries.ledger.DUE, {"campaign": self._config.campaign})
        waits = [x for x in (row.batch_in_s, row.due_in_s) if x is not None]
        return Due(
            control=Control(row.control or "run"),
            in_s=max(0.0, min(waits)) if waits else None,
            open_batches=row.open_batches,
        )

    async def counts(self) -> Counts:
        """The ledger, counted."""
        values = {"campaign": self._config.campaign}
        row = await self._database.one(queries.ledger.COUNTS, values, timeout_s=_LEDGER_TIMEOUT_S)
        return Counts(*row)

    async def remaining(self) -> Remaining:
        """An estimate of the rest from the queue, cheap enough for every ten seconds."""
        whole = not self._found_due or self._estimates % _WHOLE_EVERY == 0
        self._estimates += 1
        row = await self._database.one(
            queries.ledger.PROGRESS,
            {
                "campaign": self._config.campaign,
                "low_water": _LONG_AGO if whole else self._low_water,
                "mark": self._low_water,
            },
        )
        due_again = row.due_again + (0 if whole else self._due_before)
        if whole:
            self._due_before = row.due_before
        done = max(0, row.left_batches - due_again)
        return Remaining(done=done, open_rows=row.remaining + due_again)
