"""The share of the account's limit that `sender run` reaches, and how evenly, at every latency.

The strict fake provider counts: requests a second over a steady window, most in any sliding second,
answers 429 (its limit forgives 5 %). 4 % of the targets get a 503 first. The floor is a bare
aiohttp loop with absolute slots that sends to the same provider: what both ends can do here.
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from bench import floor
from bench.ground import Run, Server, ask, campaign, postgres, run_settings
from bench.measure import family_cpu_s, grid, median, most_in_any_second, say
from sender.dev.fake_options import FakeOptions
from sender.dev.fake_provider import start_process, stop_process

LIMITS = (2, 50, 500, 2_000)
LATENCIES_MS = (1, 50, 300, 2_000)
PROCESSES = (1, 4)
ERRORS = 0.04
SETTLE_S = 3.0
SETTLE_MORE_S = 9.0
"""Each connection plans its statements when it first runs them; four processes have four times as
many, which run each a quarter as often."""

_START_S = 30.0
_TOO_MANY = 429


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=8.0, help="of the steady window")
    parser.add_argument("--limits", type=float, nargs="+", default=LIMITS)
    parser.add_argument("--latencies-ms", type=float, nargs="+", default=LATENCIES_MS)
    parser.add_argument("--processes", type=int, nargs="+", default=PROCESSES)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    seen: dict[str, list[dict[str, Any]]] = {}
    rows = int(max(args.limits) * (args.seconds + SETTLE_S + SETTLE_MORE_S + 10))
    with postgres() as server:
        campaign(server, "rows", rows)
        for repeat in range(args.repeats):
            for limit in args.limits:
                for latency_ms in args.latencies_ms:
                    for cell in _cells(server, limit, latency_ms, args):
                        seen.setdefault(_name(cell), []).append(cell)
            say(f"{repeat + 1}/{args.repeats} done")
    return {
        "seconds": args.seconds,
        "errors_percent": ERRORS * 100,
        "postgresql": server.version,
        "cells": [median(runs) | {"least_share": _least(runs)} for runs in seen.values()],
    }


def _name(cell: dict[str, Any]) -> str:
    return f"{cell['limit_per_s']} {cell['latency_ms']} {cell['processes']}"


def _least(runs: Sequence[dict[str, Any]]) -> float:
    return min(run["share"] for run in runs)


def _cells(
    server: Server, limit: float, latency_ms: float, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The floor and each number of processes, against equal providers."""
    cells = [_floor(limit, latency_ms, args.seconds)]
    cells += [_run(server, limit, latency_ms, n, args.seconds) for n in args.processes]
    for cell in cells:
        say(
            f"{limit:g}/s {latency_ms:g} ms, {cell['processes'] or 'floor'}: {cell['share']:.1%}, "
            f"most {cell['most_in_any_second']}, 429 {cell['share_429']:.2%}"
        )
    return cells


def _options(limit: float, latency_ms: float) -> FakeOptions:
    return FakeOptions(limit_per_s=limit, latency_s=latency_ms / 1e3, first_503=ERRORS)


def _figures(
    requests: list[Any], limit: float, begin: float, seconds: float
) -> dict[str, float | int]:
    """From the provider's record: the rate over the window, the rest over all."""
    times = [at for at, _, _ in requests]
    steady = [at for at in times if begin <= at < begin + seconds]
    span = steady[-1] - steady[0] if len(steady) > 1 else seconds
    return {
        "share": (len(steady) - 1) / span / limit,
        "most_in_any_second": most_in_any_second(times),
        "share_429": sum(status == _TOO_MANY for _, _, status in requests) / len(requests),
        "steady_requests": len(steady),
    }


def _floor(limit: float, latency_ms: float, seconds: float) -> dict[str, Any]:
    process, url = start_process(_options(limit, latency_ms))
    try:
        told = floor.start(
            kind="aiohttp",
            url=url,
            rate_per_s=limit,
            workers=int(limit * latency_ms / 1e3 * 1.3) + 16,
            seconds=SETTLE_S + seconds,
        )
        requests = ask(url, "/requests")
    finally:
        stop_process(process)
    figures = _figures(requests, limit, requests[0][0] + SETTLE_S, seconds)
    return _cell(limit, latency_ms, 0, figures, cpu_us=told["cpu_us"], server_cpu_us=0.0)


def _run(
    server: Server, limit: float, latency_ms: float, processes: int, seconds: float
) -> dict[str, Any]:
    dsn = server.create("trial", "rows")
    process, url = start_process(_options(limit, latency_ms))
    try:
        with ExitStack() as stack:
            runs = [
                stack.enter_context(Run(run_settings(dsn, url, limit))) for _ in range(processes)
            ]
            _wait_for_first(url, runs[0])
            time.sleep(SETTLE_S + (SETTLE_MORE_S if processes > 1 else 0.0))
            begin = time.monotonic()
            cpu, server_cpu = sum(run.cpu_s() for run in runs), family_cpu_s(server.pid)
            time.sleep(seconds)
            cpu = sum(run.cpu_s() for run in runs) - cpu
            server_cpu = family_cpu_s(server.pid) - server_cpu
            requests = ask(url, "/requests")
    finally:
        stop_process(process)
    server.drop("trial")
    figures = _figures(requests, limit, begin, seconds)
    per = figures["steady_requests"] / 1e6
    return _cell(
        limit, latency_ms, processes, figures, cpu_us=cpu / per, server_cpu_us=server_cpu / per
    )


def _cell(
    limit: float, latency_ms: float, processes: int, figures: dict[str, Any], **more: float
) -> dict[str, Any]:
    head = {"limit_per_s": limit, "latency_ms": latency_ms, "processes": processes}
    return head | figures | more


def _wait_for_first(url: str, run: Run) -> None:
    until = time.monotonic() + _START_S
    while not ask(url, "/stats")["requests"]:
        if time.monotonic() > until or not run.look():
            raise SystemExit(f"no request came:\n{run.tail()}")
        time.sleep(0.05)


def table(result: dict[str, Any]) -> str:
    rows = [
        [
            f"{cell['limit_per_s']:,g}",
            f"{cell['latency_ms']:,g}",
            f"{cell['processes']} x sender" if cell["processes"] else "bare aiohttp",
            f"{cell['share']:.1%} ({cell['least_share']:.1%})",
            f"{cell['most_in_any_second']:,g}",
            f"{cell['share_429']:.2%}",
            f"{cell['cpu_us']:,.0f}",
            f"{cell['server_cpu_us']:,.0f}",
        ]
        for cell in result["cells"]
    ]
    head = [
        "limit/s", "latency ms", "who", "share of the limit (least)", "most in any second", "429",
        "us CPU a message", "PostgreSQL us",
    ]  # fmt: skip
    return "\n".join(grid(head, rows))
