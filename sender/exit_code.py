"""How a run's end becomes an exit code, in the contract's order. Pure."""

from sender.domain import Counts
from sender.pipeline.stop import StopReason


def decide(reason: StopReason, counts: Counts | None, failed_ratio_limit: float) -> tuple[int, str]:
    """The exit code and the sentence that explains it.

    Args:
        reason: why claiming stopped.
        counts: the ledger at the end, or None if it could not be counted.
        failed_ratio_limit: share of failed rows above which a person must look.
    """
    match reason:
        case StopReason.ACCOUNT_STOPPED | StopReason.REFUSED:
            return 2, reason.value
        case StopReason.PAUSED | StopReason.CANCELLED:
            return 0, reason.value
        case _:
            pass
    if counts is None:
        return 1, f"{reason.value}; how many rows are open was not counted"
    if counts.total == 0:
        return 78, "the campaign has no rows any more: they were deleted while it ran"
    if counts.open:
        return 1, f"{reason.value}; {counts.open} rows are open, start it again and it goes on"
    if counts.in_doubt:
        return 2, f"{counts.in_doubt} rows are in doubt: see `sender failures`"
    if counts.total and counts.failed / counts.total > failed_ratio_limit:
        return 2, f"{counts.failed} of {counts.total} rows failed: see `sender failures`"
    return 0, StopReason.DONE.value
