-- Reads the whole table beside the application; no one waits for this lock but DDL and vacuum.
SET LOCAL lock_timeout = '5s';
SET LOCAL statement_timeout = 0;
ALTER TABLE campaign_targets VALIDATE CONSTRAINT campaign_targets_state_known;

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
