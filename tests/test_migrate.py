"""What a database is after `sender migrate`, whatever it was before."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import LiteralString

import psycopg
import pytest
from psycopg import AsyncConnection
from psycopg.rows import scalar_row

from sender import ground
from sender.dev.postgres import EmbeddedPostgres
from sender.errors import SchemaError
from sender.migrate import REQUIRED_VERSION, check_schema, migrate, plan

ALL = [
    "0001 campaign_targets",
    "0002 queue",
    "0003 due_index",
    "0004 validate",
    "0005 backfill_sent",
]

BARE = """
CREATE TABLE campaign_targets (campaign_id text, member_id bigint, email text, sent_at timestamptz,
                               PRIMARY KEY (campaign_id, member_id))
"""

# What a dump would tell, without the order in which things were made.
CATALOGUE: LiteralString = """
SELECT 'column', attrelid::regclass::text, attname, format_type(atttypid, atttypmod),
       attnotnull::text, pg_get_expr(adbin, adrelid), col_description(attrelid, attnum)
FROM pg_attribute
JOIN pg_class ON pg_class.oid = attrelid
LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
WHERE relnamespace = 'public'::regnamespace AND attnum > 0 AND NOT attisdropped
UNION ALL
SELECT 'relation', relname, relkind::text, obj_description(oid, 'pg_class'), pg_get_indexdef(oid),
       (SELECT string_agg(setting, ' ' ORDER BY setting) FROM unnest(reloptions) AS setting),
       (SELECT indisvalid::text FROM pg_index WHERE indexrelid = oid)
FROM pg_class WHERE relnamespace = 'public'::regnamespace
UNION ALL
SELECT 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid),
       convalidated::text, '', ''
FROM pg_constraint WHERE connamespace = 'public'::regnamespace
UNION ALL
SELECT 'function', oid::regprocedure::text, pg_get_functiondef(oid), '', '', '', ''
FROM pg_proc WHERE pronamespace = 'public'::regnamespace
UNION ALL
SELECT 'migration', version::text, name, '', '', '', '' FROM sender_migrations
ORDER BY 1, 2, 3
"""


def catalogue(dsn: str) -> list[tuple[str, ...]]:
    with psycopg.connect(dsn) as conn:
        return conn.execute(CATALOGUE).fetchall()


def run(dsn: str, *statements: LiteralString) -> list[object]:
    """Commit the statements one by one; the first column of what the last one answers."""
    with psycopg.connect(dsn, autocommit=True, row_factory=scalar_row) as conn:
        for statement in statements:
            cursor = conn.execute(statement)
        return cursor.fetchall() if cursor.description else []


async def test_an_empty_database_becomes_what_a_run_needs(bare_dsn: str) -> None:
    assert migrate(bare_dsn) == ALL
    async with await AsyncConnection.connect(bare_dsn) as conn:
        await check_schema(conn)


def test_a_second_run_does_nothing(dsn: str) -> None:
    before = run(dsn, "SELECT applied_at FROM sender_migrations ORDER BY version")
    assert migrate(dsn) == []
    assert plan(dsn) == ""
    assert run(dsn, "SELECT applied_at FROM sender_migrations ORDER BY version") == before


def test_the_table_people_have_ends_as_a_new_one(bare_dsn: str, dsn: str) -> None:
    run(bare_dsn, BARE, "INSERT INTO campaign_targets VALUES ('c', 1, 'a@example.com', now())")
    migrate(bare_dsn)
    assert catalogue(bare_dsn) == catalogue(dsn)


def test_a_copy_of_the_migrated_table_alone_is_migrated_again(bare_dsn: str, dsn: str) -> None:
    migrate(bare_dsn)
    run(
        bare_dsn,
        "DROP TABLE campaign_batches, campaigns, campaign_actions, provider_accounts",
        "DROP TABLE sender_migrations",
        "DROP FUNCTION sender_row_xid",
    )
    assert migrate(bare_dsn) == ALL
    assert catalogue(bare_dsn) == catalogue(dsn)


def test_columns_and_rows_that_are_there_stay(bare_dsn: str, dsn: str) -> None:
    run(
        bare_dsn,
        BARE,
        "ALTER TABLE campaign_targets ADD COLUMN opted_out_at timestamptz, ADD COLUMN vars jsonb",
        "INSERT INTO campaign_targets VALUES ('c', 1, 'a', NULL, now(), '{\"name\": \"A\"}')",
    )
    migrate(bare_dsn)
    assert catalogue(bare_dsn) == catalogue(dsn)
    assert run(
        bare_dsn,
        "SELECT count(*) FROM campaign_targets"
        " WHERE opted_out_at IS NOT NULL AND vars->>'name' = 'A' AND state = 'pending'",
    ) == [1]


@pytest.mark.parametrize("ids", ["bigint", "integer"])
def test_what_the_old_program_sent_becomes_sent(bare_dsn: str, ids: LiteralString) -> None:
    run(
        bare_dsn,
        BARE.replace("bigint", ids),
        """
        INSERT INTO campaign_targets
        SELECT 'campaign-' || n % 3, n, 'a@example.com', CASE WHEN n % 2 = 0 THEN now() END
        FROM generate_series(-5000, 5000) AS n
        """,
    )
    migrate(bare_dsn)
    assert run(
        bare_dsn,
        "SELECT count(*) FROM campaign_targets WHERE (sent_at IS NULL) <> (state = 'pending')",
    ) == [0]
    assert run(bare_dsn, "SELECT count(*) FROM campaign_targets WHERE state = 'sent'") == [5001]


def test_the_back_fill_reads_each_row_once(dsn: str) -> None:
    run(
        dsn,
        "INSERT INTO campaign_targets (campaign_id, member_id, sent_at)"
        " SELECT 'c', n, CASE WHEN n % 100 = 0 THEN now() END FROM generate_series(1, 30000) AS n",
        "DELETE FROM sender_migrations WHERE version = 5",
        "SELECT pg_stat_reset()",
    )
    assert migrate(dsn) == ["0005 backfill_sent"]
    reads = (
        "SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_user_tables WHERE seq_scan + idx_scan > 0"
    )
    # A backend reports when it ends, a moment after its connection was closed.
    while not (read := [n for n in run(dsn, reads) if isinstance(n, int) and n > 1000]):
        pass
    assert read[0] <= 2 * 30_000 + 1000  # once to look; once more in a slice that has rows to mark


def test_the_old_program_goes_on(bare_dsn: str) -> None:
    run(bare_dsn, BARE)
    insert = "INSERT INTO campaign_targets (campaign_id, member_id, email) VALUES ('c', %s, 'a')"
    finish = (
        "UPDATE campaign_targets SET sent_at = now() WHERE campaign_id = 'c' AND member_id = %s"
    )
    with ThreadPoolExecutor() as pool, psycopg.connect(bare_dsn, autocommit=True) as old:
        migration = pool.submit(migrate, bare_dsn)
        member_id = 0
        while not migration.done() or member_id < 50:
            member_id += 1
            old.execute(insert, [member_id])
            old.execute(finish, [member_id])
    assert migration.result() == ALL
    assert run(bare_dsn, "SELECT count(*) FROM campaign_targets WHERE sent_at IS NOT NULL") == [
        member_id
    ]


def test_psql_runs_the_plan(bare_dsn: str, dsn: str, postgres: EmbeddedPostgres) -> None:
    run(bare_dsn, BARE, "INSERT INTO campaign_targets VALUES ('c', 1, 'a', now())")
    psql = subprocess.run(
        [postgres.bin_dir / "psql", "--no-psqlrc", "--quiet", bare_dsn],
        input=plan(bare_dsn),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (psql.returncode, psql.stdout) == (0, ""), psql.stderr
    assert catalogue(bare_dsn) == catalogue(dsn)
    assert run(bare_dsn, "SELECT state FROM campaign_targets") == ["sent"]


def test_the_plan_holds_what_is_pending_only(dsn: str) -> None:
    run(dsn, "DELETE FROM sender_migrations WHERE version = 4")
    text = plan(dsn)
    assert "0004 validate" in text
    assert "CREATE TABLE" not in text
    assert run(dsn, "SELECT count(*) FROM sender_migrations") == [4]


@pytest.mark.parametrize("version", range(REQUIRED_VERSION + 1))
async def test_a_database_behind_names_the_command(conn: AsyncConnection, version: int) -> None:
    await conn.execute("DELETE FROM sender_migrations WHERE version > %s", [version])
    if version == REQUIRED_VERSION:
        await check_schema(conn)
        return
    with pytest.raises(SchemaError, match=rf"is at schema {version}, .* run: sender migrate"):
        await check_schema(conn)


async def test_a_database_never_migrated_names_the_command(bare_dsn: str) -> None:
    async with await AsyncConnection.connect(bare_dsn) as conn:
        with pytest.raises(SchemaError, match=r"is at schema 0, .* run: sender migrate"):
            await check_schema(conn)


async def test_a_newer_database_serves_an_older_program(conn: AsyncConnection) -> None:
    await conn.execute("INSERT INTO sender_migrations (version, name) VALUES (999, 'future')")
    await check_schema(conn)


async def test_a_role_that_may_not_read_the_version_learns_which_right(
    conn: AsyncConnection,
) -> None:
    await conn.execute("CREATE ROLE reader")
    try:
        await conn.execute("SET ROLE reader")
        with pytest.raises(SchemaError, match="GRANT SELECT ON sender_migrations TO reader"):
            await check_schema(conn)
    finally:
        await conn.execute("RESET ROLE")
        await conn.execute("DROP ROLE reader")


def test_the_columns_looked_for_are_the_columns_added(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        rows = conn.execute(
            "SELECT column_name, data_type, column_default FROM information_schema.columns"
            " WHERE table_name = 'campaign_targets' ORDER BY ordinal_position"
        ).fetchall()
    assert {name: (type_, default) for name, type_, default in rows[4:]} == ground._ADDED
    assert [(name, type_) for name, type_, _ in rows[:4]] == [
        (name, types[0]) for name, types in ground._GIVEN.items()
    ]


def test_a_rows_xmin_is_found_in_full(dsn: str) -> None:
    assert run(
        dsn,
        """
        WITH made AS (INSERT INTO campaigns (campaign_id) VALUES ('c') RETURNING xmin)
        SELECT sender_row_xid(xmin) = pg_current_xact_id() FROM made
        """,
        "SELECT pg_visible_in_snapshot(sender_row_xid(xmin), pg_current_snapshot()) FROM campaigns",
    ) == [True]
