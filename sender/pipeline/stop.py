"""Why a run stops, and how: stop claiming first, stop working only when it must be now."""

from dataclasses import dataclass, field
from enum import Enum

import anyio

from sender.domain import Control


class StopReason(Enum):
    """Why no new row is claimed any more. The value is said in the last log line."""

    DONE = "every row is settled"
    DEADLINE = "the deadline was reached"
    SIGNAL = "a signal asked to stop"
    ACCOUNT_STOPPED = "the provider refuses the account or the request as such"
    REFUSED = "at least half of the last 200 answers were permanent refusals"
    PAUSED = "the campaign is paused"
    CANCELLED = "the campaign is cancelled"


@dataclass(slots=True)
class Stop:
    """The two stops of a run. The first reason wins.

    Attributes:
        claiming: set when no new row may be claimed and no new request may begin.
        working: set when what is in flight must be left as it is.
        reason: why, once `claiming` is set.
        detail: what the provider or signal said, without addresses.
    """

    claiming: anyio.Event = field(default_factory=anyio.Event)
    working: anyio.Event = field(default_factory=anyio.Event)
    reason: StopReason | None = None
    detail: str = ""

    def stop_claiming(self, reason: StopReason, detail: str = "") -> None:
        """Begin to stop; later calls change nothing."""
        if self.reason is None:
            self.reason, self.detail = reason, detail
            self.claiming.set()

    def obey(self, control: Control) -> None:
        """Stop claiming if a person paused or cancelled the campaign."""
        match control:
            case Control.PAUSED:
                self.stop_claiming(StopReason.PAUSED)
            case Control.CANCELLED:
                self.stop_claiming(StopReason.CANCELLED)
            case Control.RUN:
                pass

    def stop_working(self) -> None:
        """Stop now: requests in flight are abandoned, their keys absorb the repeat."""
        self.stop_claiming(StopReason.SIGNAL)
        self.working.set()

    @property
    def is_set(self) -> bool:
        """Whether claiming has stopped."""
        return self.reason is not None
