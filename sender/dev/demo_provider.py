"""The fake provider of the demo, seen from outside: starts it, and asks it what it has recorded."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from typing import Any, Final, cast
from urllib.parse import urlsplit

from sender.dev.demo_figures import Request
from sender.dev.fake_options import FakeOptions
from sender.dev.fake_provider import start_process, stop_process
from sender.dev.fake_stats import Stats
from sender.errors import SenderError

_TIMEOUT_S: Final = 60.0


class DemoProvider:
    """Asks a fake provider for its record, by its control calls.

    Attributes:
        url: where mails are posted.
    """

    def __init__(self, url: str) -> None:
        """Take an address; nothing is asked yet."""
        self.url = url

    def stats(self) -> Stats:
        """The counters now."""
        return cast("Stats", self._ask("/stats"))

    def mails(self, campaign: str) -> dict[int, int]:
        """Mails by member."""
        found = self._ask(f"/deliveries?template={campaign}")
        return {int(member): count for member, count in found.items()}

    def requests(self) -> list[Request]:
        """Every request, oldest first, on the clock that all processes of a machine share."""
        return [(at, key, status) for at, key, status in self._ask("/requests")]

    def _ask(self, path: str) -> Any:
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        except (OSError, HTTPException) as error:
            raise SenderError(f"the fake provider is gone: {error}") from error
        finally:
            connection.close()


@contextmanager
def demo_provider(options: FakeOptions) -> Generator[DemoProvider]:
    """A fake provider in a process of its own, gone at the end.

    Args:
        options: how it behaves.

    Yields:
        What to ask it by.
    """
    process, url = start_process(options)
    try:
        yield DemoProvider(url)
    finally:
        stop_process(process)
