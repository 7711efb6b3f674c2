"""How long the commands of people wait for a lock, and who holds it when that was too long.

A table that is locked as a whole (LOCK TABLE, ALTER TABLE, VACUUM FULL) is waited for before a
statement begins, so a limit inside the statement comes too late: it is set in front of it, in the
same transaction, which is all that is ours behind a pooler. Must never change a row.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, LiteralString

import psycopg
from psycopg import AsyncClientCursor, AsyncConnection, sql
from psycopg.rows import AsyncRowFactory, tuple_row

from sender.errors import TableLocked
from sender.schema import COLUMNS

LOCKS_S: Final = 5.0

_OWN_TABLES: Final = [*COLUMNS, "campaign_actions", "sender_migrations"]

# Who has, or stands in line for, a lock that keeps others from changing a table of ours, by table.
_HOLDERS: Final[LiteralString] = """
SELECT relname, string_agg(DISTINCT format('pid %%s (%%s, %%s)', pid, usename,
                           coalesce(nullif(application_name, ''), 'no application_name')), ', ')
FROM pg_locks JOIN pg_stat_activity USING (pid) JOIN pg_class ON pg_class.oid = relation
WHERE relation = ANY (ARRAY(SELECT to_regclass(name)::oid FROM unnest(%s::text[]) AS own(name)))
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (mode = 'AccessExclusiveLock'
       OR granted AND mode IN ('ExclusiveLock', 'ShareRowExclusiveLock', 'ShareLock'))
  AND pid <> pg_backend_pid()
GROUP BY relname
ORDER BY relname
"""


@asynccontextmanager
async def briefly(conn: AsyncConnection[Any], locks_s: float | None = None) -> AsyncGenerator[None]:
    """A transaction in which nothing waits long for a lock; for looking only."""
    async with conn.transaction():
        await conn.execute(_limit(LOCKS_S if locks_s is None else locks_s))
        yield


async def at_once[Row](
    conn: AsyncConnection[Any],
    query: LiteralString,
    values: Mapping[str, object],
    row_factory: AsyncRowFactory[Row],
) -> list[Row]:
    """Run one statement under the same limit, as a transaction and as a message of its own.

    So a process that is frozen in between holds no lock. The values are put in on this side, as
    text: not for numbers beyond an integer's range.
    """
    cursor: AsyncClientCursor[Row] = AsyncClientCursor(conn, row_factory=row_factory)
    await cursor.execute(_limit(LOCKS_S) + sql.SQL("; ") + sql.SQL(query), values)
    cursor.nextset()
    return await cursor.fetchall() if cursor.description else []


@asynccontextmanager
async def naming_holders(conn: AsyncConnection[Any], then: str) -> AsyncGenerator[None]:
    """Say which table somebody has locked, and who, instead of that a lock was not to be had.

    Args:
        conn: not inside a transaction when the error arrives here.
        then: what to do once the table is free.

    Raises:
        TableLocked: a table is locked as a whole; other errors go on their way.
    """
    try:
        yield
    except psycopg.errors.LockNotAvailable as error:
        if not (held := await _holders(conn)):
            raise
        text = "; ".join(f"{table} is locked by {holders}" for table, holders in held)
        raise TableLocked(
            f"{text}; end that transaction (pg_terminate_backend) or wait for its end; {then}"
        ) from error


async def _holders(conn: AsyncConnection[Any]) -> list[tuple[str, str]]:
    try:
        cursor = conn.cursor(row_factory=tuple_row)
        return await (await cursor.execute(_HOLDERS, [_OWN_TABLES])).fetchall()
    except psycopg.Error:
        return []


def _limit(seconds: float) -> sql.Composed:
    return sql.SQL("SET LOCAL lock_timeout = {}").format(round(seconds * 1000))
