"""`sender run` from outside: real processes, a real PostgreSQL, a provider over real HTTP."""

import asyncio
import random
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any, Protocol

import pytest
from chaos.harness import CAMPAIGN, End, Trial, near, trial_of
from psycopg import AsyncConnection

pytestmark = pytest.mark.slow

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)
SECRETS = ("correct-horse", "battery-staple", "example.com", "@")


class Begin(Protocol):
    async def __call__(self, rows: int, **options: Any) -> Trial: ...


@pytest.fixture
async def begin(dsn: str) -> AsyncIterator[Begin]:
    async with AsyncExitStack() as stack:

        async def begin(rows: int, **options: Any) -> Trial:
            mail = await stack.enter_async_context(near(**options))
            trial = await stack.enter_async_context(trial_of(dsn, mail))
            if rows:
                await trial.load(rows)
            return trial

        yield begin


async def was_handed_back(trial: Trial, **expected: int) -> None:
    """No row is claimed, nobody was charged, and the rest is open."""
    assert await trial.free()
    rows = await trial.sql("SELECT DISTINCT attempts FROM campaign_targets WHERE state = 'pending'")
    assert [row["attempts"] for row in rows] in ([0], [])
    batches = await trial.sql(
        "SELECT 1 FROM campaign_batches WHERE lease_until IS NOT NULL AND done_at IS NULL"
    )
    assert batches == []
    counts = await trial.counts()
    assert {name: getattr(counts, name) for name in expected} == expected


# --- Done -----------------------------------------------------------------------------------------


async def test_a_small_campaign_is_done_and_stays_done(begin: Begin, dsn: str) -> None:
    trial = await begin(300, api_key="correct-horse")
    settings = {
        "MAIL_API_KEY": "correct-horse",
        "DB_DSN": dsn.replace("postgres@", "postgres:battery-staple@"),
    }
    end = await trial.run(**settings)
    assert end.code == 0
    assert await trial.reckon() == {"sent": 300}
    first, lines = trial.runs[0], trial.runs[0].lines
    assert [line["event"] for line in lines] == ["run_started", "batches_built", "run_ended"]
    assert lines[0]["settings"]["MAIL_RATE_PER_S"] == 500
    assert lines[0]["repeats_at_most"] > 0
    assert end.last["reason"] == "every row is settled"
    assert (end.counts.sent, end.counts.total, end.last["requests"]) == (300, 300, 300)
    for text in (*first.text, end.stderr):
        assert not [secret for secret in SECRETS if secret in text]

    ends = await asyncio.gather(*(trial.run(**settings) for _ in range(3)))
    assert [e.code for e in ends] == [0, 0, 0]
    assert [e.last["requests"] for e in ends] == [0, 0, 0]
    assert (await trial.mail.stats())["requests"] == 300


async def test_progress_is_told_every_ten_seconds(begin: Begin) -> None:
    trial = await begin(300)
    run = await trial.start(MAIL_RATE_PER_S=12)
    told = await run.event("progress")
    run.stop()
    assert 70 <= told["accepted"] <= 130
    assert told["done"] + told["remaining"] == 300
    assert 7 <= told["rate_per_s"] <= 13
    assert told["eta_s"] == pytest.approx(told["remaining"] / told["rate_per_s"], rel=0.3)
    assert (await run.wait()).code == 1


async def test_members_refused_for_good_cost_nobody_else_and_ask_for_a_person(begin: Begin) -> None:
    bad = dict.fromkeys(range(10, 300, 40), "422")
    trial = await begin(300, by_member=bad)
    end = await trial.run()
    assert end.code == 2
    assert "8 of 300 rows failed" in end.last["reason"]
    assert await trial.reckon() == {"sent": 292, "failed": 8}
    told = {line["member_id"]: line for line in trial.runs[0].told("target_settled")}
    assert told.keys() == bad.keys()
    assert all(x["reason"] == "http_422" and x["campaign"] == CAMPAIGN for x in told.values())


async def test_few_refused_members_are_no_alarm(begin: Begin) -> None:
    trial = await begin(300, by_member={5: "422", 250: "410"})
    assert (await trial.run()).code == 0
    assert await trial.reckon() == {"sent": 298, "failed": 2}


async def test_a_provider_that_refuses_everybody_stops_the_run_soon(begin: Begin) -> None:
    trial = await begin(3000, always="422", latency_s=0.05)
    end = await trial.run()
    assert end.code == 2
    assert "permanent refusals" in end.last["reason"]
    asked = (await trial.mail.stats())["requests"]
    assert 100 <= asked <= 250
    await was_handed_back(trial, failed=asked, pending=3000 - asked)


@pytest.mark.parametrize("kind", ["401", "302", "451"])
async def test_an_account_that_is_refused_stops_the_run_and_costs_no_row(
    begin: Begin, kind: str
) -> None:
    trial = await begin(1000, always=kind)
    end = await trial.run()
    assert end.code == 2
    assert kind in end.last["reason"]
    assert (await trial.mail.stats())["requests"] <= 50
    await was_handed_back(trial, pending=1000)


@pytest.mark.parametrize("rate", [100, 149])
async def test_a_rate_below_150_is_held(begin: Begin, rate: int) -> None:
    trial = await begin(rate + rate // 2)
    assert (await trial.run(MAIL_RATE_PER_S=rate)).code == 0
    stats = await trial.mail.stats()
    # A machine with other work loses slots; with the bug it was a fifth.
    assert stats["steady_rate_per_s"] > 0.5 * rate
    assert stats["max_in_any_second"] <= 1.1 * rate


# --- Wrong from the start -------------------------------------------------------------------------


def only_line(end: End) -> str:
    (line,) = end.stderr.splitlines()
    return line


async def test_a_campaign_without_rows_is_named(begin: Begin) -> None:
    trial = await begin(1)
    end = await trial.run(CAMPAIGN_ID="autumn")
    assert end.code == 78
    assert "autumn has no rows" in only_line(end)


async def test_an_unmigrated_schema_names_the_command(begin: Begin, bare_dsn: str) -> None:
    trial = await begin(0)
    end = await trial.run(DB_DSN=bare_dsn)
    assert end.code == 78
    assert "sender migrate" in only_line(end)


async def test_wrong_settings_are_named_together(begin: Begin) -> None:
    trial = await begin(1)
    wrong = {
        "DB_DSN": "mysql://root:battery-staple@h/d",
        "CAMPAIGN_ID": "a b",
        "MAIL_URL": "ftp://correct-horse@h/",
        "MAIL_RATE_PER_S": "many",
        "LEASE_S": "1",
    }
    end = await trial.run(**wrong)
    assert end.code == 78
    named = [line.partition(":")[0] for line in end.stderr.splitlines()]
    assert sorted(named) == sorted(wrong)
    assert "battery-staple" not in end.stderr
    assert "correct-horse" not in end.stderr
    assert trial.runs[0].text == []


async def test_a_database_that_is_away_at_the_start_is_one_clear_line(begin: Begin) -> None:
    trial = await begin(1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    end = await trial.run(
        {"start_patience_s": 0.5}, DB_DSN=f"postgresql://app:battery-staple@127.0.0.1:{port}/d"
    )
    assert end.code == 1
    assert "could not be reached" in only_line(end)
    assert "battery-staple" not in end.stderr + "".join(trial.runs[0].text)
    assert (end.last["event"], end.last["exit_code"]) == ("run_ended", 1)
    assert "could not be reached" in end.last["reason"]


async def test_who_has_locked_the_rows_at_the_start_is_told(begin: Begin) -> None:
    trial = await begin(1)
    async with await AsyncConnection.connect(trial.dsn, application_name="report") as other:
        await other.execute("LOCK TABLE campaign_targets")
        told = f"campaign_targets is locked by pid {other.info.backend_pid} (postgres, report)"
        end = await trial.run({"start_patience_s": 0.5, "locks_s": 0.2})
    assert end.code == 1
    assert told in only_line(end)
    assert told in end.last["reason"]
    assert (end.last["event"], end.last["exit_code"]) == ("run_ended", 1)


async def test_rows_that_are_locked_for_a_while_at_the_start_are_waited_for(begin: Begin) -> None:
    trial = await begin(5)
    async with await AsyncConnection.connect(trial.dsn) as other:
        await other.execute("LOCK TABLE campaign_targets")
        run = await trial.start({"locks_s": 0.2})
        waits = (
            "SELECT 1 FROM pg_locks WHERE relation = 'campaign_targets'::regclass AND NOT granted"
        )
        await trial.until(waits)
    assert (await run.wait()).code == 0
    assert await trial.reckon() == {"sent": 5}


@pytest.mark.parametrize(
    ("options", "code"), [({}, 1), ({"CAMPAIGN_ID": "autumn"}, 1), ({"LEASE_S": "1"}, 78)]
)
async def test_a_signal_before_it_listens_is_heard_when_it_does(
    begin: Begin, options: dict[str, object], code: int
) -> None:
    trial = await begin(5)
    end = await trial.run({"at": "stopped_before_it_listens"}, **options)
    assert end.code == code
    told = [line["event"] for line in trial.runs[0].lines]
    assert told == ([] if code == 78 else ["run_started", "run_ended"])
    if told:
        assert "a signal asked to stop" in end.last["reason"]
        assert (end.last["exit_code"], end.stderr) == (1, "")
    assert (await trial.mail.stats())["requests"] == 0


async def test_an_error_of_its_own_is_told_in_the_last_line_too(begin: Begin) -> None:
    trial = await begin(1)
    end = await trial.run({"at": "mistaken"})
    assert end.code == 1
    assert "please report it" in end.stderr
    assert (end.last["event"], end.last["exit_code"]) == ("run_ended", 1)
    assert "TypeError" in end.last["reason"]


async def test_an_end_by_force_is_told(begin: Begin) -> None:
    trial = await begin(5, latency_s=0.8)
    run = await trial.start({"at": "held_at_the_end"})
    await trial.mail.until(lambda stats: stats["in_flight"] >= 1)
    run.stop()
    end = await run.wait()
    assert end.code == 1
    assert (end.last["event"], end.last["exit_code"]) == ("run_ended", 1)
    assert "ended by force" in end.last["reason"]


# --- Rows that must not be mailed -----------------------------------------------------------------


BAD_ADDRESSES = (
    None, "", ".", "0", " ", "a@example.com,b@example.com", "a@example.com b@example.com",
    "Ann\r\nBcc: x@example.com", "a@example.com\n", "a@", "@example.com", "a@example.com;",
)  # fmt: skip


async def test_broken_addresses_cost_themselves_only(begin: Begin) -> None:
    n = len(BAD_ADDRESSES)
    bad = {}
    for first in (1, 400, 901 - n):  # the first rows, in the middle of a batch, the last rows
        bad.update(dict(zip(range(first, first + n), BAD_ADDRESSES, strict=True)))
    trial = await begin(0)
    await trial.load(900, email=lambda member: bad.get(member, f"member{member}@example.com"))
    end = await trial.run()
    assert end.code == 2  # 4 % failed
    assert await trial.reckon() == {"sent": 900 - len(bad), "failed": len(bad)}
    failed = {row["member_id"]: row["reason"] for row in await trial.rows() if not row["sent_at"]}
    assert failed.keys() == bad.keys()
    assert set(failed.values()) == {"address_missing", "address_invalid"}
    assert (await trial.mail.stats())["requests"] == 900 - len(bad)


async def test_a_first_batch_of_people_who_opted_out_is_not_the_end(begin: Begin) -> None:
    trial = await begin(0)
    await trial.load(400, opted_out_at=LONG_AGO)
    await trial.load(200, first=401)
    await trial.load(100, first=601, sent_at=LONG_AGO)
    end = await trial.run()
    assert end.code == 0
    assert (end.counts.sent, end.counts.skipped) == (300, 400)
    assert sorted(await trial.mail.deliveries()) == list(range(401, 601))


# --- Rows that come and go ------------------------------------------------------------------------


async def test_rows_loaded_while_it_runs_are_found_wherever_they_lie(begin: Begin) -> None:
    trial = await begin(0)
    await trial.load(300, first=1000)
    run = await trial.start(MAIL_RATE_PER_S=150)
    await trial.mail.until(lambda stats: stats["deliveries"] >= 100)
    await trial.load(50, first=500)  # before the ranges
    await trial.load(50, first=5000)  # behind them
    await trial.load(20, first=-20)  # and below zero
    assert (await run.wait()).code == 0
    assert await trial.reckon() == {"sent": 420}


async def test_two_runs_at_once_never_request_the_same_key(begin: Begin) -> None:
    trial = await begin(600)
    runs = [await trial.start(MAIL_RATE_PER_S=400) for _ in range(2)]
    ends = [await run.wait() for run in runs]
    assert [end.code for end in ends] == [0, 0]
    assert await trial.reckon() == {"sent": 600}
    stats = await trial.mail.stats()
    assert stats["requests"] == stats["keys_seen"] == 600
    assert all(end.last["requests"] > 50 for end in ends)


# --- Answers --------------------------------------------------------------------------------------

# Kind of the first answer; the second is a plain yes. How often the row is charged.
ANSWERS = {
    "503": 1, "500": 1, "504": 1, "408": 0, "409": 0, "425": 0, "half_429": 0, "200_html": 1,
    "cut": 1, "cut_before": 1, "closed": 1, "invalid_json": 1, "big": 1, "length_too_long": 1,
    "endless_drip": 1, "silent": 1, "201": 0, "202": 0, "204": 0, "200_empty": 0,
}  # fmt: skip


async def test_each_answer_means_what_the_contract_says_and_the_next_mail_is_sent(
    begin: Begin,
) -> None:
    first = {100 + 10 * place: (kind,) for place, kind in enumerate(ANSWERS)}
    trial = await begin(0, by_member={**first, 700: "422", 701: "413"})
    await trial.load(720)
    # One failing answer in ten, so that the breaker stays closed.
    end = await trial.run(MAIL_RATE_PER_S=300, SEND_CONCURRENCY=40)
    assert end.code == 0
    assert await trial.reckon() == {"sent": 718, "failed": 2}
    charged = {row["member_id"]: row["attempts"] for row in await trial.rows()}
    assert {m: charged[m] for m in first} == {m: ANSWERS[kind] for m, (kind,) in first.items()}
    assert not any(charged[m] for m in charged.keys() - first.keys())


async def test_used_up_attempts_are_failed_if_all_were_refusals_and_in_doubt_if_not(
    begin: Begin,
) -> None:
    scripts = {10: "503", 20: ("503", "503", "cut"), 30: "200_html", 40: "hang"}
    trial = await begin(0, by_member=scripts)
    await trial.load(100)
    end = await trial.run(MAX_ATTEMPTS=3, MAIL_RATE_PER_S=100)
    assert end.code == 2
    rows = {row["member_id"]: row for row in await trial.rows()}
    assert [rows[m]["state"] for m in scripts] == ["failed", "in_doubt", "in_doubt", "in_doubt"]
    assert [rows[m]["attempts"] for m in scripts] == [3, 3, 3, 3]
    assert await trial.reckon() == {"sent": 96, "failed": 1, "in_doubt": 3}
    again = await trial.run()
    assert (again.code, again.last["requests"]) == (2, 0)


async def test_too_many_requests_charges_nobody_and_every_process_waits(begin: Begin) -> None:
    trial = await begin(500, retry_after=2)
    runs = [await trial.start(MAIL_RATE_PER_S=200) for _ in range(2)]
    await trial.mail.until(lambda stats: stats["deliveries"] >= 100)
    await trial.mail.control(throttle=True)
    # The one that got the answer says so, the other sees it in the database.
    told = [asyncio.create_task(run.event("account_paused")) for run in runs]
    first_told, others = await asyncio.wait(told, return_when=asyncio.FIRST_COMPLETED)
    assert first_told.pop().result()["seconds"] == 2
    for task in others:
        task.cancel()
    await trial.mail.control(throttle=False)
    assert [(await run.wait()).code for run in runs] == [0, 0]
    assert await trial.reckon() == {"sent": 500}
    assert {row["attempts"] for row in await trial.rows()} == {0}
    requests = await trial.mail.requests()
    first = min(at for at, _, status in requests if status == 429)
    after = [at - first for at, _, _ in requests if at > first]
    # What was on its way when the answer came, then nobody until the time is over.
    assert [at for at in after if 0.8 < at < 1.95] == []


# --- The ends of a run ----------------------------------------------------------------------------


async def test_after_the_deadline_nothing_is_claimed_and_the_next_start_goes_on(
    begin: Begin,
) -> None:
    trial = await begin(600)
    end = await trial.run(DEADLINE_S=4, MAIL_RATE_PER_S=100)
    assert end.code == 1
    assert "deadline" in end.last["reason"]
    sent = end.counts.sent
    assert sent < 600
    await was_handed_back(trial, sent=sent, pending=600 - sent)
    assert (await trial.run()).code == 0
    assert await trial.reckon() == {"sent": 600}
    assert (await trial.mail.stats())["requests"] == 600


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_what_is_in_flight_end_and_hands_the_rest_back(
    begin: Begin, number: signal.Signals
) -> None:
    trial = await begin(600, latency_s=0.8)
    run = await trial.start(MAIL_RATE_PER_S=150, MAIL_READ_TIMEOUT_S=2, LEASE_S=5)
    await trial.mail.until(lambda stats: stats["in_flight"] >= 60)
    run.stop(number)
    end = await run.wait(8)
    assert end.code == 1
    assert number.name in end.last["reason"]
    assert run.told("stopping")[0]["in_flight"] >= 50
    asked = (await trial.mail.stats())["requests"]
    await was_handed_back(trial, sent=asked, pending=600 - asked)
    await trial.mail.control(latency_s=0)
    assert (await trial.run()).code == 0
    assert await trial.reckon() == {"sent": 600}
    assert (await trial.mail.stats())["requests"] == 600


async def test_a_second_signal_ends_it_at_once_and_the_keys_absorb_the_repeats(
    begin: Begin,
) -> None:
    trial = await begin(200, latency_s=8)
    run = await trial.start(MAIL_READ_TIMEOUT_S=15, LEASE_S=19, SHUTDOWN_GRACE_S=20)
    await trial.mail.until(lambda stats: stats["in_flight"] >= 50)
    run.stop()
    await run.event("stopping")
    run.stop()
    end = await run.wait(4)
    assert end.code == 1
    await trial.mail.control(latency_s=0)
    await trial.sql("UPDATE campaign_batches SET lease_until = now() WHERE claim_id IS NOT NULL")
    assert (await trial.run()).code == 0
    assert await trial.reckon() == {"sent": 200}


async def test_pause_stops_every_process_within_two_seconds(begin: Begin) -> None:
    trial = await begin(2000)
    runs = [await trial.start(MAIL_RATE_PER_S=200) for _ in range(2)]
    await trial.mail.until(lambda stats: stats["deliveries"] >= 100)
    await trial.sql("UPDATE campaigns SET control = 'paused'")
    async with asyncio.timeout(4):  # two for the product, two for a busy machine
        ends = [await run.wait() for run in runs]
    assert [end.code for end in ends] == [0, 0]
    assert all("paused" in end.last["reason"] for end in ends)
    asked = (await trial.mail.stats())["requests"]
    await was_handed_back(trial, sent=asked, pending=2000 - asked)
    assert (await trial.run()).last["requests"] == 0
    await trial.sql("UPDATE campaigns SET control = 'run'")
    assert (await trial.run(MAIL_RATE_PER_S=2000)).code == 0
    assert await trial.reckon() == {"sent": 2000}


# --- The report -----------------------------------------------------------------------------------


async def test_the_counts_add_up_at_every_moment_and_never_go_back(begin: Begin) -> None:
    trial = await begin(
        0, first_503=0.1, permanent_422=0.02, accept_then_cut=0.05, latency_s=(0, 0.1)
    )
    await trial.load(900, opted_out_at=lambda member: LONG_AGO if member % 9 == 0 else None)
    run = await trial.start(MAIL_RATE_PER_S=250)
    chance, sent, looks = random.Random(7), set[int](), 0
    while run.is_running:
        await asyncio.sleep(chance.random() * 0.1)
        counts = await trial.counts()
        assert counts.total == 900
        now = {r["member_id"] for r in await trial.rows() if r["sent_at"] or r["state"] == "sent"}
        assert sent <= now
        assert now <= (await trial.mail.deliveries()).keys()
        sent, looks = now, looks + 1
    end = await run.wait()
    assert looks > 10
    assert end.counts == await trial.counts()
    assert end.counts.skipped == 100
    found = await trial.reckon()
    assert found["sent"] + found["failed"] == 800
    assert end.code == (2 if found["failed"] > 9 else 0)
