"""What a bench runs against: PostgreSQL, a campaign in it, nginx, and `sender run` itself."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from bench.measure import cpu_s, memory_mib, parent
from sender.dev.postgres import EmbeddedPostgres
from sender.migrate import migrate

ROOT = Path(__file__).parents[1]
CAMPAIGN = "spring"
ANSWER = '{"id":"0123456"}'
_PATIENCE_S = 30.0


# --- PostgreSQL -----------------------------------------------------------------------------------


class Server:
    """A PostgreSQL with its own settings, durable as it comes.

    Attributes:
        pid: of the process that all of its other processes descend from.
    """

    def __init__(self, embedded: EmbeddedPostgres) -> None:
        self._embedded = embedded
        with self.connect() as conn:
            self.pid = parent(conn.info.backend_pid)
            self.version = f"{conn.info.server_version // 10000}.{conn.info.server_version % 100}"

    def dsn(self, database: str = "postgres") -> str:
        return self._embedded.dsn_of(database)

    def connect(self, database: str = "postgres") -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn(database), autocommit=True)

    def create(self, name: str, template: str = "template1") -> str:
        """A database, as a copy of another one; returns its DSN."""
        with self.connect() as conn:
            conn.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY = FILE_COPY").format(
                    sql.Identifier(name), sql.Identifier(template)
                )
            )
        return self.dsn(name)

    def drop(self, name: str) -> None:
        with self.connect() as conn:
            conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@contextmanager
def postgres(settings: Mapping[str, str] | None = None) -> Generator[Server]:
    """A server with stock configuration and `settings`, gone at the end."""
    with EmbeddedPostgres(settings=settings) as embedded:
        yield Server(embedded)


def fill(dsn: str, rows: int, campaign: str = CAMPAIGN) -> None:
    """Put members 1 to `rows` into a campaign."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            """
            INSERT INTO campaign_targets (campaign_id, member_id, email)
            SELECT %s, n, 'member-' || n || '@example.org' FROM generate_series(1, %s) AS n
            """,
            (campaign, rows),
        )


def settle(dsn: str) -> None:
    """What a database does by itself in the hours between the load and the campaign."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("VACUUM (ANALYZE)")
        conn.execute("CHECKPOINT")


def campaign(server: Server, name: str, rows: int) -> str:
    """A migrated database with a campaign of `rows` members; returns its DSN."""
    dsn = server.create(name)
    migrate(dsn)
    fill(dsn, rows)
    settle(dsn)
    return dsn


# --- nginx ----------------------------------------------------------------------------------------

_NGINX = """
{load}
daemon off;
{user}
worker_processes 1;
error_log {home}/error.log crit;
pid {home}/pid;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    keepalive_requests 1000000000;
    client_body_temp_path {home}/body;
    proxy_temp_path {home}/proxy;
    fastcgi_temp_path {home}/fastcgi;
    uwsgi_temp_path {home}/uwsgi;
    scgi_temp_path {home}/scgi;
    split_clients "$msec$connection$connection_requests" $fails {{ {errors}% 1; * 0; }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        default_type application/json;
        location = /mail {{ {body} }}
        location = /status {{ stub_status; }}
    }}
}}
"""
_AT_ONCE = "if ($fails) {{ return 503; }} return 200 '{answer}';"
_DELAYED = "if ($fails) {{ return 503; }} echo_sleep {latency_s}; echo_duplicate 1 '{answer}';"
_ECHO = Path("/usr/lib/nginx/modules/ngx_http_echo_module.so")


class Nginx:
    """A web server that answers every mail, for use as a context manager.

    Attributes:
        url: where mails are posted.
    """

    def __init__(self, *, latency_s: float = 0.0, errors_percent: float = 0.0) -> None:
        """Prepare.

        Args:
            latency_s: seconds before a 200; needs nginx's echo module (Debian's nginx-light).
            errors_percent: share of requests that get 503, at once.
        """
        if not shutil.which("nginx") or (latency_s and not _ECHO.exists()):
            raise SystemExit("nginx with its echo module is needed: apt-get install nginx-light")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/mail"
        self._home = Path(tempfile.mkdtemp(prefix="sender-nginx-"))
        body = (_DELAYED if latency_s else _AT_ONCE).format(latency_s=latency_s, answer=ANSWER)
        (self._home / "nginx.conf").write_text(
            _NGINX.format(
                load=f"load_module {_ECHO};" if latency_s else "",
                user="user root;" if os.geteuid() == 0 else "",
                home=self._home,
                errors=max(errors_percent, 0.01),
                port=self._port,
                body=body,
            )
        )

    def __enter__(self) -> Self:
        conf = self._home / "nginx.conf"
        self._process = subprocess.Popen(
            ["nginx", "-p", self._home, "-e", self._home / "error.log", "-c", conf]
        )
        give_up_at = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self.requests()
            except OSError:
                if self._process.poll() is not None or time.monotonic() > give_up_at:
                    raise SystemExit("nginx did not start") from None
                time.sleep(0.02)
            else:
                return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)

    @property
    def pids(self) -> list[int]:
        """Its processes."""
        own = self._process.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        return [own, *map(int, children)]

    def requests(self) -> int:
        """How many requests it has had, this one included."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=5)
        connection.request("GET", "/status")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return int(lines[2].split()[2])


# --- the fake provider ----------------------------------------------------------------------------


def ask(url: str, path: str) -> Any:
    """One control call of the fake provider."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("GET", path)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


# --- sender run -----------------------------------------------------------------------------------


class Run:
    """`sender run` in a process of its own, for use as a context manager: killed at the end of it.

    Attributes:
        began_at: monotonic time of its start.
        pid: its process.
    """

    def __init__(
        self,
        settings: Mapping[str, str],
        *,
        paths: tuple[Path, ...] = (),
        prefix: tuple[str, ...] = (),
    ) -> None:
        """Start it.

        Args:
            settings: its environment; nothing else reaches it.
            paths: where its modules are looked for first.
            prefix: a command that starts it.
        """
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        python_path = os.pathsep.join(map(str, (*paths, ROOT)))
        self.began_at = time.monotonic()
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-P", "-m", "sender", "run"],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": python_path, **settings},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.peak_mib = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def cpu_s(self) -> float:
        """CPU seconds it has used."""
        return cpu_s(self.pid)

    def look(self) -> bool:
        """See how much memory it takes; False once it has ended."""
        if self._process.poll() is not None:
            return False
        try:
            self.peak_mib = memory_mib(self.pid)["peak"]
        except (FileNotFoundError, KeyError):
            return False
        return True

    def stop(self) -> None:
        """SIGTERM, and wait for its end."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(_PATIENCE_S)

    def wait(self, within_s: float) -> int:
        """Wait for its end, watching its memory; returns the exit code."""
        until = time.monotonic() + within_s
        while self.look():
            if time.monotonic() > until:
                raise SystemExit(f"sender run did not end:\n{self.tail()}")
            time.sleep(0.05)
        return self._process.wait()

    def tail(self, *, everything: bool = False) -> str:
        """What it printed: its end, or all of it."""
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        return text if everything else text[-2000:]


def run_settings(dsn: str, url: str, rate_per_s: float, **more: object) -> dict[str, str]:
    """The environment of a `sender run` whose retries come back soon."""
    return {
        "DB_DSN": dsn,
        "CAMPAIGN_ID": CAMPAIGN,
        "MAIL_URL": url,
        "MAIL_RATE_PER_S": str(rate_per_s),
        "MAIL_API_KEY": "k",
        "LOG_FORMAT": "json",
        "RETRY_BACKOFF_BASE_S": "1",
        "RETRY_BACKOFF_CAP_S": "5",
        **{name: str(value) for name, value in more.items()},
    }
