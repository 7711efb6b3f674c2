"""What an answer means for its row: the contract's table, line by line, and its bounds."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sender.domain import (
    Accepted,
    AccountStopped,
    Answer,
    Deferred,
    Lease,
    NotSent,
    Refused,
    State,
    Target,
    Throttled,
    Unavailable,
    Unknown,
)
from sender.retry import Circumstances, RetryPolicy, decide, throttle_s

POLICY = RetryPolicy(max_attempts=5, base_s=30, cap_s=600, usable_s=86_000)
CLAIMED_AT = datetime(2026, 11, 1, tzinfo=UTC)
EARLIER = CLAIMED_AT - timedelta(hours=1)
NOW = Circumstances(now=100.0, uncharged=False, jitter=0.0)


def a_target(**values: object) -> Target:
    lease = Lease(uuid4(), 1, CLAIMED_AT, 99.0, 190.0)
    known = {
        "member_id": 7,
        "email": "a@example.com",
        "variables": None,
        "attempts": 0,
        "unknowns": 0,
        "key_used_at": None,
        "key_until": float("inf"),
        "lease": lease,
    }
    return Target(**{**known, **values})


YES, NO, AS_BEFORE = CLAIMED_AT, None, "as before"


@pytest.mark.parametrize("found", [None, EARLIER], ids=["new key", "key used before"])
@pytest.mark.parametrize(
    ("answer", "state", "charged", "key"),
    [
        (Accepted(), State.SENT, False, NO),
        (Refused("http_422"), State.FAILED, False, NO),
        (Deferred("http_409"), State.PENDING, False, YES),
        (Throttled("http_429", 3.0), State.PENDING, False, AS_BEFORE),
        (Unavailable("http_503"), State.PENDING, True, YES),
        (NotSent("connection_refused"), State.PENDING, False, AS_BEFORE),
        (Unknown("timeout_answer"), State.PENDING, True, YES),
        (AccountStopped("http_401"), State.PENDING, False, AS_BEFORE),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, str | bool | State) else None,
)
def test_the_table_of_answers(answer, state, charged, key, found):
    target = a_target(key_used_at=found, key_until=86_000.0 if found else float("inf"))
    outcome = decide(answer, target, POLICY, NOW)
    assert (outcome.state, outcome.charged) == (state, charged)
    assert outcome.unknown == isinstance(answer, Unknown)
    assert outcome.key_used_at == (found if key == AS_BEFORE else key and (found or key))


@pytest.mark.parametrize(
    ("answer", "unknowns", "state"),
    [
        (Unavailable("http_503"), 0, State.FAILED),
        (Unavailable("http_503"), 1, State.IN_DOUBT),
        (Unknown("timeout_answer"), 0, State.IN_DOUBT),
        (Unknown("timeout_answer"), 4, State.IN_DOUBT),
    ],
)
def test_when_attempts_are_used_up_a_row_is_failed_only_if_all_were_refusals(
    answer, unknowns, state
):
    outcome = decide(answer, a_target(attempts=4, unknowns=unknowns), POLICY, NOW)
    assert (outcome.state, outcome.charged) == (state, True)
    assert outcome.key_used_at == CLAIMED_AT


@pytest.mark.parametrize("answer", [Unavailable("http_503"), Unknown("timeout_answer")])
def test_an_open_breaker_and_its_probe_cost_nothing(answer):
    outcome = decide(answer, a_target(attempts=4), POLICY, replace(NOW, uncharged=True))
    assert (outcome.state, outcome.charged, outcome.unknown) == (State.PENDING, False, False)
    assert outcome.key_used_at == CLAIMED_AT


def test_waits_double_up_to_the_cap():
    waits = [POLICY.backoff_s(attempt, 0.0) for attempt in range(1, 8)]
    assert waits == [30, 60, 120, 240, 480, 600, 600]
    assert POLICY.backoff_s(10_000, 0.0) == 600


@pytest.mark.parametrize("answer", [Deferred("http_409"), Unavailable("http_503"), Unknown("cut")])
@pytest.mark.parametrize("found", [None, EARLIER], ids=["new key", "key used before"])
def test_a_row_whose_key_ends_soon_is_due_earlier_than_usual_rather_than_too_late(answer, found):
    policy = replace(POLICY, usable_s=21.0)
    target = a_target(key_used_at=found, key_until=120.0 if found else float("inf"))
    outcome = decide(answer, target, policy, NOW)
    assert (outcome.state, outcome.delay_s) == (State.PENDING, 10.0)


@pytest.mark.parametrize("answer", [Deferred("http_409"), Unavailable("http_503"), Unknown("cut")])
def test_a_window_shorter_than_its_margin_allows_no_repeat(answer):
    outcome = decide(answer, a_target(), replace(POLICY, usable_s=-1.0), NOW)
    assert (outcome.state, outcome.key_used_at) == (State.IN_DOUBT, CLAIMED_AT)


@given(st.integers(0, 200), st.floats(0, 1))
def test_jitter_takes_at_most_a_fifth_off(attempt, jitter):
    full = POLICY.backoff_s(attempt, 0.0)
    assert 0.8 * full <= POLICY.backoff_s(attempt, jitter) <= full <= POLICY.cap_s


ANSWERS: st.SearchStrategy[Answer] = st.sampled_from(
    [
        Deferred("http_409"),
        Unavailable("http_503"),
        Unknown("timeout_answer"),
        Throttled("http_429", 1.0),
        NotSent("connection_refused"),
        AccountStopped("http_401"),
        Refused("http_422"),
        Accepted(),
    ]
)


@given(
    answer=ANSWERS,
    attempts=st.integers(0, 6),
    unknowns=st.integers(0, 6),
    usable_s=st.floats(-100, 100_000),
    key_age_s=st.none() | st.floats(0, 100_000),
    base_s=st.floats(0.001, 5_000),
    jitter=st.floats(0, 1),
    uncharged=st.booleans(),
)
def test_nothing_whose_key_may_be_in_use_is_due_after_the_keys_usable_end(
    answer, attempts, unknowns, usable_s, key_age_s, base_s, jitter, uncharged
):
    policy = RetryPolicy(max_attempts=5, base_s=base_s, cap_s=max(base_s, 600), usable_s=usable_s)
    now = Circumstances(now=100.0, uncharged=uncharged, jitter=jitter)
    used_at = None if key_age_s is None else EARLIER
    ends = 99.0 + usable_s if key_age_s is None else 100.0 + usable_s - key_age_s
    target = a_target(
        attempts=attempts,
        unknowns=unknowns,
        key_used_at=used_at,
        key_until=float("inf") if key_age_s is None else ends,
    )
    outcome = decide(answer, target, policy, now)
    assert outcome.delay_s >= 0
    if isinstance(answer, Deferred | Unavailable | Unknown) and outcome.state is State.PENDING:
        assert 100.0 + outcome.delay_s < ends
    if outcome.state is State.FAILED:
        assert (outcome.key_used_at is None) == isinstance(answer, Refused)
        assert not isinstance(answer, Unknown)
        assert not unknowns or isinstance(answer, Refused)


def test_a_429_without_a_hint_still_makes_everybody_wait():
    assert throttle_s(Throttled("http_429")) > 0
    assert throttle_s(Throttled("http_429", 7.0)) == 7.0
