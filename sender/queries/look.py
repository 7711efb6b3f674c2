"""The texts of the send: the last look at rows, and the shared pace of an account."""

from typing import Final, LiteralString

# LOOK AND RESERVE. Invariant: at this statement's snapshot a row named `fresh` or `again` is open
# and not opted out, one named `again` is held under the caller's fence, and so are the batches
# named `held`; slots are reserved for just those rows, at most `ahead_s` in the future. The
# reservation moves one row, the account's virtual clock; it commits asynchronously, because a
# clock lost in a crash of the server is behind the present when the server is back.
# Index: primary keys.
LOOK: Final[LiteralString] = """
WITH fresh AS MATERIALIZED (
    SELECT ARRAY(
        SELECT t.member_id
        FROM campaign_targets t
        WHERE t.campaign_id = %(campaign)s
          AND t.member_id = ANY ((SELECT %(fresh_ids)s::bigint[])::bigint[])
          AND t.state = 'pending' AND t.sent_at IS NULL AND t.opted_out_at IS NULL
          AND t.not_before IS NULL) AS ids
), again AS MATERIALIZED (
    SELECT ARRAY(
        SELECT t.member_id
        FROM campaign_targets t
        WHERE t.campaign_id = %(campaign)s
          AND t.member_id = ANY ((SELECT %(again_ids)s::bigint[])::bigint[])
          AND t.state = 'sending' AND t.claim_id = ANY (%(claim_ids)s::uuid[])
          AND t.lease_until > statement_timestamp()
          AND t.sent_at IS NULL AND t.opted_out_at IS NULL) AS ids
), wanted AS MATERIALIZED (
    SELECT CASE WHEN c.control = 'run'
                THEN cardinality(fresh.ids) + cardinality(again.ids) ELSE 0 END AS n,
           c.control, fresh.ids AS fresh, again.ids AS again
    FROM fresh CROSS JOIN again
    LEFT JOIN campaigns c ON c.campaign_id = %(campaign)s
), slot AS (
    UPDATE provider_accounts a
    SET next_free_at = CASE
            WHEN a.next_free_at > clock_timestamp() + interval '60 s' THEN clock_timestamp()
            ELSE greatest(a.next_free_at, clock_timestamp()) END
        + (SELECT n FROM wanted) / %(rate)s::float8 * interval '1 s'
    WHERE a.account = %(account)s AND (SELECT n FROM wanted) > 0
      AND (a.next_free_at <= clock_timestamp() + %(ahead_s)s::float8 * interval '1 s'
           OR a.next_free_at > clock_timestamp() + interval '60 s')
      AND (a.blocked_until IS NULL OR a.blocked_until <= clock_timestamp()
           OR a.blocked_until > clock_timestamp() + interval '11 min')
      AND set_config('synchronous_commit', 'off', true) IS NOT NULL
    RETURNING a.next_free_at
)
SELECT ARRAY(
           SELECT b.claim_id
           FROM campaign_batches b
           WHERE b.campaign_id = %(campaign)s
             AND b.batch_no BETWEEN %(first_batch)s::int AND %(last_batch)s::int
             AND b.claim_id = ANY (%(claim_ids)s::uuid[])
             AND b.lease_until > statement_timestamp()) AS held,
       w.fresh, w.again, w.control,
       extract(epoch FROM (SELECT next_free_at FROM slot) - clock_timestamp())::float8
           - w.n / %(rate)s::float8 AS starts_in_s,
       extract(epoch FROM a.next_free_at - clock_timestamp())::float8 AS ahead_s,
       extract(epoch FROM a.blocked_until - clock_timestamp())::float8 AS blocked_s
FROM provider_accounts a CROSS JOIN wanted w
WHERE a.account = %(account)s
"""

# BLOCK. A provider that asks to wait is obeyed by all processes of the account.
BLOCK: Final[LiteralString] = """
UPDATE provider_accounts
SET blocked_until = greatest(
        CASE WHEN blocked_until < clock_timestamp() + interval '11 min' THEN blocked_until END,
        clock_timestamp() + %(seconds)s::float8 * interval '1 s')
WHERE account = %(account)s
"""
