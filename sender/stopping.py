"""What stops a run from outside: signals, the deadline, and the end of patience.

Owns when a run must be over. Must never decide what its end means (`exit_code`).
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import anyio

from sender.pipeline.stop import Stop, StopReason

_LAST_WORDS_S: Final = 1.0
_NUMBERS: Final = (signal.SIGTERM, signal.SIGINT)
FORCED_EXIT_CODE: Final = 1


@dataclass(slots=True)
class Patience:
    """How long a run may still take, once something stopped it.

    Attributes:
        stop: what it tells.
        grace_s: seconds from a signal to the exit at the latest.
        last_words: called in another thread before the process is ended by force; must be quick.
    """

    stop: Stop
    grace_s: float
    last_words: Callable[[], None]
    _signals: int = 0
    _over_at: float = field(default=float("inf"))

    @property
    def left_s(self) -> float:
        """Seconds that are left to finish; infinite while nothing is pressing."""
        return max(0.0, self._over_at - time.monotonic())

    def watch_signals(self) -> None:
        """The first signal stops claiming, the second stops working. Call inside the loop."""
        loop = asyncio.get_running_loop()
        for number in _NUMBERS:
            loop.add_signal_handler(number, self._on_signal, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)  # one that came before is heard now

    def ignore_signals(self) -> None:
        """The end is told: a signal while the process goes must not make it another one."""
        loop = asyncio.get_running_loop()
        for number in _NUMBERS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals += 1
        if self._signals == 1:
            self.stop.stop_claiming(StopReason.SIGNAL, number.name)
            self._be_over_in(self.grace_s)
        else:
            self.stop.stop_working()
            self._be_over_in(_LAST_WORDS_S)

    def _be_over_in(self, seconds: float) -> None:
        """Promise the exit: a look-up or a dead connection may hold a loop that is closing."""
        self._over_at = min(self._over_at, time.monotonic() + seconds)
        timer = threading.Timer(seconds, self._end_by_force)
        timer.daemon = True
        timer.start()

    def _end_by_force(self) -> None:
        self.last_words()
        os._exit(FORCED_EXIT_CODE)

    async def keep_deadline(self, deadline: float) -> None:
        """Claim nothing after `deadline` (monotonic seconds)."""
        await anyio.sleep(max(0.0, deadline - time.monotonic()))
        self.stop.stop_claiming(StopReason.DEADLINE)

    async def keep_grace(self) -> None:
        """Whatever stopped the claiming: what is in flight has the grace to end."""
        await self.stop.claiming.wait()
        self._over_at = min(self._over_at, time.monotonic() + self.grace_s)
        await anyio.sleep(max(0.0, self.left_s - _LAST_WORDS_S))
        self.stop.stop_working()
