"""The texts of the record: outcomes under their fence, and the leases they belong to."""

from typing import Final, LiteralString

from sender.queries.shared import YIELD

# FINISH. Invariant: a row is written only under the fence it was claimed with, and what was written
# is returned. `batches` carries each lease's fate: keep (and renew), done, or release (its other
# rows were never requested: the key's stamp found at the claim is restored). The batch row is
# updated, never only locked, so that a claimer whose snapshot is older is turned away. An accepted
# answer is also taken for a row that was put in doubt meanwhile: it settles the doubt. Rows are
# locked in id order before any is written; the application locks in the same order or is retried.
# What is decided from a locked row holds until the end: nobody else can change it. `others` are
# looked up one by one (joined to all locked rows, 200 of them cost 20 ms instead of 4).
# Index: primary keys.
FINISH: Final[LiteralString] = f"""
WITH fate AS MATERIALIZED (
    SELECT * FROM json_to_recordset(%(batches)s::json) AS f(
        n int, batch_no int, claim_id uuid, fate text, found timestamptz,
        sent int, failed int, in_doubt int, deferred int)
    WHERE {YIELD}
    ORDER BY batch_no
), held AS (
    UPDATE campaign_batches b
    SET claim_id = CASE WHEN f.fate = 'keep' THEN b.claim_id END,
        lease_until = CASE WHEN f.fate = 'keep'
            THEN clock_timestamp() + %(lease_s)s::float8 * interval '1 s' END,
        done_at = CASE WHEN f.fate = 'done' THEN clock_timestamp() END,
        key_used_at = CASE f.fate WHEN 'keep' THEN b.key_used_at WHEN 'release' THEN f.found END,
        key_snapshot = CASE WHEN f.fate = 'keep' OR f.found IS NOT NULL AND f.fate = 'release'
            THEN b.key_snapshot END,
        claimed_ids = CASE WHEN f.fate = 'keep' OR f.found IS NOT NULL AND f.fate = 'release'
            THEN b.claimed_ids END,
        sent = b.sent + f.sent, failed = b.failed + f.failed,
        in_doubt = b.in_doubt + f.in_doubt, deferred = b.deferred + f.deferred
    FROM fate f
    WHERE b.campaign_id = %(campaign)s
      AND b.batch_no BETWEEN (SELECT min(batch_no) FROM fate) AND (SELECT max(batch_no) FROM fate)
      AND b.batch_no = f.batch_no AND b.claim_id = f.claim_id AND b.done_at IS NULL
    RETURNING f.n
), other AS MATERIALIZED (
    SELECT * FROM json_to_recordset(%(others)s::json) AS o(
        member_id bigint, n int, claim_id uuid, state text, charged int, unknown int,
        delay_s float8, key_used_at timestamptz, content_hash text, reason text)
), locked AS MATERIALIZED (
    SELECT t.member_id, t.state, t.not_before IS NULL AS is_first
    FROM campaign_targets t
    WHERE t.campaign_id = %(campaign)s AND t.sent_at IS NULL
      AND t.member_id = ANY (%(sent_ids)s::bigint[] || ARRAY(SELECT member_id FROM other))
    ORDER BY t.member_id
    FOR NO KEY UPDATE
), sent AS (
    UPDATE campaign_targets t
    SET state = 'sent', sent_at = clock_timestamp(), reason = NULL
    WHERE t.campaign_id = %(campaign)s
      AND t.member_id = ANY (ARRAY(
          SELECT l.member_id
          FROM locked l
          JOIN unnest(%(sent_ids)s::bigint[], %(sent_fates)s::int[]) AS s(member_id, n)
              USING (member_id)
          WHERE l.state = 'in_doubt'
             OR l.state = 'pending' AND l.is_first
                AND s.n = ANY (ARRAY(SELECT n FROM held))))
    RETURNING t.member_id
), others AS (
    UPDATE campaign_targets t
    SET state = o.state, attempts = t.attempts + o.charged, unknowns = t.unknowns + o.unknown,
        sent_at = CASE WHEN o.state = 'sent' THEN clock_timestamp() END,
        claim_id = NULL, lease_until = NULL,
        lost_claims = CASE WHEN o.reason = '' AND o.state = 'pending' THEN t.lost_claims ELSE 0 END,
        not_before = CASE WHEN o.state = 'pending'
            THEN clock_timestamp() + o.delay_s * interval '1 s' END,
        key_used_at = o.key_used_at,
        content_hash = CASE WHEN o.key_used_at IS NOT NULL
            THEN coalesce(t.content_hash, decode(o.content_hash, 'hex')) END,
        outcome_at = clock_timestamp(),
        reason = CASE WHEN o.state = 'sent' THEN NULL
            ELSE coalesce(nullif(o.reason, ''), t.reason) END
    FROM other o
    WHERE t.campaign_id = %(campaign)s AND t.member_id = o.member_id AND t.sent_at IS NULL
      AND (SELECT count(*) FROM locked) > 0
      AND ((o.n IS NULL AND t.state = 'sending' AND t.claim_id = o.claim_id)
           OR (o.n = ANY (ARRAY(SELECT n FROM held))
               AND t.state = 'pending' AND t.not_before IS NULL)
           OR (o.state = 'sent' AND t.state = 'in_doubt'))
    RETURNING t.member_id
)
SELECT ARRAY(SELECT n FROM held) AS held,
       ARRAY(SELECT member_id FROM sent) AS sent,
       ARRAY(SELECT member_id FROM others) AS others
"""

# LOCKED. Which rows somebody else has locked just now; the others were locked for a moment. Asked
# once a finish had to wait for long: one such row must not keep the outcomes of all others.
# Index: primary key.
LOCKED: Final[LiteralString] = f"""
WITH free AS MATERIALIZED (
    SELECT t.member_id
    FROM campaign_targets t
    WHERE t.campaign_id = %(campaign)s
      AND t.member_id = ANY ((SELECT %(ids)s::bigint[])::bigint[]) AND {YIELD}
    FOR NO KEY UPDATE SKIP LOCKED
)
SELECT ARRAY(
    SELECT t.member_id
    FROM campaign_targets t
    WHERE t.campaign_id = %(campaign)s
      AND t.member_id = ANY ((SELECT %(ids)s::bigint[])::bigint[])
      AND t.member_id <> ALL (ARRAY(SELECT member_id FROM free))
) AS locked
"""

# EXTEND. Invariant: only a lease that still carries the caller's fence is extended; the others are
# not named in the answer. A row that the application has locked is passed over: waiting for it
# would let all others end. Index: primary keys.
EXTEND: Final[LiteralString] = f"""
WITH batches AS (
    UPDATE campaign_batches b
    SET lease_until = clock_timestamp() + %(lease_s)s::float8 * interval '1 s'
    WHERE b.campaign_id = %(campaign)s
      AND b.batch_no BETWEEN %(first_batch)s::int AND %(last_batch)s::int
      AND b.claim_id = ANY (%(claim_ids)s::uuid[]) AND b.done_at IS NULL AND {YIELD}
    RETURNING b.claim_id
), locked AS MATERIALIZED (
    SELECT t.member_id
    FROM campaign_targets t
    WHERE t.campaign_id = %(campaign)s
      AND t.member_id = ANY ((SELECT %(again_ids)s::bigint[])::bigint[])
      AND t.claim_id = ANY (%(claim_ids)s::uuid[]) AND t.state = 'sending'
    ORDER BY t.member_id
    FOR NO KEY UPDATE SKIP LOCKED
), singles AS (
    UPDATE campaign_targets t
    SET lease_until = clock_timestamp() + %(lease_s)s::float8 * interval '1 s',
        not_before = clock_timestamp() + %(lease_s)s::float8 * interval '1 s'
    WHERE t.campaign_id = %(campaign)s AND t.member_id = ANY (ARRAY(SELECT member_id FROM locked))
      AND t.claim_id = ANY (%(claim_ids)s::uuid[]) AND t.state = 'sending'
    RETURNING t.claim_id
)
SELECT ARRAY(SELECT claim_id FROM batches UNION SELECT claim_id FROM singles) AS extended
"""
