"""A TCP proxy in front of PostgreSQL that can go deaf, cut and refuse."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


class Proxy:
    """Passes bytes on, or not.

    Attributes:
        port: where it listens.
    """

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._hears = asyncio.Event()
        self._hears.set()
        self._refuses = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    def go_deaf(self) -> None:
        """Keep every connection open and pass nothing on; new ones are accepted and as deaf."""
        self._hears.clear()

    def hear(self) -> None:
        """Pass on again, first what was kept back."""
        self._hears.set()
        self._refuses = False

    def cut(self) -> None:
        """Reset every connection."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    def refuse(self) -> None:
        """Reset every connection and each new one."""
        self._refuses = True
        self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(task := asyncio.current_task())  # type: ignore[arg-type]
        self._writers.add(writer)
        try:
            if self._refuses:
                return
            there, back = await asyncio.open_connection(*self._to)
            self._writers.add(back)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pass(reader, back))
                    group.create_task(self._pass(there, writer))
            finally:
                self._writers.discard(back)
                back.transport.abort()
        except* (OSError, _Over):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._hears.wait()
            writer.write(data)
            await writer.drain()
        raise _Over

    async def close(self) -> None:
        self.cut()
        for task in tuple(self._tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


class _Over(Exception):
    """One side has ended."""


@asynccontextmanager
async def proxy_to(dsn: str) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy to the server of `dsn`, and the DSN that leads through it."""
    parts = urlsplit(dsn)
    proxy = Proxy(parts.hostname or "127.0.0.1", parts.port or 5432)
    server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy, parts._replace(netloc=f"postgres@127.0.0.1:{proxy.port}").geturl()
    finally:
        server.close()
        await proxy.close()
        await server.wait_closed()
