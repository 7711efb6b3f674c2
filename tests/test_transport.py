"""The transport's promises about connections: none lost, none poisoned, no request repeated."""

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvloop
from aiohttp import ClientResponse
from aiohttp.connector import Connection
from provider_wire import Provider, Wire, always, http, in_turn, on_both_loops, once, tls_context

from sender.providers import transport
from sender.providers.client import PlainClient
from sender.providers.transport import (
    BEGIN,
    AiohttpTransport,
    AnswerFault,
    Begin,
    ConnectFault,
    Withheld,
)


@asynccontextmanager
async def opened(
    *, limit: int = 4, keepalive_s: float = 4.0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[PlainClient]:
    thin = AiohttpTransport(limit=limit, keepalive_s=keepalive_s, tls=tls)
    async with PlainClient(thin) as client:
        yield client


async def post(client: httpx.AsyncClient, url: str, begin: Begin | None = None) -> httpx.Response:
    extensions = {} if begin is None else {BEGIN: begin}
    return await client.send(httpx.Request("POST", url, content=b"{}", extensions=extensions))


@on_both_loops
async def test_a_request_of_httpx_gets_its_answer() -> None:
    async with Provider(always(http(201, b'{"id":1}', X_Seen="1", x_seen="2"))) as there:
        async with opened() as client:
            answer = await post(client, there.url)
        assert (answer.status_code, answer.content) == (201, b'{"id":1}')
        assert answer.headers.get_list("x-seen") == ["1", "2"]
        assert str(answer.request.url) == there.url


@on_both_loops
async def test_httpx_own_client_may_use_it_too() -> None:
    async with Provider(always(http())) as there:
        thin = AiohttpTransport(limit=1, keepalive_s=4)
        async with httpx.AsyncClient(transport=thin) as client:
            assert (await client.post(there.url, json={})).json() == {}


@on_both_loops
async def test_a_thousand_cancelled_requests_cost_no_place() -> None:
    """Cancelled while connecting, while waiting for a place, while waiting for the answer."""
    limit = 20
    everybody_is_here = asyncio.Barrier(limit)
    cancelled = False

    async def serve(wire: Wire) -> None:
        while True:
            await wire.request()
            if cancelled:
                await everybody_is_here.wait()
                await wire.write(http())

    async with Provider(serve) as there, opened(limit=limit) as client:
        for turns in range(50):
            batch = [asyncio.create_task(post(client, there.url)) for _ in range(limit)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for each in batch:
                each.cancel()
            assert all(
                isinstance(end, asyncio.CancelledError)
                for end in await asyncio.gather(*batch, return_exceptions=True)
            )
        cancelled = True
        # Answered only once all are there at the same time: every place is free.
        async with asyncio.timeout(10):
            ends = await asyncio.gather(*(post(client, there.url) for _ in range(limit)))
    assert [end.status_code for end in ends] == [200] * limit


@on_both_loops
async def test_a_post_is_never_repeated_when_its_kept_connection_breaks() -> None:
    async def break_at_the_second(wire: Wire) -> None:
        await wire.answer(http())
        await wire.request()

    async with Provider(break_at_the_second) as there, opened() as client:
        await post(client, there.url)
        with pytest.raises(AnswerFault) as fault:
            await post(client, there.url)
        assert fault.value.reason == "connection_cut"
        assert len(there.received) == 2


@on_both_loops
async def test_a_kept_connection_that_was_just_closed_is_passed_over() -> None:
    """Closed in this very turn of the loop, so that only a look at the socket can tell."""
    async with Provider(always(http())) as there, opened() as client:
        for _ in range(3):
            await post(client, there.url)
            there.wires[-1].hang_up_now()
            assert (await post(client, there.url)).status_code == 200
        assert len(there.received) == 6
        assert len(there.wires) == 4


@on_both_loops
async def test_bytes_nobody_asked_for_are_not_the_next_answer() -> None:
    """Proxies say 408 on an idle connection before they close it; a 200 there would lose a mail."""
    for stray in (http(408, b"", Connection="close"), http(200), b"HTTP/1.1 200"):
        for seen_by_the_loop in (False, True):
            async with Provider(always(http(202))) as there, opened() as client:
                await post(client, there.url)
                there.wires[0].writer.write(stray)
                for _ in range(5 * seen_by_the_loop):
                    await asyncio.sleep(0)
                assert (await post(client, there.url)).status_code == 202
                assert len(there.received) == 2


@on_both_loops
async def test_bytes_after_an_answer_are_not_the_next_answer() -> None:
    async with Provider(always(http(202) + http(200), http(202))) as there, opened() as client:
        for _ in range(3):
            assert (await post(client, there.url)).status_code == 202


@on_both_loops
async def test_only_so_many_closed_connections_are_passed_over() -> None:
    async def speak_first(wire: Wire) -> None:
        await wire.write(http(503))
        await wire.until_closed()

    async with Provider(speak_first) as there, opened() as client:
        with pytest.raises((ConnectFault, httpx.HTTPStatusError)):
            (await post(client, there.url)).raise_for_status()
        assert len(there.wires) <= 8


@on_both_loops
async def test_a_withheld_request_gives_its_connection_back() -> None:
    async with Provider(always(http())) as there, opened(limit=1) as client:
        for _ in range(5):
            with pytest.raises(Withheld):
                await post(client, there.url, begin=lambda: False)
            assert (await post(client, there.url, begin=lambda: True)).status_code == 200
        assert len(there.wires) == 1
        assert len(there.received) == 5


@on_both_loops
async def test_an_idle_connection_is_closed_in_time() -> None:
    async with Provider(always(http())) as there, opened(keepalive_s=0.05) as client:
        await post(client, there.url)
        async with asyncio.timeout(5):
            await there.wires[0].until_closed_by_sender()
        await post(client, there.url)
        assert len(there.wires) == 2


@on_both_loops
async def test_an_answer_left_early_takes_its_connection_with_it() -> None:
    async with Provider(in_turn(once(http(200, b"x" * 9)), always(http()))) as there:
        async with opened(limit=1) as client:
            request = httpx.Request("POST", there.url, content=b"{}")
            answer = await client.send(request, stream=True)
            await answer.aclose()
            assert (await post(client, there.url)).status_code == 200
        assert len(there.wires) == 2


@on_both_loops
async def test_tls_of_somebody_untrusted_is_refused(tmp_path: Path) -> None:
    server, _ = tls_context(tmp_path)
    async with Provider(always(http()), tls=server) as there, opened() as client:
        with pytest.raises(ConnectFault) as fault:
            await post(client, there.url)
        assert fault.value.reason == "tls_refused"
        assert there.received == []


@on_both_loops
async def test_tls_keeps_its_connections(tmp_path: Path) -> None:
    """The server's session tickets arrive unasked and are no reason to drop a connection."""
    server, trusting = tls_context(tmp_path)
    async with Provider(always(http()), tls=server) as there, opened(tls=trusting) as client:
        for _ in range(20):
            assert (await post(client, there.url)).status_code == 200
        assert len(there.wires) == 1


def test_tls_messages_before_the_first_request_are_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS 1.3 tickets may be there when the connection comes to hand: the socket is readable."""
    server, trusting = tls_context(tmp_path)
    tickets_are_out = threading.Event()
    real = transport.GatedRequest.send

    async def when_they_are(self: transport.GatedRequest, conn: Connection) -> ClientResponse:
        if isinstance(asyncio.get_running_loop(), uvloop.Loop):
            await asyncio.sleep(0)  # it writes what it has at the end of a turn
        assert tickets_are_out.wait(5)
        return await real(self, conn)

    def serve(listener: socket.socket) -> None:
        with listener.accept()[0] as raw, server.wrap_socket(raw, server_side=True) as there:
            tickets_are_out.set()
            there.recv(4096)
            there.sendall(http(202))

    async def send(url: str) -> int:
        async with asyncio.timeout(5), opened(tls=trusting) as client:
            return (await post(client, url)).status_code

    monkeypatch.setattr(transport.GatedRequest, "send", when_they_are)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for run in (asyncio.run, uvloop.run):
            tickets_are_out.clear()
            thread = threading.Thread(target=serve, args=[listener], daemon=True)
            thread.start()
            assert run(send(f"https://localhost:{listener.getsockname()[1]}/")) == 202
            thread.join(5)


def test_a_name_that_never_resolves_holds_neither_the_request_nor_the_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, let_go = threading.Event(), threading.Event()

    def never(*_: object, **__: object) -> list[object]:
        asked.set()
        let_go.wait()
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", never)

    async def give_up() -> None:
        async with opened() as client:
            asking = asyncio.create_task(post(client, "http://mail.example.org/"))
            while not asked.is_set():
                await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

    for run in (asyncio.run, uvloop.run):
        asked.clear()
        run(give_up())
    left = [each for each in threading.enumerate() if each.name == "resolver"]
    assert [each.daemon for each in left] == [True, True]
    let_go.set()
    for each in left:
        each.join()


@on_both_loops
async def test_a_name_is_asked_for_once_by_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = socket.getaddrinfo, []

    def count(host: str, *rest: object, **more: object) -> object:
        asked.append(host)
        return real(host, *rest, **more)  # type: ignore[arg-type]

    async with Provider(always(http())) as there, opened(limit=8) as client:
        monkeypatch.setattr(socket, "getaddrinfo", count)
        await asyncio.gather(*(post(client, there.url) for _ in range(8)))
        monkeypatch.undo()
    assert asked == ["localhost"]
