"""The SQL texts of what people do to a campaign: `pause`, `resume`, `cancel`, `resolve`, `requeue`.

Each change and its record in `campaign_actions` are one autocommit statement: neither is ever there
without the other, and no lock outlives the statement. Rows of `campaign_targets` are locked in id
order, as everywhere, and the record holds what they were under that lock.
"""

from typing import Final, LiteralString

from sender.queries.reports import TOLD
from sender.queries.shared import LOST_TOGETHER

# STEER. Invariant: the control changes only from one of `allowed`, and what it was is recorded with
# the change and returned. Index: primary key, one row.
STEER: Final[LiteralString] = """
WITH found AS MATERIALIZED (
    SELECT c.control, c.control_at, c.control_by, c.control_why
    FROM campaigns c
    WHERE c.campaign_id = %(campaign)s
    FOR NO KEY UPDATE
), steered AS (
    UPDATE campaigns c
    SET control = %(control)s, control_at = clock_timestamp(), control_by = %(by)s,
        control_why = %(why)s
    FROM found f
    WHERE c.campaign_id = %(campaign)s AND f.control = ANY (%(allowed)s)
    RETURNING c.campaign_id
), recorded AS (
    INSERT INTO campaign_actions (campaign_id, action, by_whom, why, before)
    SELECT s.campaign_id, %(action)s, %(by)s, %(why)s, to_jsonb(f)
    FROM steered s CROSS JOIN found f
)
SELECT f.control, f.control_at, f.control_by, f.control_why,
       EXISTS (SELECT FROM steered) AS changed
FROM found f
"""


def _settle(state: LiteralString, changes: LiteralString) -> LiteralString:
    return f"""
WITH found AS MATERIALIZED (
    SELECT t.member_id, t.state, t.attempts, t.unknowns, t.lost_claims, t.key_used_at,
           t.outcome_at, t.reason
    FROM campaign_targets t
    WHERE t.campaign_id = %(campaign)s AND t.member_id = ANY (%(ids)s::bigint[])
      AND t.state = '{state}' AND t.sent_at IS NULL
      AND (SELECT set_config('lock_timeout', '2s', true)) IS NOT NULL
    ORDER BY t.member_id
    FOR NO KEY UPDATE
), settled AS (
    UPDATE campaign_targets t
    SET {changes}, claim_id = NULL, lease_until = NULL
    FROM found f
    WHERE t.campaign_id = %(campaign)s AND t.member_id = f.member_id
      AND t.state = '{state}' AND t.sent_at IS NULL
    RETURNING t.member_id, to_jsonb(f) - 'member_id' AS before
), recorded AS (
    INSERT INTO campaign_actions (campaign_id, member_id, action, by_whom, why, before)
    SELECT %(campaign)s, member_id, %(action)s, %(by)s, %(why)s, before
    FROM settled
    ORDER BY member_id
)
SELECT member_id FROM settled
"""


# RESOLVE as sent: somebody knows that the provider has the mail. Invariant: only rows in doubt, and
# each with its record. `sent_at` is when that was recorded, as for every row; the record keeps the
# times before. Index: primary key.
RESOLVE_SENT: Final[LiteralString] = _settle(
    "in_doubt", "state = 'sent', sent_at = clock_timestamp(), not_before = NULL, reason = NULL"
)

# RESOLVE as pending: somebody knows that the provider does not have it, so the key is free and the
# content may be another. Invariant: only rows in doubt; they go the way of retries and no batch
# holds them. One that was lost too often is claimed alone: it may end the process once more.
# Index: primary key.
RESOLVE_PENDING: Final[LiteralString] = _settle(
    "in_doubt",
    "state = 'pending', not_before = clock_timestamp(), attempts = 0, unknowns = 0,"
    f" lost_claims = CASE WHEN t.reason = 'lost_too_often' THEN {LOST_TOGETHER} ELSE 0 END,"
    " key_used_at = NULL, content_hash = NULL, reason = 'resolved_as_pending'",
)

# REQUEUE. Invariant: only rows that failed. A key that may be in use stays so, and with it what was
# sent under it: the claim looks whether it may be repeated. Index: primary key.
REQUEUE: Final[LiteralString] = _settle(
    "failed",
    "state = 'pending', not_before = clock_timestamp(), attempts = 0, unknowns = 0,"
    " lost_claims = 0, reason = 'requeued',"
    " content_hash = CASE WHEN t.key_used_at IS NOT NULL THEN t.content_hash END",
)

# A page of the rows in a state, by member id. Locks nothing, because it may read all of the
# campaign; pages are large so that this happens a few times only. Index: primary key.
IN_STATE: Final[LiteralString] = """
SELECT t.member_id
FROM campaign_targets t
WHERE t.campaign_id = %(campaign)s AND t.member_id >= %(first)s
  AND t.state = %(state)s AND t.sent_at IS NULL
ORDER BY t.member_id
LIMIT %(limit)s
"""

COUNT_IN_STATE: Final[LiteralString] = """
SELECT count(*)
FROM campaign_targets t
WHERE t.campaign_id = %(campaign)s AND t.state = %(state)s AND t.sent_at IS NULL
"""

# TOLD_STATES of given members as people are told them; null for one that the campaign does not
# have. LIMIT keeps the look-up by key: on a table never analysed a join would read the campaign.
# Index: primary key.
TOLD_STATES: Final[LiteralString] = f"""
SELECT given.id, told.state
FROM unnest(%(ids)s::bigint[]) AS given(id)
LEFT JOIN LATERAL (
    SELECT {TOLD} AS state
    FROM campaign_targets t
    WHERE t.campaign_id = %(campaign)s AND t.member_id = given.id
    LIMIT 1
) AS told ON true
ORDER BY given.id
"""
