"""The SQL texts of the commands that only look: `status`, `failures` and `check`.

None of them locks a row. They read the whole campaign and are for people; what repeats them pauses
for longer than they took.
"""

from typing import Final, LiteralString

# A row's state as people are told it: a row with `sent_at` is sent whatever its state says, an
# opted-out pending row is skipped. Equal in all texts that tell it, queries.ledger.COUNTS too.
TOLD: Final[LiteralString] = (
    "CASE WHEN t.sent_at IS NOT NULL THEN 'sent'"
    " WHEN t.state = 'pending' AND t.opted_out_at IS NOT NULL THEN 'skipped'"
    " ELSE t.state END"
)

# STATUS. Invariant: total is the sum of the others, at one moment. Fresh rows of a batch that is
# leased now are pending in the ledger and told as sending; ranges of open batches do not overlap,
# and only rows the claim took are counted. Index: primary keys; the ledger is read once.
STATUS: Final[LiteralString] = f"""
WITH ledger AS (
    SELECT count(*) FILTER (WHERE told = 'sent') AS sent,
           count(*) FILTER (WHERE told = 'failed') AS failed,
           count(*) FILTER (WHERE told = 'in_doubt') AS in_doubt,
           count(*) FILTER (WHERE told = 'skipped') AS skipped,
           count(*) FILTER (WHERE told = 'pending') AS pending,
           count(*) FILTER (WHERE told = 'sending') AS sending,
           count(*) FILTER (WHERE sent_at > clock.at - interval '1 minute') AS last_minute,
           extract(epoch FROM clock.at - min(sent_at)
                   FILTER (WHERE sent_at > clock.at - interval '1 minute'))::float8 AS over_s
    FROM (SELECT statement_timestamp() AS at) AS clock,
    LATERAL (
        SELECT {TOLD} AS told, t.sent_at
        FROM campaign_targets t
        WHERE t.campaign_id = %(campaign)s
    ) AS rows
    GROUP BY clock.at
), leased AS (
    SELECT count(*) AS rows
    FROM campaign_batches b
    CROSS JOIN LATERAL unnest(b.claimed_ids) AS claimed(member_id)
    JOIN campaign_targets t ON t.campaign_id = b.campaign_id AND t.member_id = claimed.member_id
    WHERE b.campaign_id = %(campaign)s AND b.done_at IS NULL AND b.claim_id IS NOT NULL
      AND b.lease_until > statement_timestamp()
      AND t.state = 'pending' AND t.sent_at IS NULL AND t.opted_out_at IS NULL
      AND t.not_before IS NULL
)
SELECT sent, failed, in_doubt, skipped, pending - rows AS pending, sending + rows AS sending,
       last_minute, over_s
FROM ledger, leased
"""

# CONTROL: what a person wants of the campaign; no row means that it has never run.
CONTROL: Final[LiteralString] = """
SELECT control, control_at, control_by, control_why FROM campaigns
WHERE campaign_id = %(campaign)s
"""

# WAITING: accounts that the provider asked to wait, and when the next open row is due again.
# Index: due; rows that opted out while they waited are passed over.
WAITING: Final[LiteralString] = f"""
SELECT (SELECT max(blocked_until) FROM provider_accounts
        WHERE blocked_until > statement_timestamp()) AS blocked_until,
       (SELECT min(t.not_before) FROM campaign_targets t
        WHERE t.campaign_id = %(campaign)s AND {TOLD} IN ('pending', 'sending')
          -- Others may have written instants that no calendar of ours has.
          AND t.not_before BETWEEN '1970-01-01' AND '9999-12-31') AS next_due
"""

# LAST_FAILURES: newest first.
LAST_FAILURES: Final[LiteralString] = """
SELECT member_id, state, attempts, reason, outcome_at, key_used_at
FROM campaign_targets
WHERE campaign_id = %(campaign)s AND state IN ('failed', 'in_doubt') AND sent_at IS NULL
ORDER BY outcome_at DESC NULLS LAST, member_id
LIMIT 5
"""

# FAILURES, a page of them by member id: each page is a statement of its own, so that no snapshot
# is held while somebody reads. A row is skipped because it opted out, whatever an attempt before
# that ended with. Index: primary key.
FAILURES: Final[LiteralString] = f"""
SELECT t.member_id, {TOLD} AS state, t.attempts,
       CASE {TOLD} WHEN 'skipped' THEN 'opted_out' ELSE t.reason END AS reason,
       t.outcome_at, t.key_used_at
FROM campaign_targets t
WHERE t.campaign_id = %(campaign)s AND t.member_id > %(after)s AND {TOLD} = ANY (%(states)s)
ORDER BY t.member_id
LIMIT %(limit)s
"""

# CAMPAIGN_OPENED: whether somebody ran or steered it once. Index: primary key.
CAMPAIGN_OPENED: Final[LiteralString] = """
SELECT EXISTS (SELECT FROM campaigns WHERE campaign_id = %(campaign)s)
"""

# CAMPAIGN: whether it has rows, for `sender check`. Index: primary key, one row read.
CAMPAIGN: Final[LiteralString] = """
SELECT EXISTS (SELECT FROM campaign_targets WHERE campaign_id = %(campaign)s)
"""
