"""`sender failures`: who did not get the mail, and why. Member ids, never addresses."""

from collections.abc import AsyncIterator, Collection
from typing import Final

from psycopg.rows import class_row

from sender import queries
from sender.errors import CampaignError
from sender.locks import briefly
from sender.reading import reading
from sender.settings import CampaignSettings
from sender.status import Failure, no_rows

STATES: Final = ("failed", "in_doubt", "skipped", "pending", "sending")
DEFAULT_STATES: Final = ("failed", "in_doubt")
# Each page may read the rest of the campaign, on a table never analysed.
_PAGE: Final = 10_000


async def failures(
    settings: CampaignSettings,
    states: Collection[str] = DEFAULT_STATES,
    limit: int | None = None,
) -> AsyncIterator[Failure]:
    """Look up the targets in `states`, a page at a time.

    Args:
        settings: which campaign, where.
        states: some of `STATES`.
        limit: how many at most, or None for all.

    Yields:
        The targets, by member id.

    Raises:
        CampaignError: the campaign has no rows.
        SchemaError: the database is not migrated.
        DatabaseUnavailable: it does not answer.
    """
    after, left = -(2**63), limit
    async with reading(settings.db_dsn.get_secret_value(), at_one_moment=False) as conn:
        async with briefly(conn):
            campaign = {"campaign": settings.campaign_id}
            found = await (await conn.execute(queries.reports.CAMPAIGN, campaign)).fetchone()
        if found != (True,):
            raise CampaignError(no_rows(settings.campaign_id))
        cursor = conn.cursor(row_factory=class_row(Failure))
        while left is None or left > 0:
            size = _PAGE if left is None else min(_PAGE, left)
            values = {"campaign": settings.campaign_id, "after": after}
            values |= {"states": list(states), "limit": size}
            async with briefly(conn):
                page = await (await cursor.execute(queries.reports.FAILURES, values)).fetchall()
            for failure in page:
                yield failure
            if len(page) < size:
                return
            after = page[-1].member_id
            left = None if left is None else left - size
