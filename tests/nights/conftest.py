"""The server of the nights, and their figures."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from nights.policy import FASTEST, STARTS_IN_A_NIGHT, WORK_S
from sender.dev.postgres import EmbeddedPostgres
from sender.settings import RunSettings


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Tell the figure of a test; printed at the end with those of the trials."""
    return lambda text: record_property("figure", text)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    """A server that may be restarted, and loses nothing that it confirmed."""
    settings = {"synchronous_commit": "on"}
    with EmbeddedPostgres(durable=False, tcp=True, settings=settings) as server:
        yield server


@pytest.fixture
def factor() -> float:
    """What durations are divided by: a machine on which a start takes long gets longer nights."""
    # One start alone may have met another test's worst moment, and would make the nights as long.
    start_s = statistics.median(seconds_of_a_start() for _ in range(3))
    night_s = RunSettings.model_fields["deadline_s"].default
    return min(FASTEST, night_s / (WORK_S + STARTS_IN_A_NIGHT * start_s))


def seconds_of_a_start() -> float:
    begun = time.monotonic()
    command = [sys.executable, "-m", "sender", "run"]
    subprocess.run(command, env={}, capture_output=True, check=False, timeout=120)
    return time.monotonic() - begun
