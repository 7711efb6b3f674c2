"""Which migrations a database has, and which this program needs. Changes nothing."""

from typing import Final

from psycopg import AsyncConnection, Connection
from psycopg.rows import scalar_row

from sender.errors import RightsError, SchemaError

# What a run needs. A newer database is fine (an older program beside a newer one in a roll-out),
# and the back-fill after this version may still be going on: claims ask for `sent_at IS NULL`.
REQUIRED_VERSION: Final = 4

# What the statements of a run name. A column may be dropped or renamed behind our back.
COLUMNS: Final = {
    "campaign_targets": "campaign_id member_id email sent_at opted_out_at state attempts unknowns"
    " lost_claims priority not_before claim_id lease_until key_used_at outcome_at content_hash"
    " reason vars",
    "campaign_batches": "campaign_id batch_no lo hi priority size claim_id lease_until lost_claims"
    " key_used_at key_snapshot claimed_ids done_at sent failed in_doubt deferred",
    "campaigns": "campaign_id control control_at control_by control_why",
    "provider_accounts": "account next_free_at blocked_until",
}

_MADE_BY: Final = {
    "campaign_targets": 1,
    "campaign_batches": 2,
    "campaigns": 2,
    "provider_accounts": 2,
}

# Which columns of these tables there are, as table.column.
_THERE: Final = """
SELECT relname || '.' || attname
FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
WHERE pg_class.oid = ANY (ARRAY(SELECT to_regclass(t)::oid FROM unnest(%s::text[]) t))
  AND attnum > 0 AND NOT attisdropped
"""


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
    async with conn.cursor(row_factory=scalar_row) as cursor:
        await cursor.execute(_THERE, [list(COLUMNS)])
        _check_whole(set(await cursor.fetchall()), applied)


def applied_versions(conn: Connection) -> set[int]:
    """The versions the database has; none if it was never migrated.

    Raises:
        RightsError: the role may not read them, so it is not the one to migrate.
        SchemaError: another program's table has their name.
    """
    answer = conn.execute(
        """
        SELECT has_table_privilege(oid, 'SELECT'), quote_ident(current_user),
               relowner::regrole::text,
               ARRAY(SELECT attname || ' ' || format_type(atttypid, NULL) FROM pg_attribute
                     WHERE attrelid = pg_class.oid AND attnum > 0 AND NOT attisdropped)
        FROM pg_class WHERE oid = to_regclass('sender_migrations')
        """
    ).fetchone()
    if answer is None:
        return set()
    may_read, role, owner, columns = answer
    if not {"version integer", "name text"} <= set(columns):
        raise SchemaError(is_foreign("sender_migrations"))
    if not may_read:
        raise RightsError(
            f"role {role} may not read sender_migrations; migrate as {owner}, who made it"
        )
    with conn.cursor(row_factory=scalar_row) as cursor:
        return set(cursor.execute("SELECT version FROM sender_migrations").fetchall())


def check_whole(conn: Connection, applied: set[int]) -> None:
    """Make sure that what was migrated once is still there.

    Args:
        conn: any connection.
        applied: the versions the database says it has.

    Raises:
        SchemaError: a table or column is gone.
    """
    with conn.cursor(row_factory=scalar_row) as cursor:
        _check_whole(set(cursor.execute(_THERE, [list(COLUMNS)]).fetchall()), applied)


def is_foreign(name: str) -> str:
    """What to tell of something that has the name of one of ours."""
    return (
        f"{name} exists and is not of this program; rename it, or keep campaign_targets in a "
        "schema of its own"
    )


def _check_whole(there: set[str], applied: set[int]) -> None:
    gone: list[str] = []
    for table, names in COLUMNS.items():
        missing = [name for name in names.split() if f"{table}.{name}" not in there]
        if missing and _MADE_BY[table] in applied:
            whole = missing == names.split()
            gone += [table] if whole else [f"{table}.{name}" for name in missing]
    if gone:
        raise SchemaError(
            f"missing in the database, though migrated once: {', '.join(gone)}; rename it back, or "
            "restore it. If only sender_migrations was copied here: drop it, then: sender migrate"
        )
