"""Connections to PostgreSQL: how they are made, what a failure means, one statement at a time.

Owns the pool. Must never hold a transaction open: a statement is a transaction.

Every statement has a time-out on this side as well, because a connection can go deaf without being
cut. A statement that ran into it may have been committed; all statements are safe to repeat.
"""

import asyncio
import os
import re
import selectors
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, LiteralString, Self

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import namedtuple_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from sender.errors import ConnectionRefused, DatabaseUnavailable, SchemaError
from sender.ports import StoreLocked, StoreUnavailable

# The connection's own limits; a setting in DB_DSN wins.
_CONNECTION_DEFAULTS: Final[Mapping[str, str]] = {
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
    "application_name": "sender",
}
_STATEMENT_TIMEOUT_S: Final = 15.0
_CHECKOUT_TIMEOUT_S: Final = 5.0
_POOL_SIZE: Final = 4
_CLOSE_S: Final = 0.2

# What a retry can mend: connection trouble (08, 57), resources (53), deadlock and serialisation
# (40), lock time-out (55P03), a server that became read-only (25006), its disk (58).
_TRANSIENT_CLASSES: Final = ("08", "40", "53", "57", "58")
_TRANSIENT_CODES: Final = frozenset({"55P03", "25006", "XX000"})
# What it cannot: a value in the DSN's options, such as a time zone (22), the role or its password
# (28), the name of the database (3D), a right to connect or a parameter that is none (42).
_REFUSAL_CLASSES: Final = ("22", "28", "3D", "42")
_TRACED_CODE: Final = re.compile(rb'\tErrorResponse\t.* C "([0-9A-Z]{5})"')
_TRACE_TIMEOUT_S: Final = 5.0


def is_transient(error: BaseException) -> bool:
    """Whether trying the same statement again can help.

    An error without SQLSTATE is the connection's (cut, refused, deaf).
    """
    if isinstance(error, PoolTimeout | TimeoutError):
        return True
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return error.sqlstate[:2] in _TRANSIENT_CLASSES or error.sqlstate in _TRANSIENT_CODES


def describe(error: BaseException) -> str:
    """The error's kind for a log: its class and SQLSTATE, never its text (it may hold data)."""
    state = getattr(error, "sqlstate", None)
    return type(error).__name__ + (f" {state}" if state else "")


class Database:
    """A small pool of autocommit connections. Use as an async context manager.

    Every method raises `StoreUnavailable` if trying again can help, and `SchemaError` if a table,
    column or right that the program needs is gone.
    """

    def __init__(self, dsn: str) -> None:
        self._pool = AsyncConnectionPool(
            conninfo(dsn),
            min_size=1,
            max_size=_POOL_SIZE,
            open=False,
            timeout=_CHECKOUT_TIMEOUT_S,
            reconnect_timeout=_CHECKOUT_TIMEOUT_S,
            configure=_configure,
            kwargs={"autocommit": True},
        )

    async def __aenter__(self) -> Self:
        await self._pool.open(wait=False)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._pool.close(timeout=_CLOSE_S)

    async def one(
        self,
        query: LiteralString,
        values: Mapping[str, object],
        timeout_s: float = _STATEMENT_TIMEOUT_S,
    ) -> Any:
        """Run a statement that answers with one row."""
        async with self._cursor(timeout_s) as cursor:
            await cursor.execute(query, values)
            return await cursor.fetchone()

    async def all(self, query: LiteralString, values: Mapping[str, object]) -> list[Any]:
        """Run a statement and return its rows."""
        async with self._cursor(_STATEMENT_TIMEOUT_S) as cursor:
            await cursor.execute(query, values)
            return await cursor.fetchall()

    async def run(
        self,
        query: LiteralString,
        values: Mapping[str, object],
        timeout_s: float = _STATEMENT_TIMEOUT_S,
    ) -> int:
        """Run a statement and return how many rows it touched."""
        async with self._cursor(timeout_s) as cursor:
            await cursor.execute(query, values)
            return cursor.rowcount

    @asynccontextmanager
    async def _cursor(self, timeout_s: float) -> AsyncGenerator[psycopg.AsyncCursor[Any]]:
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._pool.connection() as connection,
                connection.cursor(binary=True, row_factory=namedtuple_row) as cursor,
            ):
                yield cursor
        except (psycopg.Error, TimeoutError) as error:
            if isinstance(error, psycopg.errors.LockNotAvailable):
                raise StoreLocked(describe(error)) from error
            if is_transient(error):
                raise StoreUnavailable(describe(error)) from error
            if isinstance(
                error,
                psycopg.errors.UndefinedTable
                | psycopg.errors.UndefinedColumn
                | psycopg.errors.InsufficientPrivilege,
            ):
                raise SchemaError(
                    f"the database lacks what this program needs: {error.diag.message_primary}; "
                    "see: sender check"
                ) from error
            raise


async def connect(dsn: str, within_s: float) -> psycopg.AsyncConnection[Any]:
    """One autocommit connection outside the pool, for the checks at a start.

    Args:
        dsn: libpq URI or conninfo.
        within_s: seconds of trying.

    Raises:
        ConnectionRefused: the server answered and waiting will not change its mind.
        DatabaseUnavailable: nothing answered in time.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            return await psycopg.AsyncConnection.connect(conninfo(dsn), autocommit=True)
        except psycopg.Error as error:
            if refused := await asyncio.to_thread(refusal, dsn, error):
                raise refused from error
            left = deadline - time.monotonic()
            if left <= 0 or not is_transient(error):
                raise DatabaseUnavailable(
                    f"the database could not be reached within {within_s:.0f} s: {told(error)}"
                ) from error
            await asyncio.sleep(min(1.0, left))


def refusal(dsn: str, error: psycopg.Error) -> ConnectionRefused | None:
    """The error of a connection attempt that waiting will not mend; None if it may.

    Args:
        dsn: where it went; it is asked once more.
        error: how it ended.
    """
    code = _refusal_code(dsn)
    if code is None or not code.startswith(_REFUSAL_CLASSES):
        return None
    return ConnectionRefused(f"DB_DSN: {told(error)} ({code})")


def told(error: psycopg.Error) -> str:
    """What a server or the network said to a connection attempt.

    Without it nobody could tell a wrong password from a wrong host. It names host, role or database
    and never a password.
    """
    lines = str(error).splitlines() or [describe(error)]
    # libpq's advice may follow on a line of its own; of many hosts the last one's word is told.
    said = [line for line in lines if " failed: " in line] or lines
    return said[-1].rpartition(" failed: ")[2].strip()


def _refusal_code(dsn: str) -> str | None:
    """The SQLSTATE with which the server refuses a connection; None if it does not, or cannot say.

    libpq keeps it to itself (its text may be in any language) except in its trace of the protocol,
    so this connects once more and reads that, from memory: it may hold what was sent.
    """
    try:
        with os.fdopen(os.memfd_create("trace"), "rb") as trace:
            connection = pq.PGconn.connect_start(conninfo(dsn).encode())
            connection.trace(trace.fileno())
            _go_through(connection)
            connection.untrace()
            connection.finish()
            trace.seek(0)
            codes = _TRACED_CODE.findall(trace.read())
    except (AttributeError, OSError, psycopg.Error):  # not every platform can trace
        return None
    return codes[-1].decode() if codes else None


def _go_through(connection: pq.abc.PGconn) -> None:
    """Connect to the end, whatever it is, or give up."""
    give_up_at = time.monotonic() + _TRACE_TIMEOUT_S
    while connection.status != pq.ConnStatus.BAD and time.monotonic() < give_up_at:
        wants = connection.connect_poll()
        if wants not in {pq.PollingStatus.READING, pq.PollingStatus.WRITING}:
            return
        reads = wants == pq.PollingStatus.READING
        with selectors.DefaultSelector() as selector:
            event = selectors.EVENT_READ if reads else selectors.EVENT_WRITE
            selector.register(connection.socket, event)
            selector.select(_TRACE_TIMEOUT_S)


def conninfo(dsn: str) -> str:
    """`dsn` with this program's connection limits where it sets none itself."""
    given = {k: v for k, v in conninfo_to_dict(dsn).items() if v is not None}
    return make_conninfo("", **{**_CONNECTION_DEFAULTS, **given})


async def _configure(connection: psycopg.AsyncConnection[Any]) -> None:
    """Prepare statements once and for all, or not at all behind a pooler.

    A pooler in transaction mode hands each statement to another server session. It shows itself:
    the process id it announced at connect is not the one that answers. A session of our own keeps
    the first plan of each text: they are made to need no other, and planning CLAIM_DUE anew each
    time costs more than running it.
    """
    cursor = await connection.execute("SELECT pg_backend_pid()")
    row = await cursor.fetchone()
    if row is None or row[0] != connection.info.backend_pid:
        connection.prepare_threshold = None
    else:
        await connection.execute("SET plan_cache_mode = force_generic_plan")
