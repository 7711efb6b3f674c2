"""The demo: its verdict on right and wrong records, and the whole of it as a process."""

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sender.dev import demo_table
from sender.dev.demo_figures import Figures, Run, Tally, Told, rate_after, rate_until, tally

# --- The verdict ---------------------------------------------------------------------------------

FAILED = Told("failed", "http_422")


@pytest.mark.parametrize(
    ("mails", "told", "twice", "lost"),
    [
        ({1: 1, 2: 1}, {}, 0, 0),
        ({1: 1}, {2: FAILED}, 0, 0),
        ({1: 1}, {2: Told("in_doubt", "connection_cut")}, 0, 0),
        ({1: 1}, {2: Told("skipped", None)}, 0, 0),
        ({1: 1, 2: 1}, {2: FAILED}, 0, 0),
        ({1: 2, 2: 1}, {}, 1, 0),
        ({1: 2, 2: 3}, {1: FAILED}, 2, 0),
        ({1: 1}, {}, 0, 1),
        ({1: 1}, {2: Told("failed", None)}, 0, 1),
        ({1: 1}, {2: Told("pending", "http_503")}, 0, 1),
        ({1: 1}, {2: Told("sending", None)}, 0, 1),
        ({}, {}, 0, 2),
    ],
)
def test_mailed_twice_or_lost_is_exit_code_1(
    mails: Mapping[int, int], told: Mapping[int, Told], twice: int, lost: int
) -> None:
    found = tally((1, 2), mails, told)
    assert (found.twice, found.lost) == (twice, lost)
    assert found.exit_code == bool(twice or lost)


@given(
    mails=st.dictionaries(st.integers(1, 9), st.integers(1, 3)),
    told=st.dictionaries(
        st.integers(1, 9),
        st.builds(
            Told,
            st.sampled_from(["failed", "in_doubt", "skipped", "pending", "sending"]),
            st.none() | st.sampled_from(["", "http_422"]),
        ),
    ),
)
def test_every_member_is_counted_once(mails: Mapping[int, int], told: Mapping[int, Told]) -> None:
    found = tally(range(1, 10), mails, told)
    assert found.once + found.twice + sum(found.not_delivered.values()) + found.lost == 9
    assert found.twice == sum(count > 1 for count in mails.values())


# --- The rate ------------------------------------------------------------------------------------


def paced(
    begin: float, end: float, first_member: int, per_s: float
) -> list[tuple[float, str, int]]:
    count = int((end - begin) * per_s)
    return [(begin + n / per_s, f"demo:{first_member + n}", 200) for n in range(count)]


def test_the_killed_run_is_measured_without_its_start() -> None:
    slow_start = paced(100, 101, 0, 10)
    assert rate_until(slow_start + paced(101, 106, 10, 500), 106) == pytest.approx(500, abs=1)
    assert rate_until(paced(100, 102.9, 0, 500), 102.9) is None
    assert rate_until([], 106) is None


def test_the_run_that_went_on_is_measured_while_it_had_somebody_new() -> None:
    before = paced(0, 10, 0, 500)
    tail = [(26 + n / 10, f"demo:{n}", 200) for n in range(30)]
    after = paced(20, 26, 5_000, 500) + tail
    assert rate_after(after, before, 14) == pytest.approx(500, abs=1)


def test_a_stall_counts_and_the_wait_for_leases_does_not() -> None:
    before = paced(0, 10, 0, 500)
    stalled = paced(20, 23, 5_000, 500) + paced(25, 27, 6_500, 500)
    assert rate_after(stalled, before, 14) == pytest.approx(500 * 4 / 6, abs=2)
    assert rate_after(stalled, before, 24) == pytest.approx(500, abs=2)
    only_waited = paced(20, 20.5, 5_000, 500) + paced(25, 26, 6_500, 500)
    assert rate_after(only_waited, before, 24) is None
    assert rate_after([], before, 24) is None
    assert rate_after([(20, "demo:1", 200)], before, 24) is None


# --- What it prints ------------------------------------------------------------------------------


def figures(found: Tally) -> Figures:
    runs = [
        Run(137, "", 6.0, 2_600, 499.9, 66.5),
        Run(0, "every row is settled", 8.0, 2_800, None, None),
    ]
    return Figures(5_000, found, 200, 505, 0, 500, 4.0, runs, 15.5)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Tally(4_995, 0, {"failed: http_422": 5}, 0), "nobody was lost"),
        (Tally(4_990, 3, {"failed: http_422": 5}, 2), "BROKEN: 3 mailed twice, 2 lost."),
    ],
)
def test_the_table_tells_what_json_tells(found: Tally, said: str) -> None:
    out = io.StringIO()
    demo_table.show(figures(found), Console(file=out, width=80))
    shown = out.getvalue()
    told = figures(found).to_json()
    assert said in shown
    assert told["ok"] == ("BROKEN" not in said)
    for name, value in (
        ("members", told["members"]),
        ("delivered once", told["delivered_once"]),
        ("delivered twice", told["delivered_twice"]),
        ("failed: http_422", 5),
        ("lost", told["lost"]),
        ("repeats absorbed by the key", 200),
    ):
        assert f"{value:,}" in next(line for line in shown.splitlines() if f" {name} " in line)
    assert "499.9/s" in shown
    assert "137 (killed)" in shown
    assert "0 (every row is settled)" in shown


# --- The whole -----------------------------------------------------------------------------------


class Demo:
    """A `sender demo` whose processes and directories can be told from all others."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._mark = uuid4().hex

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        """Start it, with a caller's settings that must not get in."""
        poison = {
            "DB_DSN": "postgresql://127.0.0.1:9/members",
            "CAMPAIGN_ID": "not a name",
            "MAIL_URL_FILE": "/no/such/file",
            "MAIL_RATE_PER_S": "-1",
            "PGOPTIONS": "-c default_transaction_read_only=on",
            "PGSERVICE": "members",
            "http_proxy": "http://127.0.0.1:9",
        }
        marks = {"TMPDIR": str(self.directory), "SENDER_DEMO_MARK": self._mark}
        return subprocess.Popen(
            [sys.executable, "-m", "sender", "demo", *arguments],
            env={**os.environ, **poison, **marks, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def processes(self) -> list[psutil.Process]:
        """What is still running of it."""
        return [found for found in psutil.process_iter() if self._is_ours(found)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("SENDER_DEMO_MARK") == self._mark
        except psutil.Error:
            return False

    def assert_gone(self) -> None:
        """No process and no directory is left; the database's guard may take a moment to end."""
        left = psutil.wait_procs(self.processes(), timeout=20)[1]
        assert left == []
        assert list(self.directory.iterdir()) == []


@pytest.fixture
def demo() -> Iterator[Demo]:
    # Not tmp_path: the database runs as nobody if we are root, and may not enter it.
    with tempfile.TemporaryDirectory(prefix="demo-test-") as directory:
        Path(directory).chmod(0o755)
        found = Demo(Path(directory))
        yield found
        for process in found.processes():
            process.kill()


def until(process: subprocess.Popen[str], text: str) -> None:
    """Read standard error up to a line that holds `text`."""
    assert process.stderr
    for line in process.stderr:
        if text in line:
            return
    pytest.fail(f"ended without saying {text!r}")


@pytest.mark.slow
def test_a_small_demo_keeps_every_promise(demo: Demo) -> None:
    with demo.start("--targets", "400", "--json") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    told = json.loads(out)
    assert told["ok"]
    assert (told["members"], told["delivered_twice"], told["lost"]) == (400, 0, 0)
    assert told["delivered_once"] + sum(told["not_delivered"].values()) == 400
    assert set(told["not_delivered"]) <= {"failed: http_422"}
    assert told["repeats_absorbed"] > 0
    assert told["most_in_any_second"] <= 525
    assert told["refused_for_rate"] == 0
    first, second = told["runs"]
    assert (first["exit_code"], second["exit_code"]) == (137, 0)
    assert first["requests"] + second["requests"] >= 400
    assert "kill -9 after" in err
    assert "LEASE_S=4" in err
    demo.assert_gone()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("starting PostgreSQL", signal.SIGINT),
        ("sender run", signal.SIGINT),
        ("again", signal.SIGTERM),
    ],
)
def test_an_interrupted_demo_leaves_nothing_behind(
    demo: Demo, moment: str, number: signal.Signals
) -> None:
    with demo.start("--targets", "400", "--json") as process:
        until(process, moment)
        # To the whole group, as a terminal does it.
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert out == ""
    demo.assert_gone()


@pytest.mark.slow
def test_a_demo_that_cannot_go_on_says_why_and_leaves_nothing_behind(demo: Demo) -> None:
    with demo.start("--targets", "400", "--json") as process:
        until(process, "sender run")
        for found in demo.processes():
            if "sender.dev.fake_provider" in found.cmdline():
                found.kill()
        out, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("the fake provider is gone")
    assert "Traceback" not in err
    assert out == ""
    demo.assert_gone()


def test_a_demo_without_a_database_says_so(demo: Demo) -> None:
    with demo.start(SENDER_TEST_PG_BIN="/no/such/place") as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert err.startswith("the demo cannot go on: ")
    assert "/no/such/place" in err
    assert err.count("\n") == 1
    demo.assert_gone()
