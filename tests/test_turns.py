"""Processes of one account reserve in turn: against a clock like theirs, in no time at all."""

import heapq
import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from sender.pace import AHEAD_S, Turns

CHUNK_S = 0.15
SETTLE_S, SECONDS = 3.0, 20.0


@dataclass
class Account:
    """Its clock, and processes that reserve from it as the pacer does, each a little late."""

    seed: int
    late_s: float = 0.01
    next_free_at: float = 0.0
    looks: int = 0
    lost_s: float = 0.0
    taken: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._agenda: list[tuple[float, int, Turns]] = []

    def join(self, process: int, at: float) -> None:
        heapq.heappush(self._agenda, (at, process, Turns()))

    def run(self, until: float, gone: frozenset[int] = frozenset()) -> None:
        self.looks, self.lost_s, self.taken = 0, 0.0, {}
        while self._agenda[0][0] < until:
            now, process, turns = heapq.heappop(self._agenda)
            if process in gone:
                continue
            at = self._look(now, process, turns)
            at += self._random.uniform(0.0, self.late_s)
            heapq.heappush(self._agenda, (max(now + 0.004, at), process, turns))

    def _look(self, now: float, process: int, turns: Turns) -> float:
        """One look; returns when the process looks again."""
        self.looks += 1
        if self.next_free_at > now + AHEAD_S:
            return self.next_free_at - AHEAD_S
        starts_at = max(self.next_free_at, now)
        self.lost_s += starts_at - self.next_free_at
        self.next_free_at = starts_at + CHUNK_S
        self.taken[process] = self.taken.get(process, 0) + 1
        turns.took(now, starts_at, self.next_free_at)
        return turns.next_at()

    @property
    def looks_a_chunk(self) -> float:
        return self.looks / sum(self.taken.values())


def joined(processes: int, seed: int) -> Account:
    account = Account(seed)
    starts = random.Random(seed)
    for process in range(processes):
        account.join(process, starts.uniform(0.0, 1.0))
    account.run(SETTLE_S)
    return account


@given(st.integers(1, 8), st.integers(0, 10_000))
def test_processes_that_take_turns_use_every_slot(processes, seed):
    account = joined(processes, seed)
    account.run(SECONDS)
    assert account.lost_s <= 0.01 * SECONDS
    assert len(account.taken) == processes


@given(st.integers(1, 4), st.integers(0, 10_000))
def test_up_to_four_rarely_ask_in_vain(processes, seed):
    account = joined(processes, seed)
    account.run(SECONDS)
    assert account.looks_a_chunk < 2


def test_asking_whenever_own_slots_end_would_ask_in_vain_for_each_other_process():
    """What the turns are for: the same clock with processes that do not take them."""

    class Eager(Turns):
        def next_at(self) -> float:
            return self._ends_at - 0.15

    account = Account(seed=1)
    for process in range(4):
        heapq.heappush(account._agenda, (0.1 * process, process, Eager()))
    account.run(SECONDS)
    assert account.looks_a_chunk > 3


@given(st.integers(2, 8), st.integers(0, 10_000), st.data())
def test_the_slots_of_processes_that_die_are_taken_over_within_a_round(processes, seed, data):
    account = joined(processes, seed)
    account.run(SECONDS)
    dead = data.draw(st.sets(st.integers(0, processes - 1), min_size=1, max_size=processes - 1))
    account.run(SECONDS + 10.0, gone=frozenset(dead))
    assert account.lost_s < 0.5  # the longest round that is waited for, once
    account.run(SECONDS + 20.0, gone=frozenset(dead))
    assert account.lost_s <= 0.1


def test_who_is_alone_asks_before_its_own_slots_end():
    turns = Turns()
    assert turns.next_at() == 0.0
    turns.took(now=10.0, starts_at=10.1, ends_at=10.225)
    assert turns.next_at() == 10.225 - 0.15
    turns.took(now=10.125, starts_at=10.226, ends_at=10.351)  # a millisecond is the network's
    assert turns.next_at() == 10.351 - 0.15


def took_turns(*starts: float) -> Turns:
    """A process that reserved an eighth of a second at each of these, a tenth ahead."""
    turns = Turns()
    for starts_at in starts:
        turns.took(now=starts_at - 0.1, starts_at=starts_at, ends_at=starts_at + 0.125)
    return turns


def test_who_shares_asks_before_the_shortest_of_the_last_three_rounds_ends():
    assert took_turns(10.0, 10.5, 11.0).next_at() == 11.125 - 0.15
    assert took_turns(10.0, 10.5, 11.0, 11.5).next_at() == 11.625 + 0.375 - 0.15
    assert took_turns(10.0, 10.5, 11.0, 11.25, 11.75).next_at() == 11.875 + 0.125 - 0.15


def test_a_round_is_waited_for_half_a_second_at_most():
    assert took_turns(10.0, 12.0, 14.0, 16.0).next_at() == 16.125 + 0.5 - 0.15


def test_who_finds_the_clock_not_ahead_waits_for_nobody():
    turns = took_turns(10.0, 10.5, 11.0, 11.5)
    turns.took(now=12.0, starts_at=12.0, ends_at=12.125)
    assert turns.next_at() == 12.125 - 0.15
