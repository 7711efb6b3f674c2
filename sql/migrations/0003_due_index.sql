-- transaction: false
-- Rows that are due again. No other index may mention a column that a claim or a finish changes: the
-- update of a row would touch every index then, and cost more than twice as much.

-- A killed build leaves an INVALID index behind, which IF NOT EXISTS would take for the real one. The
-- lock waits for a build of another migration that is still alive, so that only dead ones are dropped.
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
-- Two at once, one killed: the other found the name taken and built nothing.
DO $$
BEGIN
    IF NOT (
        SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass('campaign_targets_due')
    ) THEN
        RAISE object_not_in_prerequisite_state
            USING MESSAGE = 'campaign_targets_due is not valid, it has to be built again';
    END IF;
END
$$;
