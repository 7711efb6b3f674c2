"""What the demo says while it goes on: a progress bar on a terminal, plain lines elsewhere."""

import sys
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

from rich.console import Console

from sender.ports import Remaining
from sender.telemetry.progress import ProgressBar

_LINE_EVERY_S: Final = 2.0


class Screen:
    """Where the demo talks to people, for use as a context manager."""

    def __init__(self, members: int, *, apart: bool) -> None:
        """Prepare.

        Args:
            members: how many mails there are to deliver.
            apart: talk on standard error; standard output is for a program.
        """
        self._members = members
        self._console = Console(file=sys.stderr if apart else sys.stdout, highlight=False)
        self._began_at = time.monotonic()
        self._line_at = 0.0
        self._bar: ProgressBar | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def say(self, text: str) -> None:
        """Say a line, with the seconds since the start."""
        seconds = time.monotonic() - self._began_at
        self._console.print(f"{seconds:5.1f} s  {text}", markup=False, soft_wrap=True)

    def show(self, delivered: int) -> None:
        """Show how many mails are delivered."""
        if not self._console.is_terminal:
            self._show_line(delivered)
            return
        if self._bar is None:
            self._bar = self._open.enter_context(ProgressBar("delivered", self._console))
        self._bar.show(Remaining(delivered, self._members - delivered))

    def _show_line(self, delivered: int) -> None:
        now = time.monotonic()
        if now >= self._line_at:
            self._line_at = now + _LINE_EVERY_S
            self.say(f"  {delivered:,} of {self._members:,} delivered")
