"""The provider of `MAIL_PROVIDER=http`: one POST of JSON for one mail.

Owns the body, the headers and the time-outs of a request. Must never repeat a request itself,
follow a redirect, or let the network or the provider raise anything.
"""

import asyncio
import json
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from typing import cast, final

import httpx

from sender.domain import Answer, NotSent, Refused, Target, Unknown, idempotency_key
from sender.errors import SettingsError
from sender.ports import Gate
from sender.providers.answers import ANSWER_AT_MOST, accepting, classify, parse_json
from sender.providers.client import PlainClient
from sender.providers.transport import (
    BEGIN,
    AiohttpTransport,
    AnswerFault,
    ConnectFault,
    Withheld,
)

KEEPALIVE_S = 4.0
"""Below the 5 s of Node's servers, the shortest of the common ones."""

_ERROR_BODY_AT_MOST = 4096
_ERROR_BODY_S = 1.0


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def request_body(target: Target, campaign_id: str) -> bytes:
    """The body of a member's mail: the same to the byte at every attempt and in every version.

    The key order is fixed and the row's `vars` are copied as PostgreSQL prints them, never read and
    written again: equal `domain.content_hash` means equal bodies, and no number changes on its way
    through Python.

    Args:
        target: the row.
        campaign_id: the template.

    Returns:
        UTF-8 JSON.

    Raises:
        ValueError: the row's `vars` are neither an object nor null.
    """
    head = _encode({"to": target.email, "member_id": target.member_id, "template": campaign_id})
    variables = _object_text(target.variables)
    return (f'{head[:-1]},"vars":{variables}}}' if variables else head).encode()


def _object_text(text: str | None) -> str:
    """The text of a JSON object that has members, or nothing for null and an empty one."""
    if text is None:
        return ""
    value = parse_json(text)
    if value is not None and not isinstance(value, dict):
        raise ValueError(type(value))
    return text.strip() if value else ""


@final
class _Attempt:
    """One request: asks the gate once a connection is in hand, and then moves the clock."""

    __slots__ = ("_answer_within_s", "_gate", "begun", "clock")

    def __init__(self, gate: Gate, connect_within_s: float, answer_within_s: float) -> None:
        self._gate = gate
        self._answer_within_s = answer_within_s
        self.clock = asyncio.timeout(connect_within_s)
        self.begun = False

    def begin(self) -> bool:
        """Ask the gate; if it is open, the time for the answer runs from now."""
        self.begun = self._gate()
        if self.begun:
            self.clock.reschedule(asyncio.get_running_loop().time() + self._answer_within_s)
        return self.begun


@final
class HttpProvider:
    """Sends mails through one shared `httpx.AsyncClient`. Implements `ports.Provider`."""

    def __init__(
        self,
        *,
        url: str | None,
        api_key: str | None,
        campaign_id: str,
        connect_timeout_s: float,
        read_timeout_s: float,
        concurrency: int,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        """Set up; nothing is opened before the first mail.

        Args:
            url: where to POST.
            api_key: sent as `Authorization: Bearer`, or None.
            campaign_id: the template, and the first half of every idempotency key.
            connect_timeout_s: bounds name look-up, connecting and TLS together.
            read_timeout_s: bounds everything from the first byte sent to the last one read.
            concurrency: requests in flight at most; a connection for each.
            keepalive_s: how long an idle connection is kept.

        Raises:
            SettingsError: `url` or `api_key` cannot be used.
        """
        self._url = _checked_url(url)
        self._campaign_id = campaign_id
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._client = PlainClient(AiohttpTransport(limit=concurrency, keepalive_s=keepalive_s))
        self._fields = [
            (b"Host", self._url.netloc),
            (b"User-Agent", f"sender/{version('sender')}".encode()),
            (b"Accept", b"application/json"),
            (b"Accept-Encoding", b"identity"),
            (b"Content-Type", b"application/json"),
            *_sign_in(api_key),
        ]

    async def send(self, target: Target, gate: Gate) -> Answer | None:
        """Send the mail of `target` once; see `ports.Provider`."""
        try:
            content = request_body(target, self._campaign_id)
        except ValueError:
            return Refused("vars_not_an_object")
        attempt = _Attempt(gate, self._connect_timeout_s, self._read_timeout_s)
        try:
            async with attempt.clock:
                return await self._exchange(self._request(target, content, attempt), attempt)
        except Withheld:
            return None
        except ConnectFault as fault:
            return NotSent(fault.reason)
        except AnswerFault as fault:
            return Unknown(fault.reason)
        except TimeoutError:
            return Unknown("timeout_answer") if attempt.begun else NotSent("timeout_connect")

    async def aclose(self) -> None:
        """Close idle connections."""
        await self._client.aclose()

    def _request(self, target: Target, content: bytes, attempt: _Attempt) -> httpx.Request:
        key = idempotency_key(self._campaign_id, target.member_id)
        return httpx.Request(
            "POST",
            self._url,
            headers=[
                *self._fields,
                (b"Idempotency-Key", key.encode()),
                (b"Content-Length", b"%d" % len(content)),
            ],
            # Not `content=`: that costs four times as much to add the two fields above.
            stream=httpx.ByteStream(content),
            extensions={BEGIN: attempt.begin},
        )

    async def _exchange(self, request: httpx.Request, attempt: _Attempt) -> Answer:
        response = await self._client.send(request, stream=True)
        content = bytearray()
        try:
            if accepting(response.status_code):
                await _read(response, content, ANSWER_AT_MOST)
                if len(content) > ANSWER_AT_MOST:
                    return Unknown("answer_too_large")
            else:
                await _read_error(response, content, attempt.clock)
        finally:
            await response.aclose()
        return classify(response.status_code, response.headers, bytes(content), datetime.now(UTC))


async def _read(response: httpx.Response, into: bytearray, at_most: int) -> None:
    """Read the body to its end, or until it is longer than `at_most`."""
    async for chunk in cast("httpx.AsyncByteStream", response.stream):
        into += chunk
        if len(into) > at_most:
            return


async def _read_error(response: httpx.Response, into: bytearray, clock: asyncio.Timeout) -> None:
    """Read what is to be had: the status has decided, so neither a cut nor a drip matters."""
    now = asyncio.get_running_loop().time()
    until = min(now + _ERROR_BODY_S, clock.when() or now)
    clock.reschedule(None)
    with suppress(AnswerFault, TimeoutError):
        async with asyncio.timeout_at(until):
            await _read(response, into, _ERROR_BODY_AT_MOST)


def _sign_in(api_key: str | None) -> list[tuple[bytes, bytes]]:
    """The Authorization field, if there is a key.

    Raises:
        SettingsError: the key cannot stand in a header field.
    """
    if not api_key:
        return []
    if not (api_key.isascii() and api_key.isprintable()):
        raise SettingsError(["MAIL_API_KEY: holds a character that no header field can carry"])
    return [(b"Authorization", f"Bearer {api_key}".encode())]


def _checked_url(url: str | None) -> httpx.URL:
    """Read MAIL_URL.

    Raises:
        SettingsError: it is missing, no http or https URL, or holds a password.
    """
    try:
        parsed = httpx.URL(url or "")
        _ = parsed.host.encode("idna")  # what a look-up would raise for a label it cannot ask for
    except (httpx.InvalidURL, ValueError):
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 80) > 65535:
        raise SettingsError(["MAIL_URL: must be an http or https URL"])
    if parsed.userinfo:
        raise SettingsError(["MAIL_URL: a password belongs in MAIL_API_KEY"])
    return parsed
