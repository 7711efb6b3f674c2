"""Every SQL text of the claim, the send and the record; its invariant and its index above it.

Rules that hold for all of them:

- One autocommit statement each: a process frozen anywhere holds no lock and no snapshot.
- `sent_at IS NULL` and `opted_out_at IS NULL` stand in every predicate that leads to a request.
- `statement_timestamp()` where an index must serve the comparison (it is stable),
  `clock_timestamp()` where a lease is written (the moment, not the start of a wait).
- A limit is inside a materialised CTE: in a plain subselect it may be evaluated again for every
  outer row and take more than it says (PostgreSQL bug 15715).
- Only the primary key and `campaign_targets_due` index `campaign_targets`; neither mentions a
  column that a first attempt changes, so its finish is a heap-only update.
- Ids travel as the text of an array (`{1,2,3}`) cast to `bigint[]`: one prepared plan whatever the
  size of the numbers. They stand in a subselect, where the planner does not count them: on a table
  never analysed it takes a campaign for a 200th of the table, and reading all of that for cheaper
  than 200 look-ups (PostgreSQL 15: 21 ms a look at 50,000 rows, growing with the campaign).
- A batch is named by its number or a range of numbers, not by a join alone, nor by a list alone:
  for the same reason that would read all batches of the campaign at each claim, look and finish.
"""

from typing import Final, LiteralString

# A batch lost this often is split into single rows; a row lost twice more, alone, is in doubt.
LOST_TOGETHER: Final[LiteralString] = "3"
LOST_ALONE: Final[LiteralString] = "5"

# Equal to domain.content_hash.
CONTENT_HASH: Final[LiteralString] = (
    "sha256(convert_to(coalesce(t.email, '') || E'\\n' || coalesce(t.vars::text, ''), 'UTF8'))"
)

# Set for the rest of this statement's own transaction, from inside the statement, so that it works
# behind a pooler: waiting for the application's row locks ends after two seconds (55P03) and the
# write is tried again.
_YIELD: Final[LiteralString] = "(SELECT set_config('lock_timeout', '2s', true)) IS NOT NULL"


def _doubt(why: LiteralString) -> LiteralString:
    """What is set for a row `t` of a lost batch that may not be claimed again, beside its key."""
    return f"""state = CASE WHEN t.opted_out_at IS NULL THEN 'in_doubt' ELSE t.state END,
        reason = CASE WHEN t.opted_out_at IS NULL THEN {why} ELSE t.reason END,
        outcome_at = CASE WHEN t.opted_out_at IS NULL THEN clock_timestamp() ELSE t.outcome_at END,
        not_before = CASE WHEN t.opted_out_at IS NOT NULL THEN clock_timestamp() END,
        content_hash = CASE WHEN t.opted_out_at IS NOT NULL THEN ''::bytea END"""


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
          AND {_YIELD}
        ORDER BY batch_no
        LIMIT 1
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS w
    LIMIT 1
), changed AS (
    UPDATE campaign_targets t
    SET key_used_at = p.key_used_at, {_doubt("'changed_while_open'")}
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
    WHERE {_YIELD}
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
      AND t.member_id = ANY ((SELECT %(ids)s::bigint[])::bigint[]) AND {_YIELD}
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
      AND b.claim_id = ANY (%(claim_ids)s::uuid[]) AND b.done_at IS NULL AND {_YIELD}
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
      AND {_YIELD}
    ORDER BY batch_no
    LIMIT 100
    FOR NO KEY UPDATE SKIP LOCKED
), doubted AS (
    UPDATE campaign_targets t
    SET key_used_at = s.key_used_at, {_doubt("s.why")}
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
# Index: campaign_targets_due.
SWEEP_DUE: Final[LiteralString] = f"""
WITH stuck AS MATERIALIZED (
    SELECT t.member_id,
           CASE WHEN t.opted_out_at IS NOT NULL THEN NULL
                WHEN t.key_used_at <= statement_timestamp()
                     - %(usable_s)s::float8 * interval '1 s' THEN 'key_too_old'
                ELSE 'lost_too_often' END AS why
    FROM campaign_targets t
    WHERE t.campaign_id = %(campaign)s AND t.not_before IS NOT NULL AND t.sent_at IS NULL
      AND (t.lease_until IS NULL OR t.lease_until < statement_timestamp())
      AND (t.opted_out_at IS NULL AND t.state IN ('pending', 'sending')
           AND (t.key_used_at <= statement_timestamp() - %(usable_s)s::float8 * interval '1 s'
                OR t.lost_claims + (t.state = 'sending')::int >= {LOST_ALONE})
           OR t.opted_out_at IS NOT NULL AND t.state = 'sending')
      AND {_YIELD}
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
  AND {_YIELD}
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

# PROGRESS from the queue, without reading the ledger. Index: primary key of the batches,
# campaign_targets_due.
PROGRESS: Final[LiteralString] = """
SELECT coalesce(sum(sent + failed + in_doubt + deferred), 0)::bigint AS left_batches,
       coalesce(sum(greatest(size - sent - failed - in_doubt - deferred, 0))
                FILTER (WHERE done_at IS NULL), 0)::bigint AS remaining,
       (SELECT count(*) FROM campaign_targets t
        WHERE t.campaign_id = %(campaign)s AND t.not_before IS NOT NULL)::bigint AS due_again
FROM campaign_batches
WHERE campaign_id = %(campaign)s
"""
