"""Connections: what a failure means, and how a pooler shows itself."""

import asyncio
import struct
from dataclasses import dataclass

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.errors import lookup
from psycopg_pool import PoolTimeout

from sender.database import Database, _configure, connect, conninfo, describe, is_transient
from sender.errors import ConnectionRefused, DatabaseUnavailable


@pytest.mark.parametrize(
    "state",
    ["08006", "40P01", "40001", "53300", "55P03", "57014", "57P01", "57P03", "25006", "58030"],
)
def test_what_time_can_mend_is_tried_again(state):
    assert is_transient(lookup(state)())


@pytest.mark.parametrize("state", ["42703", "42P01", "42501", "23505", "22P02", "28P01"])
def test_what_time_cannot_mend_is_not(state):
    assert not is_transient(lookup(state)())


@pytest.mark.parametrize(
    "error", [psycopg.OperationalError("cut"), PoolTimeout("none"), TimeoutError("deaf")]
)
def test_an_error_without_a_code_is_the_connections(error):
    assert is_transient(error)


def test_a_log_gets_the_kind_and_never_the_text():
    assert describe(lookup("40P01")("a@example.com")) == "DeadlockDetected 40P01"
    assert describe(psycopg.OperationalError("password=secret")) == "OperationalError"


@dataclass
class Answering:
    """A connection whose server process says who it is."""

    announced: int
    answers: int
    prepare_threshold: int | None = 5

    @property
    def info(self):
        return self

    @property
    def backend_pid(self):
        return self.announced

    async def execute(self, _):
        return self

    async def fetchone(self):
        return (self.answers,)


async def test_behind_a_pooler_nothing_is_prepared():
    direct, pooled = Answering(7, 7), Answering(7, 8)
    await _configure(direct)
    await _configure(pooled)
    assert (direct.prepare_threshold, pooled.prepare_threshold) == (5, None)


def test_the_given_connection_settings_win():
    given = psycopg.conninfo.conninfo_to_dict(conninfo("host=db connect_timeout=1"))
    assert given["connect_timeout"] == "1"
    assert given["keepalives_idle"] == "10"


async def test_nobody_there_is_one_clear_line():
    with pytest.raises(DatabaseUnavailable, match="could not be reached within 0 s"):
        await connect("host=127.0.0.1 port=1 user=u password=secret dbname=d", 0)


async def test_a_database_that_does_not_exist_is_told_at_once(postgres):
    with pytest.raises(ConnectionRefused) as caught:
        await connect(postgres.dsn_of("no_such_database"), 30)
    assert str(caught.value) == 'DB_DSN: FATAL:  database "no_such_database" does not exist (3D000)'
    assert caught.value.exit_code == 78


async def test_a_role_that_does_not_exist_is_told_at_once_without_its_password(postgres):
    dsn = make_conninfo(postgres.dsn, user="nobody_here", password="s3cret")
    with pytest.raises(ConnectionRefused, match=r'"nobody_here" .*\(28000\)') as caught:
        await connect(dsn, 30)
    assert "s3cret" not in str(caught.value)


async def test_a_zone_that_does_not_exist_is_told_at_once(postgres):
    dsn = make_conninfo(postgres.dsn, options="-c timezone=Mars/Base")
    with pytest.raises(ConnectionRefused, match=r'DB_DSN: .*"TimeZone": "Mars/Base" \(22023\)'):
        await connect(dsn, 30)


class Refusing:
    """A server that refuses every connection with one SQLSTATE, in another language."""

    def __init__(self, code: str) -> None:
        fields = [("S", "FATAL"), ("V", "FATAL"), ("C", code), ("M", "verweigert: s3cret?")]
        body = b"".join(k.encode() + v.encode() + b"\0" for k, v in fields) + b"\0"
        self._answer = b"E" + struct.pack("!i", len(body) + 4) + body

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._refuse, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"host={host} port={port} user=u password=wrong dbname=d sslmode=disable"

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = struct.unpack("!i", await reader.readexactly(4))
        await reader.readexactly(length - 4)
        writer.write(self._answer)
        await writer.drain()
        writer.close()


@pytest.mark.parametrize("code", ["22023", "28000", "28P01", "3D000", "42501", "42704"])
async def test_what_the_server_refuses_for_good_is_not_waited_for(code):
    async with Refusing(code) as dsn:
        with pytest.raises(ConnectionRefused, match=rf"verweigert.*\({code}\)") as caught:
            await connect(dsn, 30)
    assert "wrong" not in str(caught.value)


@pytest.mark.parametrize("code", ["57P03", "53300", "08P01"])
async def test_what_the_server_refuses_for_now_is_tried_until_the_patience_ends(code):
    async with Refusing(code) as dsn:
        with pytest.raises(DatabaseUnavailable, match="could not be reached within 0 s"):
            await connect(dsn, 0)


async def test_a_connection_of_our_own_keeps_the_first_plan_of_each_text(dsn):
    async with Database(dsn) as database:
        assert (await database.one("SHOW plan_cache_mode", {}))[0] == "force_generic_plan"
