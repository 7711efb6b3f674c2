"""What `pause`, `resume`, `cancel`, `resolve` and `requeue` share: an author, a connection.

Owns how a change by a person begins and how its failure is told. Must never change anything itself.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, LiteralString, Self

import psycopg
from psycopg import AsyncConnection

from sender import queries
from sender.database import connect, describe, is_transient
from sender.errors import CampaignError, DatabaseUnavailable, SettingsError
from sender.locks import briefly, naming_holders
from sender.rights import refused
from sender.schema import check_schema
from sender.settings import CampaignSettings
from sender.status import no_rows

_PATIENCE_S: Final = 5.0
# How long to wait for the sight of rows that are not needed: who stops a campaign is in a hurry.
_GLANCE_S: Final = 1.0
_AGAIN: Final = "what was done stays done; give the same command again and it goes on"
_LONGEST: Final = 1_000


@dataclass(slots=True, frozen=True)
class Author:
    """Who does it, and why; kept in `campaign_actions`."""

    by: str
    why: str

    @classmethod
    def of(cls, by: str, why: str) -> Self:
        """Check what the arguments say.

        Raises:
            SettingsError: with a line for each that says nothing, or not on one line.
        """
        by, why = by.strip(), why.strip()
        faults = _faults("--by", by) + _faults("--why", why)
        if faults:
            raise SettingsError(faults)
        return cls(by, why)


@asynccontextmanager
async def changing(
    settings: CampaignSettings, *, touches_rows: bool
) -> AsyncGenerator[AsyncConnection[Any]]:
    """Connect to change a campaign that has rows; a statement is a transaction.

    Args:
        settings: which campaign, where.
        touches_rows: false for what changes the campaign only: while somebody has locked the table
            of the rows, it is enough that the campaign was there once.

    Yields:
        The connection.

    Raises:
        CampaignError: the campaign has no rows.
        ConfigurationError: schema or rights are wrong.
        DatabaseUnavailable: the database does not answer, or others hold what was to be changed.
    """
    conn = await connect(settings.db_dsn.get_secret_value(), within_s=_PATIENCE_S)
    conn.prepare_threshold = None  # few statements, and a pooler may be in between
    try:
        async with conn, naming_holders(conn, _AGAIN):
            async with briefly(conn):
                await check_schema(conn)
            if not await _has_rows(conn, settings.campaign_id, needed=touches_rows):
                raise CampaignError(no_rows(settings.campaign_id))
            yield conn
    except psycopg.errors.InsufficientPrivilege as error:
        raise refused(error) from error
    except psycopg.Error as error:
        if not is_transient(error):
            raise
        raise DatabaseUnavailable(_told(error)) from error


async def _has_rows(conn: AsyncConnection[Any], campaign: str, *, needed: bool) -> bool:
    try:
        return await _is_there(conn, queries.reports.CAMPAIGN, campaign, needed)
    except psycopg.errors.LockNotAvailable:
        if needed or not await _is_there(conn, queries.reports.CAMPAIGN_OPENED, campaign, needed):
            raise
        return True


async def _is_there(
    conn: AsyncConnection[Any], query: LiteralString, campaign: str, needed: bool
) -> bool:
    async with briefly(conn, None if needed else _GLANCE_S):
        found = await (await conn.execute(query, {"campaign": campaign})).fetchone()
    return found == (True,)


def _told(error: psycopg.Error) -> str:
    if isinstance(error, psycopg.errors.LockNotAvailable | psycopg.errors.DeadlockDetected):
        return f"other transactions hold the rows ({describe(error)}); {_AGAIN}"
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        return f"the database takes no writes now: is it a standby? ({describe(error)}); {_AGAIN}"
    return f"the database stopped answering ({describe(error)}); {_AGAIN}"


def _faults(name: str, text: str) -> list[str]:
    if not text:
        return [f"{name}: must not be empty"]
    if not text.isprintable():
        return [f"{name}: must be one line of text"]
    return [f"{name}: is longer than {_LONGEST} characters"] if len(text) > _LONGEST else []
