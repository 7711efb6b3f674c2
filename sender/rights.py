"""Whether a role has the rights that a run uses, before it mails what it could not record.

Reads the catalogue only. `sql/roles.sql` gives these rights to the role `sender`.
"""

from typing import Any, Final

from psycopg import AsyncConnection, errors
from psycopg.rows import tuple_row

from sender.errors import RightsError
from sender.schema import COLUMNS

# What a finish writes; whom to mail and who opted out is not ours.
_WRITTEN: Final = (
    "state sent_at attempts unknowns lost_claims not_before claim_id lease_until key_used_at"
    " outcome_at content_hash reason"
)
_OWN: Final = ("campaign_batches", "campaigns", "provider_accounts")

# Table, right, and the columns it is needed for.
_NEEDED: Final = (
    *((table, "SELECT", names) for table, names in COLUMNS.items()),
    ("campaign_targets", "UPDATE", _WRITTEN),
    *((table, right, COLUMNS[table]) for table in _OWN for right in ("INSERT", "UPDATE")),
)


async def check_rights(conn: AsyncConnection[Any]) -> None:
    """Make sure that the role may do what a run does.

    Args:
        conn: a connection of the role that is going to run, to a database with our schema.

    Raises:
        RightsError: it may not; holds a GRANT for each table.
    """
    wanted = [(t, right, name) for t, right, names in _NEEDED for name in names.split()]
    async with conn.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(
            """
            SELECT quote_ident(current_user), tab, priv, array_agg(col ORDER BY place)
            FROM unnest(%s::text[], %s::text[], %s::text[])
                 WITH ORDINALITY AS wanted(tab, priv, col, place)
            WHERE NOT has_column_privilege(tab, col, priv)
            GROUP BY tab, priv ORDER BY min(place)
            """,
            [list(part) for part in zip(*wanted, strict=True)],
        )
        lacking = await cursor.fetchall()
    if lacking:
        grants = "\n".join(_grant(*row) for row in lacking)
        raise RightsError(
            f"role {lacking[0][0]} lacks rights; use the role sender of sql/roles.sql, or as the "
            f"owner of the tables run:\n{grants}"
        )


def refused(error: errors.InsufficientPrivilege) -> RightsError:
    """What to tell a person whose command the database refused."""
    return RightsError(
        f"DB_DSN: {error.diag.message_primary}; sql/roles.sql makes the roles: sender for what "
        "changes a campaign, sender_reader for what looks at one"
    )


def _grant(role: str, table: str, right: str, columns: list[str]) -> str:
    is_whole = columns == COLUMNS[table].split()
    of = "" if is_whole else f" ({', '.join(columns)})"
    return f"GRANT {right}{of} ON {table} TO {role};"
