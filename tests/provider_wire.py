"""The provider's end of the wire, scripted byte by byte, and the rows to send over it."""

import asyncio
import functools
import gc
import inspect
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import pytest
import uvloop

from sender.domain import Lease, Target
from sender.providers.http import HttpProvider

ADDRESS = "zoë.o'hara@example.org"


def target(member_id: int = 7, *, email: str = ADDRESS, variables: str | None = None) -> Target:
    """A row as claimed; providers do not look at its lease."""
    return Target(
        member_id=member_id,
        email=email,
        variables=variables,
        attempts=0,
        unknowns=0,
        key_used_at=None,
        key_until=float("inf"),
        lease=cast("Lease", None),
    )


def provider(url: str, **settings: Any) -> HttpProvider:
    """A provider with short time-outs."""
    given = {
        "api_key": "secret-key",
        "campaign_id": "spring",
        "connect_timeout_s": 5.0,
        "read_timeout_s": 5.0,
        "concurrency": 4,
    }
    return HttpProvider(url=url, **(given | settings))


def is_open() -> bool:
    """The gate of a request that may begin."""
    return True


def http(status: int | str = 200, body: bytes = b"{}", **fields: str) -> bytes:
    """An answer; its length is said unless `fields` say otherwise."""
    lines = {"Content-Length": str(len(body))} if "Transfer_Encoding" not in fields else {}
    lines |= {name.replace("_", "-"): value for name, value in fields.items()}
    head = [f"HTTP/1.1 {status} x", *(f"{name}: {value}" for name, value in lines.items())]
    return "\r\n".join([*head, "", ""]).encode() + body


@dataclass
class Received:
    """One request as it came."""

    line: str
    fields: list[tuple[str, str]]
    body: bytes

    @property
    def key(self) -> str:
        return dict(self.fields)["Idempotency-Key"]


@dataclass
class Wire:
    """One connection, from the provider's side."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    received: list[Received]
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def request(self) -> Received:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *rest = head.removesuffix("\r\n\r\n").split("\r\n")
        fields = [cast("tuple[str, str]", tuple(each.split(": ", 1))) for each in rest]
        body = await self.reader.readexactly(int(dict(fields)["Content-Length"]))
        self.received.append(Received(line, fields, body))
        return self.received[-1]

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, data: bytes) -> None:
        await self.request()
        await self.write(data)

    async def until_closed_by_sender(self) -> None:
        """Wait until the sender has hung up, though the script reads at the same time."""
        while not self.reader.at_eof():
            await asyncio.sleep(0.001)

    async def until_closed(self) -> None:
        """Wait until the sender has hung up."""
        with suppress(ConnectionError):
            while await self.reader.read(65536):
                pass

    def reset(self) -> None:
        """Hang up with RST."""
        linger = struct.pack("ii", 1, 0)
        self._raw(lambda raw: raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger))
        self.writer.transport.abort()

    def hang_up_now(self) -> None:
        """Hang up before the loop runs again: the FIN is there, nobody has read it."""
        self._raw(lambda raw: raw.shutdown(socket.SHUT_WR))

    def _raw(self, use: Callable[[socket.socket], object]) -> None:
        fd = self.writer.get_extra_info("socket").fileno()
        with socket.socket(fileno=socket.dup(fd)) as raw:
            use(raw)


type Script = Callable[[Wire], Awaitable[object]]


@dataclass
class Provider:
    """A listening provider that follows `script` on each connection and then hangs up."""

    script: Script
    tls: ssl.SSLContext | None = None
    received: list[Received] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    url: str = ""

    async def __aenter__(self) -> Self:
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self.tls else 'http'}://localhost:{port}/v1/send?x=1"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(cast("asyncio.Task[None]", asyncio.current_task()))
        wire = Wire(reader, writer, self.received)
        self.wires.append(wire)
        # uvloop says RuntimeError where asyncio says ConnectionError.
        with suppress(asyncio.IncompleteReadError, ConnectionError, RuntimeError):
            try:
                await self.script(wire)
            finally:
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()
                wire.closed.set()


def in_turn(*scripts: Script) -> Script:
    """The first connection follows the first script, and so on; the last one repeats."""
    left = list(scripts)
    return lambda wire: (left.pop(0) if len(left) > 1 else left[0])(wire)


def always(*answers: bytes) -> Script:
    """Answer one request after the other, keeping the connection; the last answer repeats."""

    async def script(wire: Wire) -> None:
        left = list(answers)
        while True:
            await wire.answer(left.pop(0) if len(left) > 1 else left[0])

    return script


def once(answer: bytes) -> Script:
    """Answer one request and hang up."""
    return lambda wire: wire.answer(answer)


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on asyncio's loop and on uvloop, which `sender run` uses.

    What the test leaves open is found at its own end, not in another test.
    """

    @pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
    @functools.wraps(test)
    def both(run: Callable[[Coroutine[Any, Any, None]], None], **fixtures: Any) -> None:
        run(test(**fixtures))
        gc.collect()

    wanted = list(inspect.signature(test).parameters.values())
    run = inspect.Parameter("run", inspect.Parameter.KEYWORD_ONLY)
    both.__signature__ = inspect.Signature([*wanted, run])  # type: ignore[attr-defined]
    return both


def tls_context(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context for `localhost` and a client's that trusts it, and nobody else does."""
    pem = directory / "localhost.pem"
    pem.write_text(_KEY + _CERTIFICATE)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(pem)
    return server, ssl.create_default_context(cadata=_CERTIFICATE)


# Of these tests only: self-signed, for localhost, until 2126.
_KEY = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgkNQUW3qNpZH6D89I
uzPVDCi+1FylHGILaAjQo21ISc6hRANCAARNv7y1tRvg4lf2jvKsCM+sK+HRN0lH
orfol2c18S/EM2g6/fOLMxXAwZA52F+Lq/ruVdRa1KmI306YpjNxS51n
-----END PRIVATE KEY-----
"""
_CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBoDCCAUegAwIBAgIUNZ4RG6ct+Lvco52voxo5DRYL5NcwCgYIKoZIzj0EAwIw
FzEVMBMGA1UEAwwMc2VuZGVyIHRlc3RzMCAXDTI2MTEyOTE4MDAzNloYDzIxMjYx
MTA1MTgwMDM2WjAXMRUwEwYDVQQDDAxzZW5kZXIgdGVzdHMwWTATBgcqhkjOPQIB
BggqhkjOPQMBBwNCAARNv7y1tRvg4lf2jvKsCM+sK+HRN0lHorfol2c18S/EM2g6
/fOLMxXAwZA52F+Lq/ruVdRa1KmI306YpjNxS51no28wbTAdBgNVHQ4EFgQUnwSG
XHit7yXuDOdedOAq+s8GO/YwHwYDVR0jBBgwFoAUnwSGXHit7yXuDOdedOAq+s8G
O/YwDwYDVR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEw
CgYIKoZIzj0EAwIDRwAwRAIgEY3FqnhVdBguEvtbspHBd6lYDeeUy6N1QF1f234J
JvICIBfNOhRDKmUAblMEN6/toTk6X0xriSU/pRu4QuSlLjfo
-----END CERTIFICATE-----
"""
