"""The producer: claims little and late, and knows when there is nothing left to claim.

Must never end while an open row exists, and never claim while outcomes wait for a store that was
away: those rows would be requested again.
"""

import time

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from sender import address
from sender.domain import Lease, Outcome, State, Target
from sender.events import BatchesBuilt, TargetSettled, Waiting
from sender.pipeline.finisher import Finisher
from sender.pipeline.state import PipelineConfig, StoreHealth, Traffic
from sender.pipeline.stop import Stop, StopReason
from sender.ports import Due, Observer, Settled, StoreUnavailable, TargetStore

_SWEEP_EVERY_S = 10.0
_BUILD_EVERY_S = 30.0
_DUE_EVERY_S = 0.5
_OPEN_EVERY_S = 1.0
_IDLE_S = 0.5
_AWAY_S = 0.5
_SAY_WAITING_EVERY_S = 10.0


class Producer:
    """Feeds the queue from the store."""

    def __init__(
        self,
        store: TargetStore,
        finisher: Finisher,
        observer: Observer,
        config: PipelineConfig,
        traffic: Traffic,
        health: StoreHealth,
        stop: Stop,
    ) -> None:
        self._store = store
        self._health = health
        self._finisher = finisher
        self._observe = observer
        self._config = config
        self._traffic = traffic
        self._stop = stop
        self._sweep_at = self._due_at = self._build_at = self._say_at = self._open_at = 0.0
        self._company = float("inf")

    async def run(self, queue: MemoryObjectSendStream[Target]) -> None:
        """Claim until stopped or done, then close the queue."""
        async with queue:
            while not self._stop.is_set:
                try:
                    await self._step(queue)
                except StoreUnavailable as error:
                    self._health.away(error)
                    self._traffic.waiting = "the database is away"
                    await self._pause(_AWAY_S)

    async def _step(self, queue: MemoryObjectSendStream[Target]) -> None:
        if self._finisher.is_behind or not self._has_room():
            await self._until_written()
            return
        if not await self._breaker_allows():
            await self._end_if_nothing_is_open()
            return
        if self._passed("_sweep_at", _SWEEP_EVERY_S):
            self._tell(await self._store.sweep())
        lease = await self._claim()
        self._health.back()
        if lease is None:
            await self._idle()
            return
        self._finisher.hold(lease)
        if not self._fits(lease):
            self._finisher.hand_back(lease.targets)
            await self._until_all_is_written()
            return
        for target in lease.targets:
            await self._enqueue(target, queue)

    # --- claiming ---------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        in_hand = self._finisher.rows_in_hand
        return in_hand == 0 or in_hand < min(self._config.rows_in_hand, self._company + 1)

    def _fits(self, lease: Lease) -> bool:
        """Whether the lease and what else is in hand may die together; see `Lease.company`."""
        others = self._finisher.rows_in_hand - len(lease.targets)
        if others <= 0:
            self._company = float("inf")
        self._company = min(self._company, lease.company)
        return others <= 0 or self._finisher.rows_in_hand - 1 <= self._company

    async def _breaker_allows(self) -> bool:
        """Rows wait in the table while the provider fails; one is claimed for a probe."""
        breaker = self._traffic.breaker
        wait_s = breaker.next_probe_in_s(time.monotonic())
        if not breaker.is_open or (wait_s <= 0 and self._finisher.rows_in_hand == 0):
            return True
        self._traffic.waiting = "the provider fails"
        await self._pause(min(_IDLE_S, max(wait_s, 0.05)))
        return False

    async def _claim(self) -> Lease | None:
        """Rows that are due again first, now and then; else the next batch."""
        if self._passed("_due_at", _DUE_EVERY_S):
            lease, changed = await self._store.claim_due()
            self._tell(changed)
            if lease is not None:
                self._due_at = 0.0
                return lease
        lease, changed = await self._store.claim_batch()
        self._tell(changed)
        return lease

    async def _enqueue(self, target: Target, queue: MemoryObjectSendStream[Target]) -> None:
        fault = address.fault(target.email)
        if fault is not None:
            self._finisher.settle(Outcome(target, State.FAILED, reason=fault))
        elif self._stop.is_set:
            self._finisher.hand_back([target])
        else:
            await queue.send(target)

    # --- nothing to claim -------------------------------------------------------------------------

    async def _idle(self) -> None:
        due = await self._store.due()
        self._stop.obey(due.control)
        if self._stop.is_set:
            return
        if due.in_s is None:
            await self._build_or_end()
            return
        if self._passed("_build_at", _BUILD_EVERY_S) and await self._build():
            return
        if due.in_s <= 0:
            self._sweep_at = 0.0
        await self._wait_for(due)

    async def _build_or_end(self) -> None:
        """No batch is open and no row is due: build what is uncovered, or be done."""
        if await self._build():
            return
        open_rows = (await self._store.counts()).open
        if open_rows == 0:
            self._stop.stop_claiming(StopReason.DONE)
        elif not await self._store.adopt():
            await self._pause(_IDLE_S)

    async def _end_if_nothing_is_open(self) -> None:
        """While the provider fails another run may finish, or opt-outs leave nothing to send."""
        if self._finisher.rows_in_hand or not self._passed("_open_at", _OPEN_EVERY_S):
            return
        if (await self._store.due()).in_s is None and not (await self._store.counts()).open:
            self._stop.stop_claiming(StopReason.DONE)

    async def _build(self) -> int:
        built = await self._store.build()
        if built:
            self._observe(BatchesBuilt(self._config.campaign, built))
        return built

    async def _wait_for(self, due: Due) -> None:
        """Wait for a back-off or a lease to end, looking again before long: others work too."""
        in_s = due.in_s or 0.0
        if in_s > _IDLE_S and self._finisher.rows_in_hand == 0:
            self._traffic.waiting = "rows are backing off or held by another run"
            if self._passed("_say_at", _SAY_WAITING_EVERY_S):
                open_rows = (await self._store.remaining()).open_rows
                self._observe(
                    Waiting(self._config.campaign, open_rows, self._traffic.waiting, in_s)
                )
        await self._pause(min(max(in_s, 0.05), _IDLE_S))
        self._due_at = 0.0

    # --- small things -----------------------------------------------------------------------------

    def _passed(self, name: str, every_s: float) -> bool:
        """Whether `every_s` seconds have passed since this was last true."""
        now = time.monotonic()
        if now < getattr(self, name):
            return False
        setattr(self, name, now + every_s)
        return True

    async def _pause(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await self._stop.claiming.wait()

    async def _until_all_is_written(self) -> None:
        """Have nothing in hand: a row that kills the process must not take others with it."""
        while self._finisher.rows_in_hand and not self._stop.is_set:
            await self._until_written()

    async def _until_written(self) -> None:
        with anyio.move_on_after(_IDLE_S):
            await self._finisher.written()

    def _tell(self, settled: list[Settled]) -> None:
        for row in settled:
            self._observe(
                TargetSettled(
                    self._config.campaign, row.member_id, row.state, row.attempts, row.reason
                )
            )
