"""status, failures, check: what they tell of a campaign is what the ledger holds."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import pytest
from conftest import add_targets
from psycopg import AsyncConnection

from sender import check as checking
from sender import failures as listing
from sender import reading
from sender.check import check
from sender.errors import CampaignError, DatabaseUnavailable, SchemaError
from sender.failures import failures
from sender.settings import CampaignSettings
from sender.status import Status, status

NOWHERE = "postgresql://app:geheim@127.0.0.1:9/db"
LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)


def settings(dsn: str, campaign: str = "c") -> CampaignSettings:
    return CampaignSettings.load({"DB_DSN": dsn, "CAMPAIGN_ID": campaign})


def lines(found: Status) -> str:
    return "\n".join(found.lines())


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(checking, "_PATIENCE_S", 0.5)


# --- status --------------------------------------------------------------------------------------

STATES = ("pending", "sending", "sent", "failed", "in_doubt")


def told_state(state: str, sent: bool, opted_out: bool) -> str:
    """The contract's rules, once more."""
    if sent:
        return "sent"
    return "skipped" if opted_out and state == "pending" else state


async def test_every_kind_of_row_is_counted_once(dsn: str, conn: AsyncConnection) -> None:
    kinds = list(product(STATES, (True, False), (True, False)))
    expected: Counter[str] = Counter()
    for place, (state, sent, opted_out) in enumerate(kinds):
        await add_targets(
            conn,
            "c",
            place + 1,
            first=place * 100,
            state=state,
            sent_at=LONG_AGO if sent else None,
            opted_out_at=LONG_AGO if opted_out else None,
        )
        expected[told_state(state, sent, opted_out)] += place + 1
    await add_targets(conn, "another", 1)
    counts = (await status(settings(dsn))).counts
    assert asdict(counts) == expected
    assert counts.total == sum(range(1, len(kinds) + 1))


async def test_rows_of_a_live_lease_are_sending(dsn: str, conn: AsyncConnection) -> None:
    await add_targets(conn, "c", 10)
    await add_targets(conn, "c", 1, first=11, sent_at=LONG_AGO)
    await add_targets(conn, "c", 1, first=12, opted_out_at=LONG_AGO)
    await add_targets(conn, "c", 1, first=13, not_before=LONG_AGO)
    await conn.execute(
        """
        INSERT INTO campaign_batches
            (campaign_id, batch_no, lo, hi, size, claim_id, lease_until, done_at, claimed_ids)
        VALUES
            ('c', 1, 1, 3, 3, gen_random_uuid(), now() + '1 min', NULL, '{1,2,3}'),
            ('c', 2, 11, 13, 3, gen_random_uuid(), now() + '1 min', NULL, '{11,12,13}'),
            ('c', 3, 4, 4, 1, gen_random_uuid(), now() - interval '1 min', NULL, '{4}'),
            ('c', 4, 5, 5, 1, NULL, NULL, NULL, '{5}'),
            ('c', 5, 6, 6, 1, gen_random_uuid(), now() + '1 min', now(), '{6}'),
            ('other', 1, 7, 7, 1, gen_random_uuid(), now() + '1 min', NULL, '{7}')
        """
    )
    counts = (await status(settings(dsn))).counts
    assert (counts.sending, counts.pending, counts.total) == (3, 8, 13)


async def test_rate_and_time_left(dsn: str, conn: AsyncConnection) -> None:
    now = datetime.now(UTC)
    await add_targets(conn, "c", 300, state="sent", sent_at=now - timedelta(seconds=30))
    await add_targets(conn, "c", 50, first=1_000, state="sent", sent_at=now - timedelta(hours=1))
    await add_targets(conn, "c", 600, first=2_000)
    found = await status(settings(dsn))
    assert found.rate_per_s == pytest.approx(10, rel=0.2)
    assert found.eta_s == pytest.approx(60, rel=0.2)
    assert "running" in lines(found)


@pytest.mark.parametrize("control", ["paused", "cancelled"])
async def test_a_campaign_that_is_held_has_no_time_left(
    dsn: str, conn: AsyncConnection, control: str
) -> None:
    await add_targets(conn, "c", 3, state="sent", sent_at=datetime.now(UTC))
    await add_targets(conn, "c", 6, first=10)
    assert (await status(settings(dsn))).eta_s is not None
    await conn.execute("INSERT INTO campaigns (campaign_id, control) VALUES ('c', %s)", [control])
    found = await status(settings(dsn))
    assert found.rate_per_s > 0
    assert found.eta_s is None
    assert "to the end" not in lines(found)


async def test_only_open_rows_are_due(dsn: str, conn: AsyncConnection) -> None:
    await add_targets(conn, "c", 2, not_before=LONG_AGO, opted_out_at=LONG_AGO)
    await add_targets(conn, "c", 1, first=3, not_before=LONG_AGO, sent_at=LONG_AGO)
    await add_targets(conn, "c", 1, first=4, not_before=LONG_AGO, state="failed")
    assert (await status(settings(dsn))).next_due is None
    later = LONG_AGO + timedelta(days=1)
    await add_targets(conn, "c", 1, first=5, not_before=later)
    assert (await status(settings(dsn))).next_due == later


async def test_what_people_and_the_provider_want_is_told(dsn: str, conn: AsyncConnection) -> None:
    await add_targets(conn, "c", 1, not_before=datetime(2099, 1, 2, 3, tzinfo=UTC))
    await conn.execute(
        "INSERT INTO campaigns (campaign_id, control, control_by, control_why)"
        " VALUES ('c', 'paused', 'Ann', 'wrong template')"
    )
    await conn.execute("INSERT INTO provider_accounts VALUES ('a', now(), '2099-01-01 00:00Z')")
    text = lines(await status(settings(dsn)))
    assert "campaign c: paused by Ann: wrong template" in text
    assert "the provider asked to wait until 2099-01-01 00:00:00 UTC" in text
    assert "2099-01-02 03:00:00 UTC" in text


async def test_the_last_failures_are_told_newest_first(dsn: str, conn: AsyncConnection) -> None:
    for member in range(1, 8):
        at = LONG_AGO + timedelta(days=member)
        await add_targets(
            conn, "c", 1, first=member, state="failed", reason=f"r{member}", outcome_at=at
        )
    await add_targets(conn, "c", 1, first=99, state="failed", sent_at=LONG_AGO)
    found = await status(settings(dsn))
    assert [failure.member_id for failure in found.last_failures] == [7, 6, 5, 4, 3]
    assert "member 7  failed  r7" in lines(found)
    assert "done" in lines(found)


async def test_a_reason_is_as_clean_as_in_the_log(dsn: str, conn: AsyncConnection) -> None:
    await add_targets(conn, "c", 1, state="failed", reason="lost \x1b[2J ann@example.com")
    found = await status(settings(dsn))
    for told in (lines(found), json.dumps(found.to_json(), default=str, ensure_ascii=False)):
        assert "[address]" in told
        assert "example.com" not in told
        assert "\x1b" not in told


async def test_json_holds_counts_that_add_up(dsn: str) -> None:
    await add_targets(dsn, "c", 3)
    shown: dict[str, Any] = (await status(settings(dsn))).to_json()
    parts = ("sent", "failed", "in_doubt", "skipped", "pending", "sending")
    assert sum(shown[part] for part in parts) == shown["total"] == shown["open"] == 3
    assert shown["control"] == "run"
    assert shown["eta_s"] is None


# --- failures ------------------------------------------------------------------------------------


async def listed(dsn: str, *states: str, limit: int | None = None) -> list[tuple[int, str]]:
    found = failures(settings(dsn), states or listing.DEFAULT_STATES, limit)
    return [(failure.member_id, failure.state) async for failure in found]


async def test_failures_come_in_pages_by_member(
    dsn: str, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "_PAGE", 2)
    await add_targets(conn, "c", 5, first=-2, state="failed")
    await add_targets(conn, "c", 1, first=10, state="in_doubt")
    await add_targets(conn, "c", 1, first=11, opted_out_at=LONG_AGO)
    await add_targets(conn, "c", 1, first=12, state="failed", sent_at=LONG_AGO)
    all_of_them = [*((member, "failed") for member in range(-2, 3)), (10, "in_doubt")]
    assert await listed(dsn) == all_of_them
    assert await listed(dsn, "skipped") == [(11, "skipped")]
    for limit in range(1, 8):
        assert await listed(dsn, limit=limit) == all_of_them[:limit]


async def test_a_skipped_row_is_told_to_have_opted_out(dsn: str, conn: AsyncConnection) -> None:
    await add_targets(conn, "c", 1, opted_out_at=LONG_AGO)
    tried = {"reason": "http_503", "attempts": 1, "not_before": LONG_AGO}
    await add_targets(conn, "c", 1, first=2, opted_out_at=LONG_AGO, **tried)
    await add_targets(conn, "c", 1, first=3, **tried)
    found = failures(settings(dsn), ["skipped", "pending"])
    assert [failure.reason async for failure in found] == ["opted_out", "opted_out", "http_503"]


@pytest.mark.parametrize("look", [lambda s: status(s), lambda s: anext(failures(s))])
async def test_what_cannot_be_looked_at_is_told(look: Any, dsn: str, bare_dsn: str) -> None:
    with pytest.raises(CampaignError, match="campaign c has no rows"):
        await look(settings(dsn))
    with pytest.raises(SchemaError, match="sender migrate"):
        await look(settings(bare_dsn))
    with pytest.raises(DatabaseUnavailable) as caught:
        await look(settings(NOWHERE))
    assert "geheim" not in str(caught.value)


# --- check ---------------------------------------------------------------------------------------


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that takes connections, its URL, and what each connection sent."""
    received: list[bytes] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read())
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/mail", received


async def verdicts(**environ: str) -> dict[str, str]:
    return {
        finding.subject: f"{finding.verdict}: {finding.text}" for finding in await check(environ)
    }


async def test_all_is_well_and_nothing_was_sent(dsn: str) -> None:
    await add_targets(dsn, "c", 1)
    async with listening() as (url, received):
        found = await verdicts(DB_DSN=dsn, CAMPAIGN_ID="c", MAIL_URL=url, MAIL_RATE_PER_SEC="1")
        while not received:
            await asyncio.sleep(0.001)
    assert received == [b""]
    assert all(text.startswith(("ok", "note")) for text in found.values())
    assert found["database"].startswith("ok: PostgreSQL 1")
    assert found["schema"] == "ok: migrated"
    assert found["campaign"] == "ok: c has rows"
    assert "nothing was sent" in found["provider"]
    assert "did you mean MAIL_RATE_PER_S?" in found["MAIL_RATE_PER_SEC"]


async def test_all_faults_are_told_at_once(bare_dsn: str) -> None:
    found = await verdicts(
        DB_DSN=bare_dsn, MAIL_URL="http://127.0.0.1:9/", MAX_ATTEMPTS="0", LEASE_S="1"
    )
    faults = {subject for subject, text in found.items() if text.startswith("fault")}
    assert faults == {"CAMPAIGN_ID", "MAX_ATTEMPTS", "LEASE_S", "schema", "provider"}
    assert "127.0.0.1:9 cannot be reached" in found["provider"]
    assert "sender migrate" in found["schema"]


async def test_a_campaign_without_rows_or_held_is_told(dsn: str, conn: AsyncConnection) -> None:
    found = await verdicts(DB_DSN=dsn, CAMPAIGN_ID="c")
    assert found["campaign"].startswith("fault: CAMPAIGN_ID: campaign c has no rows")
    await add_targets(conn, "c", 1)
    await conn.execute("INSERT INTO campaigns (campaign_id, control) VALUES ('c', 'cancelled')")
    assert (await verdicts(DB_DSN=dsn, CAMPAIGN_ID="c"))["campaign"].startswith("note: c is cancel")
    assert "not looked at" in (await verdicts(DB_DSN=dsn))["campaign"]


async def test_a_database_that_is_away_is_told_without_its_password() -> None:
    found = await verdicts(
        DB_DSN=NOWHERE, CAMPAIGN_ID="c", MAIL_URL="https://u:geheim@127.0.0.1:9/"
    )
    assert found["database"].startswith("fault")
    assert found["provider"].startswith("fault: 127.0.0.1:9 cannot be reached")
    assert "geheim" not in str(found)
