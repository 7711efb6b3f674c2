"""The finisher: the only one who writes. Takes outcomes without waiting, records them in bulk.

Owns every lease in hand: it renews them, closes a batch when its last row is settled and releases
it when rows of it were handed back. Must never lose an outcome it was given: while the store is
away it keeps them and tries again.
"""

import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

import anyio
import stamina

from sender.domain import Fate, Lease, Outcome, State, Target
from sender.events import (
    LeaseLost,
    OutcomesAbandoned,
    RowsLocked,
    TargetDeferred,
    TargetSettled,
    WritesRefused,
)
from sender.pipeline.state import PipelineConfig, StoreHealth, Traffic
from sender.ports import Observer, Recorded, StoreLocked, StoreUnavailable, TargetStore

_EXTEND_AGAIN_S = 0.25


class Finisher:
    """Collects outcomes and writes them under their leases' fences."""

    def __init__(
        self,
        store: TargetStore,
        observer: Observer,
        config: PipelineConfig,
        traffic: Traffic,
        health: StoreHealth,
    ) -> None:
        self._store = store
        self._health = health
        self._observe = observer
        self._config = config
        self._traffic = traffic
        self._leases: set[Lease] = set()
        self._outcomes: list[Outcome] = []
        self._being_written: list[Outcome] = []
        self._fates: dict[Lease, Fate] = {}
        """What becomes of the leases of what is being written, and of those that end without."""
        self._aside: list[Outcome] = []
        """Outcomes of rows that the application has locked."""
        self._rows_in_hand = 0
        self._lost = 0
        self._closing = False
        self._wake = anyio.Event()
        self._written = anyio.Event()
        self.ended = anyio.Event()
        """Set when closed and everything is written."""
        self._extend_at = time.monotonic() + config.lease_s / 3
        self._failing = False

    # --- taken from producer and workers: nothing here waits --------------------------------------

    def hold(self, lease: Lease) -> None:
        """Take charge of a new lease."""
        self._leases.add(lease)
        self._rows_in_hand += len(lease.unsettled)

    def settle(self, outcome: Outcome) -> None:
        """Take an outcome; it will be written."""
        self._outcomes.append(outcome)
        outcome.target.lease.unsettled.discard(outcome.target)
        enough = self._config.rows_a_write
        few = outcome.target.lease.company < enough
        if few or len(self._outcomes) >= enough or self._has_all:
            self._wake.set()

    def hand_back(self, targets: Iterable[Target]) -> None:
        """Give rows back unsent and uncharged; what was known of their keys stays."""
        for target in targets:
            target.lease.released = True
            self._give_up(target)

    def skip(self, target: Target) -> None:
        """Drop a row that must not be mailed any more (opted out, sent elsewhere, gone)."""
        self._give_up(target)

    def drop_lost(self, targets: Iterable[Target]) -> None:
        """Drop rows unsent whose lease another run may hold."""
        for target in targets:
            self._lost += 1
            target.lease.released = True
            target.lease.unsettled.discard(target)
            self._rows_in_hand -= 1

    def _give_up(self, target: Target) -> None:
        if target.lease.batch_no is None:
            self.settle(Outcome(target, State.PENDING, key_used_at=target.key_used_at))
            return
        target.lease.unsettled.discard(target)
        self._rows_in_hand -= 1
        if self._has_all:
            self._wake.set()

    @property
    def _has_all(self) -> bool:
        """Whether no row in hand is without an outcome, so that nothing is worth waiting for."""
        return self.outcomes_in_hand >= self._rows_in_hand

    # --- asked by the producer --------------------------------------------------------------------

    @property
    def rows_in_hand(self) -> int:
        """Rows claimed and not yet recorded."""
        return self._rows_in_hand

    @property
    def outcomes_in_hand(self) -> int:
        """Outcomes that are not recorded yet."""
        return len(self._outcomes) + len(self._being_written) + len(self._aside)

    @property
    def is_behind(self) -> bool:
        """Whether the store, or this process, was away and not all is in order again.

        A lease that has ended may still be renewed or its outcomes written, if nobody else has
        taken its rows. Whoever claims must not be the one: they would be requested again. Nobody
        can claim rows that the application has locked.
        """
        now = time.monotonic()
        ended = {lease for lease in self._leases if lease.until <= now}
        return self._failing or bool(ended - {o.target.lease for o in self._aside})

    async def written(self) -> None:
        """Wait until something was written."""
        await self._written.wait()

    # --- its own loop -----------------------------------------------------------------------------

    def close(self) -> None:
        """No more outcomes will come; `run` ends when all are written."""
        self._closing = True
        self._wake.set()

    async def run(self) -> None:
        """Write until closed and empty."""
        while True:
            with anyio.move_on_after(self._patience_s()):
                await self._wake.wait()
            closing = self._closing
            self._wake = anyio.Event()
            await self._flush()
            if closing and not self._outcomes and not self._aside:
                self.ended.set()
                return
            if not closing:
                await self._extend_if_due()

    def _patience_s(self) -> float:
        """Seconds to wait for more outcomes; leases are extended in time."""
        extend_in_s = max(_EXTEND_AGAIN_S, self._extend_at - time.monotonic())
        return min(self._config.flush_s, extend_in_s)

    def abandon(self) -> None:
        """Tell which outcomes could not be written."""
        rows = self.outcomes_in_hand
        if rows:
            self._observe(OutcomesAbandoned(self._config.campaign, rows))

    async def _flush(self) -> None:
        await self._take_up()
        if self._fates:
            await self._retrying(self._write)
        if self._lost:
            self._observe(LeaseLost(self._config.campaign, self._lost))
            self._lost = 0
        self._written.set()
        self._written = anyio.Event()

    async def _take_up(self) -> None:
        """Move outcomes to what is written next; those of rows that are locked stay aside.

        What is being written and what comes meanwhile are two lists, and a lease's fate is fixed
        with its outcomes: rows settled while a statement runs belong to the next one.
        """
        aside, self._aside = self._aside, []
        self._being_written, self._outcomes = [*aside, *self._outcomes], []
        for outcome in aside:
            outcome.target.lease.unsettled.discard(outcome.target)
        touched = {o.target.lease for o in self._being_written}
        touched.update(lease for lease in self._leases if not lease.unsettled)
        self._fates = {lease: _fate(lease) for lease in touched}
        if aside:
            await self._retrying(self._set_aside)

    async def _write(self) -> None:
        try:
            await self._finish()
        except StoreLocked:
            if not await self._set_aside():
                raise
            self._observe(RowsLocked(self._config.campaign, len(self._aside)))
            await self._finish()

    async def _finish(self) -> None:
        outcomes, fates = self._being_written, self._fates
        recorded = await self._store.finish(outcomes, fates)
        self._being_written, self._fates = [], {}
        self._after_write(outcomes, fates, recorded)

    async def _set_aside(self) -> bool:
        """Keep what cannot be written now apart, so that it keeps nothing else; False if none is.

        The application may hold a row's lock for as long as it likes. Its lease stays open.
        """
        locked = await self._store.locked([o.target for o in self._being_written])
        self._aside += [o for o in self._being_written if o.target in locked]
        self._being_written = [o for o in self._being_written if o.target not in locked]
        for target in locked:
            target.lease.unsettled.add(target)
            self._fates[target.lease] = Fate.KEEP
        return bool(locked)

    async def _retrying(self, step: Callable[[], Awaitable[object]]) -> None:
        """Take a step that needs the store, as often as it takes."""
        # Apart from the retries, whose context leaves a cycle behind that only a collection frees.
        with suppress(StoreUnavailable):
            return await self._try(step)
        async for attempt in stamina.retry_context(
            on=StoreUnavailable, attempts=None, timeout=None, wait_initial=0.1, wait_max=1.0
        ):
            with attempt:
                return await self._try(step)
        return None

    async def _try(self, step: Callable[[], Awaitable[object]]) -> None:
        try:
            await step()
        except StoreUnavailable as error:
            self._failing = True
            self._health.away(error)
            raise
        self._failing = False
        self._health.back()

    def _after_write(
        self, outcomes: list[Outcome], fates: dict[Lease, Fate], recorded: Recorded
    ) -> None:
        self._rows_in_hand -= len(outcomes)
        for lease, fate in fates.items():
            if fate is not Fate.KEEP:
                self._leases.discard(lease)
                lease.targets.clear()  # they name the lease: a cycle would outlive them all
            elif lease.batch_no is not None:
                lease.until = recorded.until if lease.claim_id in recorded.held else 0.0
        for outcome in recorded.taken:
            self._tell(outcome)
        refused = len(outcomes) - len(recorded.taken)
        if refused:
            self._traffic.refused_writes += refused
            self._observe(WritesRefused(self._config.campaign, refused))

    def _tell(self, outcome: Outcome) -> None:
        campaign, target = self._config.campaign, outcome.target
        attempts = target.attempts + outcome.charged
        if outcome.state is State.SENT:
            self._traffic.accepted += 1
        elif outcome.state is not State.PENDING:
            self._observe(
                TargetSettled(campaign, target.member_id, outcome.state, attempts, outcome.reason)
            )
        elif outcome.reason:
            self._observe(
                TargetDeferred(
                    campaign, target.member_id, attempts, outcome.delay_s, outcome.reason
                )
            )

    async def _extend_if_due(self) -> None:
        if time.monotonic() < self._extend_at:
            return
        live = [lease for lease in self._leases if lease.unsettled]
        again = [t for lease in live if lease.batch_no is None for t in lease.unsettled]
        try:
            if live:
                await self._store.extend(live, again)
        except StoreUnavailable as error:
            self._health.away(error)
            return
        self._extend_at = time.monotonic() + self._config.lease_s / 3


def _fate(lease: Lease) -> Fate:
    if lease.unsettled:
        return Fate.KEEP
    return Fate.RELEASE if lease.released else Fate.DONE
