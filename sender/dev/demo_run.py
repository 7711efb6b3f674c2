"""One `sender run` of the demo, as the real program in a process of its own.

Owns that process and watches its memory. Must never tell it anything but settings and signals.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self, cast

from sender.errors import SenderError

_KIB_IN_MIB: Final = 1024
_TAIL_LINES: Final = 5


class DemoRun:
    """A running `sender run`, for use as a context manager: it is killed at the end of that.

    Attributes:
        began_at: monotonic seconds.
        ended_at: monotonic seconds, once it has ended.
        peak_memory_mib: most resident memory seen so far; see `look`.
    """

    def __init__(self, settings: Mapping[str, str], log: Path) -> None:
        """Start it.

        Args:
            settings: its environment beside ours.
            log: where what it prints goes.
        """
        self._log = log
        self.began_at = time.monotonic()
        self.ended_at: float | None = None
        self.peak_memory_mib: float | None = None
        with log.open("wb") as out:
            # A session of its own: Ctrl-C is for the demo, which ends this before its database.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "sender", "run"],
                env={**os.environ, **settings},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def look(self) -> bool:
        """See how much memory it takes; False once it has ended."""
        self._measure()
        if self.ended_at is None and self._process.poll() is not None:
            self.ended_at = time.monotonic()
        return self.ended_at is None

    def kill(self) -> None:
        """`kill -9`, and wait for its end; nothing happens if it has ended."""
        if self.look():
            self._process.kill()
            self.ended_at = time.monotonic()
        self._process.wait()

    @property
    def seconds(self) -> float:
        """From its start to its end, or until now."""
        return (self.ended_at or time.monotonic()) - self.began_at

    @property
    def exit_code(self) -> int:
        """As a shell tells it: 128 and the signal's number if a signal ended it.

        Raises:
            SenderError: it has not ended.
        """
        code = self._process.returncode
        if code is None:
            raise SenderError("the run has not ended")
        return code if code >= 0 else 128 - code

    @property
    def end(self) -> str:
        """Why it ended, in its own last words; empty if it had no time for any."""
        with suppress(IndexError, ValueError, KeyError):
            last = cast("dict[str, str]", json.loads(self._lines()[-1]))
            return last["reason"] if last["event"] == "run_ended" else ""
        return ""

    def tail(self) -> str:
        """The last lines it printed."""
        return "\n".join(self._lines()[-_TAIL_LINES:])

    def _lines(self) -> list[str]:
        return self._log.read_text("utf-8", "replace").splitlines()

    def _measure(self) -> None:
        """Read the peak that the system keeps; only Linux does, and only while the process lives.

        The peak that `wait4` tells afterwards is of no use: it counts what we are ourselves
        between fork and exec.
        """
        with suppress(OSError):
            for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    self.peak_memory_mib = int(line.split()[1]) / _KIB_IN_MIB
