"""The pacer: looks at queued rows, reserves their slots, and hands a permit out at each slot.

Two loops: `_reserve` keeps 0.15 seconds of slots in hand or more, in turn with the other
processes, and `_dispatch` gives each row its permit when its slot comes. A row that misses
its slot, or whose look grew old, goes back to the front and is looked at again. When the run stops,
what is queued is handed back.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from sender.domain import Outcome, State, Target
from sender.events import AccountPaused, PaceClamped
from sender.pace import AHEAD_S, LOOK_VALID_S, Pace, Turns
from sender.pipeline.finisher import Finisher
from sender.pipeline.state import Permit, PipelineConfig, StoreHealth, Traffic
from sender.pipeline.stop import Stop
from sender.ports import Look, Observer, StoreUnavailable, TargetStore

_TICK_S = 0.004
_RETRY_S = 0.1
_BREAKER_PATIENCE_S = 5.0
_CLAMPED_AHEAD_S = 60.0


class Pacer:
    """Turns queued rows into permits at the account's pace."""

    def __init__(
        self,
        store: TargetStore,
        finisher: Finisher,
        observer: Observer,
        config: PipelineConfig,
        traffic: Traffic,
        health: StoreHealth,
        stop: Stop,
        pace: Pace,
        more_workers: Callable[[], None],
    ) -> None:
        self._store = store
        self._health = health
        self._finisher = finisher
        self._observe = observer
        self._config = config
        self._traffic = traffic
        self._stop = stop
        self._pace = pace
        self._more_workers = more_workers
        self._waiting: deque[Target] = deque()
        self._slots: deque[tuple[float, Permit]] = deque()
        self._turns = Turns()
        self._blocked_until = 0.0

    def give_back(self, target: Target) -> None:
        """Take back a row whose permit could not be used."""
        if self._stop.is_set:
            self._finisher.hand_back([target])
        else:
            self._waiting.appendleft(target)

    async def run(
        self,
        queue: MemoryObjectReceiveStream[Target],
        permits: MemoryObjectSendStream[Permit],
    ) -> None:
        """Pace until the run stops, then hand back what is queued and close the permits."""
        async with permits, queue, anyio.create_task_group() as group:
            group.start_soon(self._dispatch, permits)
            await self._reserve(queue)
            await self._hand_back_all(queue)

    # --- reserving --------------------------------------------------------------------------------

    async def _reserve(self, queue: MemoryObjectReceiveStream[Target]) -> None:
        while not self._stop.is_set:
            wait_s = self._reserve_in_s(time.monotonic())
            if wait_s > 0:
                await self._pause(min(wait_s, _RETRY_S))
                continue
            try:
                await self._tell_block()
                await self._fill(queue)
                await self._look_at_some()
                self._health.back()
            except StoreUnavailable as error:
                self._health.away(error)
                self._traffic.waiting = "the database is away"
                await self._pause(_RETRY_S)

    def _reserve_in_s(self, now: float) -> float:
        """Seconds until more slots are wanted and may be had; 0 if now.

        A 429 is passed on whoever's turn it is: the others send until they are told.
        """
        if self._traffic.block_s > 0:
            return 0.0
        if not self._slots and now < self._blocked_until:
            self._traffic.waiting = "the provider asked to wait"
            return min(_RETRY_S, self._blocked_until - now)
        if not self._slots and self._free() <= 0:
            return _TICK_S
        return max(0.0, self._turns.next_at() - now)

    def _free(self) -> int:
        """Requests that may still be begun beside those out or slotted.

        Together with the answers that are not recorded yet they stay within what a kill may repeat.
        """
        out = self._traffic.permits_out + len(self._slots)
        unrecorded = out + self._finisher.outcomes_in_hand
        free = min(self._config.concurrency - out, self._config.repeats_at_most - unrecorded)
        allowance = self._traffic.refusals.allowance(out)
        return free if allowance is None else min(free, allowance)

    async def _fill(self, queue: MemoryObjectReceiveStream[Target]) -> None:
        """Have rows waiting, up to a chunk; waits a little for the first."""
        with anyio.move_on_after(_RETRY_S), suppress(anyio.EndOfStream):
            if not self._waiting:
                self._waiting.append(await queue.receive())
        with suppress(anyio.WouldBlock, anyio.EndOfStream):
            while len(self._waiting) < self._pace.chunk:
                self._waiting.append(queue.receive_nowait())

    async def _look_at_some(self) -> None:
        now = time.monotonic()
        if self._traffic.breaker.is_open:
            await self._look_while_open(now)
            return
        share = self._traffic.breaker.share(now)
        count = min(max(1, int(self._pace.chunk * share)), self._free())
        if count <= 0 or not self._waiting:
            await self._pause(_TICK_S)
            return
        await self._look([self._waiting.popleft() for _ in range(min(count, len(self._waiting)))])
        if share < 1.0:
            await self._pause(count * self._pace.spacing_s * (1 / share - 1))

    async def _look_while_open(self, now: float) -> None:
        """The provider fails: one probe now and then, the other rows go back before long."""
        breaker = self._traffic.breaker
        if self._waiting and breaker.may_probe(now):
            await self._look([self._waiting.popleft()], probe=True)
        elif breaker.opened_at is not None and now - breaker.opened_at > _BREAKER_PATIENCE_S:
            self._finisher.hand_back(self._waiting)
            self._waiting.clear()
        await self._pause(_RETRY_S)

    async def _look(self, taken: list[Target], *, probe: bool = False) -> None:
        targets = self._without_old_keys(taken)
        if not targets:
            return
        try:
            look = await self._store.look(targets)
        except StoreUnavailable:
            self._waiting.extendleft(reversed(targets))
            raise
        self._obey(look)
        open_targets = self._sort_out(targets, look)
        if look.starts_at is None:
            self._waiting.extendleft(reversed(open_targets))
            await self._pause(min(max(look.ahead_s - AHEAD_S, 0.005), 1.0))
            return
        self._traffic.waiting = ""
        ends_at = look.starts_at + len(open_targets) * self._pace.spacing_s
        self._turns.took(time.monotonic(), look.starts_at, ends_at)
        for place, target in enumerate(open_targets):
            slot_at = look.starts_at + place * self._pace.spacing_s
            self._slots.append((slot_at, Permit(target, look.asked_at, probe)))

    def _without_old_keys(self, targets: list[Target]) -> list[Target]:
        """Settle rows whose key the provider may soon forget: a repeat could be a second mail."""
        now = time.monotonic()
        for target in targets:
            if now >= target.key_until:
                self._finisher.settle(
                    Outcome(
                        target,
                        State.IN_DOUBT,
                        key_used_at=target.key_used_at,
                        reason="key_too_old",
                    )
                )
        return [target for target in targets if now < target.key_until]

    def _obey(self, look: Look) -> None:
        self._stop.obey(look.control)
        if look.ahead_s > _CLAMPED_AHEAD_S:
            self._observe(PaceClamped(look.ahead_s))
        if look.blocked_s > 0 and look.starts_at is None:
            self._blocked_until = time.monotonic() + look.blocked_s

    def _sort_out(self, targets: list[Target], look: Look) -> list[Target]:
        """Drop what must not be mailed; keep the order of the rest."""
        lost = [t for t in targets if t.lease.claim_id in look.lost]
        self._finisher.drop_lost(lost)
        ready: list[Target] = []
        for target in targets:
            if target.lease.claim_id in look.lost:
                continue
            if target in look.ready:
                ready.append(target)
            else:
                self._finisher.skip(target)
        return ready

    async def _tell_block(self) -> None:
        """Pass a 429 on to all processes of the account, before anything else is reserved."""
        seconds, reason = self._traffic.block_s, self._traffic.block_reason
        if seconds <= 0:
            return
        await self._store.block(seconds)
        self._unslot()
        self._traffic.block_s = 0.0
        if time.monotonic() >= self._blocked_until:
            self._observe(AccountPaused(seconds, reason))
        self._blocked_until = max(self._blocked_until, time.monotonic() + seconds)

    # --- dispatching ------------------------------------------------------------------------------

    async def _dispatch(self, permits: MemoryObjectSendStream[Permit]) -> None:
        while not self._stop.is_set:
            wait_s = self._slots[0][0] - time.monotonic() if self._slots else _TICK_S
            await anyio.sleep(min(max(wait_s, _TICK_S), _RETRY_S))
            if self._traffic.block_s > 0:
                self._unslot()
            else:
                await self._hand_out(permits)

    async def _hand_out(self, permits: MemoryObjectSendStream[Permit]) -> None:
        """Give permits for the slots that have come; rows whose slot is past wait again.

        Past slots are dropped before the burst is waited for: waiting for what must be dropped
        anyway would make the next slots late as well, for ever.
        """
        missed: list[Target] = []
        while self._slots and self._slots[0][0] <= time.monotonic():
            slot_at, permit = self._slots.popleft()
            if self._pace.is_missed(slot_at, time.monotonic()):
                missed.append(permit.target)
                continue
            # At most a burst is waited for, and what was waited for is used: the next slot is late
            # by as much, and a permit thrown away would make it later still. It counts as out
            # from here on: the other loop must not give its place away meanwhile.
            self._traffic.permits_out += 1
            await self._pace.leave()
            if self._stop.is_set or time.monotonic() - permit.looked_at >= LOOK_VALID_S:
                self._traffic.permits_out -= 1
                missed.append(permit.target)
                continue
            self._more_workers()
            permits.send_nowait(permit)
        for target in reversed(missed):
            self.give_back(target)

    def _unslot(self) -> None:
        """Put slotted rows back in front of the waiting ones."""
        self._waiting.extendleft(permit.target for _, permit in reversed(self._slots))
        self._slots.clear()

    # --- ending -----------------------------------------------------------------------------------

    async def _hand_back_all(self, queue: MemoryObjectReceiveStream[Target]) -> None:
        """Hand back what is slotted, waiting and queued; the producer closes its end."""
        self._unslot()
        self._finisher.hand_back(self._waiting)
        self._waiting.clear()
        async for target in queue:
            self._finisher.hand_back([target])

    async def _pause(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await self._stop.claiming.wait()
