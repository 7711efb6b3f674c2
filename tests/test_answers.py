"""The table of answers, line by line, without a network."""

import gzip
import json
import re
import zlib
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from sender.providers.answers import ANSWER_AT_MOST, classify
from sender.providers.retry_after import retry_after_s

NOW = datetime(2026, 11, 6, 8, 49, 37, tzinfo=UTC)


def judge(status: int, body: bytes = b"{}", **fields: str) -> Answer:
    headers = {name.replace("_", "-"): value for name, value in fields.items()}
    return classify(status, headers, body, NOW)


TABLE: dict[type[Answer], list[int]] = {
    Accepted: [200, 201, 202, 204],
    Refused: [400, 410, 413, 422],
    Deferred: [408, 409, 425],
    Throttled: [429],
    Unavailable: list(range(500, 600)),
    Unknown: [203, *range(205, 300)],
}
LINES = {status: answer for answer, statuses in TABLE.items() for status in statuses}


@pytest.mark.parametrize("status", range(200, 600))
def test_every_status_has_its_line(status: int) -> None:
    assert type(judge(status)) is LINES.get(status, AccountStopped)


@pytest.mark.parametrize("status", [401, 402, 403, 404, 405, 406, 407, 415, 451, 418, 499, 301])
def test_what_refuses_the_account_stops_it(status: int) -> None:
    assert type(judge(status)) is AccountStopped


@pytest.mark.parametrize("status", [0, 99, 101, 199, 600, 999])
def test_a_number_that_is_no_final_status_is_unknown(status: int) -> None:
    assert judge(status) == Unknown(f"http_{status}")


def test_reasons_name_the_status() -> None:
    assert judge(302) == AccountStopped("redirect_302")
    assert judge(401) == AccountStopped("http_401")
    assert judge(422) == Refused("http_422")
    assert judge(503) == Unavailable("http_503")
    assert judge(206) == Unknown("http_206")


GOOD = [
    b"",
    b" \r\n\t",
    b"{}",
    b'  {"id": 1}\n',
    b"null",
    b"[1.5e400]",
    b'"queued"',
    b"\xef\xbb\xbf{}",
    '{"to": "zoë"}'.encode(),
    b'{"id": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("status", [200, 201, 202, 204])
@pytest.mark.parametrize("body", GOOD)
def test_nothing_or_json_is_an_acceptance(status: int, body: bytes) -> None:
    assert judge(status, body) == Accepted()


BAD = [
    b"OK",
    b"<html>sign in</html>",
    b"{",
    b"{}{}",
    b"{'id': 1}",
    b'{"id": NaN}',
    b"-Infinity",
    b"\xff\xfe{\x00}\x00",
    b'"\xe9"',
    b"[" * 100_000,
    b"\x00",
    "\N{EN SPACE}".encode(),
]


@pytest.mark.parametrize("status", [200, 204])
@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
def test_any_other_body_of_an_acceptance_is_unknown(status: int, body: bytes) -> None:
    assert judge(status, body) == Unknown("not_json")


def test_a_compressed_answer_is_read_though_none_was_asked_for() -> None:
    assert judge(200, gzip.compress(b'{"id": 1}'), content_encoding="gzip") == Accepted()
    assert judge(200, zlib.compress(b"{}"), content_encoding=" Deflate") == Accepted()
    assert judge(200, b"", content_encoding="gzip") == Accepted()
    assert judge(200, b"{}", content_encoding="identity") == Accepted()
    assert judge(200, gzip.compress(b"OK"), content_encoding="gzip") == Unknown("not_json")


def test_a_compressed_answer_that_is_cut_foreign_or_a_bomb_is_unknown() -> None:
    bomb = gzip.compress(b" " * (ANSWER_AT_MOST + 1))
    for body in (gzip.compress(b"{}")[:-4], b"{}", bomb):
        assert judge(200, body, content_encoding="gzip") == Unknown("not_json")
    assert judge(200, b"\x01\x02", content_encoding="br") == Unknown("not_json")


WORDS = [
    ({"error": {"code": "invalid_to"}}, ":invalid_to"),
    ({"error": {"name": "validation_error", "message": "to: a@b.c"}}, ":validation_error"),
    ({"error": {"type": "bounced"}}, ":bounced"),
    ({"error": {"code": 406}}, ":406"),
    ({"error": {"code": [406]}, "code": "outer"}, ":outer"),
    ({"error": "text", "name": "missing"}, ":missing"),
    ({"code": "a" * 40}, ":" + "a" * 40),
    ({"code": "a" * 41}, ""),
    ({"code": "a@b.c"}, ""),
    ({"code": "Not a code"}, ""),
    ({"message": "no such address"}, ""),
    ([{"code": "x"}], ""),
    (None, ""),
]


@pytest.mark.parametrize(("answer", "suffix"), WORDS)
def test_a_machine_readable_word_joins_the_reason(answer: object, suffix: str) -> None:
    assert judge(422, json.dumps(answer).encode()) == Refused(f"http_422{suffix}")


json_values = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.dictionaries(
        st.sampled_from(["error", "code", "name", "type", "x"]), inner, max_size=3
    ),
)


@given(
    status=st.integers(0, 999),
    body=st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()),
    retry=st.none() | st.text(max_size=30),
    encoding=st.sampled_from(["", "gzip", "br"]),
)
def test_every_answer_is_judged_and_no_reason_holds_free_text(
    status: int, body: bytes, retry: str | None, encoding: str
) -> None:
    fields = {"content_encoding": encoding} | ({"retry_after": retry} if retry else {})
    answer = judge(status, body, **fields)
    if not isinstance(answer, Accepted):
        assert re.fullmatch(r"[a-z0-9_.:-]{1,70}", answer.reason)


def test_a_429_tells_how_long_to_wait_and_beyond_ten_minutes_stops_the_account() -> None:
    assert judge(429) == Throttled("http_429", None)
    assert judge(429, retry_after="7") == Throttled("http_429", 7.0)
    assert judge(429, retry_after="600") == Throttled("http_429", 600.0)
    assert judge(429, retry_after="601") == AccountStopped("http_429_long_wait")
    assert judge(429, retry_after="9" * 400) == AccountStopped("http_429_long_wait")
    assert judge(429, retry_after="soon") == Throttled("http_429", None)


def at(seconds: float) -> str:
    return format_datetime(NOW + timedelta(seconds=seconds), usegmt=True)


RETRY_AFTER = [
    (None, None, None),
    ("0", None, 0.0),
    ("120", None, 120.0),
    (" 3 ", None, 3.0),
    ("1.5", None, 1.5),
    ("-5", None, 0.0),
    (at(90), None, 90.0),
    (at(-90), None, 0.0),
    ("Fri Nov  6 08:50:37 2026", None, 60.0),
    ("Friday, 06-Nov-26 08:50:37 GMT", None, 60.0),
    ("Fri, 06 Nov 2026 09:50:37 +0100", None, 60.0),
    # The provider's clock is an hour fast: its own Date tells what it meant.
    (at(3630), at(3600), 30.0),
    (at(30), "yesterday", 30.0),
    *((text, None, None) for text in ["", "soon", "1e3", "inf", "nan", "5, 10", "٣", "0x10"]),
    ("Fri, 99 Nov 2026 08:49:37 GMT", None, None),
]


@pytest.mark.parametrize(("value", "date", "seconds"), RETRY_AFTER)
def test_retry_after(value: str | None, date: str | None, seconds: float | None) -> None:
    assert retry_after_s(value, date, NOW) == seconds


@given(value=st.text(), date=st.none() | st.text())
def test_no_retry_after_raises_or_is_negative(value: str, date: str | None) -> None:
    assert (retry_after_s(value, date, NOW) or 0.0) >= 0.0


@given(
    st.from_regex(r"[A-Z][a-z]{2}, \d{1,5} [A-Z][a-z]{2} \d{1,6} \d\d:\d\d:\d\d [+-]\d{1,9}"),
    st.none() | st.from_regex(r"[A-Z][a-z]{2}, \d\d Nov \d{1,6} \d\d:\d\d:\d\d GMT"),
)
def test_no_date_raises_either(value: str, date: str | None) -> None:
    assert (retry_after_s(value, date, NOW) or 0.0) >= 0.0
