"""The pipeline: claim, send, record, kept apart, and the order in which they end.

The finisher is in the outer group and the producer, pacer and workers are in the inner one: when
claiming stops, the inner group ends by closing its streams, then the finisher writes what is left.
Nothing in flight is cancelled unless the run must end now.

Imports neither a database driver nor an HTTP client nor the settings.
"""

from contextlib import suppress

import anyio
from anyio.abc import TaskGroup

from sender.domain import Target
from sender.events import Progress, Stopping
from sender.pace import Pace
from sender.pipeline.finisher import Finisher
from sender.pipeline.pacer import Pacer
from sender.pipeline.producer import Producer
from sender.pipeline.state import Permit, PipelineConfig, StoreHealth, Traffic
from sender.pipeline.stop import Stop, StopReason
from sender.pipeline.worker import Workers
from sender.ports import Observer, Provider, StoreUnavailable, TargetStore

__all__ = ["Pipeline", "PipelineConfig", "Stop", "StopReason", "Traffic"]

_PROGRESS_EVERY_S = 10.0
_LAST_WRITE_S = 0.5
_CONTROL_EVERY_S = 1.0


class Pipeline:
    """One run's claim, send and record.

    Attributes:
        traffic: what this process has done so far.
        health: whether the store answers.
    """

    def __init__(
        self,
        store: TargetStore,
        provider: Provider,
        observer: Observer,
        config: PipelineConfig,
        stop: Stop,
    ) -> None:
        self.traffic = Traffic()
        self._store = store
        self._observe = observer
        self._config = config
        self._stop = stop
        self._workers_started = 0
        health = self.health = StoreHealth(observer)
        self._finisher = Finisher(store, observer, config, self.traffic, health)
        self._producer = Producer(
            store, self._finisher, observer, config, self.traffic, health, stop
        )
        self._pacer = Pacer(
            store,
            self._finisher,
            observer,
            config,
            self.traffic,
            health,
            stop,
            Pace(config.limit_per_s),
            self._ensure_worker,
        )
        self._workers = Workers(
            provider, self._finisher, observer, config, self.traffic, stop, self._pacer.give_back
        )
        self._permits_in, self._permits_out = anyio.create_memory_object_stream[Permit](
            config.concurrency
        )
        self._inner: TaskGroup | None = None

    async def run(self) -> None:
        """Run until stopped and everything answered is recorded.

        Ends early, telling what it abandons, when `stop.working` is set. Exceptions of any part end
        all parts.
        """
        async with anyio.create_task_group() as outer:
            outer.start_soon(self._finisher.run)
            outer.start_soon(self._progress)
            outer.start_soon(self._watch_stop)
            outer.start_soon(self._watch_control)
            with self._permits_out:
                async with anyio.create_task_group() as inner:
                    self._start_inner(inner)
            self._finisher.close()
            await self._last_write()
            outer.cancel_scope.cancel()
        self._finisher.abandon()

    def _start_inner(self, inner: TaskGroup) -> None:
        self._inner = inner
        queue_in, queue_out = anyio.create_memory_object_stream[Target](self._config.queue_rows)
        inner.start_soon(self._producer.run, queue_in)
        inner.start_soon(self._pacer.run, queue_out, self._permits_in)

    def _ensure_worker(self) -> None:
        """Start another worker if all are busy: as many as the provider's latency asks for."""
        if self._workers_started < self.traffic.permits_out and self._inner is not None:
            self._workers_started += 1
            self._inner.start_soon(self._workers.run, self._permits_out.clone())

    async def _watch_stop(self) -> None:
        """Say that the run is stopping; leave what is in flight if it must end now."""
        await self._stop.claiming.wait()
        reason = self._stop.reason
        if reason is not None and reason is not StopReason.DONE:
            self._observe(Stopping(reason.value, self.traffic.in_flight))
        await self._stop.working.wait()
        if self._inner is not None:
            self._inner.cancel_scope.cancel()

    async def _watch_control(self) -> None:
        """Obey a pause also while nothing is looked at: waiting, blocked, breaker open."""
        while not self._stop.is_set:
            with suppress(StoreUnavailable):
                self._stop.obey(await self._store.control())
            await anyio.sleep(_CONTROL_EVERY_S)

    async def _last_write(self) -> None:
        """Wait until everything is written; once working must stop, not for long."""
        async with anyio.create_task_group() as group:

            async def give_up() -> None:
                await self._stop.working.wait()
                await anyio.sleep(_LAST_WRITE_S)
                group.cancel_scope.cancel()

            group.start_soon(give_up)
            await self._finisher.ended.wait()
            group.cancel_scope.cancel()

    async def _progress(self) -> None:
        accepted = done = 0
        while True:
            await anyio.sleep(_PROGRESS_EVERY_S)
            try:
                remaining = await self._store.remaining()
            except StoreUnavailable:
                continue
            traffic = self.traffic
            rate = (traffic.accepted - accepted) / _PROGRESS_EVERY_S
            speed = (remaining.done - done) / _PROGRESS_EVERY_S if done else rate
            accepted, done = traffic.accepted, remaining.done
            self._observe(
                Progress(
                    self._config.campaign,
                    traffic.accepted,
                    remaining.done,
                    remaining.open_rows,
                    rate,
                    remaining.open_rows / speed if speed > 0 else None,
                    traffic.in_flight,
                    traffic.waiting,
                )
            )
