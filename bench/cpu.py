"""CPU a message at 500/s and by part, the ceiling of one process, and what bare loops need.

nginx answers, on the core that PostgreSQL runs on too; what is measured has the other core to
itself. Rounds of floor and product follow each other; ratios are taken inside a round. The parts
are shares of samples that py-spy takes of the running process, once, outside of the rounds.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import floor
from bench.ground import Nginx, Run, Server, campaign, postgres, run_settings
from bench.measure import family_cpu_s, grid, median, pin, say

OURS, THEIRS = 0, 1
RATE_PER_S = 500.0
NO_LIMIT_PER_S = 100_000.0
SETTLE_S = 4.0
BURST_ROWS = 400_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--latency", type=float, default=0.1, help="of nginx at 500/s, in seconds")
    parser.add_argument("--errors-percent", type=float, default=4.0, help="share of 503")
    parser.add_argument("--parts-seconds", type=float, default=20.0)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rounds: list[dict[str, Any]] = []
    with postgres() as server:
        pin_family(server.pid)
        rows = int(RATE_PER_S * (args.seconds + args.parts_seconds + 3 * SETTLE_S + 30))
        campaign(server, "paced", rows)
        campaign(server, "burst", BURST_ROWS)
        for repeat in range(args.repeats):
            rounds.append(_round(server, args))
            say(f"{repeat + 1}/{args.repeats}: {rounds[-1]}")
        parts = _parts(server, args)
    return {
        "rate_per_s": RATE_PER_S,
        "latency_s": args.latency,
        "errors_percent": args.errors_percent,
        **median(rounds),
        "ratios": median([_ratios(one) for one in rounds]),
        "parts": parts,
    }


def pin_family(pid: int) -> None:
    """Keep a server's processes, and those it will start, off our core."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for one in (pid, *map(int, children)):
        pin(one, THEIRS)


@contextmanager
def _nginx(latency_s: float, errors_percent: float) -> Generator[Nginx]:
    with Nginx(latency_s=latency_s, errors_percent=errors_percent) as nginx:
        for pid in nginx.pids:
            pin(pid, THEIRS)
        yield nginx


def _round(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"paced": {}, "unlimited": {}}
    with _nginx(args.latency, args.errors_percent) as nginx:
        for kind in floor.KINDS:
            found["paced"][kind] = floor.start(
                OURS,
                kind=kind,
                url=nginx.url,
                rate_per_s=RATE_PER_S,
                workers=int(RATE_PER_S * args.latency * 2) + 16,
                seconds=args.seconds,
            )
        found["paced"]["sender run"] = _run(server, nginx, "paced", RATE_PER_S, args.seconds)
    with _nginx(0, args.errors_percent) as nginx:
        for kind in floor.KINDS:
            found["unlimited"][kind] = floor.start(
                OURS, kind=kind, url=nginx.url, workers=64, seconds=args.seconds
            )
        for name, more in (("sender run", {}), ("sender run, 64", {"SEND_CONCURRENCY": 64})):
            found["unlimited"][name] = _run(
                server, nginx, "burst", NO_LIMIT_PER_S, args.seconds, **more
            )
    return found


def _run(
    server: Server, nginx: Nginx, template: str, rate: float, seconds: float, **more: object
) -> dict[str, float]:
    dsn = server.create("trial", template)
    with Run(run_settings(dsn, nginx.url, rate, **more)) as run:
        pin(run.pid, OURS)
        _settle(nginx)
        told, cpu, server_cpu = nginx.requests(), run.cpu_s(), family_cpu_s(server.pid)
        wall = time.monotonic()
        time.sleep(seconds)
        if not run.look():
            raise SystemExit(f"sender run ended before its time:\n{run.tail()}")
        wall = time.monotonic() - wall
        told, cpu = nginx.requests() - told, run.cpu_s() - cpu
        server_cpu = family_cpu_s(server.pid) - server_cpu
    server.drop("trial")
    return {
        "cpu_us": cpu / told * 1e6,
        "per_s": told / wall,
        "server_cpu_us": server_cpu / told * 1e6,
        "peak_mib": run.peak_mib,
        "core_share": cpu / wall,
    }


def _settle(nginx: Nginx) -> None:
    """Wait for the first request and a few seconds more."""
    before, until = nginx.requests(), time.monotonic() + 30
    while nginx.requests() - before < 20 and time.monotonic() < until:
        time.sleep(0.05)
        before += 1  # the question itself
    time.sleep(SETTLE_S)


def _ratios(one: dict[str, Any]) -> dict[str, float]:
    paced, unlimited = one["paced"], one["unlimited"]
    mine = paced["sender run"]["cpu_us"]
    return {
        "sender run at 500/s to bare aiohttp at 500/s": mine / paced["aiohttp"]["cpu_us"],
        "sender run at 500/s to bare aiohttp at full speed": mine / unlimited["aiohttp"]["cpu_us"],
        "sender run at 500/s to bare httpx at 500/s": mine / paced["httpx"]["cpu_us"],
        "provider at 500/s to bare aiohttp at 500/s": paced["provider"]["cpu_us"]
        / paced["aiohttp"]["cpu_us"],
        "sender run to bare aiohttp, both at full speed": unlimited["sender run"]["cpu_us"]
        / unlimited["aiohttp"]["cpu_us"],
        "ceiling of sender run to that of bare aiohttp": unlimited["sender run"]["per_s"]
        / unlimited["aiohttp"]["per_s"],
    }


# --- by part --------------------------------------------------------------------------------------

# py-spy cannot tell a native wait from work: what a thread does while it waits is left out.
_WAITING = re.compile(r"(epoll_p?wait|PyThread_acquire_lock\w*|_wait|select) \([^;]*\)(;0x[^;]*)*$")

# What a stack belongs to: the first line of this list that any of its frames matches. Innermost
# questions first: a look made by the pacer is a look.
_PARTS = (
    ("logs and metrics", r"telemetry/|structlog"),
    ("claim", r"\.(claim_\w+|_claim\w+|sweep|due|remaining) \(\S*sender/store"),
    ("look", r"\.look \(\S*sender/store"),
    ("finish", r"\.(finish|extend) \(\S*sender/store"),
    ("database, below a statement", r"psycopg"),
    ("HTTP", r"sender/providers/|aiohttp|httpx|yarl|multidict|llhttp"),
    ("pace", r"pipeline/pacer|sender/pace|aiolimiter"),
    ("queue", r"pipeline/(worker|producer|finisher|state|__init__)|anyio|sender/(retry|breaker)"),
    ("event loop", r"uvloop|libuv|asyncio|epoll|uv__"),
)


def _parts(server: Server, args: argparse.Namespace) -> dict[str, Any] | None:
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if spy is None:
        say("py-spy is not installed: CPU by part is left out (uv sync --group bench)")
        return None
    dsn = server.create("trial", "paced")
    with (
        _nginx(args.latency, args.errors_percent) as nginx,
        Run(run_settings(dsn, nginx.url, RATE_PER_S)) as run,
    ):
        pin(run.pid, OURS)
        _settle(nginx)
        told, cpu = nginx.requests(), run.cpu_s()
        stacks = _spy(spy, run.pid, args.parts_seconds)
        told, cpu = nginx.requests() - told, run.cpu_s() - cpu
    server.drop("trial")
    total = sum(stacks.values())
    shares: Counter[str] = Counter()
    for stack, count in stacks.items():
        shares[_part(stack)] += count
    return {
        "samples": total,
        "cpu_us_while_sampled": cpu / told * 1e6,
        "share": {name: count / total for name, count in shares.most_common()},
    }


def _spy(spy: str, pid: int, seconds: float) -> Counter[str]:
    with tempfile.NamedTemporaryFile() as out:
        subprocess.run(
            [spy, "record", "--pid", str(pid), "--duration", str(int(seconds)), "--rate", "200",
             "--native", "--full-filenames", "--format", "raw", "--output", out.name],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        stacks: Counter[str] = Counter()
        for line in Path(out.name).read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            if not _WAITING.search(stack):
                stacks[stack] += int(count)
        return stacks


def _part(stack: str) -> str:
    for name, pattern in _PARTS:
        if re.search(pattern, stack):
            return name
    return "other"


def table(result: dict[str, Any]) -> str:
    rows = [
        [
            f"{name}, {title}",
            f"{run['cpu_us']:.0f}",
            f"{run['per_s']:,.0f}",
            f"{run.get('server_cpu_us', 0):.0f}",
            f"{run.get('peak_mib', 0):.0f}",
        ]
        for mode, title in (("paced", "at 500/s"), ("unlimited", "without limit"))
        for name, run in result[mode].items()
    ]
    head = ["", "us CPU a message", "messages/s", "PostgreSQL us", "peak RSS MiB"]
    lines = [*grid(head, rows), ""]
    lines += [f"- {name}: {value:.2f}" for name, value in result["ratios"].items()]
    if result["parts"]:
        mine = result["paced"]["sender run"]["cpu_us"]
        shares = result["parts"]["share"].items()
        parts = [[name, f"{share:.0%}", f"{share * mine:.0f}"] for name, share in shares]
        lines += ["", *grid(["part", "share", "us a message"], parts)]
    return "\n".join(lines)
