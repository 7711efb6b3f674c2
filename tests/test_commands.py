"""The commands themselves: what they print for people and for programs."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from conftest import add_targets
from typer.testing import CliRunner

from sender import cli, commands, settings
from sender.errors import SenderError


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.all_names():
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(f"{name}_FILE", raising=False)


def invoked(*arguments: str, env: Mapping[str, str] | None = None) -> Any:
    return CliRunner().invoke(cli.app, arguments, env=env)


def test_from_nothing_to_a_status(bare_dsn: str) -> None:
    env = {"DB_DSN": bare_dsn, "CAMPAIGN_ID": "c"}
    assert "sender migrate" in invoked("status", env=env).stderr
    assert "CREATE TABLE" in invoked("migrate", "--plan", env=env).stdout
    assert invoked("status", env=env).exit_code == 78
    assert "migrations applied" in invoked("migrate", env=env).stdout
    assert "nothing to do" in invoked("migrate", env=env).stdout
    assert "nothing to do" in invoked("migrate", "--plan", env=env).stdout
    empty = invoked("status", env=env)
    assert (empty.exit_code, empty.stderr.count("\n")) == (78, 1)
    assert "has no rows" in empty.stderr


@pytest.fixture
async def filled(dsn: str) -> Mapping[str, str]:
    """The environment of a campaign of three open rows and one that failed."""
    await add_targets(dsn, "c", 3)
    reason = '=HYPERLINK("http://x")'
    await add_targets(dsn, "c", 1, first=9, state="failed", reason=reason)
    return {"DB_DSN": dsn, "CAMPAIGN_ID": "c"}


def test_status_and_failures_for_people_and_programs(filled: Mapping[str, str]) -> None:
    assert "total               4" in invoked("status", env=filled).stdout
    assert json.loads(invoked("status", "--json", env=filled).stdout)["failed"] == 1
    assert "1 targets are failed or in_doubt" in invoked("failures", env=filled).stdout
    (failure,) = json.loads(invoked("failures", "--json", env=filled).stdout)
    assert failure["member_id"] == 9
    header, row = invoked("failures", "--csv", env=filled).stdout.splitlines()
    assert header == "member_id,state,attempts,reason,outcome_at,key_used_at"
    assert row.startswith("9,failed,0,\"'=HYPERLINK")
    pending = invoked("failures", "--state", "pending", "--limit", "2", "--json", env=filled)
    assert [failure["member_id"] for failure in json.loads(pending.stdout)] == [1, 2]


def test_check_for_people_and_programs(filled: Mapping[str, str]) -> None:
    shown = invoked("check", env=filled)
    assert shown.exit_code == 78
    assert "fault  MAIL_URL" in shown.stdout
    assert "ok     campaign" in shown.stdout
    found = json.loads(invoked("check", "--json", env=filled).stdout)
    assert not found["ok"]
    assert {"subject": "MAIL_URL", "verdict": "fault"}.items() <= found["findings"][4].items()


def test_slips_are_warned_of(filled: Mapping[str, str]) -> None:
    shown = invoked("status", env={**filled, "MAIL_URLS": "x"})
    assert shown.exit_code == 0
    assert shown.stderr == "warning: MAIL_URLS is not a setting; did you mean MAIL_URL?\n"


def test_the_fake_provider_serves_until_it_is_stopped() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "sender", "fake-provider", "--port", "0", "--options", "{}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as server:
        assert server.stdout
        assert server.stderr
        assert json.loads(server.stdout.readline())["url"].startswith("http://127.0.0.1:")
        server.send_signal(signal.SIGINT)
        assert server.wait(10) == 0
        assert server.stderr.read() == b""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("{", "--options: must be a JSON object"),
        ("[]", "--options: must be a JSON object"),
        ("@/no/such", "--options: cannot be read: No such file"),
        ('{"speed": 1}', "speed: no such option"),
    ],
)
def test_wrong_options_of_the_fake_provider(options: str, text: str) -> None:
    ended = invoked("fake-provider", "--options", options)
    assert ended.exit_code == 78
    assert ended.stderr.startswith(text)


def test_a_missing_part_of_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httptools", None)
    told = pytest.raises(SenderError, match=r"pip install 'sender\[demo\]'")
    with told, commands._parts_of_the_demo():
        import httptools  # noqa: F401
