"""The progress bar of a terminal: of `sender run`, and of the demo.

Draws with rich, so nothing imports this module but a command that has a terminal before it. While
the bar is there, whatever is printed appears above it.
"""

import time
from contextlib import suppress
from types import TracebackType
from typing import Final, Protocol, Self

import anyio
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from sender.ports import Remaining, StoreUnavailable, TargetStore

_EVERY_S: Final = 1.0
_REST: Final = 20
"""Times an answer's length is waited before the next question: under a snapshot held open for
long it takes a quarter of a second, and a picture is not worth that each second.
"""

_LAST_LOOK_S: Final = 1.0
_SPEED_OVER_S: Final = 10.0


class Waits(Protocol):
    """Knows why nothing is being sent, for people; empty if something is."""

    waiting: str


class _Rate(ProgressColumn):
    """How many members a second were done lately."""

    def render(self, task: Task) -> Text:
        """Draw it; nothing while it is not known."""
        return Text(f"{task.speed:,.0f}/s" if task.speed else "")


class ProgressBar:
    """A bar of members done, for use as a context manager."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        """Prepare; `with` draws it.

        Args:
            title: stands before the bar.
            console: where to draw; standard output if None.
        """
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            _Rate(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            speed_estimate_period=_SPEED_OVER_S,
            expand=True,
        )
        self._task = self._progress.add_task(title, total=None, note="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def show(self, remaining: Remaining, note: str = "") -> None:
        """Move the bar.

        Args:
            remaining: what is done and what is left.
            note: why nothing moves, if so.
        """
        total = remaining.done + remaining.open_rows
        self._progress.update(self._task, completed=remaining.done, total=total or None, note=note)

    async def watch(self, store: TargetStore, traffic: Waits) -> None:
        """Follow a run until cancelled, and then draw where it ended.

        Args:
            store: asked each second, or less often where it takes long to answer.
            traffic: says why nothing moves.
        """
        try:
            while True:
                asked_at = time.monotonic()
                with suppress(StoreUnavailable):
                    self.show(await store.remaining(), traffic.waiting)
                took_s = time.monotonic() - asked_at
                await anyio.sleep(max(_EVERY_S, took_s * _REST))
        finally:
            with anyio.move_on_after(_LAST_LOOK_S, shield=True), suppress(StoreUnavailable):
                self.show(await store.remaining())
