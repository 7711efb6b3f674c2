"""What has the name of something that a migration makes, and is not of this program.

Reads the catalogue only. Must never change anything, nor read a row of the application's.
"""

from typing import Final

from psycopg import Connection

from sender.schema import is_foreign

# What 0002 creates.
_TABLES: Final = ("campaign_batches", "campaigns", "provider_accounts", "campaign_actions")

# What is ours may be there unrecorded: left by a build that died, or copied with its table.
_CHECKED: Final = (
    "CHECK ((state = ANY (ARRAY['pending'::text, 'sending'::text, 'sent'::text, 'failed'::text, "
    "'in_doubt'::text])))"
)
_INDEX_END: Final = " (campaign_id, not_before) WHERE (not_before IS NOT NULL)"

# By the version that would make it.
_TAKEN: Final = """
SELECT 1, 'constraint ' || conname || ' of campaign_targets' FROM pg_constraint
WHERE conrelid = to_regclass('campaign_targets') AND conname = 'campaign_targets_state_known'
  AND NOT starts_with(pg_get_constraintdef(oid), %(checked)s)
UNION ALL
SELECT 2, name FROM unnest(%(tables)s::text[]) AS name WHERE to_regclass(name) IS NOT NULL
UNION ALL
SELECT 2, 'function sender_row_xid' WHERE to_regprocedure('sender_row_xid(xid)') IS NOT NULL
UNION ALL
SELECT 3, 'index campaign_targets_due' FROM pg_class
WHERE oid = to_regclass('campaign_targets_due')
  AND right(pg_get_indexdef(oid), length(%(index_end)s)) IS DISTINCT FROM %(index_end)s
"""


def taken_faults(conn: Connection, applied: set[int]) -> list[str]:
    """A line for each name that a migration needs and something else has.

    Args:
        conn: any connection.
        applied: the versions the database has: what they made is ours.
    """
    values = {"tables": list(_TABLES), "index_end": _INDEX_END, "checked": _CHECKED}
    rows = conn.execute(_TAKEN, values).fetchall()
    return [is_foreign(name) for version, name in rows if version not in applied]
