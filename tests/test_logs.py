"""Logs: every event is one line, nothing secret gets through, nothing stops or ends a run."""

import json
import logging
import os
import subprocess
import sys
import threading
import typing
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields
from datetime import datetime, timedelta
from io import BytesIO, StringIO, TextIOWrapper
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sender import events
from sender.domain import Counts, State
from sender.events import Event, RunEnded, RunStarted, TargetDeferred, TargetSettled
from sender.telemetry.logs import Format, LogObserver, close_logging, configure_logging

CATALOGUE = [kind for kind in vars(events).values() if isinstance(kind, type)]
EVENTS = [kind for kind in CATALOGUE if issubclass(kind, Event) and kind is not Event]
FORMATS: tuple[Format, ...] = ("json", "console")


@pytest.fixture(autouse=True)
def _quiet_again() -> Iterator[None]:
    yield
    close_logging()
    logging.captureWarnings(capture=False)


def told(*happened: Event, format: Format = "json", **options: Any) -> list[str]:
    """The lines that events make."""
    stream = StringIO()
    configure_logging(format, stream=stream, **options)
    observe = LogObserver()
    for event in happened:
        observe(event)
    close_logging()
    return stream.getvalue().splitlines()


def example(kind: type[Event], text: str = "text") -> Event:
    """An event with `text` wherever a text can be."""
    hints = typing.get_type_hints(kind)
    return kind(**{field.name: _value(hints[field.name], text) for field in fields(kind)})


def _value(hint: Any, text: str) -> object:
    known: dict[Any, object] = {int: 7, float: 1.5, str: text, State: State.FAILED}
    if hint in known:
        return known[hint]
    if typing.get_origin(hint) is Mapping:
        return {"NAME": text, "deep": [{"er": text}]}
    choices = typing.get_args(hint)
    return Counts(1, 2, 3, 4, 5, 6) if Counts in choices else _value(choices[0], text)


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_every_event_is_one_line_with_its_fields(kind: type[Event]) -> None:
    (line,) = told(example(kind), debug=True)
    shown = json.loads(line)
    assert shown["event"] == kind.name
    assert shown["level"] == ("debug" if kind is TargetDeferred else kind.level)
    assert list(shown)[:3] == ["timestamp", "level", "event"]
    moment = datetime.fromisoformat(shown["timestamp"])
    assert moment.utcoffset() == timedelta(0)
    names = {field.name for field in fields(kind)} - {"counts"}
    assert names <= shown.keys()


def test_counts_stand_at_the_top_with_their_total() -> None:
    ended = example(RunEnded)
    shown = json.loads(told(ended)[0])
    counts = {"sent": 1, "failed": 2, "in_doubt": 3, "skipped": 4, "pending": 5, "sending": 6}
    assert {**counts, "total": 21}.items() <= shown.items()


def test_a_deferred_target_is_told_at_debug_only() -> None:
    assert told(example(TargetDeferred)) == []
    assert len(told(example(TargetDeferred), debug=True)) == 1


def test_console_lines_are_for_people() -> None:
    (line,) = told(example(TargetSettled), format="console")
    assert "target_settled" in line
    assert "member_id=7" in line
    assert "\x1b" not in line


# --- The guard -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    kind=st.sampled_from(EVENTS),
    address=st.emails().filter(lambda address: len(address.split("@")[0]) > 3),
    around=st.sampled_from(
        ["{}", "to <{}>: no such user", "mailto:{}?x", "a,{};b", "\n{}\n", "'{}'"]
    ),
    format=st.sampled_from(FORMATS),
)
def test_no_address_in_any_field_of_any_event(
    kind: type[Event], address: str, around: str, format: Literal["json", "console"]
) -> None:
    lines = "\n".join(told(example(kind, around.format(address)), format=format, debug=True))
    local, _, domain = address.partition("@")
    plain = lines.replace("\\\\", "\\").replace('\\"', '"')
    assert address not in plain
    assert f"{local}@" not in plain
    assert f"@{domain}" not in plain


def test_a_value_cannot_begin_a_line_of_its_own() -> None:
    hostile = 'x\n{"level":"error","event":"forged"}\r\x1b[2J\u2028\x85'
    for format in FORMATS:
        (line,) = told(example(TargetSettled, hostile), format=format)
        assert "\x1b" not in line


# --- Libraries -----------------------------------------------------------------------------------


def test_what_libraries_say_goes_the_same_way() -> None:
    stream = StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure_logging("json", stream=stream, secrets=["geheim"])
        logging.getLogger("aiohttp.client").info("nobody needs this")
        logging.getLogger("psycopg").warning("query cancellation interrupted")
        logging.getLogger("psycopg").error("cannot reach %s", "postgresql://u:geheim@h/d")
        logging.getLogger("sender.test").info("ours")
        warnings.warn("password=geheim", stacklevel=1)
        error = ValueError("member taro@example.jp")
        logging.getLogger("asyncio").error("never retrieved", exc_info=error)
        logging.captureWarnings(capture=False)
    close_logging()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["level"], line["logger"]) for line in lines] == [
        ("error", "psycopg"),
        ("info", "sender.test"),
        ("warning", "py.warnings"),
        ("error", "asyncio"),
    ]
    assert "geheim" not in stream.getvalue()
    assert "taro" not in stream.getvalue()
    assert lines[-1]["exception"] == "ValueError: member [address]"


def test_configuring_again_does_not_tell_things_twice() -> None:
    told()
    stream = StringIO()
    configure_logging("json", stream=stream)
    logging.getLogger("any").warning("once")
    close_logging()
    assert len(stream.getvalue().splitlines()) == 1


# --- Never blocks, never raises ------------------------------------------------------------------


class Unreadable:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def test_an_event_that_cannot_be_rendered_is_told_by_name() -> None:
    odd = RunStarted("c", "1", {"odd": Unreadable()}, 200)
    (line,) = told(odd)
    assert json.loads(line)["event"] == "run_started"
    assert json.loads(line)["not_rendered"] == "RuntimeError"


def test_a_closed_stream_is_nobody_to_tell() -> None:
    stream = StringIO()
    configure_logging("json", stream=stream)
    stream.close()
    LogObserver()(example(TargetSettled))
    close_logging()


class Stuck(StringIO):
    """A pipe that nobody reads, until somebody does."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = threading.Event()
        self.reader = threading.Event()

    def write(self, text: str) -> int:
        self.is_full.set()
        self.reader.wait()
        return super().write(text)


def test_a_text_the_stream_cannot_encode_is_told_in_escapes() -> None:
    raw = BytesIO()
    stream = TextIOWrapper(raw, encoding="ascii", write_through=True)
    configure_logging("console", stream=stream)
    LogObserver()(example(TargetSettled, "gr\u00fc\u00dfe \ud800"))
    close_logging()
    assert rb"gr\xfc\xdfe \ud800" in raw.getvalue()


def test_a_full_pipe_does_not_stop_the_run_and_lost_lines_are_counted() -> None:
    stream = Stuck()
    configure_logging("json", stream=stream)
    observe, event = LogObserver(), example(TargetSettled)
    observe(event)
    stream.is_full.wait()
    for _ in range(10_100):
        observe(event)
    stream.reader.set()
    close_logging()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert sum(line["event"] == "target_settled" for line in lines) == 10_001
    assert [line["lines"] for line in lines if line["event"] == "log_lines_dropped"] == [100]


def test_lines_are_written_at_the_end_of_the_process() -> None:
    code = (
        "from sender.telemetry.logs import *; from sender.events import *;"
        "configure_logging(); o = LogObserver(); [o(BreakerClosed(1.0)) for _ in range(1000)]"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert ran.stdout.count(b"breaker_closed") == 1_000
    assert ran.stderr == b""


def test_a_reader_that_left_is_no_error() -> None:
    code = (
        "from sender.telemetry.logs import *; from sender.events import *; import time;"
        "configure_logging(); o = LogObserver(); o(BreakerClosed(1.0)); time.sleep(.05);"
        "o(BreakerClosed(2.0))"
    )
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run(
        [sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert b"Traceback" not in ran.stderr
