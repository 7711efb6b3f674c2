"""Connections: what a failure means, and how a pooler shows itself."""

from dataclasses import dataclass

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.errors import lookup
from psycopg_pool import PoolTimeout

from sender.database import _configure, connect, conninfo, describe, is_transient
from sender.errors import DatabaseUnavailable


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


async def test_what_the_server_says_is_passed_on(postgres):
    with pytest.raises(DatabaseUnavailable, match='database "no_such_database" does not exist'):
        await connect(postgres.dsn_of("no_such_database"), 0)


async def test_a_password_is_not(postgres):
    dsn = make_conninfo(postgres.dsn, user="nobody_here", password="s3cret")
    with pytest.raises(DatabaseUnavailable, match="nobody_here") as caught:
        await connect(dsn, 0)
    assert "s3cret" not in str(caught.value)
