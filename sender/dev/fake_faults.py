"""The table of what the fake provider can answer, and how each row looks on the wire.

Owns the bytes of an answer. Must never look at requests, time or the network.
"""

from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from http import HTTPStatus

NO_ANSWER = 0
_HTML = b"<!doctype html><title>Sign in</title><p>The proxy says hello.</p>"
_BIG_BYTES = 10 * 1024 * 1024
_DRIP_BYTES = 600


class Ending(Enum):
    """What happens to the connection once the answer's turn has come."""

    KEEP = auto()
    """The answer is written in one piece; the connection stays."""
    CLOSE = auto()
    """Whatever there is to write is written, then the connection is closed."""
    RESET = auto()
    """Nothing is written; the connection is reset."""
    SILENT = auto()
    """Nothing is written, ever; the connection stays."""
    DRIP = auto()
    """The head at once, then the body one byte at a time."""
    DRIP_FOR_EVER = auto()
    """The head at once, then one byte at a time until the client leaves."""


@dataclass(slots=True, frozen=True)
class Answer:
    """What to do about one request.

    Attributes:
        status: the status that is sent, or NO_ANSWER.
        head: status line and headers, with the empty line; empty if there is no answer.
        body: what follows the head.
        ending: what happens to the connection.
        delay_s: seconds between the request and the answer.
    """

    status: int
    head: bytes
    body: bytes
    ending: Ending = Ending.KEEP
    delay_s: float = 0.0


@dataclass(slots=True, frozen=True, kw_only=True)
class Fault:
    """One row of the table; `ok` is a row like the others.

    Attributes:
        name: how scripts and options call it.
        accepts: whether the mail is delivered and its key remembered.
        status: the status that is sent, or NO_ANSWER.
        ending: what happens to the connection.
        body: sent instead of the JSON that belongs to the status.
        content_type: of the body.
        surplus: added to the Content-Length that is announced.
        half: whether the second half of the body is left out.
    """

    name: str
    accepts: bool = False
    status: int = HTTPStatus.OK
    ending: Ending = Ending.KEEP
    body: bytes | None = None
    content_type: bytes = b"application/json"
    surplus: int = 0
    half: bool = False

    def answer(self, body: bytes, headers: bytes = b"", delay_s: float = 0.0) -> Answer:
        """The answer of this kind.

        Args:
            body: JSON to send unless this kind has a body of its own.
            headers: more header lines, each ended by CR LF.
            delay_s: seconds before it is sent.

        Returns:
            The answer, rendered.
        """
        if self.status == NO_ANSWER:
            return Answer(NO_ANSWER, b"", b"", self.ending, delay_s)
        if self.status == HTTPStatus.NO_CONTENT:
            body = b""
        elif self.name == "big":
            body = _big()
        elif self.body is not None:
            body = self.body
        elif self.ending is Ending.DRIP:
            body = body.ljust(_DRIP_BYTES)
        head = self._head(len(body), headers)
        if self.half:
            body = body[: len(body) // 2]
        return Answer(self.status, head, body, self.ending, delay_s)

    def _head(self, length: int, headers: bytes) -> bytes:
        if self.status == HTTPStatus.NO_CONTENT:
            framing = b""
        elif self.ending is Ending.DRIP_FOR_EVER:
            framing = b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
        else:
            framing = b"Content-Type: %s\r\nContent-Length: %d\r\n" % (
                self.content_type,
                length + self.surplus,
            )
        if self.ending is Ending.CLOSE:
            framing += b"Connection: close\r\n"
        return b"%s%s%s\r\n" % (_status_line(self.status), framing, headers)


@cache
def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()


@cache
def _big() -> bytes:
    return b'{"id":"big","padding":"%s"}' % (b"x" * _BIG_BYTES)


_ACCEPTING = (200, 201, 202, 204)
_PLAIN = (*_ACCEPTING, *(s for s in HTTPStatus if s >= HTTPStatus.BAD_REQUEST))
_REDIRECTS = (301, 302, 303, 307, 308)

OK = Fault(name="ok", accepts=True)

_SHAPES = (
    OK,
    # Answers that a client must not take for a yes.
    Fault(name="200_html", body=_HTML, content_type=b"text/html; charset=utf-8"),
    Fault(name="half_429", status=429, ending=Ending.CLOSE, half=True),
    Fault(name="cut_before", status=NO_ANSWER, ending=Ending.RESET),
    Fault(name="hang", status=NO_ANSWER, ending=Ending.SILENT),
    # The mail is accepted; whether the client can know it is the question.
    Fault(name="200_empty", accepts=True, body=b""),
    Fault(name="cut", accepts=True, status=NO_ANSWER, ending=Ending.RESET),
    Fault(name="closed", accepts=True, status=NO_ANSWER, ending=Ending.CLOSE),
    Fault(name="silent", accepts=True, status=NO_ANSWER, ending=Ending.SILENT),
    Fault(name="drip", accepts=True, ending=Ending.DRIP),
    Fault(name="endless_drip", accepts=True, ending=Ending.DRIP_FOR_EVER),
    Fault(name="invalid_json", accepts=True, body=b'{"id": "half-writ'),
    Fault(name="big", accepts=True),
    Fault(name="length_too_long", accepts=True, ending=Ending.CLOSE, surplus=10),
    Fault(name="length_too_short", accepts=True, surplus=-4),
)

FAULTS = {
    **{str(int(s)): Fault(name=str(int(s)), accepts=s in _ACCEPTING, status=s) for s in _PLAIN},
    **{str(s): Fault(name=str(s), status=s) for s in _REDIRECTS},
    **{shape.name: shape for shape in _SHAPES},
}
"""Every kind by its name: plain statuses by their number, other shapes by a word."""

SHARES = {
    "first_503": FAULTS["503"],
    "permanent_422": FAULTS["422"],
    "accept_then_cut": FAULTS["cut"],
    "accept_then_silent": FAULTS["silent"],
    "drip": FAULTS["drip"],
}
"""Faults chosen by share of keys. All but `permanent_422` happen once for a key."""


@cache
def error_body(error: str) -> bytes:
    """The JSON of a refusal.

    Args:
        error: a word for machines, such as `invalid_recipient`.

    Returns:
        The JSON text.
    """
    return b'{"error":"%s"}' % error.encode()


@cache
def error_word(status: int) -> str:
    """The word of a refusal by status alone.

    Args:
        status: the status.

    Returns:
        `invalid_recipient` for 422, else the status's phrase in lower case.
    """
    if status == NO_ANSWER:
        return "none"
    if status == HTTPStatus.UNPROCESSABLE_ENTITY:
        return "invalid_recipient"
    return HTTPStatus(status).phrase.lower().replace(" ", "_").replace("'", "")
