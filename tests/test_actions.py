"""What people do to a campaign: who is touched, what is kept, what is told, what is refused."""

import asyncio
import csv
import io
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import chain, product
from pathlib import Path
from typing import Any

import psycopg
import pytest
from chaos.harness import CAMPAIGN as TRIAL
from chaos.harness import near, trial_of
from conftest import add_targets
from psycopg import AsyncConnection
from psycopg.rows import dict_row
from typer.testing import CliRunner

from sender import cli, queries, settings, settling
from sender.actions import Author
from sender.domain import Control, Counts, Fate, Outcome, State, content_hash
from sender.errors import CampaignError, ConfigurationError, DatabaseUnavailable, SettingsError
from sender.members import HIGHEST, LOWEST
from sender.settings import CampaignSettings
from sender.settling import REQUEUE, RESOLVE, Settlement, Settling, settle
from sender.steering import steer
from sender.store import PostgresStore, StoreConfig

NOW = datetime.now(UTC)
LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)
ANN = Author("Ann", "asked the provider")
WAYS = {"sent": RESOLVE["sent"], "pending": RESOLVE["pending"], "requeue": REQUEUE}
STATES = ("pending", "sending", "sent", "failed", "in_doubt")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.all_names():
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(f"{name}_FILE", raising=False)


def of(dsn: str, campaign: str = "c") -> CampaignSettings:
    return CampaignSettings.load({"DB_DSN": dsn, "CAMPAIGN_ID": campaign})


async def do(
    dsn: str, way: Settling, named: Sequence[int] | None = None, campaign: str = "c"
) -> Settlement:
    return await settle(of(dsn, campaign), way, ANN, named)


async def rows(conn: AsyncConnection, query: str) -> list[dict[str, Any]]:
    async with conn.cursor(row_factory=dict_row) as cursor:
        return await (await cursor.execute(query)).fetchall()


async def row_of(conn: AsyncConnection, member: int) -> dict[str, Any]:
    (found,) = await rows(conn, f"SELECT * FROM campaign_targets WHERE member_id = {member}")
    return found


async def records(conn: AsyncConnection) -> list[dict[str, Any]]:
    return await rows(conn, "SELECT * FROM campaign_actions ORDER BY action_id")


async def counts(conn: AsyncConnection) -> Counts:
    return Counts(
        *(await (await conn.execute(queries.ledger.COUNTS, {"campaign": "c"})).fetchone() or ())
    )


async def waits_for_a_lock(conn: AsyncConnection) -> None:
    """Wait until a statement in this database does."""
    waiting = (
        "SELECT FROM pg_stat_activity"
        " WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    async with asyncio.timeout(20):
        while not await rows(conn, waiting):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[PostgresStore]:
    config = StoreConfig(
        dsn=dsn,
        campaign="c",
        account="a",
        rate_per_s=500,
        batch_size=10,
        lease_s=60,
        usable_s=3600,
        pace_ahead_s=0.25,
    )
    async with PostgresStore(config) as store:
        assert await store.open_campaign()
        yield store


async def send_all_due(store: PostgresStore) -> list[int]:
    """Claim what is due and record it as sent."""
    mailed: list[int] = []
    while (lease := (await store.claim_due())[0]) is not None:
        mailed += [target.member_id for target in lease.targets]
        done = [Outcome(target, State.SENT) for target in lease.targets]
        assert len((await store.finish(done, {lease: Fate.DONE})).taken) == len(done)
    return sorted(mailed)


# --- pause, resume, cancel ------------------------------------------------------------------------


async def control(conn: AsyncConnection) -> tuple[object, ...]:
    (found,) = await rows(conn, "SELECT * FROM campaigns")
    assert abs(found["control_at"] - datetime.now(UTC)) < timedelta(minutes=1)
    return found["campaign_id"], found["control"], found["control_by"], found["control_why"]


async def test_a_campaign_that_never_ran_is_paused_and_the_record_stays(
    dsn: str, conn: AsyncConnection
) -> None:
    await add_targets(conn, "c", 1)
    steered = await steer(of(dsn), Control.PAUSED, Author("Ann", "wrong template"))
    assert steered.changed
    assert await control(conn) == ("c", "paused", "Ann", "wrong template")
    (record,) = await records(conn)
    assert (record["campaign_id"], record["member_id"], record["action"]) == ("c", None, "pause")
    assert (record["by_whom"], record["why"]) == ("Ann", "wrong template")
    assert record["before"]["control"] == "run"


async def test_what_is_so_already_is_told_and_not_recorded_twice(
    dsn: str, conn: AsyncConnection
) -> None:
    await add_targets(conn, "c", 1)
    for wish in (Control.RUN, Control.PAUSED, Control.PAUSED, Control.RUN, Control.RUN):
        told = await steer(of(dsn), wish, Author(f"who wants {wish}", "w"))
    assert not told.changed
    assert told.before.control_by == "who wants run"
    assert "nothing changed" in told.line()
    assert [record["action"] for record in await records(conn)] == ["pause", "resume"]


async def test_cancel_is_lifted_by_resume_only(dsn: str, conn: AsyncConnection) -> None:
    await add_targets(conn, "c", 1)
    await steer(of(dsn), Control.PAUSED, ANN)
    await steer(of(dsn), Control.CANCELLED, Author("Bob", "wrong list"))
    with pytest.raises(CampaignError, match=r"is cancelled by Bob \(wrong list\); nothing changed"):
        await steer(of(dsn), Control.PAUSED, ANN)
    assert await control(conn) == ("c", "cancelled", "Bob", "wrong list")
    told = await steer(of(dsn), Control.RUN, ANN)
    assert "it was cancelled by Bob (wrong list)" in told.line()
    assert await control(conn) == ("c", "run", "Ann", "asked the provider")
    found = await records(conn)
    assert [record["action"] for record in found] == ["pause", "cancel", "resume"]
    befores = [(record["before"]["control"], record["before"]["control_by"]) for record in found]
    assert befores == [("run", None), ("paused", "Ann"), ("cancelled", "Bob")]


async def test_two_who_steer_at_once_follow_each_other(
    dsn: str, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_targets(conn, "c", 1)
    await steer(of(dsn), Control.PAUSED, ANN)
    monkeypatch.setattr(queries.ledger, "OPEN_CAMPAIGN", "SELECT")  # it would wait instead
    async with await AsyncConnection.connect(dsn) as other:
        await other.execute("UPDATE campaigns SET control = 'cancelled', control_by = 'Bob'")
        pausing = asyncio.create_task(steer(of(dsn), Control.PAUSED, ANN))
        await waits_for_a_lock(conn)
    with pytest.raises(CampaignError, match="is cancelled by Bob"):
        await pausing
    assert len(await records(conn)) == 1


async def test_another_campaign_is_not_steered(dsn: str, conn: AsyncConnection) -> None:
    await add_targets(conn, "c", 1)
    await add_targets(conn, "d", 1)
    await steer(of(dsn, "d"), Control.RUN, ANN)
    await steer(of(dsn), Control.CANCELLED, ANN)
    found = await rows(conn, "SELECT campaign_id, control FROM campaigns ORDER BY 1")
    assert [tuple(row.values()) for row in found] == [("c", "cancelled"), ("d", "run")]


@pytest.mark.slow
async def test_running_processes_stop_within_two_seconds_and_go_on_when_resumed(dsn: str) -> None:
    async with near(latency_s=0.1) as mail, trial_of(dsn, mail) as trial:
        await trial.load(600)
        runs = [await trial.start(MAIL_RATE_PER_S=150) for _ in range(2)]
        await mail.until(lambda stats: stats["requests"] >= 100)
        await steer(of(dsn, TRIAL), Control.PAUSED, ANN)
        ends = [await run.wait(within_s=2) for run in runs]
        assert [end.code for end in ends] == [0, 0]
        assert all("paused" in end.last["reason"] for end in ends)
        assert await trial.free()
        asked = (await mail.stats())["requests"]
        assert (await trial.run()).code == 0
        assert (await mail.stats())["requests"] == asked < 600
        await steer(of(dsn, TRIAL), Control.RUN, ANN)
        assert (await trial.run()).code == 0
        assert await trial.reckon() == {"sent": 600}


# --- resolve, requeue: which rows -----------------------------------------------------------------


@pytest.fixture
async def every_kind(conn: AsyncConnection) -> dict[str, list[int]]:
    """Rows of each state, sent or not, opted out or not; the ids by state, unsent ones only."""
    unsent: dict[str, list[int]] = {state: [] for state in STATES}
    for place, (state, sent, out) in enumerate(product(STATES, (True, False), (True, False))):
        await add_targets(
            conn,
            "c",
            1,
            first=place,
            state=state,
            sent_at=LONG_AGO if sent else None,
            opted_out_at=LONG_AGO if out else None,
            attempts=5,
            unknowns=2,
            lost_claims=4,
            key_used_at=LONG_AGO,
            outcome_at=LONG_AGO,
            reason="timeout",
            content_hash=b"x",
        )
        if not sent:
            unsent[state].append(place)
    await add_targets(conn, "another", 20, first=0, state="in_doubt")
    return unsent


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("all_of_them", [True, False])
async def test_only_rows_in_the_state_are_touched(
    dsn: str, conn: AsyncConnection, every_kind: dict[str, list[int]], way: str, all_of_them: bool
) -> None:
    everything = "SELECT xmin::text, * FROM campaign_targets ORDER BY campaign_id, member_id"
    before, told_before = await rows(conn, everything), await counts(conn)
    done = await do(dsn, WAYS[way], None if all_of_them else range(20))
    after = await rows(conn, everything)
    touched = every_kind[WAYS[way].state]
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert [row["member_id"] for row in changed] == touched
    assert {row["campaign_id"] for row in changed} == {"c"}
    assert done.settled == len(touched) == 2
    assert [record["member_id"] for record in await records(conn)] == touched
    assert sum(map(len, done.left.values())) == (0 if all_of_them else 18)
    told = await counts(conn)
    assert told.total == told_before.total
    assert getattr(told, WAYS[way].state) == getattr(told_before, WAYS[way].state) - 2
    assert told.sent == told_before.sent + (2 if way == "sent" else 0)
    assert told.skipped == told_before.skipped + (0 if way == "sent" else 1)


async def test_what_is_left_is_told_as_people_know_it(
    dsn: str, every_kind: dict[str, list[int]]
) -> None:
    done = await do(dsn, REQUEUE, range(20))
    assert {state: len(ids) for state, ids in done.left.items()} == {
        "sent": 12,
        "skipped": 1,
        "pending": 1,
        "sending": 2,
        "in_doubt": 2,
    }
    assert done.left["in_doubt"] == every_kind["in_doubt"]
    assert "2 rows left: in doubt, members 18, 19" in done.lines()
    assert any("0, 1, 4, 5, 8, 9, 10, 11, 12, 13 and 2 more" in line for line in done.lines())


@pytest.mark.parametrize("way", WAYS)
async def test_to_repeat_changes_nothing(
    dsn: str, conn: AsyncConnection, every_kind: dict[str, list[int]], way: str
) -> None:
    touched = every_kind[WAYS[way].state]
    assert (await do(dsn, WAYS[way], touched)).settled == 2
    before = await rows(conn, "SELECT xmin::text, * FROM campaign_targets ORDER BY 2, 3")
    again = await do(dsn, WAYS[way], touched)
    assert again.settled == (await do(dsn, WAYS[way])).settled == 0
    assert sorted(chain.from_iterable(again.left.values())) == touched
    assert await rows(conn, "SELECT xmin::text, * FROM campaign_targets ORDER BY 2, 3") == before
    assert len(await records(conn)) == 2


@pytest.mark.parametrize("way", WAYS)
async def test_the_record_tells_who_why_and_what_the_row_was(
    dsn: str, conn: AsyncConnection, every_kind: dict[str, list[int]], way: str
) -> None:
    member = every_kind[WAYS[way].state][0]
    await do(dsn, WAYS[way], [member])
    (record,) = await records(conn)
    assert abs(record.pop("at") - datetime.now(UTC)) < timedelta(minutes=1)
    before, action = record.pop("before"), record.pop("action")
    assert action == {"sent": "resolve_sent", "pending": "resolve_pending"}.get(way, way)
    assert record["campaign_id"] == "c"
    assert (record["member_id"], record["by_whom"]) == (member, "Ann")
    assert record["why"] == "asked the provider"
    times = [datetime.fromisoformat(before.pop(name)) for name in ("key_used_at", "outcome_at")]
    assert times == [LONG_AGO, LONG_AGO]
    assert before == {
        "state": WAYS[way].state,
        "attempts": 5,
        "unknowns": 2,
        "lost_claims": 4,
        "reason": "timeout",
    }


# --- resolve, requeue: what becomes of them -------------------------------------------------------


async def add_doubted(conn: AsyncConnection, n: int, **columns: object) -> None:
    columns = {"key_used_at": NOW - timedelta(hours=30), "attempts": 5, "unknowns": 1, **columns}
    await add_targets(conn, "c", n, state="in_doubt", outcome_at=NOW, content_hash=b"x", **columns)


async def test_resolved_as_sent_is_sent_for_good(dsn: str, conn: AsyncConnection) -> None:
    await add_doubted(conn, 3, reason="timeout")
    assert (await do(dsn, RESOLVE["sent"], [1, 2])).settled == 2
    row = await row_of(conn, 1)
    assert (row["state"], row["reason"], row["not_before"]) == ("sent", None, None)
    assert abs(row["sent_at"] - datetime.now(UTC)) < timedelta(minutes=1)
    assert await counts(conn) == Counts(sent=2, in_doubt=1)
    async with opened(dsn) as store:
        assert await store.build() == 0
        assert await send_all_due(store) == []


async def test_resolved_as_pending_is_claimed_and_sent_once(
    dsn: str, conn: AsyncConnection
) -> None:
    await add_doubted(conn, 3, reason="key_too_old")
    await conn.execute("UPDATE campaign_targets SET email = 'corrected@example.com'")
    assert (await do(dsn, RESOLVE["pending"], [1, 3])).settled == 2
    row = await row_of(conn, 1)
    nothing = ("key_used_at", "content_hash", "claim_id", "lease_until")
    assert [row[name] for name in nothing] == [None] * 4
    assert [row[name] for name in ("attempts", "unknowns", "lost_claims")] == [0, 0, 0]
    async with opened(dsn) as store:
        assert await store.build() == 0
        assert await store.sweep() == []
        assert await send_all_due(store) == [1, 3]
        assert await send_all_due(store) == []
    assert await counts(conn) == Counts(sent=2, in_doubt=1)


async def test_a_row_that_kills_comes_back_alone(dsn: str, conn: AsyncConnection) -> None:
    await add_doubted(conn, 1, reason="lost_too_often", lost_claims=5)
    await add_targets(conn, "c", 2, first=2, not_before=NOW - timedelta(minutes=1))
    await do(dsn, RESOLVE["pending"])
    async with opened(dsn) as store:
        assert await store.sweep() == []
        leases = [(await store.claim_due())[0] for _ in range(2)]
    claimed = [[t.member_id for t in lease.targets] for lease in leases if lease]
    assert sorted(map(sorted, claimed)) == [[1], [2, 3]]


async def test_requeued_rows_are_tried_again_with_what_was_corrected(
    dsn: str, conn: AsyncConnection
) -> None:
    await add_targets(
        conn, "c", 3, state="failed", attempts=5, reason="http_422", content_hash=b"old address"
    )
    await conn.execute("UPDATE campaign_targets SET opted_out_at = now() WHERE member_id = 2")
    assert (await do(dsn, REQUEUE)).settled == 3
    assert await counts(conn) == Counts(pending=2, skipped=1)
    assert (await row_of(conn, 1))["content_hash"] is None
    async with opened(dsn) as store:
        assert await send_all_due(store) == [1, 3]
        await conn.execute("UPDATE campaign_targets SET opted_out_at = NULL")
        assert await send_all_due(store) == [2]
    assert await counts(conn) == Counts(sent=3)


async def test_a_requeued_row_whose_key_may_be_in_use_keeps_key_and_content(
    dsn: str, conn: AsyncConnection
) -> None:
    def hashed(member: int) -> bytes:
        return content_hash(f"member{member}@example.com", None)

    used = {1: NOW, 2: NOW - timedelta(hours=2), 3: NOW}
    await add_targets(conn, "c", 3, state="failed", key_used_at=used.get, content_hash=hashed)
    await conn.execute("UPDATE campaign_targets SET email = 'n@example.com' WHERE member_id = 3")
    await do(dsn, REQUEUE)
    async with opened(dsn) as store:
        assert [(s.member_id, s.reason) for s in await store.sweep()] == [(2, "key_too_old")]
        lease, changed = await store.claim_due()
    assert lease
    assert [(t.member_id, t.key_used_at) for t in lease.targets] == [(1, NOW)]
    assert [row.member_id for row in changed] == [3]


# --- resolve, requeue: beside runs and the application --------------------------------------------


async def test_rows_that_a_run_holds_stay_with_it(dsn: str, conn: AsyncConnection) -> None:
    await add_targets(conn, "c", 2)
    await add_targets(conn, "c", 2, first=11, not_before=NOW - timedelta(minutes=1))
    async with opened(dsn) as store:
        await store.build()
        leases = [(await store.claim_batch())[0], (await store.claim_due())[0]]
        for way in WAYS.values():
            assert (await do(dsn, way, [1, 2, 11, 12])).settled == 0
            assert (await do(dsn, way)).settled == 0
        for lease in filter(None, leases):
            done = [Outcome(target, State.SENT) for target in lease.targets]
            assert len((await store.finish(done, {lease: Fate.DONE})).taken) == 2
    assert await counts(conn) == Counts(sent=4)


@pytest.mark.parametrize("way", RESOLVE)
async def test_a_late_yes_that_is_being_written_wins(
    dsn: str, conn: AsyncConnection, way: str
) -> None:
    await add_doubted(conn, 3)
    async with await AsyncConnection.connect(dsn) as other:
        await other.execute(
            "UPDATE campaign_targets SET state = 'sent', sent_at = '2026-01-01Z'"
            " WHERE member_id = 2"
        )
        resolving = asyncio.create_task(do(dsn, RESOLVE[way], [1, 2, 3]))
        await waits_for_a_lock(conn)
    done = await resolving
    assert (done.settled, done.left) == (2, {"sent": [2]})
    assert (await row_of(conn, 2))["sent_at"] == LONG_AGO
    assert [record["member_id"] for record in await records(conn)] == [1, 3]


async def test_a_row_that_the_application_was_changing_is_settled_too(
    dsn: str, conn: AsyncConnection
) -> None:
    await add_doubted(conn, 3, reason="timeout")
    async with await AsyncConnection.connect(dsn) as other:
        await other.execute("UPDATE campaign_targets SET attempts = 7 WHERE member_id = 2")
        resolving = asyncio.create_task(do(dsn, RESOLVE["pending"]))
        await waits_for_a_lock(conn)
    assert (await resolving).settled == 3
    assert [record["before"]["attempts"] for record in await records(conn)] == [5, 7, 5]


@pytest.mark.slow
async def test_it_gives_way_to_locks_of_the_application(
    dsn: str, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "_SLICE", 2)
    monkeypatch.setattr(settling, "_LOCKS_PATIENCE_S", 0.5)
    await add_doubted(conn, 4)
    async with await AsyncConnection.connect(dsn) as other:
        await other.execute("SELECT FROM campaign_targets WHERE member_id = 4 FOR UPDATE")
        with pytest.raises(DatabaseUnavailable, match="other transactions hold the rows"):
            async with asyncio.timeout(20):
                await do(dsn, RESOLVE["sent"])
        # What the failed slice had locked is free, what went before is done.
        await other.execute("SET lock_timeout = '100ms'")
        await other.execute("UPDATE campaign_targets SET email = 'x' WHERE member_id = 3")
    assert await counts(conn) == Counts(sent=2, in_doubt=2)
    assert (await do(dsn, RESOLVE["sent"])).settled == 2


async def test_a_thousand_rows_a_transaction_and_no_row_missed(
    dsn: str, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "_SLICE", 3)
    monkeypatch.setattr(settling, "_PAGE", 6)
    await add_doubted(conn, 10)
    await add_doubted(conn, 1, first=LOWEST)
    await add_doubted(conn, 1, first=HIGHEST)
    assert (await do(dsn, RESOLVE["pending"])).settled == 12
    found = await rows(conn, "SELECT count(*) n, xmin::text FROM campaign_actions GROUP BY 2")
    assert [row["n"] for row in found] == [3, 3, 3, 3]
    await conn.execute("UPDATE campaign_targets SET state = 'failed'")
    assert (await do(dsn, REQUEUE, sorted([LOWEST, HIGHEST, *range(1, 11)]))).settled == 12
    assert len(await records(conn)) == 24


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_a_list_made_for_another_campaign_changes_nothing(
    dsn: str, conn: AsyncConnection, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "_SLICE", 2)
    await add_targets(conn, "c", 3, state=WAYS[way].state)
    with pytest.raises(SettingsError, match="campaign c does not have members 4, 5; nothing was"):
        await do(dsn, WAYS[way], [1, 2, 3, 4, 5])
    assert await records(conn) == []


async def test_all_rows_are_taken_only_when_asked_for(dsn: str, conn: AsyncConnection) -> None:
    await add_doubted(conn, 3)
    for way, told in ((RESOLVE["sent"], "3 rows of campaign c are in doubt"), (REQUEUE, "0 rows")):
        with pytest.raises(SettingsError, match=f"or all with --all: {told}"):
            await do(dsn, way, [])
    assert await records(conn) == []


@pytest.mark.parametrize(
    ("by", "why", "told"),
    [
        ("", " \t", ["--by: must not be empty", "--why: must not be empty"]),
        ("A\nnn", "w", ["--by: must be one line of text"]),
        ("Ann", "\x1b[2J", ["--why: must be one line of text"]),
        ("Ann", "w" * 1001, ["--why: is longer than 1000 characters"]),
    ],
)
def test_who_and_why_must_be_said(by: str, why: str, told: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        Author.of(by, why)
    assert list(caught.value.faults) == told


async def test_rights_and_standbys_are_told(dsn: str, conn: AsyncConnection) -> None:
    await add_doubted(conn, 1)
    await conn.execute("CREATE ROLE looker LOGIN")
    await conn.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO looker")
    try:
        looker = psycopg.conninfo.make_conninfo(dsn, user="looker")
        with pytest.raises(ConfigurationError, match="permission denied for table campaign"):
            await do(looker, RESOLVE["sent"])
        with pytest.raises(ConfigurationError, match="permission denied for table campaigns"):
            await steer(of(looker), Control.PAUSED, ANN)
    finally:
        await conn.execute("DROP OWNED BY looker")
        await conn.execute("DROP ROLE looker")
    standby = f"{dsn}{'&' if '?' in dsn else '?'}options=-cdefault_transaction_read_only%3Don"
    with pytest.raises(DatabaseUnavailable, match="is it a standby"):
        await do(standby, RESOLVE["sent"])


# --- the commands ---------------------------------------------------------------------------------

SAID = ("--by", "Ann", "--why", "asked the provider")
DOUBTED = 'Lost\x1b[1m after 202 to ann@example.com, "x"'


def invoked(dsn: str, *arguments: str, stdin: str | bytes | None = None) -> Any:
    env = {"DB_DSN": dsn, "CAMPAIGN_ID": "c"}
    return CliRunner().invoke(cli.app, arguments, env=env, input=stdin)


@pytest.fixture
async def doubted(dsn: str) -> AsyncIterator[str]:
    """A campaign of two failed rows and three in doubt."""
    async with await AsyncConnection.connect(dsn, autocommit=True) as conn:
        await add_targets(conn, "c", 2, state="failed", reason="+1\tpermanent")
        await add_doubted(conn, 3, first=11, reason=DOUBTED)
        yield dsn


def test_the_commands_for_people_and_programs(doubted: str) -> None:
    shown = invoked(doubted, "pause", *SAID)
    assert shown.exit_code == 0
    assert shown.stdout.startswith("campaign c is paused: every run of it stops within 2 s")
    assert "paused by Ann: asked the provider" in invoked(doubted, "status").stdout
    told = json.loads(invoked(doubted, "cancel", *SAID, "--json").stdout)
    assert (told["control"], told["changed"]) == ("cancelled", True)
    assert (told["before"]["control"], told["before"]["control_by"]) == ("paused", "Ann")
    refused = invoked(doubted, "pause", *SAID)
    assert (refused.exit_code, refused.stderr.count("\n")) == (78, 1)
    assert "may run" in invoked(doubted, "resume", *SAID).stdout

    shown = invoked(doubted, "resolve", "--as", "sent", *SAID, "--member", "11", "--member", "1")
    assert shown.stdout.splitlines() == [
        "1 row that was in doubt is taken for sent",
        "1 row left: failed, member 1",
    ]
    told = json.loads(
        invoked(doubted, "resolve", "--as", "pending", *SAID, "--all", "--json").stdout
    )
    assert told == {"campaign": "c", "action": "resolve_pending", "settled": 2, "left": {}}
    shown = invoked(doubted, "requeue", *SAID, "--all", "--state", "failed")
    assert shown.stdout.startswith("2 rows that were failed are tried again by the next sender run")


def test_a_list_of_failures_can_be_given_back(doubted: str, tmp_path: Path) -> None:
    shown = invoked(doubted, "failures", "--state", "failed", "--csv").stdout
    listed = tmp_path / "list.csv"
    listed.write_text("\ufeff" + shown.replace("\n", "\r\n") + "\r\n")
    assert "2 rows" in invoked(doubted, "requeue", *SAID, "--file", str(listed)).stdout
    semicolons = 'member_id;name\n\n"11";Ann\n 12 ;Bob\n'
    given = invoked(
        doubted, "resolve", "--as", "sent", *SAID, "--file", "-", "--member", "13", stdin=semicolons
    )
    assert given.stdout == "3 rows that were in doubt are taken for sent\n"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", ["--file: holds no member id"]),
        (b"member_id\n\n", ["--file: holds no member id"]),
        (b"11\nann@example.com\n12,x\n1e3\n", ["line 2", "line 4"]),
        (b"9223372036854775808\n1_1\n", ["line 1", "line 2"]),
        ("11\n\u0661\n".encode(), ["line 2"]),
        ("11\n".encode("utf-16"), ["--file: is not UTF-8 text"]),
        (b"x\n" * 12, [*(f"line {n}" for n in range(1, 11)), "and 2 more such lines"]),
    ],
)
def test_what_is_wrong_in_a_file_is_told_by_line_and_not_repeated(
    doubted: str, content: bytes, told: list[str]
) -> None:
    ended = invoked(doubted, "resolve", "--as", "sent", *SAID, "--file", "-", stdin=content)
    assert (ended.exit_code, ended.stdout) == (78, "")
    assert len(ended.stderr.splitlines()) == len(told)
    assert all(text in line for text, line in zip(told, ended.stderr.splitlines(), strict=True))
    assert "ann" not in ended.stderr
    assert "3 targets are in_doubt" in invoked(doubted, "failures", "--state", "in_doubt").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["pause", "--by", "", "--why", "x"], 78, "--by: must not be empty"),
        (["pause", "--why", "x"], 2, "Missing option '--by'"),
        (["resolve", *SAID, "--all"], 2, "Missing option '--as'"),
        (["resolve", "--as", "lost", *SAID, "--all"], 2, "'lost' is not one of"),
        (["resolve", "--as", "sent", *SAID], 78, "3 rows of campaign c are in doubt"),
        (["resolve", "--as", "sent", *SAID, "--all", "--member", "1"], 78, "--all: not together"),
        (
            ["resolve", "--as", "sent", *SAID, "--member", "x"],
            2,
            "'--member': Input should be a valid integer",
        ),
        (["resolve", "--as", "sent", *SAID, "--member", str(2**63)], 78, "is too large"),
        (["resolve", "--as", "sent", *SAID, "--file", "/no/such"], 78, "--file: cannot be read"),
        (["resolve", "--as", "sent", *SAID, "--file", "\0"], 78, "--file: cannot be read"),
        (["requeue", *SAID, "--member", "99"], 78, "does not have member 99; nothing was changed"),
        (["requeue", *SAID, "--all", "--state", "in_doubt"], 2, "is not"),
    ],
)
def test_wrong_arguments_are_told(doubted: str, arguments: list[str], code: int, text: str) -> None:
    ended = invoked(doubted, *arguments)
    assert ended.exit_code == code
    assert text in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("arguments", [["pause"], ["requeue", "--all"]])
def test_a_campaign_without_rows_or_schema_is_told(
    arguments: list[str], dsn: str, bare_dsn: str
) -> None:
    ended = invoked(dsn, *arguments, *SAID)
    assert (ended.exit_code, ended.stderr.count("\n")) == (78, 1)
    assert "campaign c has no rows" in ended.stderr
    ended = invoked(bare_dsn, *arguments, *SAID)
    assert (ended.exit_code, "sender migrate" in ended.stderr) == (78, True)


# --- failures: rows in doubt ----------------------------------------------------------------------


@pytest.fixture
def listings(doubted: str) -> dict[str, str]:
    return {
        form: invoked(doubted, "failures", *([form] if form != "text" else [])).stdout
        for form in ("text", "--csv", "--json")
    }


def test_rows_in_doubt_are_listed_with_their_times(listings: dict[str, str]) -> None:
    used, last = NOW - timedelta(hours=30), NOW
    head, *_, line, told = listings["text"].splitlines()
    assert head.split("  ")[-1] == "reason"
    assert told == "5 targets are failed or in_doubt"
    assert line.split("  ")[-1].startswith("Lost")
    for text in (
        "13  in_doubt ",
        " 5 ",
        f"{used:%Y-%m-%d %H:%M:%S}Z",
        f"{last:%Y-%m-%d %H:%M:%S}Z",
    ):
        assert text in line
    *_, row = csv.DictReader(io.StringIO(listings["--csv"]))
    assert (row["member_id"], row["state"], row["attempts"]) == ("13", "in_doubt", "5")
    assert datetime.fromisoformat(row["key_used_at"]) == used
    assert datetime.fromisoformat(row["outcome_at"]) == last
    *_, shown = json.loads(listings["--json"])
    assert datetime.fromisoformat(shown["key_used_at"]) == used
    assert (shown["member_id"], shown["state"], shown["attempts"]) == (13, "in_doubt", 5)


def test_listings_hold_no_address_no_formula_and_no_control_character(
    listings: dict[str, str],
) -> None:
    for text in listings.values():
        assert "example.com" not in text
        assert all(character.isprintable() or character == "\n" for character in text)
    for row in csv.DictReader(io.StringIO(listings["--csv"])):
        assert row["reason"][0] in ("'", "L")


@pytest.mark.parametrize("reason", ["=1", "+1", "-1", "@x", "\t=1", "\n=1", "  =1", "\uff1d1"])
async def test_no_reason_is_a_formula_to_a_spreadsheet(dsn: str, reason: str) -> None:
    await add_targets(dsn, "c", 1, state="failed", reason=reason)
    shown = await asyncio.to_thread(invoked, dsn, "failures", "--csv")
    (row,) = csv.DictReader(io.StringIO(shown.stdout))
    assert row["reason"][0] in "'[\\"


async def test_json_is_an_array_whatever_its_length(dsn: str, conn: AsyncConnection) -> None:
    await add_targets(conn, "c", 1)
    for n in range(3):
        shown = await asyncio.to_thread(invoked, dsn, "failures", "--json")
        assert len(json.loads(shown.stdout)) == n
        await add_targets(conn, "c", 1, first=10 + n, state="failed")
