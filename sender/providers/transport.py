"""An httpx transport over aiohttp, for many small POSTs to one host.

Owns connections, what may go wrong on them, and the moment a request begins. httpx's own pool looks
at every connection for every request and loses its places to cancellation; this one does neither.
Must never repeat a request of which a byte has left, and never judge an answer.
"""

import errno
import select
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, cast, final, override

import aiohttp
import httpx

from sender.providers.resolver import DaemonResolver

if TYPE_CHECKING:
    from socket import socket
    from ssl import SSLContext

    from aiohttp.connector import Connection

type Begin = Callable[[], bool]

BEGIN = "begin"
"""Key in `httpx.Request.extensions` of a `Begin`: asked when a connection is in hand, before the
first byte leaves. If it says no, the connection goes back unused and `Withheld` is raised."""

_STALE_AT_MOST = 8
_begin: ContextVar[Begin | None] = ContextVar("begin", default=None)


class Withheld(httpx.TransportError):
    """`Begin` said no; nothing was sent and the connection is as good as before."""


@final
class ConnectFault(httpx.ConnectError):
    """No connection was had: surely nothing was sent.

    Attributes:
        reason: short and stable, without addresses.
    """

    def __init__(self, reason: str) -> None:
        """Take the reason."""
        super().__init__(reason)
        self.reason = reason


@final
class AnswerFault(httpx.ReadError):
    """The request began to leave and no whole answer came: nobody knows.

    Attributes:
        reason: short and stable, without addresses.
    """

    def __init__(self, reason: str) -> None:
        """Take the reason."""
        super().__init__(reason)
        self.reason = reason


class _Stale(Exception):
    """A kept connection turned out to be closed, or to hold bytes nobody asked for."""


# aiohttp's classes, the most special first. Which of our two classes a failure becomes is decided
# by whether the request had begun, never by the foreign one: a reset is a reset on both sides.
_REASONS: Mapping[type[BaseException], str] = {
    aiohttp.ClientConnectorDNSError: "name_not_found",
    aiohttp.ClientConnectorCertificateError: "tls_refused",
    aiohttp.ClientConnectorSSLError: "tls_refused",
    aiohttp.ClientConnectorError: "connect_failed",
    aiohttp.ClientPayloadError: "answer_cut",
    aiohttp.ClientResponseError: "answer_unreadable",
    aiohttp.ClientConnectionError: "connection_cut",
    aiohttp.ClientError: "answer_unreadable",
    OSError: "connection_cut",
}
_CONNECT_REASONS = {
    errno.ECONNREFUSED: "connection_refused",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "unreachable",
    errno.EMFILE: "too_many_files",
}


def _reason(error: Exception) -> str:
    """The tables' text for an exception of aiohttp."""
    if type(error) is aiohttp.ClientConnectorError:
        return _CONNECT_REASONS.get(error.errno or 0, "connect_failed")
    known = (text for kind, text in _REASONS.items() if isinstance(error, kind))
    return next(known, "answer_unreadable")


@final
class GatedRequest(aiohttp.ClientRequest):
    """A request that asks once more before it leaves.

    A trace callback of aiohttp could ask as well, but one that raises leaks the connection it was
    called for (3.14: out of the pool's books, still open).
    """

    @override
    async def send(self, conn: "Connection") -> aiohttp.ClientResponse:
        if _unusable(conn):
            raise _Stale
        begin = _begin.get()
        if begin is not None and not begin():
            conn.release()
            raise Withheld("withheld")
        return await super().send(conn)


def _unusable(conn: "Connection") -> bool:
    """Whether the peer has closed this connection or sent bytes that nobody asked for.

    Both are answers to nothing; sending on would lose the request or, worse, take the stray bytes
    for its answer. One poll of one descriptor tells what the loop has not read yet; under TLS it
    tells nothing, whose own messages arrive at any time.
    """
    protocol = conn.protocol
    if protocol is None or protocol.transport is None or protocol.should_close:
        return True
    transport = protocol.transport
    if transport.get_extra_info("sslcontext") is not None:
        return False
    sock = cast("socket", transport.get_extra_info("socket"))
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))


@final
class AiohttpTransport(httpx.AsyncBaseTransport):
    """Sends `httpx.Request`s through one `aiohttp.ClientSession`.

    It sets no time-outs: the caller bounds connecting and answering with one `asyncio.timeout`,
    moved when `Begin` is asked. The body of a request must be bytes (`httpx.ByteStream`).
    """

    def __init__(self, *, limit: int, keepalive_s: float, tls: "SSLContext | None" = None) -> None:
        """Set up; the session is made at the first request, inside the running loop.

        Args:
            limit: connections at most; a request waits when all are taken.
            keepalive_s: how long an idle connection is kept; shorter than the server's own, or
                every request after a pause meets a connection that is just being closed.
            tls: whom to trust; by default whom the system trusts (SSL_CERT_FILE adds to it).
        """
        self._limit = limit
        self._keepalive_s = keepalive_s
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        begun = False

        def begin() -> bool:
            nonlocal begun
            asked: Begin | None = request.extensions.get(BEGIN)
            begun = asked is None or asked()
            return begun

        _ = _begin.set(begin)
        for _ in range(_STALE_AT_MOST):
            try:
                answer = await self._post(request)
            except _Stale:
                continue
            except Withheld:
                raise
            except Exception as error:
                if begun:
                    raise AnswerFault(_reason(error)) from error
                if isinstance(error, aiohttp.ClientError | OSError):
                    raise ConnectFault(_reason(error)) from error
                raise
            return httpx.Response(
                answer.status, headers=list(answer.raw_headers), stream=_Body(answer)
            )
        raise ConnectFault("connection_cut")

    async def _post(self, request: httpx.Request) -> aiohttp.ClientResponse:
        if self._session is None:
            self._session = self._open()
        return await self._session.request(
            request.method,
            str(request.url),
            headers=[(k.decode("latin-1"), v.decode("latin-1")) for k, v in request.headers.raw],
            data=await request.aread(),
            allow_redirects=False,
        )

    def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self._limit,
                keepalive_timeout=self._keepalive_s,
                resolver=DaemonResolver(),
                ssl=self._tls or True,
            ),
            request_class=GatedRequest,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(),
            auto_decompress=False,
            trust_env=False,
            raise_for_status=False,
        )

    @override
    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


@final
class _Body(httpx.AsyncByteStream, AsyncIterator[bytes]):
    """The body of an answer as it comes. Left early, it takes its connection with it."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    @override
    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        content = self._answer.content
        if content.at_eof():
            raise StopAsyncIteration
        try:
            return await content.readany()
        except Exception as error:
            raise AnswerFault(_reason(error)) from error

    @override
    async def aclose(self) -> None:
        self._answer.close()
