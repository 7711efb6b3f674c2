"""`sender migrate`: brings the database to the current schema beside a running application.

Owns the order of the SQL files in `sql/migrations` and the table `sender_migrations`.
"""

import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import LiteralString, cast

import psycopg
import stamina
from psycopg import AsyncConnection, Connection, sql

from sender.errors import MigrationError, SchemaError

# The back-fill after it is not needed: every claim asks for `sent_at IS NULL`.
REQUIRED_VERSION = 4
RETRY_FOR_S = 300.0
BOOKKEEPING = """\
CREATE TABLE IF NOT EXISTS sender_migrations (
    version int PRIMARY KEY,
    name text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
"""
_RETRIED = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.QueryCanceled,
    psycopg.errors.ObjectNotInPrerequisiteState,
    psycopg.OperationalError,
)


@dataclass(slots=True, frozen=True)
class Migration:
    version: int
    name: str
    statements: tuple[str, ...]


def migrations() -> list[Migration]:
    found: list[Migration] = []
    for file in sorted(_directory().iterdir(), key=lambda file: file.name):
        if match := re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name):
            found.append(_parse(int(match[1]), match[2], file.read_text()))
    return found


def _parse(version: int, name: str, text: str) -> Migration:
    if text.startswith("-- transaction: false\n"):
        record = (
            f"INSERT INTO sender_migrations (version, name) VALUES ({version}, '{name}')\n"
            "    ON CONFLICT DO NOTHING;\n"
        )
        return Migration(version, name, (*text.split("\n-- step\n"), record))
    record = f"INSERT INTO sender_migrations (version, name) VALUES ({version}, '{name}');\n"
    return Migration(
        version, name, (f"BEGIN;\nSET LOCAL lock_timeout='5s';\n{record}\n{text}\nCOMMIT;\n",)
    )


def _directory() -> Traversable:
    packaged = files("sender") / "sql" / "migrations"
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "sql" / "migrations"


def migrate(dsn: str) -> list[str]:
    """Apply what is missing; returns the names of what was applied."""
    with _connect(dsn) as conn:
        done = _applied(conn)
    applied: list[str] = []
    for migration in migrations():
        if migration.version not in done and _apply(dsn, migration):
            applied.append(f"{migration.version:04} {migration.name}")
    return applied


def _apply(dsn: str, migration: Migration) -> bool:
    for attempt in stamina.retry_context(
        on=_RETRIED,
        attempts=None,
        timeout=RETRY_FOR_S,
        wait_initial=0.1,
        wait_max=5,
        wait_jitter=0.5,
    ):
        with attempt, _connect(dsn) as conn:
            try:
                _execute(conn, BOOKKEEPING)
                if migration.version in _applied(conn):
                    return False
                for statement in migration.statements:
                    _execute(conn, statement)
            except psycopg.errors.UniqueViolation:
                return False
    return True


def _execute(conn: Connection, text: str) -> None:
    # The text comes from our own files, never from outside.
    conn.execute(sql.SQL(cast(LiteralString, text)), prepare=False)


def _connect(dsn: str) -> Connection:
    return psycopg.connect(dsn, autocommit=True, prepare_threshold=None)


def _applied(conn: Connection) -> set[int]:
    if conn.execute("SELECT to_regclass('sender_migrations')").fetchone() == (None,):
        return set()
    return {version for (version,) in conn.execute("SELECT version FROM sender_migrations")}


async def check_schema(conn: AsyncConnection) -> None:
    """Raise SchemaError unless the database is at REQUIRED_VERSION or later."""
    cursor = await conn.execute("SELECT to_regclass('sender_migrations') IS NOT NULL")
    version = 0
    if await cursor.fetchone() == (True,):
        cursor = await conn.execute("SELECT coalesce(max(version), 0) FROM sender_migrations")
        row = await cursor.fetchone()
        version = row[0] if row else 0
    if version < REQUIRED_VERSION:
        raise SchemaError(
            f"the database is at schema {version}, this program needs {REQUIRED_VERSION}; "
            "run: sender migrate"
        )
