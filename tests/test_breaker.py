"""The breaker and the refusal watch, on an injected clock."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sender.breaker import Breaker, RefusalWatch, is_provider_failure
from sender.domain import (
    Accepted,
    AccountStopped,
    Deferred,
    NotSent,
    Refused,
    Throttled,
    Unavailable,
    Unknown,
)


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker()
    assert [breaker.record(failed=True, now=at) for _ in range(10)] == [False] * 9 + [True]
    return breaker


@pytest.mark.parametrize(
    ("answer", "failed"),
    [
        (Accepted(), False),
        (Refused(""), False),
        (Deferred(""), False),
        (Throttled(""), False),
        (AccountStopped(""), False),
        (Unavailable(""), True),
        (Unknown(""), True),
        (NotSent(""), True),
    ],
)
def test_only_the_providers_failures_count(answer, failed):
    assert is_provider_failure(answer) is failed


def test_four_per_cent_of_failures_never_open_it():
    breaker, chance = Breaker(), random.Random(1)
    for _ in range(100_000):
        breaker.record(failed=chance.random() < 0.04, now=0.0)
    assert not breaker.is_open


def test_half_of_the_last_fifty_opens_it():
    breaker = Breaker()
    for place in range(49):
        assert not breaker.record(failed=place % 2 == 0 and place < 48, now=0.0)
    assert breaker.record(failed=True, now=3.0)
    assert breaker.opened_at == 3.0


@given(st.lists(st.floats(0, 3), max_size=200))
def test_while_it_is_open_at_most_one_probe_begins_in_any_ten_seconds(steps):
    breaker, now, probes = opened(), 0.0, []
    for step in steps:
        now += step
        if breaker.may_probe(now):
            probes.append(now)
            assert breaker.probed(failed=True, now=now) is None
    assert all(at >= 10 for at in probes)
    assert all(later - at >= 10 for at, later in pairwise(probes))


def test_answers_to_earlier_requests_neither_close_nor_open_it():
    breaker = opened()
    assert not breaker.record(failed=False, now=1.0)
    assert not any(breaker.record(failed=True, now=9.0) for _ in range(100))
    assert breaker.opened_at == 0.0
    # Nor do they put the probe off.
    assert breaker.may_probe(10.0)


def test_a_probe_that_works_closes_it_and_the_rate_is_back_within_five_seconds():
    breaker = opened(at=5.0)
    assert breaker.share(9.0) == 0.0
    assert breaker.may_probe(15.0)
    assert breaker.probed(failed=False, now=15.5) == 10.5
    shares = [breaker.share(15.5 + s) for s in (0, 1, 2, 3, 4, 5)]
    assert 0 < shares[0] < 0.2
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_all_refused_stops_at_the_hundredth_and_half_of_two_hundred_too():
    assert [RefusalWatch().record(refused=True)] == [False]
    watch = RefusalWatch()
    assert [watch.record(refused=True) for _ in range(100)] == [False] * 99 + [True]
    watch = RefusalWatch()
    half = [watch.record(refused=place % 2 == 0) for place in range(200)]
    assert half.index(True) == 198


def test_fewer_than_half_refused_never_stops():
    watch = RefusalWatch()
    assert not any(watch.record(refused=place % 100 < 49) for place in range(10_000))


@given(st.lists(st.booleans(), max_size=300), st.integers(0, 2_000))
def test_a_suspicion_holds_requests_back_but_never_for_ever(refusals, in_flight):
    watch = RefusalWatch()
    stopped = sum(watch.record(refused=refused) for refused in refusals) > 0
    allowed = watch.allowance(in_flight)
    assert allowed is None or allowed <= max(0, 200 - in_flight)
    # With nothing in flight there is always room to settle the suspicion.
    assert stopped or watch.allowance(0) is None or watch.allowance(0) > 0
