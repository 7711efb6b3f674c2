-- The ledger: one row a member of a campaign, filled by another system at any time.
BEGIN;

-- Up to the ALTER at the end only DDL and vacuum wait for us, so we may wait for them: a running
-- autovacuum gives way after a second (deadlock_timeout), which a wait of 80 ms would never see.
SET LOCAL lock_timeout = '5s';
SET LOCAL statement_timeout = '10s';

CREATE TABLE IF NOT EXISTS sender_migrations (
    version int PRIMARY KEY,
    name text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
-- Before anything else: the key of this row is the lock between two migrations that run at once.
INSERT INTO sender_migrations (version, name) VALUES (1, 'campaign_targets');

-- For a database that has nothing yet.
CREATE TABLE IF NOT EXISTS campaign_targets (
    campaign_id text NOT NULL,
    member_id bigint NOT NULL,
    email text,
    sent_at timestamptz,
    PRIMARY KEY (campaign_id, member_id)
);

LOCK TABLE campaign_targets IN SHARE UPDATE EXCLUSIVE MODE;

-- fillfactor: every row is rewritten once, at its finish; with room on its page no index is touched
-- then (half the CPU, a quarter of the WAL). It shapes new pages only. Rows that are there already
-- lie on full pages: the first campaign moves them to new ones, once (measured: 1.2 million rows grow
-- from 93 MB to 338 MB and their indexes from 38 to 76 MB; campaigns loaded later do not grow).
-- autovacuum: a campaign leaves one dead version a row, all of them heap-only. Absolute thresholds
-- next to a small factor give a table of one campaign a dozen short runs and a table of thirty
-- campaigns at least one a campaign; 500 is 2.5 times the usual pace.
ALTER TABLE campaign_targets SET (
    fillfactor = 45,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 50000,
    autovacuum_vacuum_insert_scale_factor = 0.02,
    autovacuum_vacuum_insert_threshold = 50000,
    autovacuum_analyze_scale_factor = 0.02,
    autovacuum_analyze_threshold = 10000,
    autovacuum_vacuum_cost_limit = 500
);

-- From here on every statement of the application queues behind us: we give up first and come again.
SET LOCAL lock_timeout = '80ms';

-- One statement, one short lock, no rewrite: constant defaults are kept in the catalogue. The columns
-- may be there already (opted_out_at is the member database's; all of them in a copy of a migrated
-- table alone, with the constraint). NOT VALID: 0004 reads the old rows while the application goes on.
ALTER TABLE campaign_targets
    ADD COLUMN IF NOT EXISTS opted_out_at timestamptz,
    ADD COLUMN IF NOT EXISTS state text NOT NULL DEFAULT 'pending',
    ADD COLUMN IF NOT EXISTS attempts int NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS unknowns smallint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS lost_claims smallint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS priority smallint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS not_before timestamptz,
    ADD COLUMN IF NOT EXISTS claim_id uuid,
    ADD COLUMN IF NOT EXISTS lease_until timestamptz,
    ADD COLUMN IF NOT EXISTS key_used_at timestamptz,
    ADD COLUMN IF NOT EXISTS outcome_at timestamptz,
    ADD COLUMN IF NOT EXISTS content_hash bytea,
    ADD COLUMN IF NOT EXISTS reason text,
    ADD COLUMN IF NOT EXISTS vars jsonb,
    -- Made anew in the same statement.
    -- squawk-ignore ban-drop-constraint
    DROP CONSTRAINT IF EXISTS campaign_targets_state_known,
    ADD CONSTRAINT campaign_targets_state_known
        CHECK (state IN ('pending', 'sending', 'sent', 'failed', 'in_doubt')) NOT VALID;

COMMIT;
