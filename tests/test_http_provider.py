"""The http provider against real sockets: what it sends and what it makes of what comes back."""

import asyncio
import gzip
import json
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import EntryPoint, EntryPoints, version

import pytest
import uvloop
from hypothesis import example, given, settings
from hypothesis import strategies as st
from provider_wire import (
    ADDRESS,
    Provider,
    Script,
    Wire,
    always,
    http,
    in_turn,
    is_open,
    on_both_loops,
    once,
    provider,
    target,
)

import sender.providers
from sender.domain import (
    Accepted,
    AccountStopped,
    Answer,
    Deferred,
    NotSent,
    Refused,
    Throttled,
    Unavailable,
    Unknown,
)
from sender.errors import SettingsError
from sender.providers import open_provider, provider_names
from sender.providers.http import HttpProvider, request_body


async def send_one(script: Script, *, scheme: str = "http", **settings: float) -> Answer | None:
    """What one mail to a provider that follows `script` becomes."""
    async with Provider(script) as there:
        here = provider(there.url.replace("http", scheme, 1), **settings)
        try:
            return await here.send(target(), is_open)
        finally:
            await here.aclose()


# --- What is sent ---------------------------------------------------------------------------------


def test_the_body_is_the_same_to_the_byte_for_ever() -> None:
    """A changed byte here means that a provider refuses or repeats open mails after an upgrade."""
    assert request_body(target(7), "spring") == (
        b'{"to":"zo\xc3\xab.o\'hara@example.org","member_id":7,"template":"spring"}'
    )
    assert request_body(target(2**62, email='"a b"@x.org'), "a.b_c-1") == (
        b'{"to":"\\"a b\\"@x.org","member_id":4611686018427387904,"template":"a.b_c-1"}'
    )
    assert request_body(target(1, variables='{"n": 1.10, "é": [null]}'), "c") == (
        b'{"to":"zo\xc3\xab.o\'hara@example.org","member_id":1,"template":"c",'
        b'"vars":{"n": 1.10, "\xc3\xa9": [null]}}'
    )


@pytest.mark.parametrize("variables", [None, "{}", " { } ", "null"])
def test_without_variables_there_is_no_vars(variables: str | None) -> None:
    assert request_body(target(variables=variables), "c") == request_body(target(), "c")


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.none() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
        min_size=1,
    )
)
def test_variables_arrive_as_they_are(variables: dict[str, object]) -> None:
    text = json.dumps(variables, ensure_ascii=False)
    body = json.loads(request_body(target(variables=text), "c"))
    assert body == {"to": ADDRESS, "member_id": 7, "template": "c", "vars": variables}


@on_both_loops
async def test_a_mail_is_one_post_with_its_key() -> None:
    async with Provider(always(http(200, Set_Cookie="a=b; Path=/"))) as there:
        here = provider(there.url)
        assert await here.send(target(7), is_open) == Accepted()
        assert await here.send(target(8), is_open) == Accepted()
        await here.aclose()
    assert [(each.line, each.body) for each in there.received] == [
        ("POST /v1/send?x=1 HTTP/1.1", request_body(target(member), "spring")) for member in (7, 8)
    ]
    assert sorted(there.received[1].fields) == [
        ("Accept", "application/json"),
        ("Accept-Encoding", "identity"),
        ("Authorization", "Bearer secret-key"),
        ("Content-Length", str(len(there.received[1].body))),
        ("Content-Type", "application/json"),
        ("Host", there.url.split("/")[2]),
        ("Idempotency-Key", "spring:8"),
        ("User-Agent", f"sender/{version('sender')}"),
    ]
    assert len(there.wires) == 1


async def test_without_a_key_nobody_signs_in() -> None:
    async with Provider(always(http())) as there:
        here = provider(there.url, api_key=None)
        await here.send(target(), is_open)
        await here.aclose()
    assert "Authorization" not in dict(there.received[0].fields)


@pytest.mark.parametrize("variables", ["[1]", "1", '"x"', "true", "{", "", "[" * 9999])
async def test_variables_that_are_no_object_are_refused_without_a_request(variables: str) -> None:
    async with Provider(always(http())) as there:
        here = provider(there.url)
        refused = Refused("vars_not_an_object")
        assert await here.send(target(variables=variables), is_open) == refused
        await here.aclose()
    assert there.wires == []


async def test_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """httpx's own client logs each URL at INFO; a URL may hold a key."""
    caplog.set_level(logging.INFO)
    assert await send_one(always(http())) == Accepted()
    assert caplog.messages == []


# --- The table of answers, over the wire ----------------------------------------------------------

ANSWERS: dict[str, tuple[bytes, Answer]] = {
    "200": (http(200), Accepted()),
    "201 empty": (http(201, b""), Accepted()),
    "202 blank": (http(202, b" \n"), Accepted()),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", Accepted()),
    "chunked": (
        http(200, b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n", Transfer_Encoding="chunked"),
        Accepted(),
    ),
    "after 1xx": (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + http(200), Accepted()),
    "gzip": (http(200, gzip.compress(b"{}"), Content_Encoding="gzip"), Accepted()),
    "no gzip": (http(200, b"{}", Content_Encoding="gzip"), Unknown("not_json")),
    "until the end": (b"HTTP/1.1 200 OK\r\n\r\n{}", Accepted()),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\n\r\n{}", Accepted()),
    "203": (http(203), Unknown("http_203")),
    "206": (http(206), Unknown("http_206")),
    "html": (http(200, b"<html>"), Unknown("not_json")),
    "400": (http(400, b'{"error":{"code":"bad_to"}}'), Refused("http_400:bad_to")),
    "410": (http(410), Refused("http_410")),
    "422": (http(422), Refused("http_422")),
    "409": (http(409), Deferred("http_409")),
    "429": (http(429, Retry_After="2"), Throttled("http_429", 2.0)),
    "429 hour": (http(429, Retry_After="3600"), AccountStopped("http_429_long_wait")),
    "500": (http(500, b"<html>"), Unavailable("http_500")),
    "503": (http(503, b""), Unavailable("http_503")),
    "401": (http(401), AccountStopped("http_401")),
    "302": (http(302, Location="/elsewhere"), AccountStopped("redirect_302")),
    "302 nowhere": (http(302, Location="http://[bad"), AccountStopped("redirect_302")),
    "101": (b"HTTP/1.1 101 x\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", Unknown("http_101")),
    "999": (http(999), Unknown("http_999")),
    "obs-fold": (b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\nContent-Length: 2\r\n\r\n{}", Accepted()),
    # A status that decides needs no body, whatever became of it.
    "429 cut": (
        http(429, b"{", Retry_After="7", Connection="close", Content_Length="50"),
        Throttled("http_429", 7.0),
    ),
    "503 cut": (http(503, b"{", Content_Length="50"), Unavailable("http_503")),
    "422 long": (http(422, b" " * 9000), Refused("http_422")),
    # A status that does not decide alone does.
    "200 cut": (http(200, b"{", Content_Length="2"), Unknown("answer_cut")),
    "200 chunks cut": (
        http(200, b"2\r\n{}\r\n", Transfer_Encoding="chunked"),
        Unknown("answer_cut"),
    ),
    "200 too long": (http(200, b"{}{}", Content_Length="2"), Unknown("answer_unreadable")),
    # Nothing that could be called an answer.
    "soup": (b"\x00\xff\r\n\r\n", Unknown("answer_unreadable")),
    "HTTP/0.9": (b"{}", Unknown("answer_unreadable")),
    "no length": (http(200, Content_Length="x"), Unknown("answer_unreadable")),
    "minus": (http(200, Content_Length="-1"), Unknown("answer_unreadable")),
    "two lengths": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
        Unknown("answer_unreadable"),
    ),
    "length and chunks": (
        http(200, b"2\r\n{}\r\n0\r\n\r\n", Transfer_Encoding="chunked", Content_Length="2"),
        Unknown("answer_unreadable"),
    ),
    "long line": (http("200 " + "x" * 20_000), Unknown("answer_unreadable")),
    "nothing": (b"", Unknown("connection_cut")),
    "half a head": (b"HTTP/1.1 200 OK\r\nContent-L", Unknown("connection_cut")),
    "only a 100": (b"HTTP/1.1 100 Continue\r\n\r\n", Unknown("connection_cut")),
}


@pytest.mark.parametrize("name", ANSWERS)
@on_both_loops
async def test_an_answer_and_a_good_one_after_it(name: str) -> None:
    data, expected = ANSWERS[name]
    async with Provider(in_turn(once(data), always(http()))) as there:
        here = provider(there.url)
        assert await here.send(target(1), is_open) == expected
        await there.wires[0].closed.wait()
        assert await here.send(target(2), is_open) == Accepted()
        await here.aclose()
    assert [each.key for each in there.received] == ["spring:1", "spring:2"]


@on_both_loops
async def test_answers_that_are_whole_keep_their_connection() -> None:
    answers = [http(429, Retry_After="1"), http(422), http(503, b"x" * 4000), http(302), http(204)]
    answers[-1] = b"HTTP/1.1 204 No Content\r\n\r\n"
    async with Provider(always(*answers)) as there:
        here = provider(there.url)
        for member in range(len(answers) + 1):
            await here.send(target(member), is_open)
        await here.aclose()
    assert len(there.wires) == 1


# --- What fails before the request begins, and after ----------------------------------------------


def test_what_nobody_listens_to_is_not_sent() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        urls = {
            f"http://127.0.0.1:{nobody.getsockname()[1]}/": "connection_refused",
            "https://127.0.0.1:1/": "connection_refused",
            "http://no-such-host.invalid/": "name_not_found",
        }
        for run in (asyncio.run, uvloop.run):
            for url, reason in urls.items():
                assert run(_never_begun(url)) == NotSent(reason)


async def _never_begun(url: str, **settings: float) -> Answer | None:
    """Send where no request can begin; the gate must not even be asked."""

    def gate() -> bool:
        raise AssertionError("asked without a connection")

    here = provider(url, **settings)
    try:
        return await here.send(target(), gate)
    finally:
        await here.aclose()


def test_a_connection_that_nobody_accepts_is_not_sent() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        for each in waiting:
            each.setblocking(False)
            with suppress(BlockingIOError):
                each.connect(address)
        url = f"http://127.0.0.1:{address[1]}/"
        for run in (asyncio.run, uvloop.run):
            answer = run(_never_begun(url, connect_timeout_s=0.05))
            assert answer == NotSent("timeout_connect")
        for each in waiting:
            each.close()


async def silence(wire: Wire) -> None:
    await wire.until_closed()


async def hang_up_on_hello(wire: Wire) -> None:
    await wire.reader.read(1)


async def reset_on_hello(wire: Wire) -> None:
    await wire.reader.read(1)
    wire.reset()


async def plain_text_on_hello(wire: Wire) -> None:
    await wire.reader.read(1)
    await wire.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (silence, "timeout_connect"),
        (hang_up_on_hello, "connect_failed"),
        (reset_on_hello, "connect_failed"),
        (plain_text_on_hello, "tls_refused"),
    ],
)
@on_both_loops
async def test_tls_that_fails_is_not_sent(script: Script, reason: str) -> None:
    async with Provider(script) as there:
        url = there.url.replace("http", "https", 1)
        answer = await _never_begun(url, connect_timeout_s=0.1 if script is silence else 5.0)
    assert answer == NotSent(reason)


@on_both_loops
async def test_a_server_that_answers_before_it_is_asked_gets_nothing() -> None:
    async def overloaded(wire: Wire) -> None:
        await wire.write(http(503, Connection="close"))
        await wire.until_closed()

    async with Provider(overloaded) as there:
        here = provider(there.url)
        answer = await here.send(target(), is_open)
        await here.aclose()
    # Seen in time nothing leaves; else it is an answer like any other.
    assert answer in (NotSent("connection_cut"), Unavailable("http_503"))
    assert there.received == []


async def hang_up_at_once(wire: Wire) -> None:
    assert wire


@on_both_loops
async def test_accepted_and_closed_at_once() -> None:
    answer = await send_one(hang_up_at_once)
    assert answer in (NotSent("connection_cut"), Unknown("connection_cut"))


async def reset_after_request(wire: Wire) -> None:
    await wire.request()
    wire.reset()


async def reset_in_body(wire: Wire) -> None:
    await wire.answer(http(200, b"{", Content_Length="50"))
    wire.reset()


async def no_answer(wire: Wire) -> None:
    await wire.request()
    await wire.until_closed()


async def half_a_body(wire: Wire) -> None:
    await wire.answer(http(200, b"{", Content_Length="2"))
    await wire.until_closed()


async def endless_head(wire: Wire) -> None:
    await wire.answer(b"HTTP/1.1 200 OK\r\n")
    while True:
        await wire.write(b"X-Padding: " + b"x" * 4000 + b"\r\n")


async def endless_body(wire: Wire) -> None:
    await wire.answer(http(200, b"", Transfer_Encoding="chunked"))
    while True:
        await wire.write(b"8000\r\n" + b" " * 0x8000 + b"\r\n")


async def endless_1xx(wire: Wire) -> None:
    await wire.request()
    while True:
        await wire.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        await asyncio.sleep(0.01)


async def drip(wire: Wire) -> None:
    await wire.answer(http(200, b"", Content_Length="1000"))
    while True:
        await wire.write(b" ")
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (reset_after_request, "connection_cut"),
        (reset_in_body, "answer_cut"),
        (no_answer, "timeout_answer"),
        (half_a_body, "timeout_answer"),
        (endless_head, "answer_unreadable"),
        (endless_body, "answer_too_large"),
        (endless_1xx, "timeout_answer"),
        (drip, "timeout_answer"),
    ],
)
@on_both_loops
async def test_what_fails_after_the_first_byte_is_unknown(script: Script, reason: str) -> None:
    short = reason == "timeout_answer"
    async with Provider(in_turn(script, always(http()))) as there:
        here = provider(there.url, read_timeout_s=0.1 if short else 5.0)
        assert await here.send(target(1), is_open) == Unknown(reason)
        assert await here.send(target(2), is_open) == Accepted()
        await here.aclose()
    assert len(there.wires) == 2  # what was left unread is not read by the next mail
    assert [each.key for each in there.received] == ["spring:1", "spring:2"]


@on_both_loops
async def test_a_429_that_never_ends_is_a_429_all_the_same() -> None:
    async def half_a_429(wire: Wire) -> None:
        await wire.answer(http(429, b"{", Retry_After="7", Content_Length="50"))
        await wire.until_closed()

    assert await send_one(half_a_429, read_timeout_s=0.1) == Throttled("http_429", 7.0)


@on_both_loops
async def test_the_time_for_the_answer_does_not_run_while_connecting() -> None:
    async def late(wire: Wire) -> None:
        await wire.request()
        await asyncio.sleep(0.15)
        await wire.write(http())

    assert await send_one(late, connect_timeout_s=0.1, read_timeout_s=5.0) == Accepted()


# --- The gate -------------------------------------------------------------------------------------


@on_both_loops
async def test_a_closed_gate_lets_no_byte_out_and_keeps_the_connection() -> None:
    async with Provider(always(http())) as there:
        here = provider(there.url, concurrency=1)
        for member in range(20):
            assert await here.send(target(member), lambda: False) is None
        assert await here.send(target(20), is_open) == Accepted()
        assert await here.send(target(21), lambda: False) is None
        assert await here.send(target(22), is_open) == Accepted()
        await here.aclose()
    assert [each.key for each in there.received] == ["spring:20", "spring:22"]
    assert len(there.wires) == 1


@on_both_loops
async def test_the_gate_is_asked_once_and_only_with_a_connection_in_hand() -> None:
    asked: list[int] = []
    async with Provider(always(http())) as there:

        def gate() -> bool:
            asked.append(len(there.received))
            return True

        here = provider(there.url)
        assert await here.send(target(1), gate) == Accepted()
        assert await here.send(target(2), gate) == Accepted()
        await here.aclose()
    assert asked == [0, 1]


async def test_a_gate_that_breaks_is_not_taken_for_an_answer() -> None:
    def gate() -> bool:
        raise LookupError

    async with Provider(always(http())) as there:
        here = provider(there.url, concurrency=1)
        with pytest.raises(LookupError):
            await here.send(target(1), gate)
        assert await here.send(target(2), is_open) == Accepted()
        await here.aclose()


@on_both_loops
async def test_cancellation_is_nobodys_answer() -> None:
    async with Provider(in_turn(no_answer, always(http()))) as there:
        here = provider(there.url, concurrency=1)
        sending = asyncio.create_task(here.send(target(1), is_open))
        while not there.received:
            await asyncio.sleep(0)
        sending.cancel("from outside")
        with pytest.raises(asyncio.CancelledError, match="from outside"):
            await sending
        assert await here.send(target(2), is_open) == Accepted()
        await here.aclose()


# --- Any bytes at all -----------------------------------------------------------------------------

pieces = st.sampled_from(
    [
        b"HTTP/1.1 ",
        b"HTTP/1.0 ",
        b"200 OK",
        b"204 x",
        b"429 x",
        b"101 x",
        b"100 x",
        b"\r\n",
        b"\r\n\r\n",
        b"\n",
        b"Content-Length: 2",
        b"Content-Length: 99999999999999999999",
        b"Transfer-Encoding: chunked",
        b"Content-Encoding: gzip",
        b"Retry-After: ",
        b"Connection: close",
        b"Connection: upgrade\r\nUpgrade: x",
        b"Set-Cookie: \xff=;",
        b"Location: //[",
        b"{}",
        b"2\r\n{}\r\n0\r\n\r\n",
        b"ffffffffffffffffff\r\n",
        http(200),
        http(500),
    ]
)
soups = st.lists(pieces | st.binary(max_size=20), max_size=8).map(b"".join)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_no_bytes_raise_and_the_next_mail_is_answered_for_itself(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Whether the connection is kept or closed, each mail gets the answer that was meant for it."""

    async def two_mails(soup: bytes, hangs_up: bool) -> None:
        async def serve_soup(wire: Wire) -> None:
            await wire.answer(soup)
            if not hangs_up:
                await always(http(422))(wire)

        async with Provider(in_turn(serve_soup, always(http(422)))) as there:
            here = provider(there.url, read_timeout_s=0.05)
            assert await here.send(target(1), is_open) is not None
            assert await here.send(target(2), is_open) == Refused("http_422")
            await here.aclose()
        assert [each.key for each in there.received] == ["spring:1", "spring:2"]

    with asyncio.Runner(loop_factory=loop) as runner:

        @settings(max_examples=80, deadline=None, derandomize=True, database=None)
        @given(soup=soups, hangs_up=st.booleans())
        @example(soup=http(200) + http(200), hangs_up=False)
        @example(soup=http(200) + b"HTTP/1.1 2", hangs_up=False)
        @example(soup=http(500) + http(200), hangs_up=False)
        def check(soup: bytes, hangs_up: bool) -> None:
            runner.run(two_mails(soup, hangs_up))

        check()


# --- Opening --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        None,
        "",
        "mail.example.org",
        "ftp://x/",
        "http://",
        "http://a..b/",
        "http://256.1.1.1/",
        "http://xn--a.com/",
        "http://x:99999/",
        f"http://{'a' * 64}.org/",
        "https://user:pw-secret@example.org/",
    ],
)
def test_a_url_that_cannot_be_used_is_told_at_once_and_without_secrets(url: str | None) -> None:
    with pytest.raises(SettingsError, match="MAIL_URL") as error:
        provider(url)  # type: ignore[arg-type]
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("key", ["pw\nsecret", "pw-sécret", "secret\x7f"])
def test_a_key_that_no_header_can_carry_is_told_at_once(key: str) -> None:
    with pytest.raises(SettingsError, match="MAIL_API_KEY") as error:
        provider("http://x/", api_key=key)
    assert key not in str(error.value)


SETTINGS = {
    "url": "http://x/",
    "api_key": None,
    "campaign_id": "spring",
    "connect_timeout_s": 2,
    "read_timeout_s": 5,
    "concurrency": 16,
}


def test_http_is_opened_by_name() -> None:
    assert isinstance(open_provider("http", **SETTINGS), HttpProvider)
    assert "http" in provider_names()


class Pigeons:
    """Somebody else's provider."""

    def __init__(self, **settings: object) -> None:
        self.settings = settings


def test_a_foreign_provider_is_opened_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    known = EntryPoints([EntryPoint("pigeons", f"{__name__}:Pigeons", sender.providers.GROUP)])
    monkeypatch.setattr(sender.providers, "entry_points", lambda **by: known.select(**by))
    assert provider_names() == ["http", "pigeons"]
    opened = open_provider("pigeons", **SETTINGS)
    assert isinstance(opened, Pigeons)
    assert opened.settings == SETTINGS


def test_an_unknown_name_is_told_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"MAIL_PROVIDER.*'htp'.*http"):
        open_provider("htp", **SETTINGS)
