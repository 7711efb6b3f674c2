"""What `sender migrate` costs an application that goes on, and what the table is afterwards.

The application's table as it was before us, on full pages, a part of it sent by the old program.
Readers and opt-out writers go on; a transaction that has read and written the table stays open
for a minute, and `sender migrate` starts beside it. Then a campaign goes through the table, which
is vacuumed; then another one is loaded and goes through, to tell what grows once from what grows
each time. The server has stock settings. Campaigns go at the database's full speed, not a
provider's: autovacuum has a minute where it would have forty.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg

from bench.database import ERRORS_PERCENT, _after, _build, _drain, _sizes
from bench.ground import CAMPAIGN, ROOT, Server, postgres, settle
from bench.measure import grid, median, percentile, say

DATABASE = "trial"  # the name that bench.database looks for
SECOND = "summer"
OLD_PROGRAM = "old-program"
OLD_ROWS = 200
ALLOWED_MS = 100.0
_SETTLE_S = 2.0
_BATCH = 125  # 500/s
_KINDS = ("read", "opt out")
_SPANS = {"without": "no migration", "migrating": "while migrating"}

# opted_out_at is the member database's own: whoever writes it has it before we come.
_TABLE = """
CREATE TABLE campaign_targets (
    campaign_id text, member_id bigint, email text, sent_at timestamptz, opted_out_at timestamptz,
    PRIMARY KEY (campaign_id, member_id)
)
"""
_FILL = """
INSERT INTO campaign_targets (campaign_id, member_id, email, sent_at)
SELECT %(campaign)s, n, 'member-' || n || '@example.org',
       CASE WHEN n > %(rows)s - %(sent)s THEN now() END
FROM generate_series(1, %(rows)s) AS n
"""
_OPEN = """
SELECT count(*) FROM campaign_targets
WHERE campaign_id = %s AND sent_at IS NULL AND opted_out_at IS NULL
"""
_TOUCH = "UPDATE campaign_targets SET email = email WHERE campaign_id = %s AND member_id = 1"
# What the program before us does: reads what is not sent, and says of each that it is.
_OLD_INSERT = (
    "INSERT INTO campaign_targets (campaign_id, member_id, email)"
    " SELECT %s, n, 'm@example.org' FROM generate_series(1, %s) AS n"
)
_OLD_SELECT = (
    "SELECT campaign_id, member_id, email, sent_at FROM campaign_targets"
    " WHERE campaign_id = %s AND sent_at IS NULL"
)
_OLD_UPDATE = (
    "UPDATE campaign_targets SET sent_at = now() WHERE campaign_id = %s AND member_id = %s"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=1_200_000)
    parser.add_argument("--sent", type=float, default=0.1, help="share the old program has sent")
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--writers", type=int, default=2)
    parser.add_argument("--baseline-s", type=float, default=60, help="without a migration")
    parser.add_argument("--open-s", type=float, default=60, help="how long a transaction is open")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with postgres() as server:
        runs = [_run(server, args) for _ in range(args.repeats)]
        return {
            "postgresql": server.version,
            "rows": args.rows,
            "sent_by_the_old_program": int(args.rows * args.sent),
            "open_s": args.open_s,
            "allowed_ms": ALLOWED_MS,
            **median(runs),
        }


def _run(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    dsn = server.create(DATABASE)
    rows, sent = args.rows, int(args.rows * args.sent)
    with server.connect(DATABASE) as conn:
        conn.execute(_TABLE)
        conn.execute(_FILL, {"campaign": CAMPAIGN, "rows": rows, "sent": sent})
    settle(dsn)
    say(f"{rows:,} rows are there")
    sizes = {"before": _sizes(server)}
    old_before = _old_program(server)
    application, migration = _migrate_beside(dsn, args)
    say(f"migrated in {migration['total_s']:.1f} s, {migration['tries_lost']} tries lost")
    sizes["migrated"] = _after(server)
    settle(dsn)  # what autovacuum is at by now; the old program's statements are held side by side
    old_after = _old_program(server)
    sizes |= _two_campaigns(server, dsn, rows)
    server.drop(DATABASE)
    return {
        "application": application,
        "migration": migration,
        "table": sizes,
        "old_program_ms": {"before": old_before, "after": old_after},
    }


# --- the migration --------------------------------------------------------------------------------


def _migrate_beside(
    dsn: str, args: argparse.Namespace
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    with _application(dsn, args) as application:
        time.sleep(_SETTLE_S)
        baseline = (time.monotonic(), time.monotonic() + args.baseline_s)
        time.sleep(args.baseline_s)
        with _open_transaction(dsn, args.open_s) as met:
            began = time.monotonic()
            lines = _sender_migrate(dsn, met)
            ended = time.monotonic()
    samples = json.loads(application.told)
    return {
        "without": _waits(samples, *baseline),
        "migrating": _waits(samples, began, ended),
    }, _by_file(lines, began, ended)


@dataclass
class _Application:
    told: str = field(default="{}")


@contextmanager
def _application(dsn: str, args: argparse.Namespace) -> Generator[_Application]:
    asked = {"dsn": dsn, "rows": args.rows, "readers": args.readers, "writers": args.writers}
    command = [sys.executable, "-m", "bench.application", json.dumps(asked)]
    application = _Application()
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        if process.stdout.readline() != "ready\n":
            raise SystemExit("the application did not start")
        try:
            yield application
            application.told = process.communicate("stop\n")[0]
        finally:
            process.kill()
    if process.returncode:
        raise SystemExit("the application failed: its statements must go on while we migrate")


@contextmanager
def _open_transaction(dsn: str, for_s: float) -> Generator[threading.Event]:
    """Somebody's transaction that has read and written the table; it ends `for_s` after it is met.

    Yields:
        What is to be set when the migration begins.
    """
    begun, met, over = (threading.Event() for _ in range(3))

    def stay() -> None:
        with psycopg.connect(dsn, application_name="report") as conn:
            conn.execute(_TOUCH, (CAMPAIGN,))
            conn.execute("SELECT count(*) FROM campaign_targets")
            begun.set()
            met.wait()
            over.wait(for_s)

    thread = threading.Thread(target=stay)
    thread.start()
    begun.wait()
    try:
        yield met
    finally:
        met.set()
        over.set()
        thread.join()


def _sender_migrate(dsn: str, begun: threading.Event) -> list[tuple[float, str]]:
    """What it says, each line with its time."""
    with subprocess.Popen(
        [sys.executable, "-m", "sender", "migrate"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "DB_DSN": dsn},
        text=True,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout
        lines: list[tuple[float, str]] = []
        for line in process.stdout:
            lines.append((time.monotonic(), line.rstrip("\n")))
            begun.set()
    if process.returncode:
        raise SystemExit("\n".join(line for _, line in lines))
    return lines


def _by_file(lines: list[tuple[float, str]], began: float, ended: float) -> dict[str, Any]:
    """How long each file took, waiting included, and how often it gave way."""
    begins = {line.partition(":")[0]: at for at, line in lines if line.endswith(": begins")}
    files = {
        name: at - begins[name]
        for at, line in lines
        for name in [line.partition(":")[0]]
        if line.endswith(": done")
    }
    return {
        "total_s": ended - began,
        "tries_lost": sum("gave way" in line for _, line in lines),
        "file_s": files,
    }


def _waits(
    samples: Mapping[str, Mapping[str, list[float]]], began: float, ended: float
) -> dict[str, dict[str, float]]:
    """What the application's statements took that were under way in a span of time."""
    return {kind: _of_kind(samples[kind], began, ended) for kind in _KINDS}


def _of_kind(one: Mapping[str, list[float]], began: float, ended: float) -> dict[str, float]:
    rows = zip(one["at"], one["ms"], one["lock_ms"], strict=True)
    inside = [(ms, lock) for at, ms, lock in rows if at + ms / 1e3 >= began and at <= ended]
    took = [ms for ms, _ in inside]
    locks = [lock for _, lock in inside if lock]
    return {
        "statements": len(inside),
        "p50_ms": percentile(took, 0.5),
        "p99_ms": percentile(took, 0.99),
        "longest_ms": max(took),
        "waited_for_a_lock": len(locks),
        "longest_lock_ms": max(locks, default=0.0),
        "longest_else_ms": max(ms - lock for ms, lock in inside),
    }


# --- the old program ------------------------------------------------------------------------------


def _old_program(server: Server) -> dict[str, float]:
    """Its three statements on rows of their own, which are gone afterwards; ms, updates' median."""
    with server.connect(DATABASE) as conn:
        began = time.perf_counter()
        conn.execute(_OLD_INSERT, (OLD_PROGRAM, OLD_ROWS))
        inserted = time.perf_counter()
        found = conn.execute(_OLD_SELECT, (OLD_PROGRAM,)).fetchall()
        selected = time.perf_counter()
        updates = [_old_update(conn, member) for _, member, *_ in found]
        conn.execute("DELETE FROM campaign_targets WHERE campaign_id = %s", (OLD_PROGRAM,))
    if len(updates) != OLD_ROWS:
        raise SystemExit("the old program does not find its rows")
    return {
        "insert of 200": (inserted - began) * 1e3,
        "select of 200": (selected - inserted) * 1e3,
        "update of one": percentile(updates, 0.5),
    }


def _old_update(conn: psycopg.Connection[Any], member: int) -> float:
    began = time.perf_counter()
    if conn.execute(_OLD_UPDATE, (OLD_PROGRAM, member)).rowcount != 1:
        raise SystemExit("the old program's update does not take")
    return (time.perf_counter() - began) * 1e3


# --- what a campaign leaves -----------------------------------------------------------------------


def _two_campaigns(server: Server, dsn: str, rows: int) -> dict[str, dict[str, float]]:
    """The rows that are there, then as many that were loaded after the migration."""
    found = {"first campaign": _campaign(server, dsn, CAMPAIGN), "vacuumed": _vacuum(server)}
    with server.connect(DATABASE) as conn:
        conn.execute(_FILL, {"campaign": SECOND, "rows": rows, "sent": 0})
    settle(dsn)
    found["second loaded"] = _after(server)
    found["second campaign"] = _campaign(server, dsn, SECOND)
    found["vacuumed again"] = _vacuum(server)
    return found


def _campaign(server: Server, dsn: str, campaign: str) -> dict[str, float]:
    with server.connect(DATABASE) as conn:
        row = conn.execute(_OPEN, (campaign,)).fetchone()
        assert row
    asked = {
        "dsn": dsn,
        "kind": "ours",
        "campaign": campaign,
        "rows": row[0],
        "batch": _BATCH,
        "processes": 1,
        "samples": 0,
        "errors_percent": ERRORS_PERCENT,
    }
    _build(server, asked)
    cost = _drain(server, asked)
    say(f"{campaign}: {row[0]:,} rows in {cost['wall_us'] * row[0] / 1e6:.0f} s")
    return {"rows_done": row[0], "campaign_s": cost["wall_us"] * row[0] / 1e6, **_after(server)}


def _vacuum(server: Server) -> dict[str, float]:
    with server.connect(DATABASE) as conn:
        began = time.perf_counter()
        conn.execute("VACUUM campaign_targets")
        took = time.perf_counter() - began
    return {"vacuum_s": took, **_after(server)}


# --- what it comes to -----------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    head = ["", "statements", "p50 ms", "p99 ms", "longest ms"]
    head += ["waited for a lock", "longest such wait ms", "longest without it ms"]
    waits = [
        _wait(f"{kind}, {_SPANS[span]}", one)
        for span, kinds in result["application"].items()
        for kind, one in kinds.items()
    ]
    sizes = ["", "table MB", "indexes MB", "dead rows", "heap-only", "autovacuums", "took s"]
    old = ["the old program, ms", *result["old_program_ms"]["before"]]
    parts = [
        [_setting(result)],
        grid(head, waits),
        _migration_lines(result),
        grid(sizes, [_size(name, one) for name, one in result["table"].items()]),
        _growth_lines(result["table"]),
        grid(old, [_old(when, one) for when, one in result["old_program_ms"].items()]),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _setting(result: dict[str, Any]) -> str:
    return (
        f"{result['rows']:,} rows, {result['sent_by_the_old_program']:,} of them sent before; "
        f"a transaction open for {result['open_s']:g} s; PostgreSQL {result['postgresql']}."
    )


def _old(when: str, one: dict[str, float]) -> list[str]:
    return [f"{when} the migration", *(f"{ms:.2f}" for ms in one.values())]


def _wait(name: str, one: dict[str, float]) -> list[str]:
    return [
        name,
        f"{one['statements']:,.0f}",
        *(f"{one[key]:.1f}" for key in ("p50_ms", "p99_ms", "longest_ms")),
        f"{one['waited_for_a_lock']:.0f}",
        f"{one['longest_lock_ms']:.1f}",
        f"{one['longest_else_ms']:.1f}",
    ]


def _migration_lines(result: dict[str, Any]) -> list[str]:
    migration, allowed = result["migration"], result["allowed_ms"]
    longest = max(one["longest_lock_ms"] for one in result["application"]["migrating"].values())
    verdict = "kept" if longest <= allowed else "BROKEN"
    waited = f"longest wait of the application for a lock of ours: {longest:.1f} ms"
    took = f"{migration['total_s']:.1f} s in all, {migration['tries_lost']:.0f} tries lost"
    files = ", ".join(f"{name} {took_s:.1f} s" for name, took_s in migration["file_s"].items())
    return [f"- {waited} of {allowed:g} allowed: {verdict}", f"- {took}; waits included: {files}"]


def _size(name: str, one: dict[str, float]) -> list[str]:
    took = one.get("campaign_s", one.get("vacuum_s"))
    return [
        name,
        f"{one['heap_mb']:.0f}",
        f"{one['index_mb']:.0f}",
        *(
            f"{one[key]:{form}}" if key in one else ""
            for key, form in (("dead_rows", ",.0f"), ("hot_share", ".0%"), ("autovacuums", ".0f"))
        ),
        "" if took is None else f"{took:.1f}",
    ]


def _growth_lines(sizes: dict[str, dict[str, float]]) -> list[str]:
    lines: list[str] = []
    for name, since in (("first campaign", "migrated"), ("second campaign", "second loaded")):
        heap, index = (sizes[name][key] - sizes[since][key] for key in ("heap_mb", "index_mb"))
        share = heap / sizes[since]["heap_mb"]
        lines.append(
            f"- the {name} made the table {heap:.0f} MB larger ({share:.0%}), "
            f"its indexes {index:.0f} MB, over {sizes[name]['rows_done']:,.0f} rows"
        )
    return lines
