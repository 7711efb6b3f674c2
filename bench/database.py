"""What claim, look and finish cost the database over a whole campaign, ours and the usual way.

Nothing is sent. Each trial has a fresh copy of the same rows and a server with stock configuration;
CPU is that of all of the server's processes, autovacuum and checkpoints included, from /proc. The
usual claim under a held snapshot would take an hour: a few claims are sampled in each tenth.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

from bench.drain import PARTS, _store_config
from bench.ground import CAMPAIGN, ROOT, Server, fill, postgres, settle
from bench.measure import family_cpu_s, grid, median, say
from bench.usual import SCHEMA
from sender.migrate import migrate
from sender.store import PostgresStore

ERRORS_PERCENT = 4.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One way through the campaign.

    Attributes:
        name: what the tables call it.
        kind: ours or usual.
        fillfactor: of the targets' table.
        held: whether another session holds a snapshot all the time.
        processes: how many share the campaign.
        samples: claims to sample in each tenth, or 0 for the whole campaign.
        share: of the rows.
    """

    name: str
    kind: str = "ours"
    fillfactor: int = 45
    held: bool = False
    processes: int = 1
    samples: int = 0
    share: float = 1.0


TRIALS = (
    Trial("ours"),
    Trial("usual", "usual", 100),
    Trial("ours, snapshot held", held=True),
    Trial("usual, snapshot held", "usual", 100, held=True, samples=5),
    Trial("ours, fillfactor 100", fillfactor=100),
    Trial("ours, fillfactor 100, snapshot held", fillfactor=100, held=True),
    Trial("ours, 1 process", share=0.25),
    Trial("ours, 2 processes", processes=2, share=0.25),
    Trial("ours, 4 processes", processes=4, share=0.25),
    Trial("usual, 1 process", "usual", 100, share=0.25),
    Trial("usual, 4 processes", "usual", 100, processes=4, share=0.25),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=1_200_000)
    parser.add_argument("--batch", type=int, default=125, help="rows a claim; 125 is 500/s")
    parser.add_argument("--only", action="append", help="a trial's name; may be repeated")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    trials = [trial for trial in TRIALS if not args.only or trial.name in args.only]
    seen: dict[str, list[dict[str, Any]]] = {trial.name: [] for trial in trials}
    with postgres() as server:
        for repeat in range(args.repeats):
            for trial in trials:
                began = time.monotonic()
                seen[trial.name].append(_run(server, trial, args))
                took = time.monotonic() - began
                say(f"{repeat + 1}/{args.repeats} {trial.name}: {took:.0f} s")
        return {
            "postgresql": server.version,
            "rows": args.rows,
            "rows_a_claim": args.batch,
            "errors_percent": ERRORS_PERCENT,
            "trials": {
                trial.name: {**asdict(trial), **median(seen[trial.name])} for trial in trials
            },
            "ratios": _ratios(seen),
        }


# --- one trial ------------------------------------------------------------------------------------


def _run(server: Server, trial: Trial, args: argparse.Namespace) -> dict[str, Any]:
    rows = int(args.rows * trial.share)
    template = _template(server, trial, rows)
    dsn = server.create("trial", template)
    asked = {
        "dsn": dsn,
        "kind": trial.kind,
        "rows": rows,
        "batch": args.batch,
        "processes": trial.processes,
        "samples": trial.samples,
        "errors_percent": ERRORS_PERCENT,
    }
    build = _build(server, asked) if trial.kind == "ours" else {}
    size_before = _sizes(server)
    with _held(server) if trial.held else nullcontext():
        figures = _drain(server, asked)
        figures["after"] = _after(server)
    _check(server, trial, rows)
    server.drop("trial")
    return {**build, **figures, "before": size_before}


def _template(server: Server, trial: Trial, rows: int) -> str:
    """A database with the rows, made once."""
    name = f"{trial.kind}_{trial.fillfactor}_{rows}"
    with server.connect() as conn:
        if conn.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,)).fetchone():
            return name
    dsn = server.create(name)
    if trial.kind == "ours":
        migrate(dsn)
    with server.connect(name) as conn:
        if trial.kind == "usual":
            conn.execute(SCHEMA)
        conn.execute(f"ALTER TABLE campaign_targets SET (fillfactor = {trial.fillfactor})")
    fill(dsn, rows)
    settle(dsn)
    return name


def _build(server: Server, asked: dict[str, Any]) -> dict[str, float]:
    async def build() -> None:
        async with PostgresStore(_store_config(asked)) as store:
            await store.open_campaign()
            await store.build()

    cpu, wall = family_cpu_s(server.pid), time.perf_counter()
    uvloop.run(build())
    wall, cpu = time.perf_counter() - wall, family_cpu_s(server.pid) - cpu
    return {"build_s": wall, "build_cpu_s": cpu}


@contextmanager
def _held(server: Server) -> Generator[None]:
    """Somebody's long report."""
    with server.connect("trial") as conn, conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        conn.execute("SELECT FROM campaign_targets LIMIT 1")
        yield


def _drain(server: Server, asked: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.drain", json.dumps(asked)]
    workers = [
        subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(asked["processes"])
    ]
    for worker in workers:
        assert worker.stdout
        assert worker.stdout.readline() == "ready\n", "a worker did not start"
    with server.connect("trial") as conn:
        conn.execute("SELECT pg_stat_reset()")
        wal, cpu, began = _wal(conn), family_cpu_s(server.pid), time.perf_counter()
        for worker in workers:
            assert worker.stdin
            worker.stdin.write("go\n")
            worker.stdin.flush()
        told = [json.loads(worker.communicate()[0]) for worker in workers]
        wall, cpu = time.perf_counter() - began, family_cpu_s(server.pid) - cpu
        wal = _wal(conn) - wal
    return _per_row(asked, told, wall=wall, cpu=cpu, wal=wal)


def _wal(conn: Any) -> int:
    return int(conn.execute("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn").fetchone()[0])


def _per_row(
    asked: dict[str, Any], told: list[dict[str, Any]], *, wall: float, cpu: float, wal: int
) -> dict[str, Any]:
    rows = asked["rows"]
    done = sum(one.pop("done") for one in told)
    if done != rows:
        raise SystemExit(f"{done} of {rows} rows were done")
    client_cpu = sum(one.pop("client_cpu_s") for one in told)
    if asked["samples"]:
        # Only the sampled statements were the usual queue's own.
        rows = asked["samples"] * PARTS * asked["batch"]
        return {"statement_cpu_us": _statement_us(told, rows), "statements": told[0]}
    return {
        "wall_us": wall / rows * 1e6,
        "server_cpu_us": cpu / rows * 1e6,
        "client_cpu_us": client_cpu / rows * 1e6,
        "wal_bytes": wal / rows,
        "statement_cpu_us": _statement_us(told, rows),
        "statements": told[0],
    }


def _statement_us(told: list[dict[str, Any]], rows: int) -> dict[str, float]:
    return {
        kind: sum(one[kind]["cpu_s"] for one in told if kind in one) / rows * 1e6
        for kind in told[0]
    }


# --- what is left behind --------------------------------------------------------------------------


def _sizes(server: Server) -> dict[str, float]:
    with server.connect("trial") as conn:
        row = conn.execute(
            "SELECT pg_table_size('campaign_targets'), pg_indexes_size('campaign_targets')"
        ).fetchone()
        assert row
        return {"heap_mb": row[0] / 1e6, "index_mb": row[1] / 1e6}


def _after(server: Server) -> dict[str, float]:
    with server.connect("trial") as conn:
        row = conn.execute(
            """
            SELECT n_dead_tup, n_tup_upd, n_tup_hot_upd, autovacuum_count
            FROM pg_stat_user_tables WHERE relname = 'campaign_targets'
            """
        ).fetchone()
        assert row
        return {
            **_sizes(server),
            "dead_rows": row[0],
            "hot_share": row[2] / max(1, row[1]),
            "autovacuums": row[3],
        }


def _check(server: Server, trial: Trial, rows: int) -> None:
    with server.connect("trial") as conn:
        row = conn.execute(
            "SELECT count(*) FROM campaign_targets WHERE campaign_id = %s AND state = 'sent'",
            (CAMPAIGN,),
        ).fetchone()
    if row != (rows,):
        raise SystemExit(f"{trial.name}: {row} of {rows} rows are sent")


# --- what it comes to -----------------------------------------------------------------------------


def _ratios(seen: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Each inside one round, then the median of the rounds."""
    found: dict[str, float] = {}

    def compare(name: str, above: str, below: str, figure: str) -> None:
        if seen.get(above) and seen.get(below):
            pairs = zip(seen[above], seen[below], strict=True)
            found[name] = median([a[figure] / b[figure] for a, b in pairs])

    compare("server CPU, ours to usual", "ours", "usual", "server_cpu_us")
    compare("WAL, ours to usual", "ours", "usual", "wal_bytes")
    compare("server CPU, ours held to ours", "ours, snapshot held", "ours", "server_cpu_us")
    for n in (2, 4):
        above, below = f"ours, {n} processes", "ours, 1 process"
        compare(f"server CPU, ours, {n} processes to 1", above, below, "server_cpu_us")
    compare(
        "server CPU, usual, 4 processes to 1",
        "usual, 4 processes",
        "usual, 1 process",
        "server_cpu_us",
    )
    whole = {trial.name for trial in TRIALS if trial.share == 1.0}
    for name, runs in seen.items():
        if name not in whole:
            continue
        for figure in ("wall_p99_ms", "cpu_p99_ms", "cpu_p50_ms"):
            parts = [run["statements"]["claim"]["parts"] for run in runs]
            if all(part[-1][figure] and part[0][figure] for part in parts):
                found[f"claim {figure}, last tenth to first, {name}"] = median(
                    [part[-1][figure] / part[0][figure] for part in parts]
                )
    return found


def table(result: dict[str, Any]) -> str:
    head = [
        "", "us a row", "server CPU us", "of it claim + look + finish", "client CPU us",
        "WAL bytes", "heap MB before, after", "index MB", "dead rows", "heap-only",
    ]  # fmt: skip
    rows = [_row(name, run) for name, run in result["trials"].items()]
    claims = _claims(result)
    lines = [*grid(head, rows), "", *claims, *([""] if claims else [])]
    lines += [f"- {name}: {value:.3g}" for name, value in result["ratios"].items()]
    return "\n".join(lines)


def _row(name: str, run: dict[str, Any]) -> list[str]:
    own, before, after = run["statement_cpu_us"], run["before"], run["after"]
    figures = [
        f"{run[key]:.{digits}f}" if key in run else ""
        for key, digits in (
            ("wall_us", 1),
            ("server_cpu_us", 1),
            ("client_cpu_us", 0),
            ("wal_bytes", 0),
        )
    ]
    parts = " + ".join(f"{own[kind]:.1f}" for kind in ("claim", "look", "finish") if kind in own)
    return [
        name,
        *figures[:2],
        parts,
        *figures[2:],
        f"{before['heap_mb']:.0f}, {after['heap_mb']:.0f}",
        f"{after['index_mb']:.0f}",
        f"{after['dead_rows']:,.0f}",
        f"{after['hot_share']:.0%}",
    ]


def _claims(result: dict[str, Any]) -> list[str]:
    shown = {
        name: run["statements"]["claim"]["parts"]
        for name, run in result["trials"].items()
        if run["share"] == 1.0
    }
    if not shown:
        return []
    rows = [
        [str(part + 1), *(_claim(parts[part]) for parts in shown.values())] for part in range(PARTS)
    ]
    title = "A claim, ms, p50 / p99, by tenth of the campaign:"
    return [title, "", *grid(["tenth", *shown], rows)]


def _claim(part: dict[str, float | None]) -> str:
    middle, high = part["wall_p50_ms"], part["wall_p99_ms"]
    return "" if middle is None or high is None else f"{middle:.2f} / {high:.2f}"
