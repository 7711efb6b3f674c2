"""Whether a database can be migrated: server, rights, and tables that are there already.

Reads the catalogue only. Must never change anything, nor read a row of the application's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from psycopg import Connection
from psycopg.rows import class_row, scalar_row

from sender.errors import ConfigurationError, SchemaError
from sender.taken_names import taken_faults

OLDEST_SERVER: Final = 14

_TIMESTAMP: Final = "timestamp with time zone"

# The table people already have, and the types that serve, the usual one first. integer ids cost
# nothing: one index serves their comparison with bigint. varchar compares and travels as text does;
# char pads its values, and citext arrives as bytes where results are binary.
_GIVEN: Final[Mapping[str, tuple[str, ...]]] = {
    "campaign_id": ("text", "character varying"),
    "member_id": ("bigint", "integer"),
    "email": ("text", "character varying"),
    "sent_at": (_TIMESTAMP,),
}

# What 0001 adds where it is missing: type, and default if the column is NOT NULL.
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

_KINDS: Final[Mapping[str, str]] = {
    "v": "a view",
    "m": "a materialised view",
    "f": "a foreign table",
    "p": "a partitioned table",
}


@dataclass(slots=True, frozen=True)
class _Place:
    """Who we are, where new tables would go, and whose `campaign_targets` is."""

    role: str
    schema: str | None
    may_create: bool | None
    found_in: str | None
    owner: str | None
    may_alter: bool | None
    kind: str | None
    persistence: str | None


@dataclass(slots=True, frozen=True)
class _Column:
    name: str
    type: str
    is_required: bool
    default: str | None


def check_ground(conn: Connection, applied: set[int]) -> None:
    """Make sure that migrating can succeed, before anything is changed.

    Args:
        conn: a connection of the role that migrates.
        applied: the versions the database has.

    Raises:
        ConfigurationError: the server is too old or read-only, or the role lacks a right.
        SchemaError: something that exists is not what it must be; a line for each difference.
    """
    if faults := _server_faults(conn):
        raise ConfigurationError("\n".join(faults))
    place = _place(conn)
    faults = _table_faults(conn, place) + taken_faults(conn, applied)
    if faults:
        raise SchemaError("\n".join(faults))
    if faults := _right_faults(place):
        raise ConfigurationError("\n".join(faults))


def _server_faults(conn: Connection) -> list[str]:
    faults: list[str] = []
    version = conn.info.server_version // 10_000
    if version < OLDEST_SERVER:
        faults.append(f"PostgreSQL {version} is too old, {OLDEST_SERVER} or newer is needed")
    if conn.execute("SHOW transaction_read_only").fetchone() == ("on",):
        faults.append("the database is read-only (a standby?); DB_DSN must lead to the primary")
    return faults


def _place(conn: Connection) -> _Place:
    with conn.cursor(row_factory=class_row(_Place)) as cursor:
        place = cursor.execute(
            """
            SELECT quote_ident(current_user) AS role, quote_ident(current_schema()) AS schema,
                   has_schema_privilege(current_schema(), 'CREATE') AS may_create,
                   relnamespace::regnamespace::text AS found_in, relowner::regrole::text AS owner,
                   pg_has_role(relowner, 'USAGE') AS may_alter,
                   relkind::text AS kind, relpersistence::text AS persistence
            FROM (SELECT to_regclass('campaign_targets') AS oid) AS wanted
            LEFT JOIN pg_class USING (oid)
            """
        ).fetchone()
    if place is None:  # an outer join with one row on its left
        raise AssertionError
    return place


def _right_faults(place: _Place) -> list[str]:
    if place.schema is None:
        return [f"no schema in the search_path of role {place.role} exists"]
    faults: list[str] = []
    if not place.may_create:
        faults.append(
            f"role {place.role} may not create tables; as the owner of the schema run: "
            f"GRANT CREATE ON SCHEMA {place.schema} TO {place.role}"
        )
    if place.owner is not None and not place.may_alter:
        faults.append(
            f"role {place.role} does not own campaign_targets; migrate as {place.owner}, "
            f"or run: GRANT {place.owner} TO {place.role}"
        )
    if place.found_in is not None and place.found_in != place.schema:
        faults.append(
            f"campaign_targets is in schema {place.found_in}, new tables would go to "
            f"{place.schema}; run: ALTER ROLE {place.role} SET search_path = {place.found_in}"
        )
    return faults


def _table_faults(conn: Connection, place: _Place) -> list[str]:
    if place.kind is None:
        return []
    if place.kind != "r":
        kind = _KINDS.get(place.kind, "no table")
        return [f"campaign_targets is {kind}; a plain table is needed to lock and index its rows"]
    columns = _columns(conn)
    faults = _column_faults(columns)
    if {"campaign_id", "member_id"} <= columns.keys():
        faults += _key_faults(conn)
    if place.persistence != "p":
        faults.append(
            "campaign_targets is unlogged: a crash of the server empties it, and after the next "
            "load all are mailed again; run: ALTER TABLE campaign_targets SET LOGGED"
        )
    return faults


def _columns(conn: Connection) -> dict[str, _Column]:
    # A domain serves as the type below it does.
    with conn.cursor(row_factory=class_row(_Column)) as cursor:
        cursor.execute(
            """
            SELECT attname AS name, attnotnull AS is_required,
                   format_type(coalesce(nullif(typbasetype, 0), atttypid), NULL) AS type,
                   pg_get_expr(adbin, adrelid) AS default
            FROM pg_attribute
            JOIN pg_type ON pg_type.oid = atttypid
            LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
            WHERE attrelid = to_regclass('campaign_targets') AND attnum > 0 AND NOT attisdropped
            """
        )
        return {column.name: column for column in cursor}


def _column_faults(columns: Mapping[str, _Column]) -> list[str]:
    faults: list[str] = []
    for name, types in _GIVEN.items():
        if name not in columns:
            faults.append(
                f"campaign_targets.{name} is missing; rename the column that holds it, or add it "
                f"as {types[0]}"
            )
        elif columns[name].type not in types:
            faults.append(_wrong_type(columns[name], types[0]))
    for name, (needed, default) in _ADDED.items():
        column = columns.get(name)
        if column is None:
            continue
        if column.type != needed:
            faults.append(_wrong_type(column, needed))
        elif default is not None and (column.default != default or not column.is_required):
            faults.append(
                f"campaign_targets.{name} is there already and must be NOT NULL DEFAULT {default}; "
                "rename it if it means something else"
            )
    return faults


def _wrong_type(column: _Column, needed: str) -> str:
    fault = f"campaign_targets.{column.name} is {column.type}, {needed} is needed"
    if column.name == "member_id":
        return f"{fault}: ranges of whole numbers are leased"
    change = f"ALTER TABLE campaign_targets ALTER COLUMN {column.name} TYPE {needed}"
    if column.type == "timestamp without time zone":
        zone = "SET timezone = 'the zone it is written in' (UTC rewrites nothing)"
        return f"{fault}; run: {zone}; {change}"
    return f"{fault}; run: {change} (it may rewrite the table, and locks everyone out meanwhile)"


def _key_faults(conn: Connection) -> list[str]:
    with conn.cursor(row_factory=scalar_row) as cursor:
        key = cursor.execute(
            """
            SELECT string_agg(attname, ', ' ORDER BY place)
            FROM pg_index
            CROSS JOIN LATERAL unnest(indkey::int2[]) WITH ORDINALITY AS key(attnum, place)
            JOIN pg_attribute USING (attnum)
            WHERE indrelid = to_regclass('campaign_targets') AND attrelid = indrelid
              AND indisprimary AND place <= indnkeyatts
            """
        ).fetchone()
    if key == "campaign_id, member_id":
        return []
    found = f"has the primary key ({key})" if key else "has no primary key"
    drop = "drop the old key, " if key else ""
    fault = (
        f"campaign_targets {found}, (campaign_id, member_id) is needed; run: CREATE UNIQUE INDEX "
        "CONCURRENTLY campaign_targets_key ON campaign_targets (campaign_id, member_id), then "
        f"{drop}ALTER TABLE campaign_targets ADD PRIMARY KEY USING INDEX campaign_targets_key"
    )
    return [fault]
