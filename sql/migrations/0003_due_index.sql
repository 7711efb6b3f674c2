-- Targets that are due again. No further index may mention a column that a claim or a finish changes:
-- every index would be written at every finish then, at more than twice the cost.
-- Not one transaction, since an index that is built concurrently cannot be: each step may be repeated.

-- A killed build leaves an INVALID index behind, which IF NOT EXISTS takes for the real one. The lock
-- waits for a build that is still alive (that of another migration, or of one whose client was
-- killed), so that only a dead one is dropped.
BEGIN;
SET LOCAL lock_timeout = '5s';
SET LOCAL statement_timeout = '10s';
LOCK TABLE campaign_targets IN SHARE UPDATE EXCLUSIVE MODE;
SET LOCAL lock_timeout = '80ms';
DO $$
BEGIN
    IF EXISTS (
        SELECT FROM pg_index
        WHERE indexrelid = to_regclass('campaign_targets_due') AND NOT indisvalid
    ) THEN
        DROP INDEX campaign_targets_due;
    END IF;
END
$$;
COMMIT;

-- step
CREATE INDEX CONCURRENTLY IF NOT EXISTS campaign_targets_due
    ON campaign_targets (campaign_id, not_before) WHERE not_before IS NOT NULL;

-- step
-- If another build died while we waited for it, the name was taken and nothing was built.
DO $$
BEGIN
    IF NOT EXISTS (
        SELECT FROM pg_index
        WHERE indexrelid = to_regclass('campaign_targets_due') AND indisvalid
    ) THEN
        RAISE object_not_in_prerequisite_state
            USING MESSAGE = 'the index campaign_targets_due is not valid and must be built again';
    END IF;
    INSERT INTO sender_migrations (version, name) VALUES (3, 'due_index') ON CONFLICT DO NOTHING;
END
$$;
