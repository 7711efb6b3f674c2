"""One server a session, one migrated template database, a clone a test."""

from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, LiteralString, cast

import psycopg
import pytest
from psycopg import AsyncConnection, sql
from psycopg.conninfo import make_conninfo

from sender.dev.postgres import EmbeddedPostgres
from sender.migrate import migrate

ROLES = Path(__file__).parents[1] / "sql" / "roles.sql"
_numbers = count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """The server of this session (of this worker under xdist), reachable by TCP."""
    with EmbeddedPostgres(durable=False, tcp=True, settings={"autovacuum": "off"}) as server:
        yield server


@pytest.fixture(scope="session")
def template(postgres: EmbeddedPostgres) -> str:
    """The name of a migrated database with its roles, that nobody is connected to."""
    with psycopg.connect(postgres.dsn, autocommit=True) as admin:
        admin.execute("CREATE DATABASE sender_template")
    prepare(postgres.dsn_of("sender_template"))
    return "sender_template"


def prepare(dsn: str) -> None:
    """Migrate an empty database and make its roles."""
    migrate(dsn)
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(cast("LiteralString", ROLES.read_text()))


def as_role(dsn: str, role: str) -> str:
    """The same database, as one of the roles of sql/roles.sql."""
    return make_conninfo(dsn, user=role)


def _clone(postgres: EmbeddedPostgres, template: str) -> Iterator[str]:
    name = f"test_{next(_numbers)}"
    with psycopg.connect(postgres.dsn, autocommit=True) as admin:
        admin.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY = FILE_COPY").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )
    yield postgres.dsn_of(name)
    with psycopg.connect(postgres.dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def dsn(postgres: EmbeddedPostgres, template: str) -> Iterator[str]:
    """A migrated database of this test's own."""
    yield from _clone(postgres, template)


@pytest.fixture
def bare_dsn(postgres: EmbeddedPostgres) -> Iterator[str]:
    """An empty database of this test's own."""
    yield from _clone(postgres, "template1")


@pytest.fixture
async def conn(dsn: str) -> AsyncIterator[AsyncConnection]:
    """An autocommit connection to `dsn`."""
    async with await AsyncConnection.connect(dsn, autocommit=True) as connection:
        yield connection


async def add_targets(
    where: str | AsyncConnection, campaign: str, n: int, *, first: int = 1, **columns: object
) -> None:
    """Load members `first` to `first + n - 1` into a campaign.

    Args:
        where: a DSN, or a connection (the rows belong to its transaction).
        campaign: the campaign's id.
        n: how many rows.
        first: the lowest member id.
        columns: more columns, `email` too: a value for all rows or a function of the member id.
    """
    if isinstance(where, str):
        async with await AsyncConnection.connect(where) as connection:
            return await add_targets(connection, campaign, n, first=first, **columns)
    columns = {"email": "member{}@example.com".format, **columns}
    names = sql.SQL(", ").join(map(sql.Identifier, ("campaign_id", "member_id", *columns)))
    copy_in = sql.SQL("COPY campaign_targets ({}) FROM STDIN").format(names)
    async with where.cursor() as cursor, cursor.copy(copy_in) as copy:
        for member_id in range(first, first + n):
            values = (v(member_id) if callable(v) else v for v in columns.values())
            await copy.write_row((campaign, member_id, *values))
    return None


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Tell a trial's figure; it is printed at the end, a line each."""
    return lambda text: record_property("figure", text)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    lines = [
        (report.nodeid.rpartition("::")[2], value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == "figure"
    ]
    if lines:
        terminalreporter.section("trials")
        for name, value in sorted(lines):
            terminalreporter.write_line(f"{name.removeprefix('test_'):<58} {value}")
