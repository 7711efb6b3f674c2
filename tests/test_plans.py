"""Every text of `sender.queries`, run and explained at 0, 50 and 99 % of 50,000 rows not analysed.

The texts and their values are taken from the store itself, which is asked while the campaign
progresses through it: so what is explained is what runs, cursor included.
"""

import asyncio
import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from conftest import _clone, add_targets
from ledger import CAMPAIGN, config
from ledger import stores as stores
from psycopg import sql

from sender import queries
from sender.domain import Fate, Lease, Outcome, State
from sender.ports import StoreUnavailable
from sender.store import PostgresStore

ROWS, DUE_ROWS, SIZE = 50_000, 5_000, 100
BATCHES, DUE_CLAIMS = (ROWS - DUE_ROWS) // SIZE, DUE_ROWS // SIZE
LEVELS = (0, 50, 99)
# A plan made for its values, as behind a pooler, and the one that is kept after five executions.
PLAN_MODES = ("force_custom_plan", "force_generic_plan")

ROOMS = (queries.claim, queries.ledger, queries.look, queries.record, queries.sweep)
TEXTS = {
    text: name
    for room in ROOMS
    for name, text in vars(room).items()
    if isinstance(text, str) and text.lstrip().startswith(("SELECT", "INSERT", "UPDATE", "WITH"))
}
HOT = ("CLAIM_BATCH", "CLAIM_DUE", "LOOK", "FINISH", "EXTEND")
# These read the campaign by design, a few times a run.
READ_ALL = {"BUILD", "ADOPT", "COUNTS"}


class _Asked(Exception):
    """The store wanted the answer to a statement."""


@dataclass
class _Ear:
    """Stands in for the database of a store and hears what is asked of it."""

    heard: list[tuple[str, dict[str, object]]] = field(default_factory=list)

    async def one(self, query: str, values: Mapping[str, object], **_: object) -> Any:
        self.heard.append((query, dict(values)))
        if query is queries.ledger.CAMPAIGN_EXISTS:
            return (True,)
        raise _Asked

    async def all(self, query: str, values: Mapping[str, object]) -> list[Any]:
        self.heard.append((query, dict(values)))
        return []

    async def run(self, query: str, values: Mapping[str, object], **_: object) -> int:
        self.heard.append((query, dict(values)))
        return 0


async def statements_of(store: PostgresStore, method: str, *args: object) -> list[tuple[str, dict]]:
    """What the store would run for this call, as it stands now."""
    ear = _Ear()
    double = copy.copy(store)
    double._database = ear
    with suppress(_Asked):
        await getattr(double, method)(*args)
    return ear.heard


@dataclass(frozen=True)
class Plan:
    """An executed plan: what it touched, and its nodes."""

    buffers: int
    nodes: tuple[dict[str, Any], ...]

    def scans(self, table: str) -> list[dict[str, Any]]:
        """The nodes that found rows of `table`, or index entries of it."""
        return [
            node
            for node in self.nodes
            if "Scan" in node["Node Type"]
            and (
                node.get("Relation Name") == table
                or node.get("Index Name", "").startswith(table + "_")
            )
        ]


def explain(conn: psycopg.Connection, mode: str, query: str, values: Mapping[str, object]) -> Plan:
    """Run a statement as a prepared one in a transaction that is rolled back."""
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", query)))
    for place, name in enumerate(names, 1):
        query = query.replace(f"%({name})s", f"${place}")
    given = sql.SQL(", ").join(sql.Literal(values[name]) for name in names)
    # The driver says what it sends, except for texts, which the server takes for what fits.
    types = ", ".join("uuid" if isinstance(values[name], UUID) else "unknown" for name in names)
    with conn.transaction(force_rollback=True):
        conn.execute(sql.SQL("SET LOCAL plan_cache_mode = {}").format(mode))
        conn.execute(f"PREPARE text {f'({types})' if types else ''} AS {query}")
        try:
            execute = sql.SQL("EXECUTE text ({})" if names else "EXECUTE text").format(given)
            row = conn.execute(
                sql.SQL("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) ") + execute
            ).fetchone()
        finally:
            conn.execute("DEALLOCATE text")
    assert row is not None
    top = row[0][0]["Plan"]
    return Plan(top["Shared Hit Blocks"] + top["Shared Read Blocks"], tuple(_walk(top)))


def _walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from _walk(child)


class Progress:
    """A campaign that moves on through the store's own statements."""

    def __init__(self, store: PostgresStore, other: PostgresStore, dsn: str) -> None:
        self._store, self._other, self._dsn = store, other, dsn
        self._batches = self._dues = 0
        self._taken: list[Lease] = []
        self.plans: dict[tuple[str, str, int, str], Plan] = {}

    async def to(self, percent: int) -> None:
        """Settle `percent` of the batches and of the single claims."""
        while self._batches < BATCHES * percent // 100:
            leases = [await self._claim() for _ in range(5)]
            self._batches += len(leases)
            await self._finish(leases)
        while self._dues < min(DUE_CLAIMS * percent // 100, DUE_CLAIMS - 2):
            lease, _ = await self._store.claim_due()
            assert lease is not None
            self._dues += 1
            await self._finish([lease])

    async def explain_all(self, level: int) -> None:
        """Explain what the store would run now, in both modes."""
        for label, query, values in await self._cases():
            with psycopg.connect(self._dsn, autocommit=True) as conn:
                for mode in PLAN_MODES:
                    plan = explain(conn, mode, query, values)
                    self.plans[TEXTS[query], label, level, mode] = plan
        # What was explained has many versions now; it is done, so that no later plan meets it.
        await self._finish(self._taken)
        self._batches += 1
        self._dues += 1

    async def _claim(self) -> Lease:
        lease, _ = await self._store.claim_batch()
        assert lease is not None
        return lease

    async def _finish(self, leases: list[Lease]) -> None:
        """Three in a hundred are not a plain yes; those that come back do so much later."""
        outcomes = []
        for lease in leases:
            for place, target in enumerate(lease.targets):
                outcome = Outcome(target, State.SENT)
                if place == 0:
                    outcome = Outcome(target, State.FAILED, reason="http_422")
                elif place <= 2:
                    outcome = Outcome(
                        target,
                        State.PENDING,
                        charged=True,
                        delay_s=7200.0,
                        key_used_at=lease.claimed_at,
                        reason="http_503",
                    )
                outcomes.append(outcome)
        recorded = await self._store.finish(outcomes, dict.fromkeys(leases, Fate.DONE))
        assert len(recorded.taken) == len(outcomes)

    async def _cases(self) -> list[tuple[str, str, dict[str, object]]]:
        """Each text with the values of this moment; also a few situations of their own."""
        store = self._store
        held, single = await self._claim(), (await store.claim_due())[0]
        assert single is not None
        targets = [*held.targets, *single.targets]
        calls: list[tuple[str, str, tuple[object, ...]]] = [
            ("", "open_campaign", ()),
            ("", "build", ()),
            ("", "claim_batch", ()),
            ("", "claim_due", ()),
            ("", "look", (targets,)),
            ("", "control", ()),
            ("", "block", (10.0,)),
            ("", "finish", (_outcomes(held, single), {held: Fate.DONE, single: Fate.DONE})),
            ("all deferred", "finish", (_deferred(held), {held: Fate.KEEP})),
            ("", "extend", ([held, single], single.targets)),
            ("", "locked", (targets,)),
            ("", "sweep", ()),
            ("", "adopt", ()),
            ("", "due", ()),
            ("", "counts", ()),
            ("", "remaining", ()),
        ]
        cases = [
            (f"{label}{' from the start' if values.get('after') == 0 else ''}", query, values)
            for label, method, args in calls
            for query, values in await statements_of(store, method, *args)
        ]
        # What is lost comes back: once it is claimed again, once it is too old for that.
        lost, _ = await self._other.claim_batch()
        assert lost is not None
        async with await psycopg.AsyncConnection.connect(self._dsn, autocommit=True) as conn:
            await conn.execute(
                "UPDATE campaign_batches SET lease_until = now() - interval '1 s',"
                " key_used_at = now() - interval '1 h' WHERE batch_no = %s",
                [lost.batch_no],
            )
            await conn.execute(
                "UPDATE campaign_targets SET email = 'new@example.com' WHERE member_id = %s",
                [lost.targets[0].member_id],
            )
        for query, values in await statements_of(self._other, "claim_batch"):
            cases.append(("lost", query, {**values, "after": lost.batch_no - 1}))
        for query, values in await statements_of(self._other, "sweep"):
            cases.append(("too old", query, {**values, "usable_s": 60.0}))
        self._other._cut_off = [held.claim_id, single.claim_id]
        cases.append(("", *(await statements_of(self._other, "claim_batch"))[0]))
        self._other._cut_off = []
        self._taken = [held, single]
        return cases


def _outcomes(batch: Lease, single: Lease) -> list[Outcome]:
    sent = [Outcome(t, State.SENT) for lease in (batch, single) for t in lease.targets[5:]]
    return sent + _deferred(batch)[:5] + _deferred(single)[:5]


def _deferred(lease: Lease) -> list[Outcome]:
    used = lease.claimed_at - timedelta(seconds=1)
    return [Outcome(t, State.PENDING, charged=True, key_used_at=used) for t in lease.targets]


async def _run_through(dsn: str) -> dict[tuple[str, str, int, str], Plan]:
    await add_targets(dsn, CAMPAIGN, ROWS - DUE_ROWS)
    await add_targets(dsn, CAMPAIGN, DUE_ROWS, first=10**6, not_before="2020-01-01")
    changes = {"batch_size": SIZE, "usable_s": 86_000.0}
    async with (
        PostgresStore(config(dsn, **changes)) as store,
        PostgresStore(config(dsn, **changes)) as other,
    ):
        assert await store.open_campaign()
        assert await store.build() == BATCHES
        store._after_since += 3600  # however slow this machine is, the cursor stays where it is
        progress = Progress(store, other, dsn)
        for level in LEVELS:
            await progress.to(level)
            await progress.explain_all(level)
    return progress.plans


@pytest.fixture(scope="module", params=["alone", "beside a snapshot held open"])
def plans(request, postgres, template) -> dict[tuple[str, str, int, str], Plan]:
    """All plans, from one campaign that went from its start to its end."""
    with contextmanager(_clone)(postgres, template) as dsn, psycopg.connect(dsn) as reader:
        if request.param != "alone":
            reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            reader.execute("SELECT count(*) FROM campaign_targets")
        plans = asyncio.run(_run_through(dsn))
        reader.rollback()
        analysed = reader.execute(
            "SELECT relname FROM pg_class"
            " WHERE relname IN ('campaign_targets', 'campaign_batches') AND reltuples >= 0"
        )
        assert analysed.fetchall() == []
    return plans


def test_every_text_is_explained_at_every_level(plans):
    explained = {(name, level, mode) for name, _, level, mode in plans}
    assert explained == {
        (name, level, mode) for name in TEXTS.values() for level in LEVELS for mode in PLAN_MODES
    }


def test_no_text_but_the_counts_reads_all_targets(plans):
    read_all = {
        name
        for (name, *_), plan in plans.items()
        for scan in plan.scans("campaign_targets")
        if scan["Node Type"] == "Seq Scan"
    }
    assert read_all <= READ_ALL


@pytest.mark.parametrize("name", HOT)
@pytest.mark.parametrize("table", ["campaign_targets", "campaign_batches"])
def test_hot_texts_find_rows_by_the_whole_key(plans, name, table):
    """A scan by the campaign alone would look like an index scan and read everything."""
    found = [
        (case, scan["Index Cond"])
        for case, plan in plans.items()
        if case[0] == name
        for scan in plan.scans(table)
        if scan["Node Type"] != "Bitmap Heap Scan"
    ]
    assert found or (name, table) == ("CLAIM_DUE", "campaign_batches")
    assert [x for x in found if not re.search("member_id|not_before|batch_no", x[1])] == []


@pytest.mark.parametrize("name", HOT)
def test_hot_texts_visit_few_rows_more_than_they_take(plans, name):
    """Also at 99 %: 100 rows of each kind are in play, the single ones with their dead versions."""
    visited = {
        case: max(
            node["Actual Loops"]
            * (
                node["Actual Rows"]
                + node.get("Rows Removed by Filter", 0)
                + node.get("Rows Removed by Index Recheck", 0)
            )
            for node in plan.nodes
        )
        for case, plan in plans.items()
        if case[0] == name and "from the start" not in case[1]
    }
    assert {case: n for case, n in visited.items() if n > 6 * SIZE} == {}


@pytest.mark.parametrize("name", HOT)
def test_a_hot_text_touches_no_more_at_the_end_than_at_the_beginning(plans, name):
    grown = {
        case: (plan.buffers, first)
        for case, plan in plans.items()
        if case[0] == name and case[2] == 99 and "from the start" not in case[1]
        if plan.buffers > 1.5 * (first := plans[(*case[:2], 0, case[3])].buffers)
    }
    assert grown == {}


async def test_a_claim_reads_a_window_of_numbers_and_never_all_open_batches(dsn, stores):
    """On a table never analysed the planner takes a batch for one of very few: it would read and
    sort all of them for the first. At the few hundred batches above it does not yet.
    """
    await add_targets(dsn, CAMPAIGN, 5_000)
    store = await stores.open(batch_size=2)
    assert await store.build() == 2_500
    ((query, values),) = await statements_of(store, "claim_batch")
    with psycopg.connect(dsn, autocommit=True) as conn:
        plans = [explain(conn, mode, query, values) for mode in PLAN_MODES]
    read = [
        scan["Actual Loops"] * (scan["Actual Rows"] + scan.get("Rows Removed by Filter", 0))
        for plan in plans
        for scan in plan.scans("campaign_batches")
    ]
    assert read
    assert max(read) <= 64


async def test_no_text_reads_all_targets_of_a_table_analysed_while_nothing_was_due(dsn, stores):
    """As after the load: the planner knows of no time that a row may be due at."""
    await add_targets(dsn, CAMPAIGN, 20_000)
    store = await stores.open(batch_size=SIZE)
    assert await store.build() == 200
    lease, _ = await store.claim_batch()
    assert lease is not None
    calls = [("claim_batch",), ("claim_due",), ("look", lease.targets), ("sweep",), ("due",)]
    calls += [("remaining",), ("extend", [lease], lease.targets), ("locked", lease.targets)]
    calls += [("finish", _outcomes(lease, lease), {lease: Fate.DONE})]
    store._cut_off = [lease.claim_id]
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("ANALYZE")
        read_all = {
            TEXTS[query]
            for method, *args in calls
            for query, values in await statements_of(store, method, *args)
            for mode in PLAN_MODES
            for scan in explain(conn, mode, query, values).scans("campaign_targets")
            if scan["Node Type"] == "Seq Scan"
        }
    assert read_all == set()


# --- what a text sets for its own transaction -----------------------------------------------------


@pytest.fixture
def impatient(monkeypatch) -> None:
    """Texts that give way to the application after 50 ms instead of two seconds."""
    hasty = [
        (queries.claim, "CLAIM_BATCH"),
        (queries.record, "FINISH"),
        (queries.sweep, "SWEEP_BATCHES"),
        (queries.sweep, "ADOPT"),
    ]
    for room, name in hasty:
        text = getattr(room, name)
        assert "set_config('lock_timeout', '2s', true)" in text
        monkeypatch.setattr(room, name, text.replace("'2s'", "'50ms'"))


async def _finish_plain(store: PostgresStore) -> None:
    lease, _ = await store.claim_batch()
    await store.finish([Outcome(t, State.SENT) for t in lease.targets], {lease: Fate.DONE})


async def _finish_other(store: PostgresStore) -> None:
    lease, _ = await store.claim_batch()
    await store.finish(
        [Outcome(t, State.FAILED, reason="http_422") for t in lease.targets], {lease: Fate.DONE}
    )


async def _finish_single(store: PostgresStore) -> None:
    lease, _ = await store.claim_due()
    await store.finish([Outcome(t, State.SENT) for t in lease.targets], {lease: Fate.DONE})


async def _claim_changed(store: PostgresStore) -> None:
    await store.claim_batch()


async def _sweep(store: PostgresStore) -> None:
    await store.sweep()


async def _adopt(store: PostgresStore) -> None:
    await store.adopt()


_EXPIRED = "UPDATE campaign_batches SET lease_until = now() - interval '1 s'"
_DUE = "UPDATE campaign_targets SET not_before = '2020-01-01'"


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("write", "before"),
    [
        (_finish_plain, []),
        (_finish_other, []),
        (_finish_single, [_DUE]),
        (_claim_changed, ["claim", "UPDATE campaign_targets SET email = 'new@e.com'", _EXPIRED]),
        (_sweep, ["claim", _EXPIRED + ", key_used_at = '2020-01-01'"]),
        (_adopt, ["UPDATE campaign_targets SET state = 'sending'"]),
    ],
    ids=lambda x: x.__name__.lstrip("_") if callable(x) else "",
)
async def test_a_write_gives_way_to_a_row_lock_of_the_application(dsn, conn, stores, write, before):
    await add_targets(conn, CAMPAIGN, 3)
    store = await stores.open(role="postgres")  # whose role has no time-out of its own
    await store.build()
    for step in before:
        await (store.claim_batch() if step == "claim" else conn.execute(step))
    async with await psycopg.AsyncConnection.connect(dsn) as application:
        # The lock comes after a claim that skips locked rows, and before the write that waits.
        claims = store._database
        store._database = _LockBefore(claims, application)
        with pytest.raises(StoreUnavailable, match="LockNotAvailable 55P03"):
            await write(store)
        store._database = claims
    # It was set for that transaction only.
    assert {(await claims.one("SHOW lock_timeout", {}))[0] for _ in range(4)} == {"0"}


class _LockBefore:
    """A database where the application locks row 2 just before a statement that waits for it."""

    def __init__(self, database: Any, application: psycopg.AsyncConnection) -> None:
        self._database, self._application = database, application

    def __getattr__(self, name: str) -> Any:
        async def ask(query: str, values: Mapping[str, object], **more: object) -> Any:
            skips = query in {queries.claim.CLAIM_DUE, queries.sweep.SPLIT, queries.sweep.SWEEP_DUE}
            if not skips and self._application.info.transaction_status.name == "IDLE":
                lock = "SELECT FROM campaign_targets WHERE member_id = 2 FOR UPDATE"
                await self._application.execute(lock)
            return await getattr(self._database, name)(query, values, **more)

        return ask


async def test_the_look_does_not_wait_for_its_commit_to_reach_the_disk(dsn, stores):
    """Its commit is asynchronous, and the next statement's of the same session is not."""
    await add_targets(dsn, CAMPAIGN, 5)
    store = await stores.open()
    await store.build()
    lease, _ = await store.claim_batch()
    ((query, values),) = await statements_of(store, "look", lease.targets)
    behind = "SELECT pg_current_wal_flush_lsn() < pg_current_wal_insert_lsn()"
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        await conn.execute("SET synchronous_commit = on")

        async def is_behind_after(text: str, given: Mapping[str, object]) -> bool:
            await conn.execute(text, given)
            return (await (await conn.execute(behind)).fetchone())[0]

        # The server's own writer may come in between, but not every time.
        assert any([await is_behind_after(query, values) for _ in range(20)])
        block = (queries.look.BLOCK, {"account": "acct", "seconds": 0.0})
        assert not any([await is_behind_after(*block) for _ in range(5)])


@pytest.mark.slow
@pytest.mark.parametrize("held", [False, True], ids=["alone", "beside a snapshot held open"])
async def test_nearly_all_finishes_are_heap_only(dsn, held):
    await add_targets(dsn, CAMPAIGN, 5_000)
    async with await psycopg.AsyncConnection.connect(dsn) as reader:
        await reader.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        if held:
            await reader.execute("SELECT count(*) FROM campaign_targets")
        async with PostgresStore(config(dsn, batch_size=SIZE)) as store:
            await store.open_campaign()
            await store.build()
            while (lease := (await store.claim_batch())[0]) is not None:
                await store.finish(
                    [Outcome(t, State.SENT) for t in lease.targets], {lease: Fate.DONE}
                )
        await reader.rollback()
        # The store's sessions report what they did when they end, which is a moment later.
        written = 0
        async with asyncio.timeout(30):
            while written < 5_000:
                cursor = await reader.execute(
                    "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables"
                    " WHERE relname = 'campaign_targets'"
                )
                written, heap_only = await cursor.fetchone()
                await reader.rollback()
                await asyncio.sleep(0.02)
    assert written == 5_000
    assert heap_only / written > 0.95
