"""`sender status --watch`: looks again and again until no row is open, and shows each look.

Must never end because the database is away: that is told, and asked again. Must never be most of
what a database does: a look reads the whole campaign, so the pause is longer than the look was.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Protocol

from sender.errors import DatabaseUnavailable
from sender.settings import CampaignSettings
from sender.status import Status, status

if TYPE_CHECKING:
    from rich.console import Console

_EVERY_S: Final = 2.0
# How much longer than a look the pause after it is at least.
_REST: Final = 4


class Show(Protocol):
    """What becomes of a look."""

    def look(self, found: Status) -> None:
        """Show where the campaign stands."""
        ...

    def away(self, campaign: str, why: str) -> None:
        """Show that the database could not be asked."""
        ...


async def watch(settings: CampaignSettings, show: Show) -> None:
    """Look until the campaign has no open row.

    Args:
        settings: which campaign, where.
        show: gets each look.

    Raises:
        ConfigurationError: the campaign has no rows, schema or rights are wrong.
    """
    while True:
        began = time.monotonic()
        try:
            found = await status(settings)
        except DatabaseUnavailable as error:
            show.away(settings.campaign_id, str(error))
            await asyncio.sleep(_EVERY_S)
            continue
        show.look(found)
        if not found.counts.open:
            return
        took = time.monotonic() - began
        await asyncio.sleep(max(_EVERY_S - took, took * _REST))


class Lines:
    """A line a round: for a file, a pipe, a pod's log."""

    def look(self, found: Status) -> None:
        """Print it in short."""
        print(f"{_clock()}  campaign {found.campaign} {found.line()}", flush=True)

    def away(self, campaign: str, why: str) -> None:
        """Print why there is nothing to tell."""
        print(f"{_clock()}  campaign {campaign} cannot be seen, asking again: {why}", flush=True)


class Objects:
    """A JSON object a line: as `sender status --json`, and `at`; or `away` with the reason."""

    def look(self, found: Status) -> None:
        """Print all of it."""
        self._print(found.to_json())

    def away(self, campaign: str, why: str) -> None:
        """Print why there is nothing to tell."""
        self._print({"campaign": campaign, "away": why})

    def _print(self, told: dict[str, object]) -> None:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        print(json.dumps({"at": at, **told}, default=str), flush=True)


class Screen:
    """All of it, drawn in place; what was seen last stays while the database is away."""

    def __init__(self, draw: Callable[[str], None]) -> None:
        """Prepare; `draw` replaces what is on the screen."""
        self._draw = draw
        self._seen: list[str] = []

    def look(self, found: Status) -> None:
        """Draw it."""
        self._seen = list(found.lines())
        self._show("" if not found.counts.open else "; Ctrl-C ends the watch, not the run")

    def away(self, campaign: str, why: str) -> None:
        """Draw why it is not newer."""
        self._seen = self._seen or [f"campaign {campaign}"]
        self._show(f": cannot be seen, asking again: {why}")

    def _show(self, note: str) -> None:
        self._draw("\n".join([*self._seen, f"{_clock()}{note}"]))


@contextmanager
def shown(*, as_json: bool) -> Generator[Show]:
    """What suits whoever reads standard output."""
    if as_json or not sys.stdout.isatty():
        yield Objects() if as_json else Lines()
        return
    from rich.console import Console

    with screen(Console()) as show:
        yield show


@contextmanager
def screen(console: "Console") -> Generator[Screen]:
    """Draw on a terminal; what is drawn last stays there."""
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, auto_refresh=False) as live:
        yield Screen(lambda text: live.update(Text(text), refresh=True))


def _clock() -> str:
    return f"{datetime.now(UTC):%H:%M:%S}Z"
