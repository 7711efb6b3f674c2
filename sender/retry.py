"""What an answer means for its row: pure decisions, no I/O, no clock of its own."""

from dataclasses import dataclass
from datetime import datetime
from typing import assert_never

from sender.domain import (
    Accepted,
    AccountStopped,
    Answer,
    Deferred,
    NotSent,
    Outcome,
    Refused,
    State,
    Target,
    Throttled,
    Unavailable,
    Unknown,
)

_THROTTLED_WITHOUT_HINT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how late a row is tried again.

    Attributes:
        max_attempts: charged attempts after which a row is given up.
        base_s: wait after the first charged attempt, in seconds; doubles with each.
        cap_s: longest wait, in seconds.
        usable_s: seconds after its first use in which a key may be repeated; not positive if never.
    """

    max_attempts: int
    base_s: float
    cap_s: float
    usable_s: float

    def backoff_s(self, attempt: int, jitter: float) -> float:
        """Seconds to wait after charged attempt number `attempt` (from 1).

        Args:
            attempt: charged attempts so far, this one included; 0 counts as 1.
            jitter: 0 to 1; takes up to a fifth off, so that rows that failed together do not come
                back together.
        """
        doublings = min(max(attempt, 1) - 1, 64)
        return min(self.cap_s, self.base_s * 2.0**doublings) * (1 - 0.2 * jitter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What an answer is judged by besides the row.

    Attributes:
        now: monotonic seconds.
        uncharged: the breaker is open or this was its probe: a failing provider costs no attempt.
        jitter: 0 to 1.
    """

    now: float
    uncharged: bool
    jitter: float


def decide(
    answer: Answer, target: Target, policy: RetryPolicy, circumstances: Circumstances
) -> Outcome:
    """Settle one row by the contract's table of answers.

    The key's state follows the table too: "yes" keeps the earliest moment it may have been used,
    "no" clears it, "as before" leaves what was found at the claim.
    """
    used = target.key_used_at or target.lease.claimed_at
    match answer:
        case Accepted():
            return Outcome(target, State.SENT)
        case Refused(reason):
            return Outcome(target, State.FAILED, reason=reason)
        case Deferred(reason):
            return _again(target, policy, circumstances, used, reason)
        case Throttled(reason, retry_after_s):
            wait = _THROTTLED_WITHOUT_HINT_S if retry_after_s is None else retry_after_s
            return _as_before(target, reason, wait * (1 + 0.2 * circumstances.jitter))
        case NotSent(reason):
            return _as_before(target, reason, policy.backoff_s(1, circumstances.jitter))
        case AccountStopped(reason):
            return _as_before(target, reason, 0.0)
        case Unavailable(reason):
            charged = not circumstances.uncharged
            return _again(target, policy, circumstances, used, reason, charged=charged)
        case Unknown(reason):
            charged = not circumstances.uncharged
            return _again(
                target, policy, circumstances, used, reason, charged=charged, unknown=charged
            )
    assert_never(answer)


def throttle_s(answer: Throttled) -> float:
    """Seconds that all of the account waits after this answer."""
    wait = answer.retry_after_s
    return _THROTTLED_WITHOUT_HINT_S if wait is None else wait


def _as_before(target: Target, reason: str, delay_s: float) -> Outcome:
    return Outcome(
        target, State.PENDING, delay_s=delay_s, key_used_at=target.key_used_at, reason=reason
    )


def _again(
    target: Target,
    policy: RetryPolicy,
    circumstances: Circumstances,
    used: datetime,
    reason: str,
    *,
    charged: bool = False,
    unknown: bool = False,
) -> Outcome:
    """A row whose key may be in use: due again inside the key's window, or settled."""
    attempts = target.attempts + charged
    if charged and attempts >= policy.max_attempts:
        # The age of the key stays with a failed row too: it may be requeued.
        doubt = unknown or target.unknowns > 0
        return Outcome(
            target,
            State.IN_DOUBT if doubt else State.FAILED,
            charged=True,
            unknown=unknown,
            key_used_at=used,
            reason=reason,
        )
    delay_s = policy.backoff_s(attempts, circumstances.jitter)
    key_left_s = _key_left_s(target, policy, circumstances.now)
    if delay_s >= key_left_s:
        delay_s = key_left_s / 2  # earlier than usual rather than too late
    if delay_s <= 0 or key_left_s < 1.0:
        return Outcome(
            target,
            State.IN_DOUBT,
            charged=charged,
            unknown=unknown,
            key_used_at=used,
            reason=reason,
        )
    return Outcome(
        target,
        State.PENDING,
        charged=charged,
        unknown=unknown,
        delay_s=delay_s,
        key_used_at=used,
        reason=reason,
    )


def _key_left_s(target: Target, policy: RetryPolicy, now: float) -> float:
    if target.key_used_at is not None:
        return target.key_until - now
    return target.lease.first_use_at + policy.usable_s - now
