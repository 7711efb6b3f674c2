"""The ledger under two processes in any order: claims, kills, zombies, late loads, opt-outs.

A hypothesis state machine over a real PostgreSQL. Each process is a store and a finisher, as a run
has them; the provider remembers keys for a window, as the contract says. Time passes by moving
every stamp back, in the database and in the processes, so nothing sleeps.
"""

import asyncio
import os
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any

import psycopg
import pytest
from conftest import _clone
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from ledger import config

from sender import queries
from sender.database import Database
from sender.domain import (
    Accepted,
    Answer,
    Deferred,
    Fate,
    Lease,
    NotSent,
    Outcome,
    Refused,
    State,
    Target,
    Throttled,
    Unavailable,
    Unknown,
)
from sender.pipeline.finisher import Finisher
from sender.pipeline.state import PipelineConfig, StoreHealth, Traffic
from sender.retry import Circumstances, RetryPolicy, decide
from sender.store import PostgresStore

LEASE_S, USABLE_S = 60.0, 3600.0
A_LEASE, A_WINDOW = LEASE_S + 1, 2 * USABLE_S
SIZES = (3, 1)
POLICY = RetryPolicy(max_attempts=2, base_s=30.0, cap_s=60.0, usable_s=USABLE_S)

# What a request may meet: the answer that comes back, whether the mail went out, and whether the
# provider remembers the key.
ANSWERS: dict[str, tuple[Answer, bool, bool]] = {
    "accepted": (Accepted(), True, True),
    "accepted, answer lost": (Unknown("timeout_answer"), True, True),
    "lost on the way": (Unknown("cut"), False, True),
    "busy with it": (Deferred("http_409"), False, True),
    "failed": (Unavailable("http_503"), False, False),
    "refused": (Refused("http_422"), False, False),
    "throttled": (Throttled("http_429", 1.0), False, False),
    "not reached": (NotSent("refused"), False, False),
}

_PROCESS = st.integers(0, 1)
# Mostly what was touched last, so that one row meets several things.
_ROW = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3, 4, 5])
_KINDS = st.lists(
    st.sampled_from(["accepted"] * 3 + ["failed"] + sorted(ANSWERS)), min_size=1, max_size=3
)
# A step: how often it is taken, and what it is given.
_STEPS: dict[str, tuple[int, tuple[st.SearchStrategy[Any], ...]]] = {
    "claim": (2, (_PROCESS,)),
    "request": (2, (_PROCESS, _KINDS)),
    "claim_and_request": (3, (_PROCESS, _KINDS)),
    "claim_request_and_record": (2, (_PROCESS, _KINDS)),
    "record": (3, (_PROCESS, st.integers(0, 3), st.booleans(), st.booleans())),
    "hand_back": (1, (_PROCESS, st.integers(1, 3), st.booleans())),
    "extend": (1, (_PROCESS,)),
    "keep_in_order": (1, (_PROCESS,)),
    "kill": (1, (_PROCESS, st.booleans())),
    "a_lease_passes": (2, ()),
    "a_window_passes": (1, ()),
    "opt_out_or_in": (2, (_ROW,)),
    "change_address": (1, (_ROW,)),
    "change_priority": (1, (_ROW,)),
    "load_late": (1, (st.lists(st.integers(1, 60), min_size=1, max_size=4), st.integers(0, 1))),
    "delete": (1, (_ROW,)),
    "requeue": (1, ()),
}
STEPS = st.sampled_from(
    [name for name, (often, _) in _STEPS.items() for _ in range(often)]
).flatmap(lambda name: st.tuples(st.just(name), *_STEPS[name][1]))

_campaigns = count(1)


@dataclass
class Environment:
    """What all examples share: an event loop, a pool, a connection of the application."""

    dsn: str
    runner: asyncio.Runner
    database: Database
    application: psycopg.AsyncConnection

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)


@dataclass
class Provider:
    """Remembers keys while their window lasts, and every delivery for ever."""

    bodies: dict[int, str | None] = field(default_factory=dict)
    accepted: set[int] = field(default_factory=set)
    delivered: list[int] = field(default_factory=list)

    def take(self, target: Target, kind: str) -> Answer:
        answer, goes_out, remembers = ANSWERS[kind]
        member = target.member_id
        body = self.bodies.get(member, target.email)
        assert body == target.email, f"{member}: another body under a key in use"
        if member in self.accepted and goes_out:
            return answer
        if member in self.accepted and isinstance(answer, Refused | Deferred):
            return Accepted()
        if remembers:
            self.bodies[member] = target.email
        if goes_out:
            assert member not in self.delivered, f"{member} was mailed twice"
            self.accepted.add(member)
            self.delivered.append(member)
        return answer

    def forget(self) -> None:
        self.bodies.clear()
        self.accepted.clear()


class Process:
    """A run: its store, its finisher, what it has queued and what is in flight."""

    def __init__(self, environment: Environment, campaign: str, size: int) -> None:
        changes = {
            "campaign": campaign,
            "account": campaign,
            "batch_size": size,
            "lease_s": LEASE_S,
            "usable_s": USABLE_S,
            "rate_per_s": 1e5,
        }
        self.store = PostgresStore(config(environment.dsn, **changes))
        self.store._database = environment.database
        self.traffic = Traffic()
        sizes = PipelineConfig(
            campaign=campaign, limit_per_s=1e5, concurrency=10, lease_s=LEASE_S, retry=POLICY
        )
        health = StoreHealth(lambda _: None)
        self.finisher = Finisher(self.store, lambda _: None, sizes, self.traffic, health)
        self.queue: list[Target] = []
        self.in_flight: list[tuple[Target, Answer]] = []
        self.leases: list[Lease] = []

    def hold(self, lease: Lease | None) -> None:
        if lease is not None:
            self.finisher.hold(lease)
            self.leases.append(lease)
            self.queue += lease.targets

    def age(self, seconds: float) -> None:
        delta = timedelta(seconds=seconds)
        self.store._low_water_set_at -= seconds
        self.store._after_since -= seconds
        for lease in self.leases:
            lease.claimed_at -= delta
            lease.first_use_at -= seconds
            lease.until -= seconds
            if lease.found_key_used_at is not None:
                lease.found_key_used_at -= delta
            for target in lease.targets:
                target.key_until -= seconds
                if target.key_used_at is not None:
                    target.key_used_at -= delta
        for outcome in self.finisher._outcomes:
            if outcome.key_used_at is not None:
                outcome.key_used_at -= delta


_ORDER = f"""
SELECT (SELECT sent + failed + in_doubt + skipped + pending + sending
        FROM ({queries.ledger.COUNTS}) AS counts),
       ARRAY(SELECT member_id FROM campaign_targets
             WHERE campaign_id = %(campaign)s AND sent_at IS NOT NULL),
       ARRAY(SELECT member_id FROM campaign_targets
             WHERE campaign_id = %(campaign)s AND sent_at IS NULL AND state = 'failed'),
       ARRAY(SELECT a.batch_no
             FROM campaign_batches a JOIN campaign_batches b USING (campaign_id, priority)
             WHERE campaign_id = %(campaign)s AND a.batch_no < b.batch_no
               AND a.lo <= b.hi AND b.lo <= a.hi AND a.done_at IS NULL AND b.done_at IS NULL),
       ARRAY(SELECT t.member_id
             FROM campaign_batches b JOIN campaign_targets t USING (campaign_id)
             WHERE campaign_id = %(campaign)s AND t.member_id = ANY (b.claimed_ids)
               AND b.done_at IS NULL AND b.lease_until > now() AND t.state = 'pending'
               AND t.sent_at IS NULL AND t.opted_out_at IS NULL AND t.not_before IS NULL
             GROUP BY t.member_id HAVING count(*) > 1)
"""


class LedgerMachine(RuleBasedStateMachine):
    """See the module's text."""

    environment: Environment

    def __init__(self) -> None:
        super().__init__()
        self.campaign = f"machine-{next(_campaigns)}"
        self.provider = Provider()
        self.rows: list[int] = []  # touched last comes first
        self.last_claim: dict[int, tuple[Lease, State | None]] = {}
        self.versions = count(1)
        self.processes: list[Process] = []
        self.killed: list[Process] = []

    # --- how it is driven -------------------------------------------------------------------------

    def do[T](self, work: Coroutine[Any, Any, T]) -> T:
        return self.environment.run(work)

    def sql(self, text: str, **values: object) -> list[Any]:
        async def execute() -> list[Any]:
            cursor = await self.environment.application.execute(
                text, {"campaign": self.campaign, **values}
            )
            return await cursor.fetchall() if cursor.description else []

        return self.do(execute())

    def write(self, change: str, member: int, only_if: str = "true") -> None:
        self.sql(
            f"UPDATE campaign_targets SET {change}"
            f" WHERE campaign_id = %(campaign)s AND member_id = %(member)s AND {only_if}",
            member=member,
        )

    def load_row(self, member: int, priority: int = 0) -> None:
        self.sql(
            "INSERT INTO campaign_targets (campaign_id, member_id, email, priority)"
            " VALUES (%(campaign)s, %(member)s, %(email)s, %(priority)s)",
            member=member,
            email=f"m{member}.{next(self.versions)}@example.com",
            priority=priority,
        )
        self.touch(member)

    def a_row(self, place: int) -> int | None:
        return self.touch(self.rows[place % len(self.rows)]) if self.rows else None

    def touch(self, member: int) -> int:
        self.rows = [member, *(m for m in self.rows if m != member)]
        return member

    async def _new_process(self, place: int) -> Process:
        process = Process(self.environment, self.campaign, SIZES[place])
        await process.store.open_campaign()
        return process

    @initialize(priorities=st.lists(st.integers(0, 1), min_size=3, max_size=8))
    def begin(self, priorities: list[int]) -> None:
        for place, priority in enumerate(priorities, 1):
            self.load_row(10 * place, priority)
        for place in range(len(SIZES)):
            self.processes.append(self.do(self._new_process(place)))
        self.do(self.processes[0].store.build())

    # --- what a run does --------------------------------------------------------------------------

    def claim(self, p: int) -> None:
        """What is due, else a batch, else a batch that is built for it."""
        store = self.processes[p].store
        lease, _ = self.do(store.claim_due())
        if lease is None:
            lease, _ = self.do(store.claim_batch())
        if lease is None and self.do(store.build()):
            lease, _ = self.do(store.claim_batch())
        self.processes[p].hold(lease)

    def request(self, p: int, kinds: list[str]) -> None:
        """Look at some queued rows and request those that may go, as pacer and worker do."""
        process = self.processes[p]
        taken, process.queue = process.queue[: len(kinds)], process.queue[len(kinds) :]
        targets = [t for t in taken if time.monotonic() < t.key_until]
        for target in taken:
            if target not in targets:
                used = {"key_used_at": target.key_used_at, "reason": "key_too_old"}
                process.finisher.settle(Outcome(target, State.IN_DOUBT, **used))
        if targets:
            self._look_and_send(process, targets, kinds)

    def claim_and_request(self, p: int, kinds: list[str]) -> None:
        self.claim(p)
        self.request(p, kinds)

    def claim_request_and_record(self, p: int, kinds: list[str]) -> None:
        self.claim_and_request(p, kinds)
        self.record(p, len(kinds), last=False, write=True)

    def _look_and_send(self, process: Process, targets: list[Target], kinds: list[str]) -> None:
        look = self.do(process.store.look(targets))
        self._check_ready([t.member_id for t in look.ready])
        process.finisher.drop_lost([t for t in targets if t.lease.claim_id in look.lost])
        for target, kind in zip(targets, kinds, strict=False):
            if target.lease.claim_id in look.lost:
                continue
            if target not in look.ready:
                process.finisher.skip(target)
            elif time.monotonic() < target.lease.until:
                self._check_claim(target)
                process.in_flight.append((target, self.provider.take(target, kind)))
            else:
                process.queue.append(target)

    def _check_ready(self, members: list[int]) -> None:
        wrong = self.sql(
            "SELECT member_id FROM campaign_targets WHERE campaign_id = %(campaign)s"
            " AND member_id = ANY (%(members)s)"
            " AND (sent_at IS NOT NULL OR opted_out_at IS NOT NULL"
            "      OR state NOT IN ('pending', 'sending'))",
            members=members,
        )
        assert wrong == []

    def _check_claim(self, target: Target) -> None:
        """Requested by another claim before: that one was lost, or left the row open."""
        lease, ended = self.last_claim.get(target.member_id, (target.lease, None))
        if lease is not target.lease:
            assert ended in {State.PENDING, State.FAILED}, "two claims at once requested a row"
        self.last_claim[target.member_id] = (target.lease, None)
        if target.member_id in self.rows:
            self.touch(target.member_id)

    def record(self, p: int, n: int, last: bool, write: bool) -> None:
        """Answers come in any order, are settled, and sooner or later written."""
        process = self.processes[p]
        for _ in range(min(n, len(process.in_flight))):
            target, answer = process.in_flight.pop(-1 if last else 0)
            now = Circumstances(now=time.monotonic(), uncharged=False, jitter=0.0)
            outcome = decide(answer, target, POLICY, now)
            process.finisher.settle(outcome)
            if self.last_claim[target.member_id] == (target.lease, None):
                self.last_claim[target.member_id] = (target.lease, outcome.state)
        if write:
            self.do(process.finisher._flush())

    def hand_back(self, p: int, n: int, write: bool) -> None:
        process = self.processes[p]
        back, process.queue = process.queue[:n], process.queue[n:]
        process.finisher.hand_back(back)
        self.record(p, 0, last=False, write=write)

    def extend(self, p: int) -> None:
        finisher = self.processes[p].finisher
        finisher._extend_at = 0.0
        self.do(finisher._extend_if_due())

    def keep_in_order(self, p: int) -> None:
        store = self.processes[p].store
        for step in (store.sweep, store.adopt, store.build):
            self.do(step())

    def kill(self, p: int, missed: bool) -> None:
        self.killed.append(self.processes[p])
        self.processes[p] = self.do(self._new_process(p))
        if missed:
            self.time_passes(A_LEASE)

    # --- what others do ---------------------------------------------------------------------------

    def a_lease_passes(self) -> None:
        self.time_passes(A_LEASE)

    def a_window_passes(self) -> None:
        self.time_passes(A_WINDOW)

    def time_passes(self, seconds: float) -> None:
        """All stamps move back; the provider forgets keys older than their window."""
        if seconds == A_WINDOW:
            self.provider.forget()
        for table, columns in (
            ("campaign_batches", ("lease_until", "key_used_at", "done_at")),
            ("campaign_targets", ("lease_until", "key_used_at", "not_before", "outcome_at")),
        ):
            moved = ", ".join(f"{c} = {c} - %(age)s * interval '1 s'" for c in columns)
            touched = " OR ".join(f"{c} IS NOT NULL" for c in columns)
            self.sql(
                f"UPDATE {table} SET {moved} WHERE campaign_id = %(campaign)s AND ({touched})",
                age=seconds,
            )
        for process in (*self.processes, *self.killed):
            process.age(seconds)
        for member, (lease, _) in self.last_claim.items():
            # Lost for good, though other single rows of the lease may still be extended.
            if lease.until <= time.monotonic():
                self.last_claim[member] = (lease, State.PENDING)

    def opt_out_or_in(self, row: int) -> None:
        if (member := self.a_row(row)) is not None:
            self.write("opted_out_at = CASE WHEN opted_out_at IS NULL THEN now() END", member)

    def change_address(self, row: int) -> None:
        if (member := self.a_row(row)) is not None:
            self.write(f"email = 'm{member}.{next(self.versions)}@example.com'", member)

    def change_priority(self, row: int) -> None:
        """Of a row that no open batch has claimed: another could claim it beside that one."""
        if (member := self.a_row(row)) is not None:
            self.write(
                "priority = 1 - priority",
                member,
                "member_id <> ALL (ARRAY(SELECT unnest(claimed_ids) FROM campaign_batches"
                " WHERE campaign_id = %(campaign)s AND done_at IS NULL))",
            )

    def load_late(self, members: list[int], priority: int) -> None:
        for member in set(members) - {*self.rows, *self.last_claim}:
            self.load_row(member, priority)

    def delete(self, row: int) -> None:
        if (member := self.a_row(row)) is None:
            return
        self.sql(
            "DELETE FROM campaign_targets"
            " WHERE campaign_id = %(campaign)s AND member_id = %(member)s",
            member=member,
        )
        self.rows.remove(member)

    def requeue(self) -> None:
        self.sql(
            "UPDATE campaign_targets SET state = 'pending', not_before = clock_timestamp(),"
            " attempts = 0, unknowns = 0, lost_claims = 0, reason = 'requeued',"
            " content_hash = CASE WHEN key_used_at IS NOT NULL THEN content_hash END"
            " WHERE campaign_id = %(campaign)s AND state = 'failed' AND sent_at IS NULL"
        )

    @rule(step=STEPS)
    def step(self, step: tuple[Any, ...]) -> None:
        """One rule for all: rules of their own are left out of most examples, many at a time."""
        name, *args = step
        getattr(self, name)(*args)

    # --- what must hold ---------------------------------------------------------------------------

    @invariant()
    def the_ledger_is_in_order(self) -> None:
        """One statement for all of it: this runs after every step."""
        ((total, sent, failed, overlaps, twice),) = self.sql(_ORDER)
        delivered = set(self.provider.delivered)
        assert total == len(self.rows), "the counts do not add up"
        assert overlaps == [], "ranges of open batches overlap"
        assert twice == [], "a row is under two live leases"
        assert set(sent) <= delivered, "a row is sent and was not delivered"
        assert not set(failed) & delivered, "a row is failed and was delivered"

    def states(self) -> dict[int, str]:
        return dict(
            self.sql(
                "SELECT member_id, CASE WHEN sent_at IS NOT NULL THEN 'sent'"
                " WHEN state = 'pending' AND opted_out_at IS NOT NULL THEN 'skipped'"
                " ELSE state END FROM campaign_targets WHERE campaign_id = %(campaign)s"
            )
        )

    def teardown(self) -> None:
        """The end of a campaign: everything in hand is lost, and one run goes on to the end."""
        if not self.processes:
            return
        for p in range(len(self.processes)):
            self.kill(p, missed=False)
        for _ in range(40):
            self.time_passes(A_LEASE)
            if not self._go_on(self.processes[0]):
                break
        else:
            raise AssertionError(f"never done: {self.states()}")
        told = self.states()
        assert set(told.values()) <= {"sent", "failed", "in_doubt", "skipped"}
        assert {told[m] for m in set(self.rows) & set(self.provider.delivered)} <= {
            "sent",
            "in_doubt",
            "skipped",
        }

    def _go_on(self, process: Process) -> int:
        """One round of a run that meets no fault; returns how many rows are still open."""
        self.keep_in_order(0)
        for claim in (process.store.claim_batch, process.store.claim_due):
            while (lease := self.do(claim())[0]) is not None:
                process.hold(lease)
        while process.queue:
            self.request(0, ["accepted"] * len(process.queue))
        self.record(0, len(process.in_flight), last=False, write=True)
        return self.do(process.store.counts()).open


@pytest.fixture(scope="module")
def environment(postgres, template) -> Iterator[Environment]:
    """One loop, pool and connection for all examples; each example is a campaign of its own."""

    clone = _clone(postgres, template)
    dsn = next(clone)
    with asyncio.Runner() as runner:
        database = Database(dsn)
        runner.run(database.__aenter__())
        application = runner.run(psycopg.AsyncConnection.connect(dsn, autocommit=True))
        yield Environment(dsn, runner, database, application)
        runner.run(application.close())
        runner.run(database.__aexit__())
    next(clone, None)


def _run(environment: Environment, **changes: Any) -> None:
    class Machine(LedgerMachine):
        pass

    Machine.environment = environment
    run_state_machine_as_test(
        Machine,
        settings=settings(
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
            **changes,
        ),
    )


@pytest.mark.slow
def test_any_order_of_claims_kills_and_changes(environment):
    _run(environment, max_examples=40, stateful_step_count=40, derandomize=True)


@pytest.mark.chaos
@pytest.mark.skipif(os.environ.get("SENDER_CHAOS") != "long", reason="the long form")
def test_any_order_of_claims_kills_and_changes_for_long(environment):
    _run(environment, max_examples=3000, stateful_step_count=60, print_blob=True)


# --- sequences found on the way, step by step -----------------------------------------------------


@pytest.fixture
def machine(environment) -> Iterator[LedgerMachine]:
    """A campaign of one row in one batch, ended as every example is."""
    LedgerMachine.environment = environment
    machine = LedgerMachine()
    machine.begin([0])
    yield machine
    machine.the_ledger_is_in_order()
    machine.teardown()


def _play(machine: LedgerMachine, *steps: tuple[Any, ...]) -> dict[int, str]:
    for step in steps:
        machine.step(step)
        machine.the_ledger_is_in_order()
    return machine.states()


_LOSE = (("claim_and_request", 0, ["accepted"] * 3), ("kill", 0, True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "meanwhile",
    [
        # Seen at the look of the next claim, before that claim, before the batch is split or swept.
        [("claim", 1), ("opt_out_or_in", 0), ("request", 1, ["accepted"]), ("record", 1, 0, 0, 1)],
        [("opt_out_or_in", 0), ("claim", 1), ("record", 1, 0, False, True)],
        [("opt_out_or_in", 0), ("a_window_passes",), ("keep_in_order", 1)],
    ],
)
def test_who_opts_out_of_a_lost_claim_and_in_again_much_later_is_not_mailed_as_if_new(
    machine, meanwhile
):
    told = _play(machine, *_LOSE, *meanwhile)
    assert told == {10: "skipped"}
    told = _play(machine, ("a_window_passes",), ("opt_out_or_in", 0), ("keep_in_order", 1))
    _play(machine, ("claim_and_request", 1, ["accepted"]))
    assert machine.provider.delivered == [10]


@pytest.mark.slow
def test_a_lost_batch_is_claimed_whole_by_a_run_with_smaller_batches(machine):
    machine.load_late([20, 30], 0)
    _play(machine, ("record", 0, 0, False, True))
    machine.sql("DELETE FROM campaign_batches WHERE campaign_id = %(campaign)s")
    _play(machine, *_LOSE)
    assert sorted(machine.provider.delivered) == [10, 20, 30]
    # The second process takes one row a claim; it must not leave the others without their stamp.
    _play(machine, ("claim", 1))
    assert len(machine.processes[1].queue) == 3


@pytest.mark.slow
def test_rows_loaded_into_a_lost_range_do_not_push_its_rows_out(machine):
    machine.load_late([20, 30], 0)
    machine.sql("DELETE FROM campaign_batches WHERE campaign_id = %(campaign)s")
    _play(machine, *_LOSE, ("load_late", [11, 12, 13], 0), ("claim", 0))
    assert [t.member_id for t in machine.processes[0].queue] == [10, 20, 30]


@pytest.mark.slow
@pytest.mark.parametrize("singly", [False, True])
def test_a_row_that_a_lost_claim_may_have_sent_never_ends_as_failed(machine, singly):
    if singly:
        machine.sql(
            "UPDATE campaign_targets SET not_before = now() WHERE campaign_id = %(campaign)s"
        )
    fails = ("claim_request_and_record", 1, ["failed"])
    told = _play(machine, *_LOSE, fails, ("a_lease_passes",), fails)
    assert told == {10: "in_doubt"}


@pytest.mark.slow
def test_a_look_does_not_name_rows_of_a_batch_that_is_lost(machine):
    _play(machine, ("claim", 0), ("a_lease_passes",))
    process = machine.processes[0]
    look = machine.do(process.store.look(process.queue))
    assert (look.ready, len(look.lost)) == (frozenset(), 1)


@pytest.mark.slow
def test_a_row_that_changes_its_priority_stays_with_the_claim_that_has_it(machine):
    _play(machine, ("claim", 0))
    machine.write("priority = 1", 10)
    _play(machine, ("keep_in_order", 1), ("claim", 1))
    assert machine.processes[1].queue == []


@pytest.mark.slow
@pytest.mark.parametrize(("late", "then"), [("refused", "failed"), ("accepted", "accepted")])
def test_a_late_answer_is_not_written_under_the_next_claim_of_the_same_process(machine, late, then):
    """It lost the batch, claimed it again, and writes what both claims brought together."""
    _play(machine, ("claim_and_request", 0, [late]), ("a_lease_passes",))
    _play(machine, ("claim_and_request", 0, [then]), ("record", 0, 2, False, False))
    process = machine.processes[0]
    lost, held = process.leases
    outcomes = process.finisher._outcomes
    recorded = machine.do(process.store.finish(outcomes, {lost: Fate.DONE, held: Fate.DONE}))
    process.finisher._outcomes = []
    assert [o.target.lease for o in recorded.taken] == [held]
    assert machine.states() == {10: "sent" if then == "accepted" else "pending"}


@pytest.mark.slow
def test_a_lease_that_was_lost_is_not_renewed_by_the_next_claim_of_the_same_process(machine):
    _play(machine, ("claim", 0), ("a_lease_passes",), ("claim", 0))
    process = machine.processes[0]
    lost, held = process.leases
    recorded = machine.do(process.store.finish([], {lost: Fate.KEEP, held: Fate.KEEP}))
    assert recorded.held == {held.claim_id}
