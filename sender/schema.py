"""Which migrations a database has, and which this program needs. Changes nothing."""

from typing import Final

from psycopg import AsyncConnection, Connection
from psycopg.rows import scalar_row

from sender.errors import SchemaError

# What a run needs. A newer database is fine (an older program beside a newer one in a roll-out),
# and the back-fill after this version may still be going on: claims ask for `sent_at IS NULL`.
REQUIRED_VERSION: Final = 4

# What the statements of a run name. A column may be dropped or renamed behind our back.
_COLUMNS: Final = {
    "campaign_targets": "campaign_id member_id email sent_at opted_out_at state attempts unknowns"
    " lost_claims priority not_before claim_id lease_until key_used_at outcome_at content_hash"
    " reason vars",
    "campaign_batches": "campaign_id batch_no lo hi priority size claim_id lease_until lost_claims"
    " key_used_at key_snapshot claimed_ids done_at sent failed in_doubt deferred",
    "campaigns": "campaign_id control control_at control_by control_why",
    "provider_accounts": "account next_free_at blocked_until",
}


async def check_schema(conn: AsyncConnection) -> None:
    """Make sure that the database is new enough for this program.

    Args:
        conn: any connection of the role that is going to run.

    Raises:
        SchemaError: a migration is missing, or the role may not read which there are.
    """
    async with conn.cursor(row_factory=scalar_row) as cursor:
        await cursor.execute(
            """
            SELECT CASE WHEN to_regclass('sender_migrations') IS NULL THEN 'missing'
                        WHEN has_table_privilege('sender_migrations', 'SELECT') THEN 'readable'
                        ELSE current_user END
            """
        )
        answer = str(await cursor.fetchone())
        if answer not in {"missing", "readable"}:
            raise SchemaError(
                f"role {answer} may not read sender_migrations; as the owner of the tables run: "
                f"GRANT SELECT ON sender_migrations TO {answer}"
            )
        applied: set[int] = set()
        if answer == "readable":
            await cursor.execute("SELECT version FROM sender_migrations")
            applied.update(await cursor.fetchall())
    missing = set(range(1, REQUIRED_VERSION + 1)) - applied
    if missing:
        raise SchemaError(
            f"the database is at schema {min(missing) - 1}, this program needs {REQUIRED_VERSION}; "
            "run: sender migrate"
        )
    gone = await _columns_gone(conn)
    if gone:
        raise SchemaError(f"missing in the database, though migrated once: {', '.join(gone)}")


async def _columns_gone(conn: AsyncConnection) -> list[str]:
    """The columns a run needs that are not there any more, as table.column."""
    async with conn.cursor(row_factory=scalar_row) as cursor:
        await cursor.execute(
            """
            SELECT c.relname || '.' || a.attname
            FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
            WHERE c.oid = ANY (ARRAY(SELECT to_regclass(t)::oid FROM unnest(%s::text[]) t))
              AND a.attnum > 0 AND NOT a.attisdropped
            """,
            [list(_COLUMNS)],
        )
        there = set(await cursor.fetchall())
    needed = [f"{table}.{name}" for table, names in _COLUMNS.items() for name in names.split()]
    return [name for name in needed if name not in there]


def applied_versions(conn: Connection) -> set[int]:
    """The versions the database has; none if it was never migrated."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        if cursor.execute("SELECT to_regclass('sender_migrations')").fetchone() is None:
            return set()
        return set(cursor.execute("SELECT version FROM sender_migrations").fetchall())
