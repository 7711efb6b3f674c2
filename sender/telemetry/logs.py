"""Log lines: every event of a run, and what libraries say, through one renderer and one guard.

Never blocks, never raises, never lets an address, a key or a password through.
"""

import atexit
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import Processor

from sender.domain import Counts
from sender.events import Event, TargetDeferred
from sender.telemetry.redaction import Redactor, redactor
from sender.telemetry.writer import LineWriter

type Format = Literal["json", "console"]

_LONGEST_TRACE = 8_000
_LEVELS = frozenset({"debug", "info", "warning", "error", "critical"})
_COUNTS = (*(field.name for field in fields(Counts)), "total")


@dataclass(slots=True)
class _Output:
    """Where lines go until the next `configure_logging`."""

    writer: LineWriter | None = None


_output = _Output()


def configure_logging(
    format: Format = "json",
    *,
    secrets: Iterable[str] = (),
    debug: bool = False,
    stream: TextIO | None = None,
) -> None:
    """Send events, our own log and what libraries warn of to one stream, one line each.

    Args:
        format: json for machines, console for people.
        secrets: texts that must never appear, whatever they stand in.
        debug: also tell each row that is tried again later.
        stream: standard output if None.
    """
    out: TextIO = sys.stdout if stream is None else stream
    if reconfigure := getattr(out, "reconfigure", None):
        reconfigure(errors="backslashreplace")  # a text it cannot encode must not be lost
    clean = redactor(secrets)
    render = _renderer(format, colours=out.isatty())
    steps: list[Processor] = [
        _redact(clean),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        render,
    ]
    close_logging()
    writer = _output.writer = LineWriter(out, dropped=_dropped_line(steps))
    structlog.configure(
        processors=steps,
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.DEBUG if debug else logging.INFO
        ),
        logger_factory=lambda *_: _Lines(writer.put),
        cache_logger_on_first_use=False,
    )
    _route_libraries()


def close_logging(timeout_s: float = 2.0) -> None:
    """Write what waits, for at most `timeout_s` seconds. Called at exit too."""
    if _output.writer:
        _output.writer.close(timeout_s)
        _output.writer = None


atexit.register(close_logging)


class LogObserver:
    """Tells every event as one line."""

    def __init__(self) -> None:
        """Take the log that `configure_logging` set up."""
        self._log: Any = structlog.get_logger().bind()

    def __call__(self, event: Event) -> None:
        """Tell the event; an event that cannot be rendered is told by its name only."""
        level = "debug" if isinstance(event, TargetDeferred) else event.level
        tell: Callable[..., None] = getattr(self._log, level)
        try:
            tell(event.name, **_flat(event))
        except Exception as error:  # noqa: BLE001 - a log line must never end a run
            tell(event.name, not_rendered=type(error).__name__)


class _Lines:
    """What structlog hands finished lines to."""

    def __init__(self, put: Callable[[str], None]) -> None:
        self.debug = self.info = self.warning = self.error = self.critical = put


class _Libraries(logging.Handler):
    """Gives records of the standard log the way of the events."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
            log = structlog.get_logger()
            level = record.levelname.lower()
            tell = getattr(log, level if level in _LEVELS else "warning")
            more = {"exception": trace[-_LONGEST_TRACE:].rstrip()} if trace else {}
            tell(record.getMessage(), logger=record.name, **more)
        except Exception:  # noqa: BLE001 - as in the observer
            self.handleError(record)


def _route_libraries() -> None:
    root = logging.getLogger()
    for handler in [old for old in root.handlers if isinstance(old, _Libraries)]:
        root.removeHandler(handler)
    root.addHandler(_Libraries())
    root.setLevel(logging.WARNING)
    logging.getLogger("sender").setLevel(logging.INFO)
    # That the database is away is told once, as our own event; that a statement was cancelled or a
    # connection closed for it is nothing more.
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    logging.captureWarnings(capture=True)


def _renderer(format: Format, *, colours: bool) -> Processor:
    if format == "json":
        return structlog.processors.JSONRenderer()
    return structlog.dev.ConsoleRenderer(
        colors=colours, exception_formatter=structlog.dev.plain_traceback
    )


def _redact(clean: Redactor) -> Processor:
    def redact(_: Any, level: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        # In the order in which people read them; the time is filled in by the next step.
        cleaned: dict[str, Any] = {"timestamp": "", "level": level, "event": ""}
        trace = line.pop("exception", None)
        for name, value in line.items():
            cleaned[name] = clean(value)
        if trace:
            cleaned["exception"] = "\n".join(map(clean, str(trace).splitlines()))
        return cleaned

    return redact


def _dropped_line(steps: Iterable[Processor]) -> Callable[[int], str]:
    def line(count: int) -> str:
        event: Any = {"event": "log_lines_dropped", "lines": count}
        for step in steps:
            event = step(None, "warning", event)
        return str(event)

    return line


@cache
def _field_names(kind: type[Event]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _flat(event: Event) -> dict[str, Any]:
    """The fields of an event; counts stand among them, their total too."""
    flat: dict[str, Any] = {}
    for name in _field_names(type(event)):
        value = getattr(event, name)
        if isinstance(value, Counts):
            flat.update({part: getattr(value, part) for part in _COUNTS})
        else:
            flat[name] = value
    return flat
