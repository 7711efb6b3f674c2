"""The texts that settle what nobody may claim any more."""

from typing import Final, LiteralString

from sender.queries.shared import LOST_ALONE, LOST_TOGETHER, YIELD, doubt

# SWEEP BATCHES that nobody holds and nobody may claim: keys too old, or a single row lost too
# often. Only rows that a lost claim took are in doubt (opted out since: as in CLAIM_BATCH); others
# were surely never sent and a later build covers them. Index: primary keys.
SWEEP_BATCHES: Final[LiteralString] = f"""
WITH stuck AS MATERIALIZED (
    SELECT batch_no, lo, hi, key_used_at, claimed_ids,
           CASE WHEN key_used_at <= statement_timestamp()
                     - %(usable_s)s::float8 * interval '1 s'
                THEN 'key_too_old' ELSE 'lost_too_often' END AS why
    FROM campaign_batches
    WHERE campaign_id = %(campaign)s AND done_at IS NULL AND key_used_at IS NOT NULL
      AND (lease_until IS NULL OR lease_until < statement_timestamp())
      AND (key_used_at <= statement_timestamp() - %(usable_s)s::float8 * interval '1 s'
           OR lo = hi AND lost_claims + (claim_id IS NOT NULL)::int >= {LOST_ALONE})
      AND {YIELD}
    ORDER BY batch_no
    LIMIT 100
    FOR NO KEY UPDATE SKIP LOCKED
), doubted AS (
    UPDATE campaign_targets t
    SET key_used_at = s.key_used_at, {doubt("s.why")}
    FROM stuck s
    WHERE t.campaign_id = %(campaign)s AND t.member_id BETWEEN s.lo AND s.hi
      AND t.member_id = ANY (s.claimed_ids) AND t.state = 'pending' AND t.sent_at IS NULL
      AND t.not_before IS NULL
    RETURNING t.member_id, t.state, t.reason, t.attempts, s.batch_no
), closed AS (
    UPDATE campaign_batches b
    SET done_at = clock_timestamp(), claim_id = NULL, lease_until = NULL,
        in_doubt = b.in_doubt + (SELECT count(*) FROM doubted d
                                 WHERE d.batch_no = b.batch_no AND d.state = 'in_doubt')
    FROM stuck s
    WHERE b.campaign_id = %(campaign)s AND b.batch_no = s.batch_no
)
SELECT member_id, reason, attempts FROM doubted WHERE state = 'in_doubt'
"""

# SPLIT a batch that was lost together too often into single rows, so that the row which kills the
# process costs itself and not its neighbours. Rows that no lost claim took are left to a later
# build. Numbers as in BUILD: a loser fails with 23505.
# Index: primary keys.
SPLIT: Final[LiteralString] = f"""
WITH lost AS MATERIALIZED (
    SELECT batch_no, lo, hi, priority, key_used_at, key_snapshot, claimed_ids,
           lost_claims + (claim_id IS NOT NULL)::int AS lost_claims
    FROM campaign_batches
    WHERE campaign_id = %(campaign)s AND done_at IS NULL AND lo < hi
      AND (lease_until IS NULL OR lease_until < statement_timestamp())
      AND lost_claims + (claim_id IS NOT NULL)::int >= {LOST_TOGETHER}
    ORDER BY batch_no
    LIMIT 10
    FOR NO KEY UPDATE SKIP LOCKED
), closed AS (
    UPDATE campaign_batches b
    SET done_at = clock_timestamp(), claim_id = NULL, lease_until = NULL
    FROM lost l
    WHERE b.campaign_id = %(campaign)s AND b.batch_no = l.batch_no
), singles AS (
    SELECT t.member_id, l.priority, l.lost_claims, l.key_used_at, l.key_snapshot,
           ARRAY[t.member_id] AS claimed_ids,
           row_number() OVER (ORDER BY l.batch_no, t.member_id) AS place
    FROM lost l
    JOIN campaign_targets t
      ON t.campaign_id = %(campaign)s AND t.member_id BETWEEN l.lo AND l.hi
     AND t.member_id = ANY (l.claimed_ids) AND t.state = 'pending' AND t.sent_at IS NULL
     AND t.not_before IS NULL
)
INSERT INTO campaign_batches (campaign_id, batch_no, lo, hi, priority, size, lost_claims,
                              key_used_at, key_snapshot, claimed_ids)
SELECT %(campaign)s,
       coalesce((SELECT max(batch_no) FROM campaign_batches WHERE campaign_id = %(campaign)s), 0)
           + place,
       member_id, member_id, priority, 1, lost_claims, key_used_at, key_snapshot, claimed_ids
FROM singles
"""

# SWEEP SINGLE ROWS that nobody holds and nobody may claim: keys too old or lost too often become
# in doubt; a member who opted out while a claim of the row was lost is skipped again.
# Index: campaign_targets_due; from `low_water` on, as in CLAIM_DUE: under a snapshot held open the
# entries of all rows that were ever due again lead to pages all over the table. IS NOT NULL is for
# the planner: in a table analysed while nothing was due it takes a comparison for a third of it.
SWEEP_DUE: Final[LiteralString] = f"""
WITH stuck AS MATERIALIZED (
    SELECT t.member_id,
           CASE WHEN t.opted_out_at IS NOT NULL THEN NULL
                WHEN t.key_used_at <= statement_timestamp()
                     - %(usable_s)s::float8 * interval '1 s' THEN 'key_too_old'
                ELSE 'lost_too_often' END AS why
    FROM campaign_targets t
    WHERE t.campaign_id = %(campaign)s
      AND t.not_before IS NOT NULL AND t.not_before >= to_timestamp(%(low_water)s::float8)
      AND t.sent_at IS NULL AND (t.lease_until IS NULL OR t.lease_until < statement_timestamp())
      AND (t.opted_out_at IS NULL AND t.state IN ('pending', 'sending')
           AND (t.key_used_at <= statement_timestamp() - %(usable_s)s::float8 * interval '1 s'
                OR t.lost_claims + (t.state = 'sending')::int >= {LOST_ALONE})
           OR t.opted_out_at IS NOT NULL AND t.state = 'sending')
      AND {YIELD}
    ORDER BY t.member_id
    LIMIT 1000
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE campaign_targets t
SET state = CASE WHEN s.why IS NULL THEN 'pending' ELSE 'in_doubt' END,
    lost_claims = t.lost_claims + (t.state = 'sending')::int,
    unknowns = t.unknowns + (t.state = 'sending')::int,
    not_before = CASE WHEN s.why IS NULL THEN clock_timestamp() END,
    claim_id = NULL, lease_until = NULL, reason = coalesce(s.why, t.reason),
    outcome_at = CASE WHEN s.why IS NULL THEN t.outcome_at ELSE clock_timestamp() END
FROM stuck s
WHERE t.campaign_id = %(campaign)s AND t.member_id = s.member_id
RETURNING t.member_id, t.state, t.reason, t.attempts
"""

# ADOPT rows marked sending that neither a batch nor the due index leads to (written by something
# else): they become due, so that every open row is found. Seq scan; run only before the end.
ADOPT: Final[LiteralString] = f"""
UPDATE campaign_targets t
SET not_before = clock_timestamp(), claim_id = NULL, lease_until = NULL
WHERE t.campaign_id = %(campaign)s AND t.state = 'sending' AND t.not_before IS NULL
  AND t.sent_at IS NULL AND (t.lease_until IS NULL OR t.lease_until < statement_timestamp())
  AND {YIELD}
"""
