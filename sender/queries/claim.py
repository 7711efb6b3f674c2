"""The texts of the claim: which rows form a batch, who takes it, and rows that are due again."""

from typing import Final, LiteralString

from sender.queries.shared import CONTENT_HASH, LOST_ALONE, LOST_TOGETHER, YIELD, doubt

# BUILD. Invariant: ranges of open batches of one campaign and priority never overlap, and every
# open first-attempt row that no open batch covers gets one. Batches and rows are swept in id order;
# a row is covered if the batch that began last reaches it, and a new range never crosses a batch
# that is open (`gap`). Numbers go on from the highest, so of two builders that saw the same queue
# one fails on the primary key (23505) and nothing is built twice. A row that an open batch has
# claimed stays with it, whatever became of its priority.
# Index: primary keys.
BUILD: Final[LiteralString] = """
WITH line AS (
    SELECT priority, lo AS id, hi, true AS is_batch
    FROM campaign_batches
    WHERE campaign_id = %(campaign)s AND done_at IS NULL
    UNION ALL
    SELECT t.priority, t.member_id, NULL::bigint, false
    FROM campaign_targets t
    WHERE t.campaign_id = %(campaign)s AND t.state = 'pending' AND t.sent_at IS NULL
      AND t.opted_out_at IS NULL AND t.not_before IS NULL
      AND t.member_id NOT IN (
          SELECT unnest(claimed_ids) FROM campaign_batches
          WHERE campaign_id = %(campaign)s AND done_at IS NULL)
), swept AS (
    SELECT priority, id, is_batch,
           max(hi) OVER w AS covered_to,
           count(*) FILTER (WHERE is_batch) OVER w AS gap
    FROM line
    WINDOW w AS (PARTITION BY priority ORDER BY id, is_batch DESC ROWS UNBOUNDED PRECEDING)
), uncovered AS (
    SELECT priority, gap, id,
           (row_number() OVER (PARTITION BY priority, gap ORDER BY id) - 1) / %(size)s::int AS part
    FROM swept
    WHERE NOT is_batch AND (covered_to IS NULL OR covered_to < id)
), ranges AS (
    SELECT priority, min(id) AS lo, max(id) AS hi, count(*)::int AS size
    FROM uncovered GROUP BY priority, gap, part
)
INSERT INTO campaign_batches (campaign_id, batch_no, lo, hi, priority, size)
SELECT %(campaign)s,
       coalesce((SELECT max(batch_no) FROM campaign_batches WHERE campaign_id = %(campaign)s), 0)
           + row_number() OVER (ORDER BY priority DESC, lo),
       lo, hi, priority, size
FROM ranges
"""

# CLAIM A BATCH. Invariant: at most one live lease a batch, and it is a new fence each time. A
# batch whose key may be too old, or that was lost too often, is not claimed (the sweep settles
# it). A lost batch is claimed with just the rows that the lost claim took (`claimed_ids`), all of
# them: only their keys may be in use, and a row left out would lose that stamp when the batch is
# done. Those that changed since are put in doubt: the old key must not carry a new body
# (`key_snapshot` is the snapshot the rows were read with, so "changed since" is exact). A member
# who opted out since keeps the stamp on the row, with a hash that fits no content: a later opt-in
# ends in doubt.
# Index: primary keys; `after` lets the scan start behind the batches that are done. From there it
# looks in windows of 64 numbers, 128, 256, ...: on a table never analysed the planner reads and
# sorts all open batches for the first of them (9,600 of them: 6 ms a claim instead of 1).
CLAIM_BATCH: Final[LiteralString] = f"""
WITH picked AS MATERIALIZED (
    SELECT w.*
    FROM generate_series(0, 25) AS n
    CROSS JOIN LATERAL (
        SELECT batch_no, lo, hi, priority, key_used_at, key_snapshot, claimed_ids,
               (claim_id IS NOT NULL)::int AS lost
        FROM campaign_batches
        WHERE campaign_id = %(campaign)s AND done_at IS NULL
          AND batch_no > %(after)s::bigint - 64 + (64::bigint << n)
          AND batch_no <= %(after)s::bigint - 64 + (128::bigint << n)
          AND (lease_until IS NULL OR lease_until < statement_timestamp())
          AND (key_used_at IS NULL
               OR key_used_at > statement_timestamp() - %(usable_s)s::float8 * interval '1 s')
          AND lost_claims + (claim_id IS NOT NULL)::int
              < CASE WHEN lo = hi THEN {LOST_ALONE} ELSE {LOST_TOGETHER} END
          AND {YIELD}
        ORDER BY batch_no
        LIMIT 1
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS w
    LIMIT 1
), changed AS (
    UPDATE campaign_targets t
    SET key_used_at = p.key_used_at, {doubt("'changed_while_open'")}
    FROM picked p
    WHERE p.key_used_at IS NOT NULL
      AND t.campaign_id = %(campaign)s AND t.member_id BETWEEN p.lo AND p.hi
      AND t.member_id = ANY (p.claimed_ids) AND t.state = 'pending' AND t.sent_at IS NULL
      AND t.not_before IS NULL
      AND NOT pg_visible_in_snapshot(sender_row_xid(t.xmin), p.key_snapshot)
    RETURNING t.member_id, t.state
), doubted AS (
    SELECT member_id FROM changed WHERE state = 'in_doubt'
), rows AS MATERIALIZED (
    SELECT t.member_id, t.email, t.vars::text AS vars, t.attempts, t.unknowns
    FROM picked p
    CROSS JOIN LATERAL (
        SELECT x.* FROM campaign_targets x
        WHERE x.campaign_id = %(campaign)s AND x.member_id BETWEEN p.lo AND p.hi
          AND CASE WHEN p.key_used_at IS NULL THEN x.priority = p.priority
                   ELSE x.member_id = ANY (p.claimed_ids) END
          AND x.state = 'pending' AND x.sent_at IS NULL
          AND x.opted_out_at IS NULL AND x.not_before IS NULL
          AND NOT x.member_id = ANY (ARRAY(SELECT member_id FROM changed))
        ORDER BY x.member_id
        LIMIT greatest(%(size)s::int, cardinality(p.claimed_ids))
    ) t
), lease AS (
    UPDATE campaign_batches b
    SET claim_id = %(claim)s,
        lease_until = clock_timestamp() + %(lease_s)s::float8 * interval '1 s',
        lost_claims = b.lost_claims + p.lost,
        key_used_at = coalesce(p.key_used_at, clock_timestamp()),
        key_snapshot = pg_current_snapshot(),
        claimed_ids = ARRAY(SELECT member_id FROM rows),
        in_doubt = b.in_doubt + (SELECT count(*) FROM doubted)
    FROM picked p
    WHERE b.campaign_id = %(campaign)s AND b.batch_no = (SELECT batch_no FROM picked)
    RETURNING b.batch_no, b.lost_claims, p.key_used_at AS found,
              extract(epoch FROM clock_timestamp() - p.key_used_at)::float8 AS key_age_s,
              clock_timestamp() AS claimed_at
)
SELECT l.batch_no, l.lost_claims, l.claimed_at, l.found, l.key_age_s,
       r.member_id, r.email, r.vars, r.attempts, r.unknowns,
       ARRAY(SELECT member_id FROM doubted) AS changed
FROM lease l LEFT JOIN rows r ON true
"""

# CLAIM SINGLE ROWS that are due again: retries, requeued and released rows, and rows whose single
# lease was lost. While leased, a row's `not_before` is its lease's end, so it comes back by itself
# and no rescuer is needed. A row whose content changed while its key may be in use goes in doubt. A
# row that was lost together with others too often is claimed alone. A lost claim ended without a
# known answer: it counts in `unknowns`, so that a row it may have sent never ends as failed.
# Index: campaign_targets_due; `low_water` lets the scan start behind entries that are dead.
CLAIM_DUE: Final[LiteralString] = f"""
WITH due AS MATERIALIZED (
    SELECT t.member_id, t.not_before, t.key_used_at, t.state, t.lost_claims,
           coalesce(t.key_used_at IS NOT NULL AND t.content_hash <> {CONTENT_HASH}, false)
               AS changed
    FROM campaign_targets t
    WHERE t.campaign_id = %(campaign)s AND t.not_before <= statement_timestamp()
      AND t.not_before >= to_timestamp(%(low_water)s::float8)
      AND t.state IN ('pending', 'sending') AND t.sent_at IS NULL AND t.opted_out_at IS NULL
      AND (t.key_used_at IS NULL
           OR t.key_used_at > statement_timestamp() - %(usable_s)s::float8 * interval '1 s')
      AND t.lost_claims + (t.state = 'sending')::int < {LOST_ALONE}
    ORDER BY t.not_before
    LIMIT %(size)s::int
    FOR NO KEY UPDATE SKIP LOCKED
), ranked AS (
    SELECT due.*, row_number() OVER (ORDER BY not_before, member_id) AS place,
           lost_claims + (state = 'sending')::int >= {LOST_TOGETHER} AS alone
    FROM due
), taken AS (
    SELECT * FROM ranked
    WHERE place = 1 OR (NOT alone AND NOT (SELECT alone FROM ranked WHERE place = 1))
)
UPDATE campaign_targets t
SET state = CASE WHEN d.changed THEN 'in_doubt' ELSE 'sending' END,
    claim_id = CASE WHEN d.changed THEN NULL ELSE %(claim)s END,
    lease_until = CASE WHEN NOT d.changed
        THEN clock_timestamp() + %(lease_s)s::float8 * interval '1 s' END,
    not_before = CASE WHEN NOT d.changed
        THEN clock_timestamp() + %(lease_s)s::float8 * interval '1 s' END,
    lost_claims = t.lost_claims + (d.state = 'sending')::int,
    unknowns = t.unknowns + (d.state = 'sending')::int,
    key_used_at = coalesce(d.key_used_at, clock_timestamp()),
    content_hash = coalesce(t.content_hash, {CONTENT_HASH}),
    reason = CASE WHEN d.changed THEN 'changed_while_open' ELSE t.reason END,
    outcome_at = CASE WHEN d.changed THEN clock_timestamp() ELSE t.outcome_at END
FROM taken d
WHERE t.campaign_id = %(campaign)s AND t.member_id = d.member_id
RETURNING t.member_id, t.email, t.vars::text, t.attempts, t.unknowns, d.key_used_at AS found,
          extract(epoch FROM clock_timestamp() - d.key_used_at)::float8 AS key_age_s,
          extract(epoch FROM d.not_before)::float8 AS due_at, t.lost_claims, d.changed,
          clock_timestamp() AS claimed_at
"""

# LET GO of claims whose answers never came: the statement may have been carried out all the same,
# for nobody. They count as lost claims, and are free at once instead of when their leases end.
# Invariant: nobody holds a lease with one of these fences. Index: primary key of the batches,
# campaign_targets_due.
LET_GO: Final[LiteralString] = f"""
WITH batches AS (
    UPDATE campaign_batches b
    SET lease_until = statement_timestamp() - interval '1 ms'
    WHERE b.campaign_id = %(campaign)s AND b.done_at IS NULL
      AND b.claim_id = ANY (%(claim_ids)s::uuid[]) AND {YIELD}
)
UPDATE campaign_targets t
SET lease_until = statement_timestamp() - interval '1 ms', not_before = statement_timestamp()
WHERE t.campaign_id = %(campaign)s AND t.not_before IS NOT NULL
  AND t.state = 'sending' AND t.claim_id = ANY (%(claim_ids)s::uuid[])
"""
