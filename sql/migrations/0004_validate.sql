-- Reads the whole table, beside the application: only DDL and vacuum wait for these locks.
BEGIN;
SET LOCAL lock_timeout = '5s';
SET LOCAL statement_timeout = 0;
INSERT INTO sender_migrations (version, name) VALUES (4, 'validate');

ALTER TABLE campaign_targets VALIDATE CONSTRAINT campaign_targets_state_known;

COMMENT ON TABLE sender_migrations IS 'Which migrations of sender this database has.';
COMMENT ON TABLE campaign_targets IS
    'The ledger of sender: one row a member of a campaign. A row with sent_at is never mailed, '
    'whatever its state says.';
COMMENT ON COLUMN campaign_targets.sent_at IS 'When the provider''s acceptance was recorded; never taken back.';
COMMENT ON COLUMN campaign_targets.opted_out_at IS
    'Written by the member database at any moment; a pending row that has it is skipped.';
COMMENT ON COLUMN campaign_targets.state IS
    'pending, sending (leased singly), sent, failed, in_doubt (nobody knows; a person must look). '
    'Targets of a leased batch (campaign_batches) stay pending until their finish.';
COMMENT ON COLUMN campaign_targets.attempts IS 'Charged attempts.';
COMMENT ON COLUMN campaign_targets.unknowns IS 'How many of the attempts ended without a known answer.';
COMMENT ON COLUMN campaign_targets.lost_claims IS 'How often a claim ended without a finish or a release.';
COMMENT ON COLUMN campaign_targets.priority IS 'Higher goes first.';
COMMENT ON COLUMN campaign_targets.not_before IS
    'Null before the first attempt; then when the row is due again, or its single lease ends.';
COMMENT ON COLUMN campaign_targets.claim_id IS 'Fence of a row leased singly: new for every claim.';
COMMENT ON COLUMN campaign_targets.lease_until IS 'Until when the single lease holds.';
COMMENT ON COLUMN campaign_targets.key_used_at IS
    'Since when the idempotency key may have reached the provider; null if surely never.';
COMMENT ON COLUMN campaign_targets.outcome_at IS 'When the last outcome other than sent was recorded.';
COMMENT ON COLUMN campaign_targets.content_hash IS
    'What was sent under the key; a row that differs must not be sent under it again.';
COMMENT ON COLUMN campaign_targets.reason IS 'Why it failed, is in doubt or waits; for people.';
COMMENT ON COLUMN campaign_targets.vars IS 'Further values for the mail.';

COMMIT;
