"""PgBouncer in transaction mode: each transaction of a client may get another server session."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, LiteralString, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row

# Fewer server sessions than two runs have connections, so that they must be shared; each is given
# up after a while, so that nobody keeps the same one.
POOL_SIZE = 4
_SETTINGS = {
    "listen_addr": "127.0.0.1",
    "unix_socket_dir": "",
    "auth_type": "trust",
    "admin_users": "postgres",
    "pool_mode": "transaction",
    "default_pool_size": POOL_SIZE,
    "max_db_connections": POOL_SIZE,
    "max_client_conn": 500,
    "server_lifetime": 3,
    "server_login_retry": 0.2,
    "log_connections": 0,
    "log_disconnections": 0,
}
_USERS = ("postgres", "sender_owner", "sender", "sender_reader", "member_api")
_PATIENCE_S = 30.0


def find_pgbouncer() -> str | None:
    """The program, also where `sbin` is not in the path."""
    return shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


class Bouncer:
    """A PgBouncer before a server on this machine, for use as a context manager.

    Attributes:
        port: on 127.0.0.1; kept over a restart.
    """

    def __init__(self, program: str, server_port: int) -> None:
        self._program = program
        self._home = Path(tempfile.mkdtemp(prefix="sender-bouncer-"))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        users = self._home / "users"
        users.write_text("".join(f'"{user}" ""\n' for user in _USERS))
        own = {"listen_port": self.port, "auth_file": users, "logfile": self._home / "log"}
        settings = "".join(f"{name} = {value}\n" for name, value in (_SETTINGS | own).items())
        (self._home / "ini").write_text(
            f"[databases]\n* = host=127.0.0.1 port={server_port}\n[pgbouncer]\n{settings}"
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        shutil.rmtree(self._home, ignore_errors=True)

    def start(self) -> None:
        """Start it and wait until it listens."""
        # It refuses to be root.
        user = pwd.getpwnam("nobody") if os.getuid() == 0 else None
        if user is not None:
            os.chown(self._home, user.pw_uid, user.pw_gid)
        self._process = subprocess.Popen(
            [self._program, "--quiet", self._home / "ini"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=user and user.pw_uid,
            group=user and user.pw_gid,
            extra_groups=user and [],
        )
        give_up_at = time.monotonic() + _PATIENCE_S
        while self._process.poll() is None and time.monotonic() < give_up_at:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.01)
        raise AssertionError(f"PgBouncer did not start:\n{(self._home / 'log').read_text()}")

    def kill(self) -> None:
        """Kill it: every client and every server loses its connection."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def to(self, dsn: str, user: str) -> str:
        """The database of `dsn` by way of this, as a role."""
        return make_conninfo(dsn, host="127.0.0.1", port=self.port, user=user)

    async def tell(self, command: LiteralString) -> list[dict[str, Any]]:
        """A command of its console, and the answer."""
        where = make_conninfo("", host="127.0.0.1", port=self.port, user="postgres")
        async with await psycopg.AsyncConnection.connect(
            where, dbname="pgbouncer", autocommit=True, row_factory=dict_row
        ) as console:
            cursor = await console.execute(command)
            return await cursor.fetchall() if cursor.description else []

    async def of(self, command: LiteralString, dsn: str) -> list[dict[str, Any]]:
        """The lines of an answer that are about the database of `dsn`."""
        name = conninfo_to_dict(dsn)["dbname"]
        return [line for line in await self.tell(command) if line["database"] == name]
