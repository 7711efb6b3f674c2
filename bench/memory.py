"""The peak of resident memory of `sender run`, and whether it grows with the campaign.

A provider that mails nobody lets a campaign end within minutes; a real one with slow answers shows
what connections cost. Runs are kept to 256 MiB by a control group where one can be made, or it is
said that none could. The floor is an interpreter that has imported what a run imports.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.ground import ROOT, Run, Server, campaign, postgres, run_settings
from bench.measure import grid, median, say
from bench.null_provider import NAME, entry_point
from sender.dev.fake_options import FakeOptions
from sender.dev.fake_provider import start_process, stop_process

LIMIT_MIB = 256
FEW_ROWS = 10_000
SLOW_ANSWER_S = 2.0
_CONCURRENCY = 1_250  # what a run at 500/s takes by default, whatever rate makes this one end soon
_IMPORTS = "import sender.run, sender.commands, sender.exits, sender.providers.http"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=1_200_000)
    parser.add_argument("--rate", type=float, default=4_000, help="of the runs that mail nobody")
    parser.add_argument("--latency", type=float, default=0.3, help="their answers' seconds")
    parser.add_argument("--slow-seconds", type=float, default=60, help="of the real one at 500/s")
    parser.add_argument(
        "--whole", action="store_true", help="all rows at 500/s with real requests: 40 minutes"
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with postgres() as server, _group() as group:
        campaign(server, "few", FEW_ROWS)
        campaign(server, "slow", int(500 * (args.slow_seconds + 20)))
        campaign(server, "many", args.rows)
        rounds = []
        for repeat in range(args.repeats):
            rounds.append(_round(server, group, args))
            say(f"{repeat + 1}/{args.repeats}: {rounds[-1]}")
        whole = _slow(server, group, "many", None) if args.whole else None
    return {
        "rows": args.rows,
        "few_rows": FEW_ROWS,
        "rate_per_s": args.rate,
        "limit_mib": LIMIT_MIB if group else None,
        "floor_mib": _floor(),
        **median(rounds),
        "growth_mib": median([one["many"]["peak_mib"] - one["few"]["peak_mib"] for one in rounds]),
        "whole": whole,
    }


def _round(server: Server, group: "Group | None", args: argparse.Namespace) -> dict[str, Any]:
    return {
        "few": _null(server, group, "few", args),
        "slow": _slow(server, group, "slow", args.slow_seconds),
        "many": _null(server, group, "many", args),
    }


def _floor() -> dict[str, float]:
    """Peaks of interpreters that import and end."""
    peak = "import bench.measure; print(bench.measure.memory_mib()['peak'])"
    return {
        name: float(
            subprocess.run(
                [sys.executable, "-c", f"{imports}\n{peak}"],
                cwd=ROOT,
                check=True,
                capture_output=True,
            ).stdout
        )
        for name, imports in (("python", ""), ("imports of a run", _IMPORTS))
    }


def _null(
    server: Server, group: "Group | None", template: str, args: argparse.Namespace
) -> dict[str, Any]:
    """A campaign to its end, with nobody mailed."""
    dsn = server.create("trial", template)
    url = f"http://null.invalid/?latency_s={args.latency}"
    settings = run_settings(dsn, url, args.rate, MAIL_PROVIDER=NAME, SEND_CONCURRENCY=_CONCURRENCY)
    with entry_point() as path, Run(settings, paths=(path,), prefix=_enter(group)) as run:
        began = time.monotonic()
        code = run.wait(within_s=args.rows / 200 + 60)
        if code:
            raise SystemExit(f"sender run ended with {code}:\n{run.tail()}")
    server.drop("trial")
    figures = {"peak_mib": run.peak_mib, "seconds": time.monotonic() - began}
    return figures | (group.figures() if group else {})


def _slow(
    server: Server, group: "Group | None", template: str, seconds: float | None
) -> dict[str, Any]:
    """Real requests at 500/s with answers after 2 s, for so long or to the campaign's end."""
    dsn = server.create("trial", template)
    process, url = start_process(
        FakeOptions(latency_s=SLOW_ANSWER_S, first_503=0.04, max_recorded=0)
    )
    try:
        settings = run_settings(dsn, url, 500, DEADLINE_S=20_000)
        with Run(settings, prefix=_enter(group)) as run:
            if seconds is None:
                run.wait(within_s=20_000)
            else:
                until = time.monotonic() + seconds
                while time.monotonic() < until and run.look():
                    time.sleep(0.05)
    finally:
        stop_process(process)
    server.drop("trial")
    return {"peak_mib": run.peak_mib} | (group.figures() if group else {})


# --- a control group ------------------------------------------------------------------------------


class Group:
    """A control group with a limit of memory; version 1 or 2 of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._new = not (path / "memory.limit_in_bytes").exists()
        limit = "memory.max" if self._new else "memory.limit_in_bytes"
        (path / limit).write_text(str(LIMIT_MIB * 1024**2))

    def figures(self) -> dict[str, float]:
        """The most it used since it was asked last, page cache and sockets included, and kills."""
        peak = self.path / ("memory.peak" if self._new else "memory.max_usage_in_bytes")
        events = self.path / ("memory.events" if self._new else "memory.oom_control")
        used = int(peak.read_text()) / 1024**2
        counts = dict(line.split() for line in events.read_text().splitlines())
        with suppress(OSError):  # version 2 before Linux 6.12 cannot begin anew
            peak.write_text("0")
        return {"group_peak_mib": used, "killed": int(counts.get("oom_kill", 0))}


@contextmanager
def _group() -> Generator[Group | None]:
    root = Path("/sys/fs/cgroup/memory")
    path = (root if root.exists() else root.parent) / "sender-bench"
    try:
        path.mkdir(exist_ok=True)
        group = Group(path)
    except OSError as error:
        say(f"no control group could be made ({error.strerror}): runs without a limit")
        yield None
        return
    try:
        yield group
    finally:
        time.sleep(0.1)  # what ran in it is gone, the kernel may need a moment to notice
        path.rmdir()


def _enter(group: Group | None) -> tuple[str, ...]:
    """A command that puts itself into the group and becomes the command that follows."""
    if group is None:
        return ()
    return ("/bin/sh", "-c", f'echo $$ > {group.path}/cgroup.procs; exec "$@"', "sh")


def table(result: dict[str, Any]) -> str:
    shown = {
        f"{result['few_rows']:,} rows, nobody mailed": result["few"],
        f"{result['rows']:,} rows, nobody mailed": result["many"],
        "500/s, 1,000 requests in flight": result["slow"],
        f"{result['rows']:,} rows at 500/s, 1,000 in flight": result["whole"],
    }
    rows = [
        [name, f"{run['peak_mib']:.1f}", f"{run.get('group_peak_mib', 0):.0f}"]
        for name, run in shown.items()
        if run
    ]
    rows += [[f"floor: {name}", f"{mib:.1f}", ""] for name, mib in result["floor_mib"].items()]
    lines = grid(["", "peak RSS MiB", "all in the control group MiB"], rows)
    return "\n".join([*lines, "", f"- growth, few rows to many: {result['growth_mib']:.2f} MiB"])
