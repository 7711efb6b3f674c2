"""The fake provider on the wire: real sockets, every kind of answer, outages, its own process."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from sender.dev.fake_faults import FAULTS, Ending
from sender.dev.fake_provider import FakeOptions, FakeProvider, start_process, stop_process
from sender.errors import SenderError

PLAIN = [name for name, fault in FAULTS.items() if name.isdecimal() and name != "204"]


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """One raw connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: fake", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    def mail(self, member: int, **headers: str) -> None:
        body = json.dumps({"to": "a@example.com", "member_id": member, "template": "spring"})
        key = {"Content_Type": "application/json", "Idempotency_Key": f"spring:{member}"}
        self.send("POST", "/mail", body.encode(), **key, **headers)

    async def head(self) -> Reply:
        text = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = text.rstrip().split("\r\n")
        return Reply(int(status.split()[1]), dict(line.split(": ", 1) for line in lines), b"")

    async def reply(self) -> Reply:
        reply = await self.head()
        reply.body = await self.reader.readexactly(int(reply.headers.get("Content-Length", "0")))
        return reply

    async def post(self, member: int = 7, **headers: str) -> Reply:
        self.mail(member, **headers)
        return await self.reply()

    async def call(self, method: str, path: str, body: object = None) -> Reply:
        self.send(method, path, b"" if body is None else json.dumps(body).encode())
        return await self.reply()


@asynccontextmanager
async def client(fake: FakeProvider) -> AsyncIterator[Client]:
    port = int(fake.origin.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()
        # Whatever became of the connection is what the test looked at.
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@asynccontextmanager
async def serving(**options: object) -> AsyncIterator[tuple[FakeProvider, Client]]:
    chosen = FakeOptions(**options)  # pyright: ignore[reportArgumentType]
    async with FakeProvider(chosen) as fake, client(fake) as one:
        yield fake, one


# --- Plain answers --------------------------------------------------------------------------------


async def test_a_mail_is_accepted_and_the_connection_kept() -> None:
    async with serving() as (fake, one):
        replies = [await one.post(member) for member in (7, 8)]
        assert [reply.status for reply in replies] == [200, 200]
        assert replies[0].json["id"] != replies[1].json["id"]
        assert fake.deliveries("spring") == {7: 1, 8: 1}
        assert fake.stats()["connections_opened"] == 1


async def test_a_common_client_gets_along() -> None:
    async with FakeProvider(FakeOptions(api_key="secret")) as fake:
        mail = {"to": "a@example.com", "member_id": 7, "template": "spring"}
        headers = {"Idempotency-Key": "spring:7", "Authorization": "Bearer secret"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for _ in range(2):
                async with session.post(fake.url, json=mail) as answer:
                    assert (answer.status, await answer.json()) == (200, {"id": "m0-1"})


async def test_requests_sent_at_once_are_answered_in_order() -> None:
    async with serving(latency_s=0.005, by_member={7: "503"}) as (_, one):
        for member in (7, 8, 9):
            one.mail(member)
        one.send("GET", "/health")
        assert [(await one.reply()).status for _ in range(4)] == [503, 200, 200, 200]


@pytest.mark.parametrize("kind", PLAIN)
async def test_a_plain_status_comes_with_json_and_keeps_the_connection(kind: str) -> None:
    async with serving(always=kind, retry_after=3) as (fake, one):
        first, second = await one.post(), await one.post()
        assert (first.status, second.status) == (int(kind), int(kind))
        assert set(first.json) == ({"id"} if FAULTS[kind].accepts else {"error"})
        assert first.headers.get("Retry-After") == ("3" if kind == "429" else None)
        assert first.headers.get("Location") == ("/mail" if kind.startswith("3") else None)
        assert fake.deliveries("spring") == ({7: 1} if FAULTS[kind].accepts else {})


async def test_204_has_neither_body_nor_length() -> None:
    async with serving(always="204") as (fake, one):
        one.mail(7)
        assert (await one.head()).headers == {}
        assert (await one.post()).status == 204
        assert fake.deliveries("spring") == {7: 1}


async def test_latency_keeps_many_requests_in_flight() -> None:
    async with FakeProvider(FakeOptions(latency_s=60)) as fake, AsyncExitStack() as crowd:
        for member in range(100):
            one = await crowd.enter_async_context(client(fake))
            one.mail(member)
        await fake.until(lambda state: state.wire.in_flight == 100)
        assert fake.stats()["max_in_flight"] == 100
        assert len(fake.deliveries("spring")) == 100


# --- Broken answers -------------------------------------------------------------------------------


async def test_html_is_no_delivery() -> None:
    async with serving(by_member={7: ("200_html",)}) as (fake, one):
        reply = await one.post()
        assert reply.headers["Content-Type"].startswith("text/html")
        assert (reply.status, reply.body[:15]) == (200, b"<!doctype html>")
        assert fake.deliveries("spring") == {}


async def test_an_empty_200_and_broken_json_are_deliveries() -> None:
    async with serving(by_member={7: "200_empty", 8: "invalid_json"}) as (fake, one):
        assert (await one.post(7)).body == b""
        with pytest.raises(ValueError, match="Unterminated"):
            _ = (await one.post(8)).json
        assert fake.deliveries("spring") == {7: 1, 8: 1}


async def test_a_big_answer_has_ten_megabytes_of_json() -> None:
    async with serving(always="big") as (_, one):
        reply = await one.post()
        assert len(reply.body) > 10_000_000
        assert reply.json["id"] == "big"


async def test_a_length_too_long_ends_before_it_is_reached() -> None:
    async with serving(always="length_too_long") as (_, one):
        one.mail(7)
        with pytest.raises(asyncio.IncompleteReadError) as caught:
            await one.reply()
        assert json.loads(caught.value.partial) == {"id": "m0-1"}


async def test_a_length_too_short_leaves_bytes_on_the_connection() -> None:
    async with serving(always="length_too_short") as (_, one):
        reply = await one.post()
        assert json.loads(reply.body + await one.reader.readexactly(4)) == {"id": "m0-1"}


async def test_half_a_429_and_the_connection_is_closed() -> None:
    async with serving(always="half_429", retry_after=4) as (_, one):
        one.mail(7)
        reply = await one.head()
        rest = await one.reader.read()
        assert (reply.status, reply.headers["Retry-After"]) == (429, "4")
        assert reply.headers["Connection"] == "close"
        assert len(rest) == int(reply.headers["Content-Length"]) // 2


@pytest.mark.parametrize(("kind", "delivered"), [("cut", {7: 1}), ("cut_before", {})])
async def test_a_cut_resets_the_connection(kind: str, delivered: dict[int, int]) -> None:
    async with serving(by_member={7: (kind,)}) as (fake, one):
        one.mail(7)
        with pytest.raises(ConnectionResetError):
            await one.reader.read()
        assert fake.deliveries("spring") == delivered
        async with client(fake) as other:
            assert (await other.post()).status == 200
        assert fake.deliveries("spring") == {7: 1}
        assert fake.stats()["abandoned"] == 0
        assert fake.stats()["by_status"] == {"none": 1, "200": 1}


async def test_closed_is_an_end_of_file_without_an_answer() -> None:
    async with serving(always="closed") as (fake, one):
        one.mail(7)
        assert await one.reader.read() == b""
        assert fake.deliveries("spring") == {7: 1}


@pytest.mark.parametrize(("kind", "delivered"), [("silent", {7: 1}), ("hang", {})])
async def test_silence_sends_nothing_and_keeps_the_connection(
    kind: str, delivered: dict[int, int]
) -> None:
    async with serving(always=kind, keep_alive_s=0.01) as (fake, one):
        one.mail(7)
        await fake.until(lambda state: state.traffic.requests == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.reader.read(1), 0.05)
        assert fake.deliveries("spring") == delivered


async def test_a_share_of_silence_answers_the_repeat() -> None:
    async with serving(accept_then_silent=1) as (fake, one):
        one.mail(7)
        await fake.until(lambda state: state.traffic.requests == 1)
        async with client(fake) as other:
            assert (await other.post()).status == 200
        assert fake.stats()["repeats_absorbed"] == 1
        assert one.reader.at_eof() is False


async def test_a_drip_arrives_byte_by_byte_and_ends_as_json() -> None:
    async with serving(drip=1, drip_interval_s=1e-9) as (_, one):
        one.mail(7)
        head = await one.head()
        first = await one.reader.read(100)
        rest = await one.reader.readexactly(int(head.headers["Content-Length"]) - len(first))
        assert len(first) < 100
        assert json.loads(first + rest) == {"id": "m0-1"}
        assert (await one.post()).json == {"id": "m0-1"}


async def test_an_endless_drip_ends_when_the_client_leaves() -> None:
    async with FakeProvider(FakeOptions(always="endless_drip", drip_interval_s=0.001)) as fake:
        async with client(fake) as one:
            one.mail(7)
            assert (await one.head()).headers["Transfer-Encoding"] == "chunked"
            assert await one.reader.readexactly(12) == b"1\r\n \r\n" * 2
        await fake.until(lambda state: state.wire.open == 0)
        assert (fake.stats()["abandoned"], fake.stats()["in_flight"]) == (1, 0)


def test_every_way_to_end_is_in_the_table() -> None:
    assert {fault.ending for fault in FAULTS.values()} == set(Ending)


# --- Connections ----------------------------------------------------------------------------------


async def test_an_idle_connection_is_closed_after_keep_alive() -> None:
    async with serving(keep_alive_s=0.03) as (_, one):
        assert (await one.post()).status == 200
        assert await one.reader.read() == b""


async def test_a_connection_is_closed_after_its_last_request() -> None:
    async with serving(requests_per_connection=2) as (_, one):
        assert [(await one.post(member)).status for member in (7, 8)] == [200, 200]
        assert await one.reader.read() == b""


async def test_connection_close_is_obeyed() -> None:
    async with serving() as (_, one):
        assert (await one.post(Connection="close")).status == 200
        assert await one.reader.read() == b""


async def test_what_is_no_http_gets_400_and_is_counted() -> None:
    async with serving() as (fake, one):
        one.writer.write(b"nonsense\r\n\r\n")
        assert (await one.reply()).json == {"error": "malformed"}
        assert await one.reader.read() == b""
        assert (fake.stats()["malformed"], fake.stats()["requests"]) == (1, 0)


async def test_a_client_that_leaves_before_its_answer_is_counted() -> None:
    async with FakeProvider(FakeOptions(latency_s=60)) as fake:
        async with client(fake) as one:
            one.mail(7)
            await fake.until(lambda state: state.wire.in_flight == 1)
        await fake.until(lambda state: state.wire.in_flight == 0)
        assert fake.stats()["abandoned"] == 1
        assert fake.deliveries("spring") == {7: 1}


# --- Control and outages --------------------------------------------------------------------------


async def test_control_calls_answer_json() -> None:
    async with serving() as (fake, one):
        await one.post()
        assert (await one.call("GET", "/health")).json == {"status": "ok"}
        assert (await one.call("GET", "/stats")).json["deliveries"] == 1
        assert (await one.call("GET", "/deliveries")).json == {"spring": {"7": 1}}
        assert (await one.call("GET", "/deliveries?template=spring")).json == {"7": 1}
        assert (await one.call("GET", "/deliveries?template=other")).json == {}
        [[at, key, status]] = (await one.call("GET", "/requests?member_id=7")).json
        assert (at, key, status) == fake.requests(7)[0]
        assert (await one.call("GET", "/requests?member_id=8")).json == []
        assert (await one.call("GET", "/requests?member_id=x")).status == 400
        assert (await one.call("POST", "/stats")).status == 405
        assert fake.stats()["requests"] == 1


async def test_control_changes_behaviour_and_refuses_nonsense() -> None:
    async with serving() as (fake, one):
        reply = await one.call("POST", "/control", {"always": "202", "latency_s": [0, 0.001]})
        assert (reply.status, reply.json["always"]) == (200, "202")
        assert (await one.post()).status == 202
        for wrong in ({"nonsense": 1}, {"outage": "refuse"}, {"outage": "503", "outage_s": -1}, []):
            assert (await one.call("POST", "/control", wrong)).status == 400
        one.send("POST", "/control", b"{")
        assert (await one.reply()).status == 400
        assert fake.state.options.outage is None


async def test_an_outage_of_503_leaves_control_calls_alone_and_ends_by_itself() -> None:
    async with serving() as (fake, one):
        await one.call("POST", "/control", {"outage": True, "outage_s": 0.02})
        assert (await one.post()).status == 503
        assert (await one.call("GET", "/health")).status == 200
        await fake.until(lambda state: state.options.outage is None)
        assert (await one.post()).status == 200


async def test_an_outage_of_resets_takes_mail_connections_and_no_others() -> None:
    async with serving() as (fake, one), client(fake) as control:
        await one.post()
        await control.call("POST", "/control", {"outage": "reset"})
        with pytest.raises(ConnectionResetError):
            await one.reader.read()
        async with client(fake) as other:
            other.mail(8)
            with pytest.raises(ConnectionResetError):
                await other.reader.read()
        await control.call("POST", "/control", {"outage": None})
        async with client(fake) as other:
            assert (await other.post(8)).status == 200


async def test_an_outage_of_hanging_answers_nobody() -> None:
    async with serving(outage="hang") as (fake, one), client(fake) as control:
        one.mail(7)
        await fake.until(lambda state: state.traffic.requests == 1)
        await control.call("POST", "/control", {"outage": False})
        assert (await control.post(8)).status == 200
        assert not one.reader.at_eof()
        assert fake.deliveries("spring") == {8: 1}


async def test_an_outage_of_refusing_closes_the_port_until_it_ends() -> None:
    async with serving() as (fake, one):
        await one.post()
        fake.control(outage="refuse", outage_s=60)
        with pytest.raises(ConnectionResetError):
            await one.reader.read()
        with pytest.raises(ConnectionRefusedError):
            async with client(fake):
                pass
        fake.control(outage=None)
        async with client(fake) as other:
            assert (await other.post(8)).status == 200


async def test_a_refusing_outage_asked_over_http_ends_by_itself() -> None:
    async with serving() as (fake, control):
        await control.call("POST", "/control", {"outage": "refuse", "outage_s": 0.02})
        with pytest.raises(ConnectionRefusedError):
            async with client(fake):
                pass
        await fake.until(lambda state: state.options.outage is None)
        async with client(fake) as other:
            assert (await other.post()).status == 200


async def test_it_can_begin_refusing_and_end_so() -> None:
    async with FakeProvider(FakeOptions(outage="refuse")) as fake:
        with pytest.raises(ConnectionRefusedError):
            async with client(fake):
                pass
        for _ in range(3):
            fake.control(outage=None)
            fake.control(outage="refuse")
        with pytest.raises(ConnectionRefusedError):
            async with client(fake):
                pass


# --- A process of its own -------------------------------------------------------------------------


@pytest.mark.slow
async def test_in_a_process_of_its_own_it_serves_until_the_signal() -> None:
    process, url = start_process(FakeOptions(path="/v1/mail", by_member={7: ("202", "cut")}))
    try:
        mail = {"to": "a@example.com", "member_id": 7, "template": "spring"}
        async with aiohttp.ClientSession(headers={"Idempotency-Key": "spring:7"}) as session:
            async with session.post(url, json=mail) as answer:
                assert answer.status == 202
            with pytest.raises(aiohttp.ClientConnectionError):
                await session.post(url, json=mail)
            async with session.get(url.removesuffix("/v1/mail") + "/stats") as answer:
                assert (await answer.json())["repeats_absorbed"] == 1
        os.kill(process.pid, signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 5) == 0
    finally:
        stop_process(process)


@pytest.mark.slow
def test_a_process_that_cannot_start_is_an_error_and_no_hang() -> None:
    with pytest.raises(SenderError, match="did not start"):
        start_process(host="192.0.2.1")
