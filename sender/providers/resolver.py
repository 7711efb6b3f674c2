"""Name look-ups that do not hold the process.

The C library may take minutes for a name when its servers are away, and nothing can cancel it. The
loop's own threads are waited for at exit (12 s measured for a look-up that took 12 s); a daemon
thread is left behind. aiohttp asks for a name once for all requests that wait for it.
"""

import asyncio
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import final, override

from aiohttp.abc import AbstractResolver, ResolveResult

type _Found = Sequence[tuple[int, int, int, str, Sequence[str | int | bytes]]]


@final
class DaemonResolver(AbstractResolver):
    """Asks the C library in a daemon thread for each look-up."""

    @override
    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await _look_up(host, port, family)
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=int(address[1]),
                family=kind,
                proto=proto,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, proto, _, address in found
        ]

    @override
    async def close(self) -> None:
        """Nothing to close; a look-up under way ends alone."""


def _look_up(host: str, port: int, family: socket.AddressFamily) -> "asyncio.Future[_Found]":
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Found] = loop.create_future()

    def settle(found: _Found, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(found)
        else:
            future.set_exception(error)

    def ask() -> None:
        found: _Found = []
        error: Exception | None = None
        try:
            found = socket.getaddrinfo(
                host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
            )
        except (OSError, UnicodeError) as caught:
            error = caught
        with suppress(RuntimeError):  # the loop has ended meanwhile
            _ = loop.call_soon_threadsafe(settle, found, error)

    threading.Thread(target=ask, name="resolver", daemon=True).start()
    return future
