"""The table of answers: what a status, its headers and its body mean.

Pure: no I/O, no clock, no HTTP library.
"""

import json
import re
import zlib
from collections.abc import Mapping
from datetime import datetime
from typing import cast

from sender.domain import (
    Accepted,
    AccountStopped,
    Answer,
    Deferred,
    Refused,
    Throttled,
    Unavailable,
    Unknown,
)
from sender.providers.retry_after import retry_after_s

LONGEST_WAIT_S = 600.0
"""A provider that asks for more wants something else than a pause; a person must look."""

ANSWER_AT_MOST = 1024 * 1024
"""Bytes of an accepting answer that are read; more is no answer of a mail API."""

_TAKEN = frozenset({200, 201, 202, 204})
_REFUSED = frozenset({400, 410, 413, 422})
_DEFERRED = frozenset({408, 409, 425})
_CODE_NAMES = ("code", "name", "type")
_CODE = re.compile(r"[a-z0-9_.-]{1,40}", re.ASCII)


def _no_constant(name: str) -> object:
    """NaN and Infinity are Python's, not JSON's."""
    raise ValueError(name)


# Numbers stay text: none is used, and Python refuses integers of more than 4300 digits.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_no_constant)


def parse_json(text: str) -> object:
    """Read strict JSON; numbers come as text.

    Raises:
        ValueError: it is not JSON, or nested beyond all reason.
    """
    try:
        return cast("object", _DECODER.decode(text.strip(" \t\r\n")))
    except RecursionError as error:
        raise ValueError(text[:20]) from error


def accepting(status: int) -> bool:
    """Whether the body decides as well; for every other status it does not matter."""
    return status in _TAKEN


def classify(status: int, headers: Mapping[str, str], body: bytes, now: datetime) -> Answer:
    """Say what a whole answer means.

    Args:
        status: the status code.
        headers: header fields; looked up by lower-case names.
        body: the body; whole if `accepting(status)`, else as much as was to be had.
        now: the local wall clock, for a `Retry-After` date in an answer without `Date`.

    Returns:
        The line of the table.
    """
    if accepting(status):
        return _judge_body(body, headers.get("content-encoding", ""))
    if 200 <= status < 300 or status < 200 or status > 599:
        return Unknown(f"http_{status}")
    if status < 400:
        return AccountStopped(f"redirect_{status}")
    reason = f"http_{status}{_machine_code(body)}"
    if status == 429:
        return _throttled(reason, headers, now)
    if status in _REFUSED:
        return Refused(reason)
    if status in _DEFERRED:
        return Deferred(reason)
    return Unavailable(reason) if status >= 500 else AccountStopped(reason)


def _throttled(reason: str, headers: Mapping[str, str], now: datetime) -> Answer:
    wait_s = retry_after_s(headers.get("retry-after"), headers.get("date"), now)
    if wait_s is not None and wait_s > LONGEST_WAIT_S:
        return AccountStopped(f"{reason}_long_wait")
    return Throttled(reason, wait_s)


def _judge_body(body: bytes, encoding: str) -> Answer:
    """Accepted if the body is empty or JSON: a login page of a proxy says 200 as well."""
    try:
        if body and encoding.strip().lower() not in ("", "identity"):
            body = _inflate(body, encoding)
        if body.strip():
            _ = parse_json(body.decode("utf-8-sig"))
    except (ValueError, zlib.error):
        return Unknown("not_json")
    return Accepted()


def _inflate(body: bytes, encoding: str) -> bytes:
    """Undo gzip or deflate, asked for or not.

    Raises:
        ValueError: what comes out is cut or too large.
        zlib.error: it is neither.
    """
    engine = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    plain = engine.decompress(body, ANSWER_AT_MOST)
    if not engine.eof:
        raise ValueError(encoding)
    return plain


def _machine_code(body: bytes) -> str:
    """`:code` if the body is JSON that names its error by a short machine-readable word."""
    try:
        answer = parse_json(body.decode("utf-8-sig"))
    except ValueError:
        return ""
    outer = _members(answer)
    words = (
        place.get(name) for place in (_members(outer.get("error")), outer) for name in _CODE_NAMES
    )
    return next((f":{w}" for w in words if isinstance(w, str) and _CODE.fullmatch(w)), "")


def _members(value: object) -> Mapping[str, object]:
    """The members of a JSON object; none for anything else."""
    return cast("Mapping[str, object]", value) if isinstance(value, dict) else {}
