"""The fake provider served by a running loop: the listening socket, the connections, the outages.

Owns the socket and what an outage does to it. Must never decide an answer.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self, cast

from sender.dev.fake_checks import is_number
from sender.dev.fake_control import answer_control, is_control
from sender.dev.fake_faults import Answer
from sender.dev.fake_options import FakeOptions
from sender.dev.fake_rules import Request
from sender.dev.fake_state import FakeState
from sender.dev.fake_stats import Stats
from sender.dev.fake_wire import Connection
from sender.errors import SettingsError

LOOPBACK = "127.0.0.1"
_BACKLOG = 4096
# Turns the loop takes at most from accepting a socket to `connection_made`.
_ACCEPTING_TURNS = 4


class Listener:
    """A listening socket that can be closed and opened again at the same port.

    Both take effect in the kernel before the call returns, so whoever ends an outage may connect.
    """

    def __init__(self, factory: Callable[[], Connection], host: str, port: int) -> None:
        """Prepare; nothing listens yet.

        Args:
            factory: makes the protocol of a new connection.
            host: address to listen at.
            port: port to listen at, 0 for any free one.
        """
        self.host: str = host
        self.port: int = port
        self._factory: Callable[[], Connection] = factory
        self._sock: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._opening: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Listen, unless it does already."""
        if self._sock is None:
            sock = socket.create_server((self.host, self.port), backlog=_BACKLOG)
            self.port = cast("tuple[str, int]", sock.getsockname())[1]
            self._sock = sock
            self._opening = asyncio.get_running_loop().create_task(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        if self._sock is not sock:
            return
        # In two steps, so that `close` finds the server whenever the loop has the socket.
        self._server = await asyncio.get_running_loop().create_server(
            self._factory, sock=sock, backlog=_BACKLOG, start_serving=False
        )
        await self._server.start_serving()

    def close(self) -> None:
        """Stop listening; connections stay."""
        if self._server is not None:
            self._server.close()
        elif self._sock is not None:
            self._sock.close()
        self._sock = self._server = None

    async def settled(self) -> None:
        """Wait until the loop has taken over the last socket opened."""
        if self._opening is not None:
            await self._opening


class FakeProvider:
    """The provider, served by the running loop between `async with` and its end.

    Attributes:
        state: everything it knows.
    """

    def __init__(
        self,
        options: FakeOptions | None = None,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Prepare; nothing listens yet.

        Args:
            options: how to behave.
            host: address to listen at.
            port: port to listen at, 0 for any free one.
            clock: monotonic seconds for keys and limit, instead of the real ones.
        """
        options = options or FakeOptions()
        self.state: FakeState = FakeState(options, clock) if clock else FakeState(options)
        self._options: FakeOptions = options
        self._connections: set[Connection] = set()
        self._listener: Listener = Listener(self._connection, host, port)
        self._end_of_outage: asyncio.TimerHandle | None = None
        self._waiting: dict[asyncio.Event, Callable[[], bool]] = {}

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return f"http://{self._listener.host}:{self._listener.port}"

    @property
    def url(self) -> str:
        """Where mails are posted."""
        return self.origin + self._options.path

    async def __aenter__(self) -> Self:
        """Listen."""
        self._listener.open()
        await self._listener.settled()
        if self._options.outage == "refuse":
            self._listener.close()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop listening and drop every connection."""
        self._stop_timer()
        await self._listener.settled()
        self._listener.close()
        for _ in range(_ACCEPTING_TURNS):
            await asyncio.sleep(0)
        for connection in tuple(self._connections):
            connection.reset()
        await self._until(lambda: not self._connections)

    def stats(self) -> Stats:
        """The statistics now."""
        return self.state.stats()

    def deliveries(self, template: str) -> dict[int, int]:
        """Mails delivered by member.

        Args:
            template: the campaign.

        Returns:
            Count by member id, of members that got any.
        """
        return self.state.ledger.deliveries().get(template, {})

    def requests(self, member_id: int | None = None) -> list[tuple[float, str | None, int]]:
        """The requests kept; see `FakeState.requests`."""
        return self.state.requests(member_id)

    async def until(self, condition: Callable[[FakeState], bool]) -> None:
        """Wait until something has happened; looked at whenever a request came or a client left.

        Args:
            condition: what to wait for.
        """
        await self._until(lambda: condition(self.state))

    async def _until(self, condition: Callable[[], bool]) -> None:
        if condition():
            return
        event = asyncio.Event()
        self._waiting[event] = condition
        try:
            await event.wait()
        finally:
            del self._waiting[event]

    def _changed(self) -> None:
        for event, condition in self._waiting.items():
            if condition():
                event.set()

    def _connection(self) -> Connection:
        return Connection(
            self._options, self.state.wire, self._route, self._connections, self._changed
        )

    def _route(self, request: Request) -> Answer:
        if is_control(request):
            return answer_control(request, self.state, self._control)
        answer = self.state.decide(request)
        if self._waiting:
            self._changed()
        return answer

    # --- control and outages ----------------------------------------------------------------------

    def control(self, **changes: object) -> None:
        """Change how the provider behaves from now on, like `POST /control`.

        Args:
            **changes: names of `CONTROLS` with new values; `reset_stats`: True begins the counters
                anew; `outage_s`: seconds after which the outage ends by itself, needed for
                `outage="refuse"` over HTTP, where nobody could end it.

        Raises:
            SettingsError: a name is unknown or a value is wrong; then nothing is changed.
        """
        self._apply(changes)

    def _control(self, changes: Mapping[str, object]) -> None:
        if changes.get("outage") == "refuse" and changes.get("outage_s") is None:
            raise SettingsError(["outage_s: needed with refuse, since no call could end it"])
        self._apply(changes)

    def _apply(self, changes: Mapping[str, object]) -> None:
        wanted = dict(changes)
        outage_s = wanted.pop("outage_s", None)
        if outage_s is not None and (not is_number(outage_s) or cast("float", outage_s) <= 0):
            raise SettingsError([f"outage_s: must be seconds above 0, not {outage_s!r}"])
        self.state.control(wanted)
        if "outage" in wanted:
            self._stop_timer()
            self._begin_outage(self.state.options.outage)
        if outage_s is not None:
            self._end_of_outage = asyncio.get_running_loop().call_later(
                cast("float", outage_s), self._apply, {"outage": None}
            )
        self._changed()

    def _begin_outage(self, outage: str | None) -> None:
        if outage == "refuse":
            self._listener.close()
        else:
            self._listener.open()
        if outage in ("reset", "refuse"):
            for connection in tuple(self._connections):
                # A connection that only carries control calls is the one this call came over.
                if connection.carried_mail:
                    connection.reset()

    def _stop_timer(self) -> None:
        if self._end_of_outage is not None:
            self._end_of_outage.cancel()
            self._end_of_outage = None
