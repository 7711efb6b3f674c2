"""The exit code: the first line of the contract's table that applies."""

import pytest

from sender.domain import Counts
from sender.exit_code import decide
from sender.pipeline.stop import StopReason

OPEN = Counts(sent=5, pending=1)
HELD = Counts(sent=5, sending=1)
DOUBT = Counts(sent=500, in_doubt=1)
BAD = Counts(sent=98, failed=2)
FEW_BAD = Counts(sent=99, failed=1)
DONE = Counts(sent=5, skipped=3)
R = StopReason


@pytest.mark.parametrize(
    ("reason", "counts", "code"),
    [
        (R.ACCOUNT_STOPPED, OPEN, 2),
        (R.ACCOUNT_STOPPED, None, 2),
        (R.REFUSED, OPEN, 2),
        (R.PAUSED, OPEN, 0),
        (R.PAUSED, DOUBT, 0),
        (R.CANCELLED, None, 0),
        (R.DEADLINE, OPEN, 1),
        (R.SIGNAL, HELD, 1),
        (R.SIGNAL, None, 1),
        (R.DEADLINE, Counts(pending=1, in_doubt=9, failed=90), 1),
        (R.SIGNAL, DOUBT, 2),
        (R.DONE, DOUBT, 2),
        (R.DONE, BAD, 2),
        (R.DONE, FEW_BAD, 0),
        (R.DONE, DONE, 0),
        (R.SIGNAL, DONE, 0),
        (R.DONE, OPEN, 1),
        (R.DONE, Counts(), 78),
        (R.SIGNAL, Counts(), 78),
    ],
)
def test_the_first_line_that_applies(reason, counts, code):
    found, why = decide(reason, counts, 0.01)
    assert found == code
    assert why


def test_the_limit_itself_is_allowed():
    assert decide(R.DONE, Counts(sent=1, failed=1), 0.5)[0] == 0
    assert decide(R.DONE, Counts(sent=1, failed=2), 0.5)[0] == 2
    assert decide(R.DONE, Counts(failed=2), 1.0)[0] == 0
