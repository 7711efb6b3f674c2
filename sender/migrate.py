"""`sender migrate`: brings the database to the current schema beside a busy application.

Owns the order of the files in `sql/migrations` and how they are repeated. What is in a file is
what runs: each is a script that psql could run too, in steps divided by a line `-- step`. A step is
one message, so a transaction inside it goes to its end whatever becomes of this process: no lock is
held over a round trip. Each file records its version itself, in its transaction or last step.

Whoever waits for a lock that the application queues behind gives up after 80 ms and tries again
later. Nothing depends on the session (a pooler may change it between steps) nor on advisory locks.
"""

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final, LiteralString, cast

import psycopg
import stamina
from psycopg import Connection, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from sender.database import conninfo, refusal, told
from sender.errors import ConfigurationError, DatabaseUnavailable, MigrationError, SchemaError
from sender.ground import check_ground
from sender.schema import REQUIRED_VERSION, applied_versions, check_schema, check_whole

__all__ = ["REQUIRED_VERSION", "check_schema", "migrate", "plan"]

PATIENCE_S: Final = 300.0

type Tell = Callable[[str], None]

_FOREIGN_STATE: Final = (
    "campaign_targets.state, which was there before, holds something else than pending, sending, "
    "sent, failed or in_doubt; correct those rows and migrate again"
)
_STEP: Final = "\n-- step\n"

# Others were in the way, or the connection was lost (no SQLSTATE): the same file may pass later.
# 23505 is another migration that records the same version, 57014 a statement_timeout of the role,
# 55000 an index that another build left invalid.
_PASSING: Final = frozenset(
    {"23505", "40001", "40P01", "55000", "55P03", "57014", "57P01", "57P02", "57P03"}
)


@dataclass(slots=True, frozen=True)
class _File:
    version: int
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.version:04} {self.name}"


def migrate(dsn: str, *, tell: Tell = lambda _: None, patience_s: float = PATIENCE_S) -> list[str]:
    """Apply the migrations that the database does not have yet.

    Safe to repeat, to kill at any point and to run twice at once.

    Args:
        dsn: libpq URI or conninfo of the role that owns the tables.
        tell: receives a line for people now and then.
        patience_s: how long one migration is tried again while others hold the locks it needs.

    Returns:
        What this call applied, oldest first; empty if there was nothing to do.

    Raises:
        ConfigurationError: DSN, server, rights or existing tables are wrong; nothing was changed.
        DatabaseUnavailable: the database did not answer.
        MigrationError: a migration failed or lost its patience; a repeat goes on from there.
    """
    return [str(file) for file in _pending(dsn) if _apply(dsn, file, tell, patience_s)]


def plan(dsn: str) -> str:
    """The SQL that `migrate` would run, for psql; empty if there is nothing to do.

    Args:
        dsn: as for `migrate`.

    Raises:
        ConfigurationError: as for `migrate`.
        DatabaseUnavailable: the database did not answer.
    """
    pending = _pending(dsn)
    if not pending:
        return ""
    head = (
        "-- For psql, outside of a transaction. 'canceling statement due to lock timeout' means:\n"
        "-- the application was in the way; make a new plan and go on, as sender migrate does.\n"
        "\\set ON_ERROR_STOP on\n"
    )
    return "\n".join([head, *(f"-- {file}\n{file.text}" for file in pending)])


def _pending(dsn: str) -> list[_File]:
    try:
        with _connect(dsn) as conn, _foreign_errors("reading the catalogue"):
            while True:
                applied = applied_versions(conn)
                pending = [file for file in _files() if file.version not in applied]
                try:
                    check_whole(conn, applied)
                    if pending:
                        check_ground(conn, applied)
                except SchemaError:
                    # What another migration has made since we read is not a stranger's.
                    if applied == applied_versions(conn):
                        raise
                else:
                    return pending
    except psycopg.OperationalError as error:
        away = DatabaseUnavailable(f"the database does not answer: {told(error)}")
        raise refusal(dsn, error) or away from error


def _apply(dsn: str, file: _File, tell: Tell, patience_s: float) -> bool:
    """Run a file until it passes; False if another migration was first."""
    tell(f"{file}: begins")
    attempts = stamina.retry_context(
        on=_is_passing,
        attempts=None,
        timeout=patience_s,
        wait_initial=0.2,
        wait_max=5.0,
        wait_jitter=0.3,
    )
    with _foreign_errors(str(file)):
        for attempt in attempts:
            with attempt, _connect(dsn) as conn:
                conn.add_notice_handler(lambda notice: _pass_on(notice, file, tell))
                if file.version in applied_versions(conn):
                    tell(f"{file}: is there already")
                    return False
                _run(conn, file, tell)
    tell(f"{file}: done")
    return True


def _run(conn: Connection, file: _File, tell: Tell) -> None:
    for step in file.text.split(_STEP):
        try:
            # Our own file, and nothing is put into it. Without parameters it is one simple-query
            # message, however many statements it holds.
            conn.execute(sql.SQL(cast("LiteralString", step)), prepare=False)
        except psycopg.OperationalError as error:
            if error.sqlstate == "55P03":
                conn.rollback()
                error.add_note(f"held by {_holders(conn)}")
                tell(f"{file}: gave way; {error.__notes__[-1]}")
            raise


def _is_passing(error: Exception) -> bool:
    if not isinstance(error, psycopg.Error):
        return False
    return error.sqlstate in _PASSING or (
        error.sqlstate is None and isinstance(error, psycopg.OperationalError)
    )


def _holders(conn: Connection) -> str:
    rows = conn.execute(
        """
        SELECT DISTINCT format('pid %s (%s, %s)', pid, usename,
                               coalesce(nullif(application_name, ''), 'no application_name'))
        FROM pg_locks JOIN pg_stat_activity USING (pid)
        WHERE relation IN (to_regclass('campaign_targets'), to_regclass('sender_migrations'))
          AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND granted AND pid <> pg_backend_pid()
        LIMIT 5
        """
    )
    return ", ".join(holder for (holder,) in rows) or "somebody who is gone already"


def _pass_on(notice: psycopg.errors.Diagnostic, file: _File, tell: Tell) -> None:
    # The migrations speak by INFO; NOTICE is PostgreSQL's own "already exists, skipping".
    if notice.severity_nonlocalized == "INFO":
        tell(f"{file}: {notice.message_primary}")


@contextmanager
def _foreign_errors(doing: str) -> Generator[None]:
    """Turn what psycopg raises into our own errors; texts come from the server, never the DSN."""
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigurationError(f"{doing}: {error.diag.message_primary}") from error
    except psycopg.errors.DuplicateTable as error:
        raise SchemaError(f"{doing}: {error.diag.message_primary}") from error
    except psycopg.Error as error:
        notes: list[str] = getattr(error, "__notes__", [])
        if error.diag.constraint_name == "campaign_targets_state_known":
            raise SchemaError(f"{doing}: {_FOREIGN_STATE}") from error
        text = "; ".join([error.diag.message_primary or str(error), *notes])
        raise MigrationError(f"{doing}: {text}") from error


def _connect(dsn: str) -> Connection:
    # No prepared statements: a pooler in transaction mode would not know them.
    return psycopg.connect(_conninfo(dsn), autocommit=True, prepare_threshold=None)


def _conninfo(dsn: str) -> str:
    """The DSN with our defaults; refuses one whose parts libpq would quote in an error message."""
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # The text of this error holds the DSN, so it is not kept, not even as a cause.
        raise ConfigurationError("DB_DSN is neither a libpq URI nor a conninfo string") from None
    ports = str(given.get("port") or "").replace(",", "")
    if "@" in str(given.get("host")) or not (ports or "0").isdecimal():
        raise ConfigurationError(
            "DB_DSN has no valid host and port; write @ : / ? # % inside a password as %40 %3A %2F "
            "%3F %23 %25"
        )
    return conninfo(make_conninfo("", **{"application_name": "sender migrate", **given}))


def _files() -> list[_File]:
    found = (
        _File(int(match[1]), match[2], entry.read_text("utf-8"))
        for entry in _directory().iterdir()
        if (match := re.fullmatch(r"(\d{4})_(\w+)\.sql", entry.name))
    )
    return sorted(found, key=lambda file: file.version)


def _directory() -> Traversable:
    """`sender/sql/migrations` of an installed wheel, else `sql/migrations` of the checkout."""
    packaged = files("sender") / "sql" / "migrations"
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "sql" / "migrations"
