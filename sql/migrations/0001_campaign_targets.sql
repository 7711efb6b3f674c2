-- The ledger. One row a member of a campaign; filled by another system at any time.
-- Creates the bare table where there is none, so that an empty database works too.
CREATE TABLE IF NOT EXISTS campaign_targets (
    campaign_id text NOT NULL,
    member_id bigint NOT NULL,
    email text,
    sent_at timestamptz,
    PRIMARY KEY (campaign_id, member_id)
);

-- step
-- All in one statement: one short lock, no rewrite (constant defaults are kept in the catalogue).
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
    ADD COLUMN IF NOT EXISTS vars jsonb;
