"""Workers: one request for one permit, and the answer's consequences. None waits for the store.

Between the provider's answer and the outcome in the finisher's hands nothing is awaited.
"""

import random
import time
from collections.abc import Callable

from anyio.streams.memory import MemoryObjectReceiveStream

from sender.breaker import is_provider_failure
from sender.domain import AccountStopped, Answer, Refused, Target, Throttled, Unknown
from sender.events import AttemptBroke, BreakerClosed, BreakerOpened
from sender.pace import LOOK_VALID_S
from sender.pipeline.finisher import Finisher
from sender.pipeline.state import Permit, PipelineConfig, Traffic
from sender.pipeline.stop import Stop, StopReason
from sender.ports import Gate, Observer, Provider
from sender.retry import Circumstances, decide, throttle_s


class Workers:
    """What all workers of a pipeline share; each of them runs `run`."""

    def __init__(
        self,
        provider: Provider,
        finisher: Finisher,
        observer: Observer,
        config: PipelineConfig,
        traffic: Traffic,
        stop: Stop,
        give_back: Callable[[Target], None],
    ) -> None:
        self._provider = provider
        self._finisher = finisher
        self._observe = observer
        self._config = config
        self._traffic = traffic
        self._stop = stop
        self._give_back = give_back

    async def run(self, permits: MemoryObjectReceiveStream[Permit]) -> None:
        """Use permits until there are no more."""
        with permits:
            async for permit in permits:
                try:
                    await self._use(permit)
                finally:
                    self._traffic.permits_out -= 1

    async def _use(self, permit: Permit) -> None:
        traffic, begun = self._traffic, False

        def gate() -> bool:
            nonlocal begun
            begun = self._may_begin(permit)
            if begun:
                traffic.requests += 1
                traffic.in_flight += 1
            return begun

        try:
            answer = await self._ask(permit.target, gate)
        finally:
            traffic.in_flight -= begun
        if answer is None:
            self._give_back(permit.target)
        else:
            self._take(answer, permit)

    async def _ask(self, target: Target, gate: Gate) -> Answer | None:
        """Send; a provider that breaks on one row costs that row an attempt, not the run."""
        try:
            return await self._provider.send(target, gate)
        except Exception as error:  # noqa: BLE001 - whatever one row's content provokes
            self._observe(
                AttemptBroke(self._config.campaign, target.member_id, type(error).__name__)
            )
            return Unknown(f"provider_broke_{type(error).__name__}")

    def _may_begin(self, permit: Permit) -> bool:
        """The gate, asked before the first byte: the look is young, lease and key are good."""
        now, target = time.monotonic(), permit.target
        return (
            now - permit.looked_at < LOOK_VALID_S
            and now < target.lease.until
            and now < target.key_until
            and not self._stop.is_set
            and (permit.probe or not self._traffic.breaker.is_open)
        )

    def _take(self, answer: Answer, permit: Permit) -> None:
        now = time.monotonic()
        uncharged = permit.probe or self._traffic.breaker.is_open
        circumstances = Circumstances(now=now, uncharged=uncharged, jitter=random.random())
        self._finisher.settle(decide(answer, permit.target, self._config.retry, circumstances))
        self._learn(answer, permit, now)

    def _learn(self, answer: Answer, permit: Permit, now: float) -> None:
        traffic, failed = self._traffic, is_provider_failure(answer)
        if isinstance(answer, Throttled):
            traffic.block_s = max(traffic.block_s, throttle_s(answer))
            traffic.block_reason = answer.reason
        elif isinstance(answer, AccountStopped):
            self._stop.stop_claiming(StopReason.ACCOUNT_STOPPED, answer.reason)
        elif traffic.refusals.record(refused=isinstance(answer, Refused)):
            self._stop.stop_claiming(StopReason.REFUSED)
        if permit.probe:
            open_s = traffic.breaker.probed(failed=failed, now=now)
            if open_s is not None:
                self._observe(BreakerClosed(open_s))
        elif traffic.breaker.record(failed=failed, now=now):
            self._observe(BreakerOpened(getattr(answer, "reason", "")))
