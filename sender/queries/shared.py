"""What several texts have in common: how often is too often, a content's hash, a short wait."""

from typing import Final, LiteralString

# A batch lost this often is split into single rows; a row lost twice more, alone, is in doubt.
LOST_TOGETHER: Final[LiteralString] = "3"
LOST_ALONE: Final[LiteralString] = "5"

# Equal to domain.content_hash.
CONTENT_HASH: Final[LiteralString] = (
    "sha256(convert_to(coalesce(t.email, '') || E'\\n' || coalesce(t.vars::text, ''), 'UTF8'))"
)

# Set for the rest of this statement's own transaction, from inside the statement, so that it works
# behind a pooler: waiting for the application's row locks ends after two seconds (55P03) and the
# write is tried again.
YIELD: Final[LiteralString] = "(SELECT set_config('lock_timeout', '2s', true)) IS NOT NULL"


def doubt(why: LiteralString) -> LiteralString:
    """What is set for a row `t` of a lost batch that may not be claimed again, beside its key."""
    return f"""state = CASE WHEN t.opted_out_at IS NULL THEN 'in_doubt' ELSE t.state END,
        reason = CASE WHEN t.opted_out_at IS NULL THEN {why} ELSE t.reason END,
        outcome_at = CASE WHEN t.opted_out_at IS NULL THEN clock_timestamp() ELSE t.outcome_at END,
        not_before = CASE WHEN t.opted_out_at IS NOT NULL THEN clock_timestamp() END,
        content_hash = CASE WHEN t.opted_out_at IS NOT NULL THEN ''::bytea END"""
