"""The ledger and the queue in PostgreSQL: build, claim, look, finish, extend, sweep, count.

Owns the mapping between rows and `domain` objects. Must never decide what an answer means. Each
method is one autocommit statement and raises `StoreUnavailable` if trying again can help.
"""

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self
from uuid import UUID, uuid4

from psycopg.errors import UniqueViolation

from sender import queries
from sender.database import Database
from sender.domain import Control, Counts, Fate, Lease, Outcome, State, Target, content_hash
from sender.ports import Due, Look, Recorded, Remaining, Settled

_LEDGER_TIMEOUT_S: Final = 300.0
_FROM_THE_START_EVERY_S: Final = 30.0
_SMALL_COMPANY: Final = 20
_LOW_WATER_RESET_S: Final = 60.0
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

    async def __aenter__(self) -> Self:
        await self._database.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._database.__aexit__(*exc)

    # --- start ------------------------------------------------------------------------------------

    async def open_campaign(self) -> bool:
        """Make the campaign's and the account's rows; False if the campaign has no targets."""
        key = {"campaign": self._config.campaign, "account": self._config.account}
        row = await self._database.one(queries.CAMPAIGN_EXISTS, key)
        if not row[0]:
            return False
        await self._database.run(queries.OPEN_CAMPAIGN, key)
        await self._database.run(queries.OPEN_ACCOUNT, key)
        return True

    async def build(self) -> int:
        """Put open rows that no open batch covers into batches.

        Returns:
            How many batches were made; 0 also if another run was making them at the same moment.
        """
        values = {"campaign": self._config.campaign, "size": self._config.batch_size}
        try:
            made = await self._database.run(queries.BUILD, values, timeout_s=_LEDGER_TIMEOUT_S)
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
        rows = await self._database.all(
            queries.CLAIM_BATCH,
            {
                "campaign": config.campaign,
                "after": after,
                "usable_s": config.usable_s,
                "claim": claim_id,
                "lease_s": config.lease_s,
                "size": config.batch_size,
            },
        )
        if not rows:
            return None, []
        head = rows[0]
        self._after = head.batch_no
        until = asked_at + config.lease_s
        lease = Lease(claim_id, head.batch_no, head.claimed_at, asked_at, until, head.found)
        lease.company = _company(head.lost_claims)
        key_until = self._key_until(asked_at, head.key_age_s)
        lease.targets = [
            Target(
                row.member_id,
                row.email,
                row.vars,
                row.attempts,
                row.unknowns + (head.found is not None),
                head.found,
                key_until,
                lease,
            )
            for row in rows
            if row.member_id is not None
        ]
        lease.unsettled.update(lease.targets)
        changed = [Settled(m, State.IN_DOUBT, 0, "changed_while_open") for m in head.changed]
        return lease, changed

    async def claim_due(self) -> tuple[Lease | None, list[Settled]]:
        """Take single rows that are due again; returns as `claim_batch`."""
        config = self._config
        asked_at, claim_id = time.monotonic(), uuid4()
        if asked_at - self._low_water_set_at > _LOW_WATER_RESET_S:
            self._low_water, self._low_water_set_at = _LONG_AGO, asked_at
        rows = await self._database.all(
            queries.CLAIM_DUE,
            {
                "campaign": config.campaign,
                "low_water": self._low_water,
                "usable_s": config.usable_s,
                "size": config.batch_size,
                "claim": claim_id,
                "lease_s": config.lease_s,
            },
        )
        changed = [
            Settled(row.member_id, State.IN_DOUBT, row.attempts, "changed_while_open")
            for row in rows
            if row.changed
        ]
        taken = [row for row in rows if not row.changed]
        if not taken:
            return None, changed
        # A thousandth less, for what a float cannot hold.
        self._low_water = min(row.due_at for row in rows) - 0.001
        until = asked_at + config.lease_s
        lease = Lease(claim_id, None, taken[0].claimed_at, asked_at, until)
        lease.company = _company(max(row.lost_claims for row in taken))
        lease.targets = [
            Target(
                row.member_id,
                row.email,
                row.vars,
                row.attempts,
                row.unknowns,
                row.found,
                self._key_until(asked_at, row.key_age_s),
                lease,
            )
            for row in taken
        ]
        lease.unsettled.update(lease.targets)
        return lease, changed

    def _key_until(self, asked_at: float, age_s: float | None) -> float:
        if age_s is None:
            return float("inf")
        return asked_at + self._config.usable_s - age_s

    # --- look and reserve -------------------------------------------------------------------------

    async def look(self, targets: Sequence[Target]) -> Look:
        """See which rows may still be mailed, and reserve slots of the shared pace for them."""
        fresh = [t.member_id for t in targets if t.lease.batch_no is not None]
        again = [t.member_id for t in targets if t.lease.batch_no is None]
        leases = {t.lease.claim_id: t.lease for t in targets}
        asked_at = time.monotonic()
        row = await self._database.one(
            queries.LOOK,
            {
                "campaign": self._config.campaign,
                "account": self._config.account,
                **_batch_range(leases.values()),
                "claim_ids": list(leases),
                "fresh_ids": _array(fresh),
                "again_ids": _array(again),
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
        await self._database.run(queries.BLOCK, values)

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
        plain = [o for o in outcomes if _is_plain_sent(o)]
        others = [o for o in outcomes if not _is_plain_sent(o)]
        stamps = _stamps_to_keep(outcomes, fates)
        numbers = {x: n for n, x in enumerate(fates)}
        asked_at = time.monotonic()
        row = await self._database.one(
            queries.FINISH,
            {
                "campaign": self._config.campaign,
                "lease_s": self._config.lease_s,
                "batches": json.dumps(_fates(outcomes, fates, numbers)),
                "others": json.dumps([_as_json(o, numbers) for o in (*others, *stamps)]),
                "sent_ids": _array(o.target.member_id for o in plain),
                "sent_fates": _array(numbers[o.target.lease] for o in plain),
            },
        )
        held = {x for x, n in numbers.items() if n in set(row.held)}
        return Recorded(
            taken=_taken(plain, row.sent, held) + _taken(others, row.others, held),
            held=frozenset(x.claim_id for x in held),
            until=asked_at + self._config.lease_s,
        )

    async def locked(self, targets: Sequence[Target]) -> frozenset[Target]:
        """Which of the rows somebody else has locked just now."""
        row = await self._database.one(
            queries.LOCKED,
            {"campaign": self._config.campaign, "ids": _array(t.member_id for t in targets)},
        )
        locked = set(row.locked)
        return frozenset(t for t in targets if t.member_id in locked)

    async def extend(self, leases: Sequence[Lease], again: Sequence[Target]) -> frozenset[UUID]:
        """Renew leases; returns the claim ids that are still held. Sets their `until`."""
        asked_at = time.monotonic()
        row = await self._database.one(
            queries.EXTEND,
            {
                "campaign": self._config.campaign,
                "lease_s": self._config.lease_s,
                **_batch_range(leases),
                "claim_ids": [x.claim_id for x in leases],
                "again_ids": _array(t.member_id for t in again),
            },
        )
        held = frozenset(row.extended)
        for lease in leases:
            lease.until = asked_at + self._config.lease_s if lease.claim_id in held else 0.0
        return held

    # --- keep in order ----------------------------------------------------------------------------

    async def sweep(self) -> list[Settled]:
        """Settle what nobody may claim any more; returns the rows that were put in doubt."""
        values = {"campaign": self._config.campaign, "usable_s": self._config.usable_s}
        # Another run may be splitting or building; the next sweep looks again.
        with suppress(UniqueViolation):
            await self._database.run(queries.SPLIT, values)
        doubted = [
            Settled(row.member_id, State.IN_DOUBT, row.attempts, row.reason)
            for row in await self._database.all(queries.SWEEP_BATCHES, values)
        ]
        doubted += [
            Settled(row.member_id, State.IN_DOUBT, row.attempts, row.reason)
            for row in await self._database.all(queries.SWEEP_DUE, values)
            if row.state == State.IN_DOUBT
        ]
        return doubted

    async def adopt(self) -> int:
        """Make rows due that are marked sending without a lease; returns how many."""
        values = {"campaign": self._config.campaign}
        return await self._database.run(queries.ADOPT, values, timeout_s=_LEDGER_TIMEOUT_S)

    # --- ask --------------------------------------------------------------------------------------

    async def control(self) -> Control:
        """What a person wants of the campaign."""
        row = await self._database.one(queries.CONTROL, {"campaign": self._config.campaign})
        return Control.RUN if row is None else Control(row.control)

    async def due(self) -> Due:
        """When the next row can be claimed."""
        row = await self._database.one(queries.DUE, {"campaign": self._config.campaign})
        waits = [x for x in (row.batch_in_s, row.due_in_s) if x is not None]
        return Due(
            control=Control(row.control or "run"),
            in_s=max(0.0, min(waits)) if waits else None,
            open_batches=row.open_batches,
        )

    async def counts(self) -> Counts:
        """The ledger, counted."""
        values = {"campaign": self._config.campaign}
        row = await self._database.one(queries.COUNTS, values, timeout_s=_LEDGER_TIMEOUT_S)
        return Counts(*row)

    async def remaining(self) -> Remaining:
        """An estimate of the rest from the queue, cheap enough for every ten seconds."""
        row = await self._database.one(queries.PROGRESS, {"campaign": self._config.campaign})
        done = max(0, row.left_batches - row.due_again)
        return Remaining(done=done, open_rows=row.remaining + row.due_again)


def _company(lost_claims: int) -> float:
    """How many rows may be in hand beside one that was lost this often.

    After the losses in its batch a row gets one more try in small company, so that a run of deaths
    with another cause costs little time, and then it goes alone.
    """
    together = int(queries.LOST_TOGETHER)
    if lost_claims < together:
        return float("inf")
    return _SMALL_COMPANY if lost_claims == together else 0


def _array(values: Iterable[object]) -> str:
    return "{" + ",".join(map(str, values)) + "}"


def _batch_range(leases: Iterable[Lease]) -> dict[str, int]:
    numbers = [x.batch_no for x in leases if x.batch_no is not None]
    return {"first_batch": min(numbers, default=1), "last_batch": max(numbers, default=0)}


def _is_plain_sent(outcome: Outcome) -> bool:
    return outcome.state is State.SENT and outcome.target.lease.batch_no is not None


def _stamps_to_keep(outcomes: Sequence[Outcome], fates: Mapping[Lease, Fate]) -> list[Outcome]:
    """Rows of a batch that was lost before and is done now, if they end without an outcome.

    They were skipped, and the lost claim may have sent them: the age of their key goes to the row,
    or a member who opts in again one day would be mailed under it as if it were new. Those that
    have an outcome by now are not first attempts any more and the statement passes over them.
    """
    lost = [x for x, fate in fates.items() if fate is Fate.DONE and x.found_key_used_at is not None]
    settled: set[Target] = {o.target for o in outcomes} if lost else set()
    return [
        Outcome(t, State.PENDING, key_used_at=t.key_used_at)
        for x in lost
        for t in x.targets
        if t not in settled
    ]


def _taken(
    outcomes: Sequence[Outcome], members: Iterable[int], held: Collection[Lease]
) -> list[Outcome]:
    """The outcomes that were written, by their members.

    A process that lost a batch and claimed it again may hold two outcomes of one member; the one
    under the lease that is held was written.
    """
    taken: dict[int, Outcome] = {}
    written = set(members)
    for outcome in outcomes:
        member = outcome.target.member_id
        if member in written and (member not in taken or outcome.target.lease in held):
            taken[member] = outcome
    return list(taken.values())


def _as_json(outcome: Outcome, numbers: Mapping[Lease, int]) -> dict[str, object]:
    target, used = outcome.target, outcome.key_used_at
    return {
        "member_id": target.member_id,
        "n": None if target.lease.batch_no is None else numbers[target.lease],
        "claim_id": str(target.lease.claim_id),
        "state": outcome.state,
        "charged": int(outcome.charged),
        # A batch that was lost before this claim: its claim ended without a known answer.
        "unknown": int(outcome.unknown) + (target.lease.found_key_used_at is not None),
        "delay_s": outcome.delay_s,
        "key_used_at": used and used.isoformat(),
        "content_hash": used and content_hash(target.email, target.variables).hex(),
        "reason": outcome.reason,
    }


def _fates(
    outcomes: Sequence[Outcome], fates: Mapping[Lease, Fate], numbers: Mapping[Lease, int]
) -> list[dict[str, object]]:
    tally = {x.claim_id: dict.fromkeys(State, 0) for x in fates}
    for outcome in outcomes:
        tally[outcome.target.lease.claim_id][outcome.state] += 1
    return [
        {
            "n": numbers[x],
            "batch_no": x.batch_no,
            "claim_id": str(x.claim_id),
            "fate": fate,
            "found": x.found_key_used_at and x.found_key_used_at.isoformat(),
            "sent": tally[x.claim_id][State.SENT],
            "failed": tally[x.claim_id][State.FAILED],
            "in_doubt": tally[x.claim_id][State.IN_DOUBT],
            "deferred": tally[x.claim_id][State.PENDING],
        }
        for x, fate in fates.items()
        if x.batch_no is not None
    ]
