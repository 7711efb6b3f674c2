"""Seconds from exec to the first request, and which packages the imports go to.

The provider's record and the start are on the one clock that all processes share. The floor is a
bare program that imports the same client libraries, connects and posts.
"""

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import uvloop

from bench.drain import _store_config
from bench.ground import ROOT, Run, Server, ask, campaign, postgres, run_settings
from bench.measure import grid, median, say
from sender.dev.fake_options import FakeOptions
from sender.dev.fake_provider import start_process, stop_process
from sender.store import PostgresStore

FEW_ROWS = 1_000
_PATIENCE_S = 60.0
_LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+([\w.]+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=1_200_000)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with postgres() as server:
        campaign(server, "few", FEW_ROWS)
        campaign(server, "many", args.rows)
        campaign(server, "begun", args.rows)
        _build(server.dsn("begun"))
        rounds = []
        for repeat in range(args.repeats):
            rounds.append(
                {
                    "floor": _floor(server),
                    f"{FEW_ROWS:,} rows": _first(server, "few"),
                    f"{args.rows:,} rows, first run": _first(server, "many"),
                    f"{args.rows:,} rows, a later run": _first(server, "begun"),
                }
            )
            say(f"{repeat + 1}/{args.repeats}: {rounds[-1]}")
        imports = [_imports(server) for _ in range(args.repeats)]
    names = {name for one in imports for name in one}
    spent = {name: median([one.get(name, 0.0) for one in imports]) for name in names}
    return {
        "rows": args.rows,
        "seconds": median(rounds),
        "ratio": median([one[f"{FEW_ROWS:,} rows"] / one["floor"] for one in rounds]),
        "import_ms": dict(sorted(spent.items(), key=lambda item: -item[1])),
    }


def _build(dsn: str) -> None:
    async def build() -> None:
        async with PostgresStore(_store_config({"dsn": dsn, "batch": 125})) as store:
            await store.open_campaign()
            await store.build()

    uvloop.run(build())


def _floor(server: Server) -> float:
    process, url = start_process(FakeOptions())
    try:
        began = time.monotonic()
        command = [sys.executable, "-m", "bench.first", server.dsn(), url]
        subprocess.run(command, cwd=ROOT, check=True)
        return ask(url, "/requests")[0][0] - began
    finally:
        stop_process(process)


def _first(server: Server, template: str) -> float:
    dsn = server.create("trial", template)
    process, url = start_process(FakeOptions())
    try:
        with Run(run_settings(dsn, url, 500)) as run:
            until = time.monotonic() + _PATIENCE_S
            while not (requests := ask(url, "/requests")):
                if time.monotonic() > until or not run.look():
                    raise SystemExit(f"no request came:\n{run.tail()}")
                time.sleep(0.2)  # seldom: the provider has the cores to share
            first = requests[0][0] - run.began_at
    finally:
        stop_process(process)
    server.drop("trial")
    return first


def _imports(server: Server) -> dict[str, float]:
    """Milliseconds by package over a whole small run; the standard library is one."""
    dsn = server.create("trial", "few")
    process, url = start_process(FakeOptions())
    try:
        settings = run_settings(dsn, url, 2_000, PYTHONPROFILEIMPORTTIME=1)
        with Run(settings) as run:
            run.wait(within_s=_PATIENCE_S)
            text = run.tail(everything=True)
    finally:
        stop_process(process)
    server.drop("trial")
    spent: Counter[str] = Counter()
    for own_us, module in _LINE.findall(text):
        package = module.partition(".")[0]
        known = package in sys.stdlib_module_names
        spent["standard library" if known else package] += int(own_us)
    return {name: own_us / 1e3 for name, own_us in spent.items() if own_us >= 500}


def table(result: dict[str, Any]) -> str:
    firsts = [[name, f"{seconds:.2f}"] for name, seconds in result["seconds"].items()]
    imports = [[name, f"{ms:.0f}"] for name, ms in result["import_ms"].items()]
    return "\n".join(
        [
            *grid(["", "s from exec to the first request"], firsts),
            "",
            f"- small campaign to floor: {result['ratio']:.2f}",
            "",
            *grid(["package", "import ms"], imports),
        ]
    )
