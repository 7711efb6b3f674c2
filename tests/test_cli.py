"""The commands from outside: what they print, how they end, and what never appears."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sender import cli, errors, exits, settings
from sender.errors import DatabaseUnavailable, MigrationError, SchemaError, SenderError
from sender.exits import ending
from sender.help_text import environment_table

GOOD = {"DB_DSN": "postgresql://127.0.0.1:9/d", "CAMPAIGN_ID": "c", "MAIL_URL": "http://h/"}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.all_names():
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(f"{name}_FILE", raising=False)


def sender(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
    return subprocess.run(
        [sys.executable, "-m", "sender", *arguments],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def invoked(*arguments: str, env: Mapping[str, str] | None = None) -> Any:
    return CliRunner().invoke(cli.app, arguments, env=env)


# --- Help ----------------------------------------------------------------------------------------


def test_help_tells_a_newcomer_what_to_do() -> None:
    shown = sender("--help").stdout
    names = ["demo", "migrate", "check", "run", "status", "failures"]
    names += ["pause", "resume", "cancel", "resolve", "requeue", "fake-provider"]
    places = [shown.index(f"\n  {name} ") for name in names]
    assert places == sorted(places)
    assert "sender demo" in shown
    assert "..." not in shown.partition("Environment")[0].partition("Commands:")[2]
    for code in ("   0  ", "   1  ", "   2  ", "  78  "):
        assert code in shown
    assert environment_table() in shown


def test_the_environment_table_is_made_of_the_settings() -> None:
    table = environment_table()
    assert all(f"\n  {name} " in table for name in settings.all_names())
    assert "[default 500]" in table
    assert "[required]" in table
    assert "[default: rate x 2.5 s, 16 to 2,000]" in " ".join(table.split())
    assert max(map(len, table.splitlines())) <= 100


@pytest.mark.parametrize("command", [*cli.app.registered_commands], ids=lambda c: c.callback)
def test_every_command_has_help_and_no_surprises(command: Any) -> None:
    name = command.name or command.callback.__name__
    shown = invoked(name, "--help")
    assert shown.exit_code == 0
    assert len(shown.output.splitlines()[2].strip()) > 20


def test_version() -> None:
    assert invoked("--version").output.startswith("sender ")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["run", "--fast"], 78),
        (["status", "--fast"], 2),
        (["failures", "--state", "lost"], 2),
        (["failures", "--csv", "--json"], 2),
        (["nonsense"], 2),
        ([], 2),
    ],
)
def test_wrong_arguments(
    arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["sender", *arguments])
    assert cli.main() == code
    assert "Usage" in "".join(capsys.readouterr())


def test_two_forms_at_once_are_refused_by_name() -> None:
    ended = invoked("failures", "--json", "--csv", env=GOOD)
    assert "--csv: not together with --json" in ended.stderr
    assert ended.stdout == ""


# --- How commands end ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("run", ["DB_DSN", "CAMPAIGN_ID", "MAIL_API_KEY", "MAIL_URL", "LEASE_S"]),
        ("status", ["DB_DSN", "CAMPAIGN_ID"]),
        ("migrate", ["DB_DSN"]),
    ],
)
def test_wrong_settings_are_all_named_on_stderr(command: str, names: list[str]) -> None:
    ran = sender(
        command,
        DB_DSN="postgresql:/u:geheim@h",
        CAMPAIGN_ID="a b",
        MAIL_API_KEY="geheim\n",
        MAIL_URL="ftp://u:geheim@h",
        LEASE_S="1",
    )
    assert ran.returncode == 78
    assert [line.split(":")[0] for line in ran.stderr.splitlines()] == names
    assert "geheim" not in ran.stdout + ran.stderr
    assert ran.stdout == ""


def test_run_is_the_same_by_its_short_way_and_by_typer() -> None:
    short = sender("run", LEASE_S="x")
    long = invoked("run", env={"LEASE_S": "x"})
    assert (short.returncode, short.stderr) == (long.exit_code, long.stderr)


def test_run_keeps_what_draws_on_terminals_out_of_a_pod() -> None:
    code = (
        "import sys; sys.argv = ['sender', 'run']; from sender.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, *(n for n, m in sys.modules.items() if m))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ended, *loaded = ran.stdout.split()
    assert ended == "78"
    assert "sender.run" in loaded
    assert not {"typer", "rich", "pygments", "click", "uvicorn"} & set(loaded)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DatabaseUnavailable("away"), 1),
        (MigrationError("lost"), 1),
        (SchemaError("old"), 78),
        (KeyboardInterrupt(), 130),
        (ExceptionGroup("in a group", [SchemaError("old")]), 78),
        (RuntimeError("bug"), 1),
    ],
)
def test_errors_become_exit_codes(error: BaseException, code: int, capsys: Any) -> None:
    def fail() -> int:
        raise error

    assert ending(fail) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert ("Traceback" in said.err) == isinstance(error, RuntimeError)


def test_a_command_ends_with_its_own_code() -> None:
    assert ending(lambda: None) == 0
    assert ending(lambda: 2) == 2
    with pytest.raises(SystemExit):
        ending(lambda: sys.exit(3))


@given(
    secret=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1).map(
        "s3cr".__add__
    ),
    kind=st.sampled_from([SenderError, RuntimeError]),
    text=st.sampled_from(["postgresql://u:{}@h/d", "to {}@example.com", "Bearer {}"]),
)
def test_no_error_tells_a_secret(secret: str, kind: type[Exception], text: str) -> None:
    def fail() -> int:
        raise kind(text.format(secret))

    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exits, "_tell", told.append)
        ending(fail)
    assert told
    assert "s3cr" not in "".join(told)


def test_every_error_has_an_exit_code_of_the_contract() -> None:
    found = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in found if issubclass(kind, SenderError)}
    assert codes == {1, 78}


def test_a_reader_that_left_is_no_error(bare_dsn: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run(
        [sys.executable, "-m", "sender", "migrate", "--plan"],
        env={**os.environ, "DB_DSN": bare_dsn},
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (0, b"")
