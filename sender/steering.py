"""`sender pause`, `resume`, `cancel`: whether a campaign may run, and who said so.

Running processes look before each request; nothing here reaches out to them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from psycopg.rows import dict_row

from sender import queries
from sender.actions import Author, changing
from sender.domain import Control
from sender.errors import CampaignError
from sender.locks import at_once
from sender.settings import CampaignSettings
from sender.status import Steering

ACTIONS: Final[Mapping[Control, str]] = {
    Control.PAUSED: "pause",
    Control.RUN: "resume",
    Control.CANCELLED: "cancel",
}


@dataclass(slots=True, frozen=True)
class Steered:
    """What became of a wish for a campaign.

    Attributes:
        control: what is wanted now.
        changed: whether something else was wanted before.
        before: what was wanted before, by whom and why.
    """

    campaign: str
    control: Control
    changed: bool
    before: Steering

    def line(self) -> str:
        """The same for people."""
        now = _NOW[self.control]
        if not self.changed:
            return f"campaign {self.campaign} {now[0]} already{_said(self.before)}; nothing changed"
        was = "" if self.before.control == Control.RUN else f"it was {self.before.control}"
        was = was and f"; {was}{_said(self.before)}"
        return f"campaign {self.campaign} {now[0]}: {now[1]}{was}"


_NOW: Final[Mapping[Control, tuple[str, str]]] = {
    Control.PAUSED: (
        "is paused",
        "every run of it stops within 2 s and hands its rows back; sender resume lets it go on",
    ),
    Control.RUN: ("may run", "the next sender run goes on where it stopped"),
    Control.CANCELLED: (
        "is cancelled",
        "every run of it stops within 2 s; nothing but sender resume lets it run again",
    ),
}


async def steer(settings: CampaignSettings, wish: Control, author: Author) -> Steered:
    """Say whether a campaign may run.

    Args:
        settings: which campaign, where.
        wish: what is wanted. A cancelled campaign may run again if just that is asked for, but it
            cannot be paused: it would be held less than before.
        author: kept with the change.

    Raises:
        CampaignError: the campaign has no rows, or is cancelled and was to be paused.
        ConfigurationError: schema or rights are wrong.
        DatabaseUnavailable: the database does not answer.
    """
    allowed = set(Control) - {wish}
    if wish is Control.PAUSED:
        allowed.discard(Control.CANCELLED)
    values = {
        "campaign": settings.campaign_id,
        "control": wish,
        "allowed": list(allowed),
        "action": ACTIONS[wish],
        "by": author.by,
        "why": author.why,
    }
    async with changing(settings, touches_rows=False) as conn:
        await at_once(conn, queries.ledger.OPEN_CAMPAIGN, values, dict_row)
        rows = await at_once(conn, queries.actions.STEER, values, dict_row)
    if not rows:
        raise CampaignError(f"campaign {settings.campaign_id} has no row in campaigns any more")
    row = rows[0]
    changed = bool(row.pop("changed"))
    before = Steering(**row)
    if before.control == Control.CANCELLED and wish is Control.PAUSED:
        raise CampaignError(
            f"campaign {settings.campaign_id} is cancelled{_said(before)}; nothing changed, "
            "because to pause it would take that back"
        )
    return Steered(settings.campaign_id, wish, changed, before)


def _said(steering: Steering) -> str:
    by = f" by {steering.control_by}" if steering.control_by else ""
    return f"{by} ({steering.control_why})" if steering.control_why else by
