-- The queue, and what a campaign is steered by. New tables only: nobody waits for us. Not IF NOT
-- EXISTS: a table of this name that somebody else made must not be taken for ours.
BEGIN;
SET LOCAL lock_timeout = '5s';
SET LOCAL statement_timeout = '10s';
INSERT INTO sender_migrations (version, name) VALUES (2, 'queue');

-- Each row is updated a handful of times (claim, extensions, partial finishes), found by its key:
-- half-empty pages keep the versions together and the key untouched.
CREATE TABLE campaign_batches (
    campaign_id text NOT NULL,
    batch_no int NOT NULL,
    lo bigint NOT NULL,
    hi bigint NOT NULL,
    priority smallint NOT NULL DEFAULT 0,
    size int NOT NULL,
    claim_id uuid,
    lease_until timestamptz,
    lost_claims smallint NOT NULL DEFAULT 0,
    key_used_at timestamptz,
    key_snapshot pg_snapshot,
    claimed_ids bigint[],
    done_at timestamptz,
    sent int NOT NULL DEFAULT 0,
    failed int NOT NULL DEFAULT 0,
    in_doubt int NOT NULL DEFAULT 0,
    deferred int NOT NULL DEFAULT 0,
    PRIMARY KEY (campaign_id, batch_no)
) WITH (
    fillfactor = 45,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 2000
);
COMMENT ON TABLE campaign_batches IS
    'The queue of sender: one row leases the open targets lo..hi of one campaign and priority. '
    'Ranges of open batches (done_at is null) of one campaign and priority never overlap.';
COMMENT ON COLUMN campaign_batches.claim_id IS 'Fence: new for every claim, compared by every write.';
COMMENT ON COLUMN campaign_batches.lease_until IS 'Until when the claim holds; afterwards anyone may claim.';
COMMENT ON COLUMN campaign_batches.lost_claims IS 'How often a claim ended without a finish or a release.';
COMMENT ON COLUMN campaign_batches.key_used_at IS
    'Since when idempotency keys of this batch may have reached the provider; null if surely never.';
COMMENT ON COLUMN campaign_batches.key_snapshot IS 'The snapshot the last claim read its targets with.';
COMMENT ON COLUMN campaign_batches.claimed_ids IS 'The members the last claim took.';
COMMENT ON COLUMN campaign_batches.deferred IS 'Targets that went back to the ledger, to be retried singly.';

CREATE TABLE campaigns (
    campaign_id text PRIMARY KEY,
    control text NOT NULL DEFAULT 'run',
    control_at timestamptz,
    control_by text,
    control_why text,
    CONSTRAINT campaigns_control_known CHECK (control IN ('run', 'paused', 'cancelled'))
);
COMMENT ON TABLE campaigns IS 'What a person wants of a campaign (sender pause, resume, cancel), and who said so.';

-- A handful of rows, each updated several times a second: nearly empty pages, so that an update
-- always finds room beside its old version and the table stays a page or two long.
CREATE TABLE provider_accounts (
    account text PRIMARY KEY,
    next_free_at timestamptz NOT NULL DEFAULT '-infinity',
    blocked_until timestamptz
) WITH (
    fillfactor = 10,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 500
);
COMMENT ON TABLE provider_accounts IS 'The pace all runs of one provider account share.';
COMMENT ON COLUMN provider_accounts.next_free_at IS 'Virtual clock: the first moment no message is booked for.';
COMMENT ON COLUMN provider_accounts.blocked_until IS 'The provider asked the account to wait until then.';

CREATE TABLE campaign_actions (
    action_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    campaign_id text NOT NULL,
    member_id bigint,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    action text NOT NULL,
    by_whom text NOT NULL,
    why text NOT NULL,
    before jsonb
);
COMMENT ON TABLE campaign_actions IS 'What people did to a campaign or a target: who, when, why. Never changed.';
COMMENT ON COLUMN campaign_actions.before IS 'The row as it was before.';

-- A row's xmin has 32 bits, a snapshot's ids 64: the highest id of the past that ends like the xmin.
CREATE FUNCTION sender_row_xid(row_xmin xid) RETURNS xid8
    LANGUAGE sql STABLE PARALLEL SAFE
    RETURN (
        pg_snapshot_xmax(pg_current_snapshot())::text::bigint
        - ((pg_snapshot_xmax(pg_current_snapshot())::text::bigint - row_xmin::text::bigint)
           & 4294967295)
    )::text::xid8;
COMMENT ON FUNCTION sender_row_xid(xid) IS 'The full transaction id behind a row''s xmin.';

COMMIT;
