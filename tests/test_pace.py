"""The pace of one process: slots, bursts and what is too late, on a clock that jumps over waits."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sender.pace import AHEAD_S, LOOK_VALID_S, Pace

LIMITS = st.sampled_from([0.1, 1.0, 19.9, 20.0, 50.0, 500.0, 2_000.0, 100_000.0])


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting, tells the clock that the time is over, and a moment for the work."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        self._clock[0] += (timeout or 0.0) + 1e-7
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = [0.0]
        super().__init__(_Jumping(self.clock))

    def time(self) -> float:
        return self.clock[0]


def on_a_jumping_clock[T](work: Callable[[_Loop], Coroutine[Any, Any, T]]) -> T:
    with asyncio.Runner(loop_factory=_Loop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, _Loop)
        return runner.run(work(loop))


def departures(pace: Pace, slots: list[float], stalled_until: float = 0.0) -> list[float]:
    """When requests leave whose slots are these, in a process that stood still for a while."""

    async def work(loop: _Loop) -> list[float]:
        loop.clock[0] = stalled_until
        left = []
        for slot in slots:
            await asyncio.sleep(max(0.0, slot - loop.time()))
            await pace.leave()
            left.append(loop.time())
        return left

    return on_a_jumping_clock(work)


def most_within(times: list[float], seconds: float) -> int:
    first = most = 0
    for last, time in enumerate(times):
        while time - times[first] > seconds:
            first += 1
        most = max(most, last - first + 1)
    return most


@pytest.mark.slow
@given(limit=LIMITS, stalled=st.floats(0, 3))
@settings(deadline=None, max_examples=30)
def test_after_a_stall_of_any_length_no_more_leave_together_than_a_burst(limit, stalled):
    pace = Pace(limit)
    times = departures(pace, [n / limit for n in range(400)], stalled_until=stalled)
    burst = max(2, round(limit * 0.01))
    for seconds in (0.0, 0.01, 0.1, 1.0):
        assert most_within(times, seconds) <= burst + 1.05 * limit * seconds + 1


@pytest.mark.slow
@given(limit=LIMITS)
@settings(deadline=None, max_examples=20)
def test_who_is_on_time_is_not_held_back(limit):
    pace = Pace(limit)
    slots = [n * pace.spacing_s for n in range(300)]
    assert all(
        not pace.is_missed(slot, left)
        for slot, left in zip(slots, departures(pace, slots), strict=True)
    )


@given(limit=LIMITS)
def test_the_rate_is_the_limit_and_a_little_less_where_a_single_early_one_counts(limit):
    pace = Pace(limit)
    assert 0.99 * limit <= pace.rate_per_s <= limit
    assert (pace.rate_per_s < limit) == (limit < 20)
    assert pace.spacing_s == 1 / pace.rate_per_s


@given(LIMITS)
def test_slots_are_reserved_for_a_while_at_once_and_for_one_row_at_least(limit):
    assert Pace(limit).chunk == max(1, int(limit * 0.15))


@given(st.floats(-10, 10))
def test_a_slot_is_missed_a_moment_after_it_came_and_never_before(late):
    missed = Pace(500.0).is_missed(100.0, 100.0 + late)
    assert missed or late < 0.031
    assert not missed or late > 0.029


def test_what_is_reserved_stays_within_the_life_of_a_look():
    # A slot begins at most AHEAD_S after its look, its chunk 0.15 s later.
    pace = Pace(500.0)
    assert AHEAD_S + pace.chunk * pace.spacing_s < LOOK_VALID_S
