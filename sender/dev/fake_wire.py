"""One connection to the fake provider: bytes to requests, answers to bytes, faults to the socket.

Owns parsing, order, latency and the ways a connection can end. Must never decide an answer. A bare
protocol, because ASGI does not let an application reset a connection or announce a wrong length,
and because it takes about 80 us of CPU a request at 2,000/s where uvicorn takes 135.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import cast, override

import httptools

from sender.dev.fake_control import is_control
from sender.dev.fake_faults import FAULTS, Answer, Ending, error_body
from sender.dev.fake_options import FakeOptions
from sender.dev.fake_rules import Request
from sender.dev.fake_traffic import Wire

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Connection(asyncio.Protocol):
    """Serves one client, one request after the other.

    Attributes:
        carried_mail: whether a mail request came over it.
    """

    def __init__(
        self,
        options: FakeOptions,
        wire: Wire,
        route: Callable[[Request], Answer],
        crowd: set["Connection"],
        lost: Callable[[], None],
    ) -> None:
        """Prepare for one connection.

        Args:
            options: keep-alive and drip; not the ones control calls change.
            wire: where to count.
            route: answers a request.
            crowd: the set of open connections, which it joins and leaves by itself.
            lost: called after it has left.
        """
        self.carried_mail: bool = False
        self._options: FakeOptions = options
        self._wire: Wire = wire
        self._route: Callable[[Request], Answer] = route
        self._crowd: set[Connection] = crowd
        self._lost: Callable[[], None] = lost
        self._loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._parser: httptools.HttpRequestParser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._target: bytes = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: bytes = b""
        self._waiting: deque[tuple[Request, bool]] = deque()
        self._busy: bool = False
        self._in_flight: bool = False
        self._keep: bool = True
        self._answered: int = 0
        self._idle_since: float = 0.0
        self._pending: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None

    # --- asyncio.Protocol -------------------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Join the crowd."""
        # uvloop's transport is none by inheritance.
        self._transport = cast("asyncio.Transport", transport)
        self._crowd.add(self)
        self._wire.opened += 1
        self._wire.open += 1
        self._idle_since = self._loop.time()
        self._watch_idleness()

    @override
    def data_received(self, data: bytes) -> None:
        """Feed the parser; it calls the `on_` methods."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a mistake in here, not the client's
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._wire.malformed += 1
            if self._busy:
                self.reset()
                return
            self._keep = False
            self._play(FAULTS["400"].answer(error_body("malformed"), b"Connection: close\r\n"))

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the crowd."""
        self._crowd.discard(self)
        self._wire.open -= 1
        for timer in (self._pending, self._idle):
            if timer is not None:
                timer.cancel()
        self._transport = None
        if self._in_flight:
            self._wire.abandoned += 1
            self._settle()
        self._lost()

    # --- the parser's calls -----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        self._target = self._body = b""
        self._headers = {}

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._body += body

    def on_message_complete(self) -> None:
        """The request is here in full; it waits if the one before has no answer yet."""
        request = Request(self._parser.get_method(), self._target, self._headers, self._body)
        keep = self._parser.should_keep_alive()
        if self._busy:
            self._waiting.append((request, keep))
        else:
            self._begin(request, keep)

    # --- answering --------------------------------------------------------------------------------

    def _begin(self, request: Request, keep: bool) -> None:
        self._busy = True
        self._keep = keep
        if not is_control(request):
            self.carried_mail = self._in_flight = True
            self._wire.begin()
        answer = self._route(request)
        if answer.delay_s > 0:
            self._pending = self._loop.call_later(answer.delay_s, self._play, answer)
        else:
            self._play(answer)

    def _play(self, answer: Answer) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        match answer.ending:
            case Ending.KEEP:
                self._transport.write(answer.head + answer.body)
                self._finish()
            case Ending.CLOSE:
                self._transport.write(answer.head + answer.body)
                self._keep = False
                self._finish()
            case Ending.RESET:
                self._settle()
                self.reset()
            case Ending.SILENT:
                self._settle()
            case Ending.DRIP | Ending.DRIP_FOR_EVER:
                self._transport.write(answer.head)
                self._drip(answer, 0)

    def _drip(self, answer: Answer, sent: int) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if answer.ending is Ending.DRIP_FOR_EVER:
            self._transport.write(b"1\r\n \r\n")
        elif sent == len(answer.body):
            self._finish()
            return
        else:
            self._transport.write(answer.body[sent : sent + 1])
        interval = self._options.drip_interval_s
        self._pending = self._loop.call_later(interval, self._drip, answer, sent + 1)

    def _settle(self) -> None:
        """The request in flight, if there is one, has all it will get."""
        if self._in_flight:
            self._in_flight = False
            self._wire.in_flight -= 1

    def _finish(self) -> None:
        """The answer is complete: take the next request, or be idle, or close."""
        self._settle()
        self._busy = False
        self._answered += 1
        if not self._keep or self._answered == self._options.requests_per_connection:
            self.close()
        elif self._waiting:
            self._begin(*self._waiting.popleft())
        else:
            self._idle_since = self._loop.time()

    # --- ending -----------------------------------------------------------------------------------

    def _watch_idleness(self) -> None:
        """One timer a connection, put off when it fires early, instead of one a request."""
        rest = self._options.keep_alive_s
        if not self._busy:
            rest = self._idle_since + self._options.keep_alive_s - self._loop.time()
            if rest <= 0:
                self.close()
                return
        self._idle = self._loop.call_later(rest, self._watch_idleness)

    def close(self) -> None:
        """Close after what has been written."""
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        """Reset the connection: the client reads ECONNRESET, not an end of file."""
        if self._transport is None:
            return
        sock: socket.socket | None = self._transport.get_extra_info("socket")
        if sock is not None and not self._transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._transport.abort()
