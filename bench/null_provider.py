"""A provider that mails nobody: says yes after `?latency_s=` of its MAIL_URL.

It opens the real provider too and leaves it idle, so that all modules of a real run are in memory.
`entry_point` makes it known to a `sender run` without being installed.
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qs, urlsplit

from sender.domain import Accepted, Answer, Target
from sender.ports import Gate

NAME = "null"


class NullProvider:
    """Implements `ports.Provider`."""

    def __init__(self, *, url: str | None, **settings: Any) -> None:
        from sender.providers.http import HttpProvider

        asked = parse_qs(urlsplit(url or "").query)
        self._latency_s = float(asked.get("latency_s", ["0"])[0])
        self._real = HttpProvider(url=url, **settings)

    async def send(self, target: Target, gate: Gate) -> Answer | None:
        if not gate():
            return None
        await asyncio.sleep(self._latency_s)
        return Accepted()

    async def aclose(self) -> None:
        await self._real.aclose()


@contextmanager
def entry_point() -> Generator[Path]:
    """A folder that, on a process's path, makes MAIL_PROVIDER=null known to it."""
    with TemporaryDirectory(prefix="sender-null-") as folder:
        about = Path(folder) / "bench_null-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-null\nVersion: 1\n")
        (about / "entry_points.txt").write_text(
            f"[sender.providers]\n{NAME} = bench.null_provider:NullProvider\n"
        )
        yield Path(folder)
