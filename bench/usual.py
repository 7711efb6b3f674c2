"""The usual way to make a table a queue, to be measured beside ours.

One mutable row a target, a partial index on its state, rows taken from the low end with SKIP
LOCKED, results joined in from `unnest`. It forgives nothing ours forgives (no look before the
request, no fence against a changed address, no doubt): it is the floor people know.
"""

from typing import Any, LiteralString
from uuid import uuid4

from sender.database import Database

SCHEMA: LiteralString = """
CREATE TABLE campaign_targets (
    campaign_id text NOT NULL,
    member_id bigint NOT NULL,
    email text,
    sent_at timestamptz,
    opted_out_at timestamptz,
    state text NOT NULL DEFAULT 'pending',
    attempts int NOT NULL DEFAULT 0,
    not_before timestamptz,
    claim_id uuid,
    lease_until timestamptz,
    last_error text,
    PRIMARY KEY (campaign_id, member_id)
);
CREATE INDEX ix_targets_work ON campaign_targets (campaign_id, member_id)
    WHERE state IN ('pending', 'sending');
"""

CLAIM: LiteralString = """
WITH picked AS MATERIALIZED (
    SELECT member_id
    FROM campaign_targets
    WHERE campaign_id = %(campaign)s AND state IN ('pending', 'sending')
      AND (state = 'pending' AND (not_before IS NULL OR not_before <= statement_timestamp())
           OR state = 'sending' AND lease_until < statement_timestamp())
      AND sent_at IS NULL AND opted_out_at IS NULL
    ORDER BY member_id
    LIMIT {size}
    FOR UPDATE SKIP LOCKED
)
UPDATE campaign_targets t
SET state = 'sending', attempts = t.attempts + 1, claim_id = %(claim)s,
    lease_until = clock_timestamp() + interval '90 s'
FROM picked p
WHERE t.campaign_id = %(campaign)s AND t.member_id = p.member_id
RETURNING t.member_id, t.email, t.attempts
"""

FINISH: LiteralString = """
UPDATE campaign_targets t
SET state = v.state, last_error = v.error, lease_until = NULL,
    sent_at = CASE WHEN v.state = 'sent' THEN clock_timestamp() END,
    not_before = CASE WHEN v.state = 'pending' THEN clock_timestamp() END
FROM unnest(%(ids)s::bigint[], %(states)s::text[], %(errors)s::text[]) AS v(member_id, state, error)
WHERE t.campaign_id = %(campaign)s AND t.member_id = v.member_id
  AND t.state = 'sending' AND t.claim_id = %(claim)s
RETURNING t.member_id
"""

# Writes the same versions of rows as a claim and a finish, for less: brings a table to where a
# campaign would have brought it.
ADVANCE: tuple[LiteralString, ...] = (
    """
    UPDATE campaign_targets
    SET state = 'sending', attempts = attempts + 1, claim_id = gen_random_uuid(),
        lease_until = clock_timestamp()
    WHERE campaign_id = %(campaign)s AND member_id BETWEEN %(lo)s AND %(hi)s AND state = 'pending'
    """,
    """
    UPDATE campaign_targets SET state = 'sent', sent_at = clock_timestamp(), lease_until = NULL
    WHERE campaign_id = %(campaign)s AND member_id BETWEEN %(lo)s AND %(hi)s AND state = 'sending'
    """,
)


class UsualQueue:
    """Claim and finish of the usual queue."""

    def __init__(self, database: Database, campaign: str, size: int) -> None:
        self._database = database
        self._campaign = campaign
        self._claim: Any = CLAIM.format(size=size)

    async def claim(self) -> tuple[object, list[int]]:
        """Take the next rows; returns the fence and the member ids."""
        claim = uuid4()
        rows = await self._database.all(self._claim, {"campaign": self._campaign, "claim": claim})
        return claim, [row.member_id for row in rows]

    async def finish(self, claim: object, ids: list[int], failing: list[bool]) -> int:
        """Write what became of them."""
        return await self._database.run(
            FINISH,
            {
                "campaign": self._campaign,
                "claim": claim,
                "ids": ids,
                "states": ["pending" if failed else "sent" for failed in failing],
                "errors": ["http_503" if failed else None for failed in failing],
            },
        )

    async def advance(self, lo: int, hi: int) -> None:
        """Bring members `lo` to `hi` to their end."""
        for text in ADVANCE:
            values = {"campaign": self._campaign, "lo": lo, "hi": hi}
            await self._database.run(text, values, timeout_s=300)
