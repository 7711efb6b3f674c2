"""What the database looks like, held against what this program needs.

Reads the catalogue only. Must never change anything, nor read a row of the application's.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from psycopg import AsyncConnection, Connection
from psycopg.rows import namedtuple_row, scalar_row

from sender.errors import ConfigurationError, SchemaError

# What a run needs. Newer is fine (a roll-out, an older program beside it), and the back-fill after
# it may still be going on: every claim asks for `sent_at IS NULL`.
REQUIRED_VERSION: Final = 4
OLDEST_SERVER: Final = 140000

_TIMESTAMP: Final = "timestamp with time zone"

# The table people already have, and the types that serve. integer ids cost nothing: they compare
# with bigint inside one index. varchar and citext compare as text does; char pads, so it does not.
_GIVEN: Final[Mapping[str, tuple[str, ...]]] = {
    "campaign_id": ("text", "character varying"),
    "member_id": ("bigint", "integer"),
    "email": ("text", "character varying", "citext"),
    "sent_at": (_TIMESTAMP,),
}

# What 0001 adds where it is missing: type and default (a column with a default is NOT NULL).
_ADDED: Final[Mapping[str, tuple[str, str | None]]] = {
    "opted_out_at": (_TIMESTAMP, None),
    "state": ("text", "'pending'::text"),
    "attempts": ("integer", "0"),
    "unknowns": ("smallint", "0"),
    "lost_claims": ("smallint", "0"),
    "priority": ("smallint", "0"),
    "not_before": (_TIMESTAMP, None),
    "claim_id": ("uuid", None),
    "lease_until": (_TIMESTAMP, None),
    "key_used_at": (_TIMESTAMP, None),
    "outcome_at": (_TIMESTAMP, None),
    "content_hash": ("bytea", None),
    "reason": ("text", None),
    "vars": ("jsonb", None),
}

_CREATED: Final = ("campaign_batches", "campaigns", "provider_accounts", "campaign_actions")

_KINDS: Final[Mapping[str, str]] = {
    "v": "a view",
    "m": "a materialised view",
    "f": "a foreign table",
    "p": "a partitioned table",
}


class _Column(NamedTuple):
    name: str
    type: str
    is_required: bool
    default: str | None


async def check_schema(conn: AsyncConnection) -> None:
    """Make sure that the database is new enough for this program.

    Args:
        conn: any connection of the role that is going to run.

    Raises:
        SchemaError: a needed migration is missing, or the bookkeeping may not be read.
    """
    async with conn.cursor(row_factory=scalar_row) as cursor:
        await cursor.execute(
            "SELECT CASE WHEN to_regclass('sender_migrations') IS NULL THEN 'none'"
            " WHEN has_table_privilege('sender_migrations', 'SELECT') THEN 'read'"
            " ELSE format('role %s may not read sender_migrations; run as its owner:"
            " GRANT SELECT ON sender_migrations TO %1$I', current_user) END"
        )
        answer: str = await cursor.fetchone() or "none"
        present: set[int] = set()
        if answer == "read":
            await cursor.execute("SELECT version FROM sender_migrations")
            present = set(await cursor.fetchall())
        elif answer != "none":
            raise SchemaError(answer)
    missing = set(range(1, REQUIRED_VERSION + 1)) - present
    if missing:
        raise SchemaError(
            f"the database is at schema {min(missing) - 1}, this program needs {REQUIRED_VERSION}; "
            "run: sender migrate"
        )


def applied_versions(conn: Connection) -> set[int]:
    """The versions the database has; none if it has never been migrated."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        if cursor.execute("SELECT to_regclass('sender_migrations')").fetchone() is None:
            return set()
        return set(cursor.execute("SELECT version FROM sender_migrations").fetchall())


def check_ground(conn: Connection, applied: set[int]) -> None:
    """Make sure that migrating can succeed, before anything is changed.

    Args:
        conn: a connection of the role that migrates.
        applied: the versions that are there already.

    Raises:
        ConfigurationError: the server is too old or read-only, or the role lacks a right.
        SchemaError: tables exist that are not what they must be; one line for each difference.
    """
    if faults := _server_faults(conn):
        raise ConfigurationError("\n".join(faults))
    table_faults = _table_faults(conn)
    if 2 not in applied:
        table_faults += _strangers(conn)
    if table_faults:
        raise SchemaError("\n".join(table_faults))
    if faults := _right_faults(conn):
        raise ConfigurationError("\n".join(faults))


def _server_faults(conn: Connection) -> list[str]:
    faults: list[str] = []
    if conn.info.server_version < OLDEST_SERVER:
        faults.append(
            f"PostgreSQL {conn.info.server_version // 10000} is too old; "
            f"{OLDEST_SERVER // 10000} or newer is needed"
        )
    if conn.execute("SHOW transaction_read_only").fetchone() == ("on",):
        faults.append("the database is read-only (a standby?); DB_DSN must lead to the primary")
    return faults


def _right_faults(conn: Connection) -> list[str]:
    row = (
        conn.cursor(row_factory=namedtuple_row)
        .execute(
            """
            SELECT current_user AS role, current_schema() AS schema,
                   has_schema_privilege(current_schema(), 'CREATE') AS may_create,
                   pg_get_userbyid(c.relowner) AS owner,
                   c.relowner IS NULL OR pg_has_role(c.relowner, 'USAGE') AS may_alter,
                   c.relnamespace IS NULL OR c.relnamespace = current_schema()::regnamespace AS here,
                   c.relnamespace::regnamespace::text AS found_in
            FROM (SELECT to_regclass('campaign_targets') AS oid) AS named
            LEFT JOIN pg_class c USING (oid)
            """
        )
        .fetchone()
    )
    assert row is not None
    if row.schema is None:
        return [f"no schema of the search_path exists for role {row.role}; set search_path"]
    faults: list[str] = []
    if not row.may_create:
        faults.append(
            f"role {row.role} lacks CREATE on schema {row.schema}: "
            f"GRANT CREATE ON SCHEMA {row.schema} TO {row.role}"
        )
    if not row.may_alter:
        faults.append(
            f"role {row.role} does not own campaign_targets: migrate as {row.owner}, "
            f"or GRANT {row.owner} TO {row.role}"
        )
    if not row.here:
        faults.append(
            f"campaign_targets is in schema {row.found_in}, new tables would go to {row.schema}: "
            f"ALTER ROLE {row.role} SET search_path = {row.found_in}"
        )
    return faults


def _strangers(conn: Connection) -> list[str]:
    found = conn.execute(
        "SELECT name FROM unnest(%s::text[]) AS name WHERE to_regclass(name) IS NOT NULL",
        [list(_CREATED)],
    )
    return [
        f"{name} exists and is not of this program: rename it, or keep campaign_targets in a "
        "schema of its own"
        for (name,) in found
    ]


def _table_faults(conn: Connection) -> list[str]:
    row = conn.execute(
        "SELECT relkind::text, relpersistence::text FROM pg_class"
        " WHERE oid = to_regclass('campaign_targets')"
    ).fetchone()
    if row is None:
        return []
    kind, persistence = row
    if kind != "r":
        what = _KINDS.get(kind, "no table")
        return [
            f"campaign_targets is {what}; a plain table is needed: its rows are locked and indexed"
        ]
    faults = _column_faults(_columns(conn)) + _key_faults(conn)
    if persistence != "p":
        faults.append(
            "campaign_targets is unlogged, a crash of the server empties it and all would be mailed "
            "again: ALTER TABLE campaign_targets SET LOGGED"
        )
    return faults


def _columns(conn: Connection) -> dict[str, _Column]:
    # A domain serves as the type below it does.
    rows = conn.execute(
        """
        SELECT attname, format_type(coalesce(nullif(typbasetype, 0), atttypid), NULL),
               attnotnull, pg_get_expr(adbin, adrelid)
        FROM pg_attribute
        JOIN pg_type ON pg_type.oid = atttypid
        LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
        WHERE attrelid = to_regclass('campaign_targets') AND attnum > 0 AND NOT attisdropped
        """
    )
    return {row[0]: _Column(*row) for row in rows}


def _column_faults(columns: Mapping[str, _Column]) -> list[str]:
    faults: list[str] = []
    for name, types in _GIVEN.items():
        if name not in columns:
            faults.append(f"campaign_targets.{name} is missing: add it as {types[0]}")
        elif columns[name].type.rpartition(".")[2] not in types:
            faults.append(_wrong_type(columns[name], types[0]))
    for name, (type_, default) in _ADDED.items():
        if (column := columns.get(name)) is None:
            continue
        if column.type != type_:
            faults.append(_wrong_type(column, type_))
        elif default is not None and (column.default != default or not column.is_required):
            faults.append(f"campaign_targets.{name} must be NOT NULL DEFAULT {default}")
    return faults


def _wrong_type(column: _Column, needed: str) -> str:
    text = f"campaign_targets.{column.name} is {column.type}, {needed} is needed"
    if column.name == "member_id":
        return f"{text}: the queue leases ranges of whole numbers"
    change = f"ALTER TABLE campaign_targets ALTER COLUMN {column.name} TYPE {needed}"
    if needed == _TIMESTAMP and column.type == "timestamp without time zone":
        return f"{text}: SET timezone to the zone it is written in (UTC rewrites nothing), then {change}"
    return f"{text}: {change} (rewrites the table under an exclusive lock)"


def _key_faults(conn: Connection) -> list[str]:
    row = conn.execute(
        """
        SELECT string_agg(attname, ', ' ORDER BY place)
        FROM pg_index
        CROSS JOIN LATERAL unnest(indkey::int2[]) WITH ORDINALITY AS key(attnum, place)
        JOIN pg_attribute USING (attnum)
        WHERE indrelid = to_regclass('campaign_targets') AND attrelid = indrelid AND indisprimary
          AND place <= indnkeyatts
        """
    ).fetchone()
    key = row[0] if row else None
    if key == "campaign_id, member_id":
        return []
    found = (
        f"the primary key of campaign_targets is ({key})"
        if key
        else "campaign_targets has no primary key"
    )
    return [
        f"{found}, (campaign_id, member_id) is needed: CREATE UNIQUE INDEX CONCURRENTLY "
        "campaign_targets_key ON campaign_targets (campaign_id, member_id), then "
        + ("drop the old key and " if key else "")
        + "ALTER TABLE campaign_targets ADD PRIMARY KEY USING INDEX campaign_targets_key"
    ]
