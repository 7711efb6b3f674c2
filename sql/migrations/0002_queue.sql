-- The queue and what a campaign is steered by. New tables only: nobody waits for us.
SET LOCAL lock_timeout = '5s';
SET LOCAL statement_timeout = '10s';

-- The queue. One row leases a range of member ids of one campaign and one priority. Ranges of open
-- batches of one campaign and priority never overlap.
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
    done_at timestamptz,
    sent int NOT NULL DEFAULT 0,
    failed int NOT NULL DEFAULT 0,
    in_doubt int NOT NULL DEFAULT 0,
    deferred int NOT NULL DEFAULT 0,
    PRIMARY KEY (campaign_id, batch_no)
) WITH (
    fillfactor = 45,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000
);

CREATE TABLE campaigns (
    campaign_id text PRIMARY KEY,
    control text NOT NULL DEFAULT 'run' CHECK (control IN ('run', 'paused', 'cancelled')),
    control_at timestamptz,
    control_by text,
    control_why text
);

-- One row an account, updated at every claim: nearly empty pages keep each update on its page.
CREATE TABLE provider_accounts (
    account text PRIMARY KEY,
    next_free_at timestamptz NOT NULL DEFAULT '-infinity',
    blocked_until timestamptz
) WITH (
    fillfactor = 10,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 200
);

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
