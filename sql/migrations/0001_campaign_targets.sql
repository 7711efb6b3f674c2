-- The ledger. One row a member of a campaign; filled by another system at any time.

-- This lock stops nobody but DDL and vacuum. A running autovacuum gives way to a waiter after one
-- second (deadlock_timeout), which a wait of 80 ms would never see.
SET LOCAL lock_timeout = '5s';
SET LOCAL statement_timeout = '10s';

-- Creates the bare table where there is none, so that an empty database works too.
CREATE TABLE IF NOT EXISTS campaign_targets (
    campaign_id text NOT NULL,
    member_id bigint NOT NULL,
    email text,
    sent_at timestamptz,
    PRIMARY KEY (campaign_id, member_id)
) WITH (fillfactor = 45);

LOCK TABLE campaign_targets IN SHARE UPDATE EXCLUSIVE MODE;

-- From here on statements of the application queue behind us, so we give up first and come again.
SET LOCAL lock_timeout = '80ms';

-- All in one statement: one short lock, no rewrite (constant defaults are kept in the catalogue).
-- NOT VALID: old rows are read later, in 0004, while the application goes on.
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
    ADD CONSTRAINT campaign_targets_state_known
        CHECK (state IN ('pending', 'sending', 'sent', 'failed', 'in_doubt')) NOT VALID;
