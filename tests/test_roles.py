"""Who may do what: each role does its work, and the database refuses the rest."""

import json
import os
import subprocess
import sys

import psycopg
import pytest
from conftest import ROLES, add_targets, as_role
from psycopg.errors import InsufficientPrivilege

from sender.migrate import migrate

CAMPAIGN = "spring"
REFUSED = {
    "sender": [
        "UPDATE campaign_targets SET email = 'x@example.com'",
        "UPDATE campaign_targets SET opted_out_at = NULL",
        "UPDATE campaign_targets SET member_id = 5",
        "UPDATE campaign_targets SET vars = '{}'",
        "INSERT INTO campaign_targets (campaign_id, member_id) VALUES ('spring', 9)",
        "DELETE FROM campaign_targets",
        "TRUNCATE campaign_targets",
        "DELETE FROM campaign_batches",
        "UPDATE campaign_actions SET why = 'nobody'",
        "DELETE FROM campaign_actions",
        "UPDATE sender_migrations SET version = 9",
        "ALTER TABLE campaign_targets ADD COLUMN x int",
        "CREATE TABLE mine (x int)",
    ],
    "member_api": [
        "SELECT email FROM campaign_targets",
        "UPDATE campaign_targets SET state = 'sent'",
        "UPDATE campaign_targets SET sent_at = now()",
        "DELETE FROM campaign_targets",
        "SELECT * FROM campaign_batches",
        "UPDATE campaigns SET control = 'paused'",
    ],
    "sender_reader": [
        "SELECT email FROM campaign_targets",
        "SELECT vars FROM campaign_targets",
        "UPDATE campaign_targets SET opted_out_at = now()",
        "UPDATE campaigns SET control = 'paused'",
        "INSERT INTO campaign_actions (campaign_id, action, by_whom, why) VALUES ('a','b','c','d')",
    ],
}


@pytest.mark.parametrize(
    ("role", "statement"), [(role, text) for role, texts in REFUSED.items() for text in texts]
)
def test_the_database_refuses(dsn, role, statement):
    with (
        psycopg.connect(as_role(dsn, role)) as connection,
        pytest.raises(InsufficientPrivilege),
    ):
        connection.execute(statement)


async def test_the_member_api_opts_members_out(dsn, conn):
    await add_targets(conn, CAMPAIGN, 2)
    with psycopg.connect(as_role(dsn, "member_api"), autocommit=True) as connection:
        done = connection.execute(
            "UPDATE campaign_targets SET opted_out_at = now()"
            " WHERE campaign_id = %s AND member_id = 2",
            [CAMPAIGN],
        )
        assert done.rowcount == 1


async def test_the_reader_sees_where_a_campaign_stands(dsn, conn):
    await add_targets(conn, CAMPAIGN, 3)
    seen = json.loads(command("status", "--json", dsn=as_role(dsn, "sender_reader")).stdout)
    assert (seen["total"], seen["pending"]) == (3, 3)
    listed = command("failures", "--json", dsn=as_role(dsn, "sender_reader"))
    assert listed.returncode == 0


def test_the_owner_migrates_an_empty_database(bare_dsn):
    with psycopg.connect(bare_dsn, autocommit=True) as admin:
        admin.execute(ROLES.read_text())
    assert migrate(as_role(bare_dsn, "sender_owner"))
    with psycopg.connect(bare_dsn, autocommit=True) as admin:
        admin.execute(ROLES.read_text())
    with psycopg.connect(as_role(bare_dsn, "sender")) as connection:
        assert connection.execute("SELECT count(*) FROM campaign_batches").fetchone() == (0,)


@pytest.mark.parametrize(
    ("revoked", "told"),
    [
        ("UPDATE (sent_at) ON campaign_targets", "GRANT UPDATE (sent_at) ON campaign_targets"),
        ("SELECT ON campaign_targets", "GRANT SELECT ON campaign_targets"),
        ("INSERT ON campaign_batches", "GRANT INSERT ON campaign_batches"),
        ("UPDATE ON provider_accounts", "GRANT UPDATE ON provider_accounts"),
    ],
)
async def test_a_right_that_a_run_lacks_is_named_before_it_sends(dsn, conn, revoked, told):
    await add_targets(conn, CAMPAIGN, 1)
    as_sender = as_role(dsn, "sender")
    assert "role sender may do what a run does" in command("check", dsn=as_sender).stdout
    await conn.execute(f"REVOKE {revoked} FROM sender")
    ran = command("run", dsn=as_sender, MAIL_URL="http://127.0.0.1:9/")
    assert ran.returncode == 78, ran.stdout
    grants = [line for line in ran.stderr.splitlines() if line.startswith("GRANT ")]
    assert grants == [f"{told} TO sender;"]
    assert grants[0] in command("check", dsn=as_sender).stdout
    await conn.execute(grants[0])
    assert "role sender may do what a run does" in command("check", dsn=as_sender).stdout


@pytest.mark.parametrize("words", ["status", "failures", "pause --by me --why so"])
async def test_a_command_that_its_role_may_not_do_says_which_may(dsn, conn, words):
    await add_targets(conn, CAMPAIGN, 1)
    await conn.execute("GRANT SELECT ON sender_migrations TO member_api")
    ran = command(*words.split(), dsn=as_role(dsn, "member_api"))
    assert ran.returncode == 78
    assert "permission denied for table campaign" in ran.stderr
    assert "sql/roles.sql makes the roles" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_sender_lets_go_of_locks(dsn):
    with psycopg.connect(as_role(dsn, "sender")) as connection:
        shown = {
            name: connection.execute(f"SHOW {name}").fetchone()[0]
            for name in ("lock_timeout", "idle_in_transaction_session_timeout")
        }
    assert shown == {"lock_timeout": "2s", "idle_in_transaction_session_timeout": "10s"}


def command(*words: str, dsn: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sender", *words],
        env={**os.environ, "DB_DSN": dsn, "CAMPAIGN_ID": CAMPAIGN, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("instant", ["-infinity", "infinity", "20000-01-01", "0500-01-01 BC"])
async def test_status_survives_instants_that_no_calendar_of_ours_has(dsn, conn, instant):
    await add_targets(conn, CAMPAIGN, 1, not_before=instant)
    seen = command("status", "--json", dsn=as_role(dsn, "sender"))
    assert seen.returncode == 0, seen.stderr
    assert json.loads(seen.stdout)["pending"] == 1


async def test_a_column_that_is_gone_is_named_before_anything_is_sent(dsn, conn):
    await add_targets(conn, CAMPAIGN, 1)
    await conn.execute("ALTER TABLE campaign_targets RENAME COLUMN email TO mail")
    seen = command("check", dsn=as_role(dsn, "sender"))
    assert seen.returncode == 78
    assert "campaign_targets.email" in seen.stdout
