"""Every SQL text of the claim, the send and the record; its invariant and its index above it.

Rules that hold for all of them:

- One autocommit statement each: a process frozen anywhere holds no lock and no snapshot.
- `sent_at IS NULL` and `opted_out_at IS NULL` stand in every predicate that leads to a request.
- `statement_timestamp()` where an index must serve the comparison (it is stable),
  `clock_timestamp()` where a lease is written (the moment, not the start of a wait).
- A limit is inside a materialised CTE: in a plain subselect it may be evaluated again for every
  outer row and take more than it says (PostgreSQL bug 15715).
- Only the primary key and `campaign_targets_due` index `campaign_targets`; neither mentions a
  column that a first attempt changes, so its finish is a heap-only update.
- Ids travel as the text of an array (`{1,2,3}`) cast to `bigint[]`: one prepared plan whatever the
  size of the numbers. They stand in a subselect, where the planner does not count them: on a table
  never analysed it takes a campaign for a 200th of the table, and reading all of that for cheaper
  than 200 look-ups (PostgreSQL 15: 21 ms a look at 50,000 rows, growing with the campaign).
- A batch is named by its number or a range of numbers, not by a join alone, nor by a list alone:
  for the same reason that would read all batches of the campaign at each claim, look and finish.
"""

from sender.queries import actions, claim, ledger, look, record, reports, shared, sweep

__all__ = ["actions", "claim", "ledger", "look", "record", "reports", "shared", "sweep"]
