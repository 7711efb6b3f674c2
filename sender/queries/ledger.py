"""The texts that open a campaign, and those that ask where it stands."""

from typing import Final, LiteralString

OPEN_CAMPAIGN: Final[LiteralString] = """
INSERT INTO campaigns (campaign_id) VALUES (%(campaign)s) ON CONFLICT DO NOTHING
"""

OPEN_ACCOUNT: Final[LiteralString] = """
INSERT INTO provider_accounts (account, next_free_at)
VALUES (%(account)s, clock_timestamp()) ON CONFLICT DO NOTHING
"""

CAMPAIGN_EXISTS: Final[LiteralString] = """
SELECT EXISTS (SELECT FROM campaign_targets WHERE campaign_id = %(campaign)s)
"""

# CONTROL. What a person wants of the campaign. Index: primary key.
CONTROL: Final[LiteralString] = """
SELECT control FROM campaigns WHERE campaign_id = %(campaign)s
"""

# DUE. When the next row can be claimed: whether a batch is free now, and how many seconds until the
# next back-off or lease ends. Index: primary key of the batches, campaign_targets_due.
DUE: Final[LiteralString] = """
SELECT (SELECT control FROM campaigns WHERE campaign_id = %(campaign)s) AS control,
       (SELECT count(*) FROM campaign_batches
        WHERE campaign_id = %(campaign)s AND done_at IS NULL) AS open_batches,
       (SELECT extract(epoch FROM min(coalesce(lease_until, clock_timestamp())) - clock_timestamp())
        FROM campaign_batches
        WHERE campaign_id = %(campaign)s AND done_at IS NULL)::float8 AS batch_in_s,
       (SELECT extract(epoch FROM t.not_before - clock_timestamp())
        FROM campaign_targets t
        WHERE t.campaign_id = %(campaign)s AND t.not_before IS NOT NULL
          AND t.state IN ('pending', 'sending') AND t.sent_at IS NULL
          AND (t.opted_out_at IS NULL OR t.state = 'sending')
        ORDER BY t.not_before LIMIT 1)::float8 AS due_in_s
"""

# COUNTS. The ledger, each row once; a row with `sent_at` is sent whatever its state says. Reads the
# whole campaign: for starts, ends and people.
COUNTS: Final[LiteralString] = """
SELECT count(*) FILTER (WHERE s = 'sent') AS sent,
       count(*) FILTER (WHERE s = 'failed') AS failed,
       count(*) FILTER (WHERE s = 'in_doubt') AS in_doubt,
       count(*) FILTER (WHERE s = 'skipped') AS skipped,
       count(*) FILTER (WHERE s = 'pending') AS pending,
       count(*) FILTER (WHERE s = 'sending') AS sending
FROM (
    SELECT CASE WHEN t.sent_at IS NOT NULL THEN 'sent'
                WHEN t.state = 'pending' AND t.opted_out_at IS NOT NULL THEN 'skipped'
                ELSE t.state END AS s
    FROM campaign_targets t
    WHERE t.campaign_id = %(campaign)s
) AS ledger
"""

# PROGRESS from the queue, without reading the ledger: rows that are due again from `low_water` on,
# and how many of them before `mark`. Index: primary key of the batches, campaign_targets_due.
PROGRESS: Final[LiteralString] = """
SELECT queue.*, due.*
FROM (
    SELECT coalesce(sum(sent + failed + in_doubt + deferred), 0)::bigint AS left_batches,
           coalesce(sum(greatest(size - sent - failed - in_doubt - deferred, 0))
                    FILTER (WHERE done_at IS NULL), 0)::bigint AS remaining
    FROM campaign_batches
    WHERE campaign_id = %(campaign)s
) AS queue
CROSS JOIN (
    SELECT count(*) AS due_again,
           count(*) FILTER (WHERE t.not_before < to_timestamp(%(mark)s::float8)) AS due_before
    FROM campaign_targets t
    WHERE t.campaign_id = %(campaign)s
      AND t.not_before IS NOT NULL AND t.not_before >= to_timestamp(%(low_water)s::float8)
) AS due
"""
