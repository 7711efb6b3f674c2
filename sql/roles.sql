-- Who may do what. Run as an administrator of the database, before the first `sender migrate` (the
-- owner has to exist) and again after each (new tables get their rights): psql -f sql/roles.sql
-- Repeatable. Gives no passwords: \password sender, or the cloud's own login.
--
--   sender_owner   runs `sender migrate`; owns what it makes. A campaign_targets that exists keeps
--                  its owner: let that role migrate, or hand the table over yourself.
--   sender         runs `sender run`, check, status, failures, pause, resume, cancel, requeue,
--                  resolve. May settle a row; may not change whom it mails or who opted out.
--   member_api     the member database's side: may opt members out (and in), nothing else.
--   sender_reader  dashboards: where a campaign stands; sees no address.
BEGIN;

-- The application goes first here too.
SET LOCAL lock_timeout = '2s';

DO $$
DECLARE
    wanted text;
BEGIN
    FOREACH wanted IN ARRAY ARRAY['sender_owner', 'sender', 'member_api', 'sender_reader'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = wanted) THEN
            EXECUTE format('CREATE ROLE %I LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE', wanted);
        END IF;
        EXECUTE format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), wanted);
        EXECUTE format('GRANT USAGE ON SCHEMA public TO %I', wanted);
    END LOOP;
    GRANT CREATE ON SCHEMA public TO sender_owner;
END
$$;

-- The sender gives way to the application, and a process frozen in a transaction lets go of its
-- locks long before its leases end (LEASE_S). The longest statement counts a whole campaign.
ALTER ROLE sender SET lock_timeout = '2s';
ALTER ROLE sender SET statement_timeout = '5min';
ALTER ROLE sender SET idle_in_transaction_session_timeout = '10s';

DO $$
BEGIN
    IF to_regclass('public.campaign_batches') IS NULL THEN
        RAISE NOTICE 'no tables of sender yet: run `sender migrate`, then this file again';
        RETURN;
    END IF;

    GRANT SELECT ON campaign_targets, campaign_batches, campaigns, provider_accounts,
        campaign_actions, sender_migrations TO sender;
    GRANT UPDATE (state, sent_at, attempts, unknowns, lost_claims, not_before, claim_id, lease_until,
        key_used_at, outcome_at, content_hash, reason) ON campaign_targets TO sender;
    GRANT INSERT, UPDATE ON campaign_batches, campaigns, provider_accounts TO sender;
    -- What people did is added to, never changed.
    GRANT INSERT ON campaign_actions TO sender;

    GRANT SELECT (campaign_id, member_id, opted_out_at) ON campaign_targets TO member_api;
    GRANT UPDATE (opted_out_at) ON campaign_targets TO member_api;

    GRANT SELECT (campaign_id, member_id, sent_at, opted_out_at, state, attempts, unknowns,
        lost_claims, priority, not_before, claim_id, lease_until, key_used_at, outcome_at, reason)
        ON campaign_targets TO sender_reader;
    GRANT SELECT ON campaign_batches, campaigns, provider_accounts, campaign_actions,
        sender_migrations TO sender_reader;
END
$$;

COMMIT;
