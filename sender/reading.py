"""A connection for the commands that only look. Must never write, nor hold a snapshot for long."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection, IsolationLevel

from sender.database import connect, describe
from sender.errors import DatabaseUnavailable
from sender.locks import briefly, naming_holders
from sender.rights import refused
from sender.schema import check_schema

_PATIENCE_S: Final = 5.0


@asynccontextmanager
async def reading(dsn: str, *, at_one_moment: bool) -> AsyncGenerator[AsyncConnection[Any]]:
    """Connect to look at a migrated database.

    Args:
        dsn: libpq URI or conninfo.
        at_one_moment: all statements see the same moment, so that what they tell adds up; for a few
            quick ones only, because vacuum waits for it. Without it, each wants `briefly`.

    Yields:
        The connection.

    Raises:
        SchemaError: the database is not migrated.
        RightsError: the role may not look.
        DatabaseUnavailable: it does not answer, stopped answering, or somebody has locked a table.
    """
    conn = await connect(dsn, within_s=_PATIENCE_S)
    conn.prepare_threshold = None  # few statements, and a pooler may be in between
    try:
        async with conn, naming_holders(conn, "then ask again"):
            async with briefly(conn):
                await check_schema(conn)
            if not at_one_moment:
                yield conn
                return
            await conn.set_isolation_level(IsolationLevel.REPEATABLE_READ)
            await conn.set_read_only(True)
            async with briefly(conn):
                yield conn
    except psycopg.errors.InsufficientPrivilege as error:
        raise refused(error) from error
    except psycopg.OperationalError as error:
        raise DatabaseUnavailable(
            f"the database stopped answering ({describe(error)}); ask again"
        ) from error
