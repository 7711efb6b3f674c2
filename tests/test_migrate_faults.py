"""`sender migrate` beside an application, beside itself, and killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import Connection
from test_migrate import ALL, BARE, catalogue, run

from sender import migrate as module
from sender.errors import MigrationError
from sender.migrate import migrate

pytestmark = pytest.mark.slow

SENT = "SELECT count(*) FROM campaign_targets WHERE state = 'sent'"


@pytest.fixture
def api_dsn(bare_dsn: str) -> str:
    """The table people have: 10 members, all sent."""
    fill = "INSERT INTO campaign_targets SELECT 'c', n, 'a', now() FROM generate_series(1, 10) AS n"
    run(bare_dsn, BARE, fill)
    return bare_dsn


@pytest.fixture
def api(api_dsn: str) -> Iterator[Connection]:
    """The application; its statements fail rather than wait for ever."""
    with psycopg.connect(api_dsn, autocommit=True, application_name="api") as conn:
        conn.execute("SET statement_timeout = '10s'")
        yield conn


class Migration:
    """A migration in a thread of its own, and what it said."""

    def __init__(self, dsn: str) -> None:
        self.said: list[str] = []
        self._pool = ThreadPoolExecutor(1)
        self.result: Future[list[str]] = self._pool.submit(
            migrate, dsn, tell=self.said.append, patience_s=20
        )

    def has_said(self, text: str) -> bool:
        return any(text in line for line in self.said)

    def end(self) -> list[str]:
        try:
            return self.result.result(30)
        finally:
            self._pool.shutdown(wait=False)


def wait_until(is_true: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


@contextmanager
def holding(dsn: str, statement: str) -> Iterator[None]:
    """Another connection of the application, inside a transaction that did `statement`."""
    with psycopg.connect(dsn, application_name="slow api") as conn:
        conn.execute(statement.encode())
        yield


def migrated_to(dsn: str, version: int) -> None:
    for file in module._files()[:version]:
        for step in file.text.split(module._STEP):
            with psycopg.connect(dsn, autocommit=True) as conn:
                conn.execute(step.encode())


def waiting(api: Connection, mode: str) -> object:
    """The migration's process if it waits for `mode` on the table."""
    row = api.execute(
        "SELECT pid FROM pg_locks WHERE NOT granted AND mode = %s"
        " AND relation = 'campaign_targets'::regclass",
        [mode],
    ).fetchone()
    return row and row[0]


def building(api: Connection) -> int | None:
    """The process that builds an index and waits for an old transaction to end."""
    row = api.execute(
        "SELECT pid FROM pg_stat_progress_create_index WHERE phase LIKE 'waiting for%'"
    ).fetchone()
    return row and row[0]


def test_it_gives_way_to_a_long_transaction_and_comes_again(api_dsn: str, api: Connection) -> None:
    with holding(api_dsn, "SELECT count(*) FROM campaign_targets"):
        migration = Migration(api_dsn)
        for _ in range(2):
            wait_until(lambda: waiting(api, "AccessExclusiveLock"))
            # Queues behind the migration, which stands behind a transaction that does not end: that
            # this returns at all means that the migration went away.
            api.execute("UPDATE campaign_targets SET email = 'b' WHERE member_id = 1")
        wait_until(lambda: migration.has_said("slow api"))
        assert not migration.result.done()
    assert migration.end() == ALL


def test_the_application_waits_no_longer_than_the_lock_timeout_lets_it(
    api_dsn: str, api: Connection
) -> None:
    # The server tells who waited how long; a timer of 80 ms is late on a busy machine, as the same
    # wait beside it shows.
    api.execute("SET client_min_messages = log; SET log_lock_waits = on; SET deadlock_timeout = 1")
    waits: list[float] = []
    api.add_notice_handler(
        lambda notice: waits.extend(
            float(ms)
            for ms in re.findall(r"acquired .* after ([\d.]+) ms", notice.message_primary or "")
        )
    )
    with holding(api_dsn, "SELECT count(*) FROM campaign_targets"):
        same = wait_of("80ms", api_dsn)
        migration = Migration(api_dsn)
        while len(waits) < 3:
            wait_until(lambda: waiting(api, "AccessExclusiveLock"))
            api.execute("UPDATE campaign_targets SET email = 'b' WHERE member_id = 1")
    assert migration.end() == ALL
    # The wait after this one in the file, for vacuum, is of 5 s.
    assert max(waits) < 10 * same


def wait_of(lock_timeout: str, dsn: str) -> float:
    """Milliseconds that somebody with this lock_timeout waits for a table that is in use."""
    with psycopg.connect(dsn, autocommit=True, options=f"-c lock_timeout={lock_timeout}") as conn:
        began = time.monotonic()
        with conn.transaction(), pytest.raises(psycopg.errors.LockNotAvailable):
            conn.execute("LOCK TABLE campaign_targets")
        return (time.monotonic() - began) * 1e3


def test_it_waits_for_vacuum_without_holding_up_the_application(
    api_dsn: str, api: Connection
) -> None:
    with holding(api_dsn, "LOCK TABLE campaign_targets IN SHARE UPDATE EXCLUSIVE MODE"):
        migration = Migration(api_dsn)
        wait_until(lambda: waiting(api, "ShareUpdateExclusiveLock"))
        api.execute("UPDATE campaign_targets SET email = 'b' WHERE member_id = 1")
        # Longer than it would stand in the application's way.
        longest = "SELECT max(clock_timestamp() - waitstart) > interval '0.2 s' FROM pg_locks"
        wait_until(lambda: api.execute(longest).fetchone() == (True,))
    assert migration.end() == ALL
    assert not migration.has_said("gave way")


def test_the_command_says_that_it_gave_way_and_nothing_else(api_dsn: str) -> None:
    command = [sys.executable, "-m", "sender", "migrate"]
    env = {**os.environ, "DB_DSN": api_dsn}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as migration:
        assert migration.stdout is not None
        with holding(api_dsn, "SELECT count(*) FROM campaign_targets"):
            lines = [migration.stdout.readline() for _ in range(3)]
        migration.stdout.read()
    assert migration.returncode == 0
    assert lines[0] == "0001 campaign_targets: begins\n"
    assert [line.partition("; held")[0] for line in lines[1:]] == [
        "0001 campaign_targets: gave way"
    ] * 2


def test_it_says_who_was_in_the_way_when_its_patience_ends(api_dsn: str) -> None:
    with (
        holding(api_dsn, "SELECT count(*) FROM campaign_targets"),
        pytest.raises(MigrationError, match=r"0001 campaign_targets: .*lock timeout.*slow api"),
    ):
        migrate(api_dsn, patience_s=0.1)
    assert migrate(api_dsn) == ALL


def test_the_back_fill_passes_over_rows_in_use_and_comes_back(
    api_dsn: str, api: Connection
) -> None:
    migrated_to(api_dsn, 4)
    with holding(api_dsn, "SELECT FROM campaign_targets WHERE member_id = 5 FOR UPDATE"):
        migration = Migration(api_dsn)
        wait_until(lambda: api.execute(SENT).fetchone() == (9,))
        assert not migration.result.done()
    assert migration.end() == ALL[4:]
    assert run(api_dsn, SENT) == [10]


def test_two_at_once_apply_each_migration_once(api_dsn: str, dsn: str) -> None:
    with holding(api_dsn, "SELECT count(*) FROM campaign_targets"):
        both = [Migration(api_dsn), Migration(api_dsn)]
        wait_until(lambda: all(migration.has_said("gave way") for migration in both))
    applied = [name for migration in both for name in migration.end()]
    # 0003 and 0005 are no transactions: both may take part.
    assert sorted(set(applied)) == ALL
    assert all(applied.count(ALL[place]) == 1 for place in (0, 1, 3))
    assert catalogue(api_dsn) == catalogue(dsn)
    assert run(api_dsn, SENT) == [10]


def test_what_another_migration_made_meanwhile_is_no_strangers(
    api_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = module.check_ground

    def check_late(conn: Connection, applied: set[int]) -> None:
        monkeypatch.undo()
        assert migrate(api_dsn) == ALL
        check(conn, applied)

    monkeypatch.setattr(module, "check_ground", check_late)
    assert migrate(api_dsn) == []


def test_an_index_whose_build_died_is_built_again(api_dsn: str, api: Connection, dsn: str) -> None:
    migrated_to(api_dsn, 2)
    with holding(api_dsn, "UPDATE campaign_targets SET email = 'b' WHERE member_id = 1"):
        migration = Migration(api_dsn)
        wait_until(lambda: building(api))
        api.execute("SELECT pg_terminate_backend(%s)", [building(api)])
        # To drop what is left of it takes the lock that the application queues behind.
        wait_until(lambda: migration.has_said("gave way"))
    assert migration.end() == ALL[2:]
    assert catalogue(api_dsn) == catalogue(dsn)


def test_a_build_that_outlives_its_client_is_waited_for(
    api_dsn: str, api: Connection, dsn: str
) -> None:
    migrated_to(api_dsn, 2)
    program = "import sys; from sender.migrate import migrate; migrate(sys.argv[1])"
    with holding(api_dsn, "UPDATE campaign_targets SET email = 'b' WHERE member_id = 1"):
        with subprocess.Popen([sys.executable, "-c", program, api_dsn]) as killed:
            wait_until(lambda: building(api))
            killed.send_signal(signal.SIGKILL)
        first = building(api)
        migration = Migration(api_dsn)
        wait_until(lambda: waiting(api, "ShareUpdateExclusiveLock"))
        assert building(api) == first
    assert migration.end() == ALL[2:]
    assert catalogue(api_dsn) == catalogue(dsn)


class Killed(BaseException):
    """Stands for kill -9: nothing of ours runs after it, and the server sees a cut connection."""


def test_killed_before_and_after_every_step_it_still_arrives(
    api_dsn: str, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [
        (file, step, kill_first)
        for file in module._files()
        for step in file.text.split(module._STEP)
        for kill_first in (True, False)
    ]
    execute = Connection.execute

    for _, fatal_step, kill_first in steps:

        def execute_or_die(conn: Connection, query: object, *args: object, **kwargs: object):
            is_fatal = isinstance(query, psycopg.sql.SQL) and query.as_string() == fatal_step  # noqa: B023
            if is_fatal and not kill_first:  # noqa: B023
                execute(conn, query, *args, **kwargs)
            if is_fatal:
                conn.pgconn.finish()
                raise Killed
            return execute(conn, query, *args, **kwargs)

        monkeypatch.setattr(Connection, "execute", execute_or_die)
        with pytest.raises(Killed):
            migrate(api_dsn)
    monkeypatch.undo()
    assert migrate(api_dsn) == []
    assert catalogue(api_dsn) == catalogue(dsn)
    assert run(api_dsn, SENT) == [10]


def test_kill_9_at_each_line_it_says_and_the_next_goes_on(api_dsn: str, dsn: str) -> None:
    command = [sys.executable, "-m", "sender", "migrate"]
    env = {**os.environ, "DB_DSN": api_dsn}
    said: list[str] = []
    while not said or "nothing to do" not in said[-1]:
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as migration:
            assert migration.stdout is not None
            for line in migration.stdout:
                if line not in said:
                    said.append(line)
                    migration.kill()
                    break
    assert len(said) > len(ALL)
    assert catalogue(api_dsn) == catalogue(dsn)
    assert run(api_dsn, SENT) == [10]


def test_a_back_fill_that_died_half_way_goes_on(dsn: str) -> None:
    run(
        dsn,
        "DELETE FROM sender_migrations WHERE version = 5",
        "INSERT INTO campaign_targets (campaign_id, member_id, sent_at)"
        " SELECT 'c', n, now() FROM generate_series(1, 6000) AS n",
        # The second slice meets an error; what the first wrote is there.
        "ALTER TABLE campaign_targets"
        " ADD CONSTRAINT trap CHECK (member_id <> 3000 OR state <> 'sent')",
    )
    with pytest.raises(MigrationError, match=r"0005 backfill_sent: .*trap"):
        migrate(dsn)
    assert run(dsn, SENT) == [2000]
    run(dsn, "ALTER TABLE campaign_targets DROP CONSTRAINT trap")
    assert migrate(dsn) == ALL[4:]
    assert run(dsn, SENT) == [6000]


def test_the_bench_of_it_measures(tmp_path: Path) -> None:
    short = ["--rows=3000", "--repeats=1", "--open-s=3", "--baseline-s=1", "--readers=1"]
    ran = subprocess.run(
        [sys.executable, "-m", "bench", "migration", "--json", *short],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout)["result"]
    assert found["migration"]["tries_lost"] > 0
    assert found["application"]["without"]["read"]["longest_lock_ms"] == 0
    assert found["application"]["migrating"]["read"]["longest_lock_ms"] > 0
    assert found["table"]["first campaign"]["rows_done"] > 2000
    kept = tmp_path / "kept.json"
    kept.write_text(ran.stdout)
    show = [sys.executable, "-m", "bench", "show", str(kept)]
    shown = subprocess.run(
        show, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60, check=True
    )
    assert "longest wait of the application for a lock of ours" in shown.stdout


def test_a_lost_connection_is_made_again(api_dsn: str, api: Connection) -> None:
    with holding(api_dsn, "LOCK TABLE campaign_targets IN SHARE UPDATE EXCLUSIVE MODE"):
        migration = Migration(api_dsn)
        wait_until(lambda: waiting(api, "ShareUpdateExclusiveLock"))
        api.execute("SELECT pg_terminate_backend(%s)", [waiting(api, "ShareUpdateExclusiveLock")])
        wait_until(lambda: waiting(api, "ShareUpdateExclusiveLock"))
    assert migration.end() == ALL
