"""Writes log lines from a thread of its own: a full pipe must not stop the loop that sends.

Never blocks, never raises; when nobody reads, lines are dropped, counted, and the count is told.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TextIO

_WAITING_AT_MOST = 10_000


class LineWriter:
    """Hands lines to a stream in order."""

    def __init__(self, stream: TextIO, dropped: Callable[[int], str]) -> None:
        """Begin to write.

        Args:
            stream: where lines go; it is not closed.
            dropped: makes the line that tells how many lines were dropped.
        """
        self._stream = stream
        self._dropped_line = dropped
        self._dropped = 0
        self._waiting: deque[str] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._write, name="log-writer", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Take a line without its line end."""
        if len(self._waiting) >= _WAITING_AT_MOST:
            self._dropped += 1
            return
        self._waiting.append(line)
        if not self._wake.is_set():
            self._wake.set()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits; give up after `timeout_s`."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _write(self) -> None:
        while True:
            self._wake.wait()
            closing = self._closing
            self._wake.clear()
            self._write_waiting()
            if closing:
                return

    def _write_waiting(self) -> None:
        lines: list[str] = []
        while self._waiting:
            lines.append(self._waiting.popleft())
        if self._dropped:
            lines.append(self._dropped_line(self._dropped))
            self._dropped = 0
        # A closed pipe or stream: there is nobody left to tell.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write("".join(f"{line}\n" for line in lines))
            self._stream.flush()
