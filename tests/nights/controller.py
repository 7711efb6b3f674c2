"""The Job and CronJob controllers in miniature: real processes, real signals, nothing else.

Owns when a pod is started, replaced and ended. What it is to do comes from the manifest.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from chaos.harness import End, Run

from nights.policy import Policy

_LONGEST_POD_S = 120.0
_TERMINATED = 128 + signal.SIGTERM

type StartPod = Callable[[], Awaitable[Run]]
type Reason = Literal["", "PodFailurePolicy", "BackoffLimitExceeded", "DeadlineExceeded"]


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The Job's last condition: Complete if there is no reason, else Failed."""

    reason: Reason = ""

    @property
    def is_complete(self) -> bool:
        return not self.reason


class Pod:
    """One container of a Job.

    Attributes:
        disrupted: whether it has the condition DisruptionTarget.
        killed: whether it was ended by SIGKILL.
    """

    def __init__(self, run: Run, grace_s: float) -> None:
        self.run = run
        self.disrupted = False
        self.killed = False
        self._grace_s = grace_s
        self._ended = asyncio.create_task(run.wait(_LONGEST_POD_S))

    async def ended(self, within_s: float) -> End | None:
        """How it ended, or None if it has not within this time."""
        done, _ = await asyncio.wait({self._ended}, timeout=max(0.0, within_s))
        return self._ended.result() if done else None

    @property
    def end(self) -> End:
        return self._ended.result()

    @property
    def exit_code(self) -> int:
        """As a container tells it: 137 for SIGKILL."""
        return self.end.code if self.end.code >= 0 else 128 - self.end.code

    @property
    def told_its_end(self) -> bool:
        """Whether its last line says how it ended, or it was stopped before its first one."""
        if self.exit_code == _TERMINATED and not self.run.lines:
            return True
        last = self.end.last
        return (last.get("event"), last.get("exit_code")) == ("run_ended", self.exit_code)

    def kill(self) -> None:
        """What the kernel does when the memory limit is reached."""
        self.killed = True
        self.run.kill()

    async def terminate(self) -> None:
        """SIGTERM, and SIGKILL after the grace."""
        self.run.stop(signal.SIGTERM)
        if await self.ended(self._grace_s) is None:
            self.kill()
            await self.ended(_LONGEST_POD_S)

    async def evict(self) -> None:
        """What a drained node does."""
        self.disrupted = True
        await self.terminate()


class Job:
    """One pod at a time until it is complete or failed."""

    def __init__(self, policy: Policy, start_pod: StartPod) -> None:
        self.pods: list[Pod] = []
        self._policy = policy
        self._start_pod = start_pod
        self._until = asyncio.get_running_loop().time() + policy.active_deadline_s
        self._changed = asyncio.Condition()
        self.ended = asyncio.create_task(self._live())

    @property
    def is_active(self) -> bool:
        return not self.ended.done()

    @property
    def end(self) -> JobEnd:
        return self.ended.result()

    async def pod(self, number: int) -> Pod:
        """Wait for its nth pod, from 1."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.pods) >= number)
        return self.pods[number - 1]

    async def _live(self) -> JobEnd:
        failures = 0
        while True:
            pod = await self._begin()
            if await pod.ended(self._left_s()) is None:
                await pod.terminate()
                return JobEnd("DeadlineExceeded")
            if pod.exit_code == 0:
                return JobEnd()
            action = self._policy.judge(pod.exit_code, disrupted=pod.disrupted)
            if action == "FailJob":
                return JobEnd("PodFailurePolicy")
            failures += action == "Count"
            if failures > self._policy.backoff_limit:
                return JobEnd("BackoffLimitExceeded")
            await asyncio.sleep(min(self._policy.delay_s(failures), max(0.0, self._left_s())))
            if self._left_s() <= 0:
                return JobEnd("DeadlineExceeded")

    async def _begin(self) -> Pod:
        pod = Pod(await self._start_pod(), self._policy.grace_s)
        async with self._changed:
            self.pods.append(pod)
            self._changed.notify_all()
        return pod

    def _left_s(self) -> float:
        return self._until - asyncio.get_running_loop().time()


class CronJob:
    """Makes the Jobs; safety must not depend on how many."""

    def __init__(self, policy: Policy, start_pod: StartPod) -> None:
        self.policy = policy
        self.jobs: list[Job] = []
        self._start_pod = start_pod

    def on_schedule(self) -> Job | None:
        """The schedule has come; None if concurrencyPolicy forbids a Job now."""
        if self.policy.forbid and any(job.is_active for job in self.jobs):
            return None
        return self.create()

    def create(self) -> Job:
        """`kubectl create job --from=cronjob/sender`, or the controller's own double."""
        job = Job(self.policy, self._start_pod)
        self.jobs.append(job)
        return job
