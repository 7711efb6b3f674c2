"""What each command does once its arguments are read: take the settings, call, print.

Each imports what it needs when it runs: `sender --help` is quick and a pod's `sender run` small.
"""

import asyncio
import json
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sender.errors import SenderError, SettingsError

if TYPE_CHECKING:
    from sender.run import Watch
    from sender.settings import RunSettings


def run() -> int:
    """`sender run`."""
    import structlog

    from sender import run as program
    from sender.settings import load_run
    from sender.telemetry.logs import configure_logging

    settings = load_run()
    with _watcher(settings) as watch:
        configure_logging(settings.log_format, secrets=settings.secrets)
        for line in settings.unknown:
            structlog.get_logger().warning("setting_unknown", reason=line)
        return program.main(settings, watch)


@contextmanager
def _watcher(settings: "RunSettings") -> Generator["Watch | None"]:
    """A progress bar for people at a terminal, nothing otherwise."""
    if settings.log_format != "console" or not sys.stdout.isatty():
        yield None
        return
    from sender.telemetry.progress import ProgressBar

    with ProgressBar(settings.campaign_id) as bar:
        yield bar.watch


def migrate(*, plan_only: bool) -> None:
    """`sender migrate`."""
    import stamina.instrumentation

    from sender import migrate as program
    from sender.settings import load_database

    settings = load_database()
    dsn = settings.db_dsn.get_secret_value()
    warn(settings.unknown)
    if plan_only:
        print(program.plan(dsn) or "-- nothing to do: the schema is current")
        return
    stamina.instrumentation.set_on_retry_hooks([])  # the migration tells its retries itself
    done = program.migrate(dsn, tell=partial(print, flush=True))
    print(f"{len(done)} migrations applied" if done else "nothing to do: the schema is current")


def status(*, as_json: bool) -> None:
    """`sender status`."""
    from sender.settings import load_campaign
    from sender.status import status as look

    settings = load_campaign()
    warn(settings.unknown)
    found = asyncio.run(look(settings))
    if as_json:
        print(json_text(found.to_json()))
    else:
        print("\n".join(found.lines()))


def watch(*, as_json: bool) -> None:
    """`sender status --watch`: until no row is open, or Ctrl-C."""
    from sender.settings import load_campaign
    from sender.watching import shown
    from sender.watching import watch as look

    settings = load_campaign()
    warn(settings.unknown)
    with suppress(KeyboardInterrupt), shown(as_json=as_json) as show:
        asyncio.run(look(settings, show))


def check(*, as_json: bool) -> int:
    """`sender check`."""
    from sender.check import FAULT_EXIT_CODE
    from sender.check import check as look

    findings = asyncio.run(look())
    faults = sum(finding.verdict == "fault" for finding in findings)
    if as_json:
        print(json_text({"ok": not faults, "findings": [asdict(finding) for finding in findings]}))
    else:
        for finding in findings:
            first, *more = finding.text.splitlines() or [""]
            print(f"{finding.verdict:<6} {finding.subject:<23} {first}".rstrip())
            for line in more:
                print(" " * 31 + line)
        counted = "1 fault" if faults == 1 else f"{faults} faults"
        print(counted if faults else "everything a run needs is in place")
    return FAULT_EXIT_CODE if faults else 0


def failures(*, states: Sequence[str], form: str, limit: int | None) -> None:
    """`sender failures`.

    Args:
        states: which targets to list.
        form: text, csv or json.
        limit: how many at most.
    """
    from sender.failures import failures as look_up
    from sender.listing import write
    from sender.settings import load_campaign

    settings = load_campaign()
    warn(settings.unknown)
    asyncio.run(write(look_up(settings, states, limit), states, form))


def demo(*, targets: int, as_json: bool) -> int:
    """`sender demo`."""
    with _parts_of_the_demo():
        from sender.dev.demo import demo as program
    return program(targets, as_json)


def fake_provider(*, host: str, port: int, more: str | None, options: Mapping[str, Any]) -> None:
    """`sender fake-provider`.

    Args:
        host: address to listen at.
        port: port, 0 for any.
        more: a JSON object of further options, or `@` and the path of a file with one.
        options: options by name; None where not given.
    """
    with _parts_of_the_demo():
        from sender.dev.fake_options import FakeOptions
        from sender.dev.fake_provider import run as program
    given = {name: value for name, value in options.items() if value is not None}
    program(FakeOptions.from_json({**_object(more or "{}"), **given}), host, port)


@contextmanager
def _parts_of_the_demo() -> Generator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if str(error.name).startswith("sender"):
            raise
        raise SenderError(
            f"{error.name} is not installed; the demo needs more: pip install 'sender[demo]'"
        ) from error


def _object(text: str) -> dict[str, Any]:
    try:
        if text.startswith("@"):
            text = Path(text[1:]).read_text()
        value = json.loads(text)
    except OSError as error:
        raise SettingsError([f"--options: cannot be read: {error.strerror}"]) from error
    except ValueError:
        value = None
    if isinstance(value, dict):
        return cast("dict[str, Any]", value)
    raise SettingsError(["--options: must be a JSON object, or @ and the path of one"])


def json_text(value: object) -> str:
    """JSON for programs, indented for people who look."""
    return json.dumps(value, indent=2, default=str)


def warn(lines: Iterable[str]) -> None:
    """Tell of settings that look misspelt."""
    for line in lines:
        print(f"warning: {line}", file=sys.stderr)
