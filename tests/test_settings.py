"""Settings: what each takes, how wrong ones are told, and that no secret is ever in a text."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sender import environment, setting_checks, settings
from sender.errors import SettingsError
from sender.settings import CampaignSettings, DatabaseSettings, RunSettings

GOOD = {
    "DB_DSN": "postgresql://app:geheim@db.example:5433/members",
    "CAMPAIGN_ID": "summer-2026",
    "MAIL_URL": "https://api.example/v1/mail",
}

DEFAULTS = {
    "MAIL_PROVIDER": "http",
    "MAIL_RATE_PER_S": 500,
    "MAIL_CONNECT_TIMEOUT_S": 2,
    "MAIL_READ_TIMEOUT_S": 5,
    "SEND_CONCURRENCY": 1250,
    "BATCH_SIZE": 200,
    "LEASE_S": 90,
    "MAX_ATTEMPTS": 5,
    "RETRY_BACKOFF_BASE_S": 30,
    "RETRY_BACKOFF_CAP_S": 600,
    "IDEMPOTENCY_WINDOW_S": 86_400,
    "DEADLINE_S": 3_000,
    "SHUTDOWN_GRACE_S": 20,
    "FAILED_RATIO_LIMIT": 0.01,
}


def faults_of(kind: type[DatabaseSettings] = RunSettings, **given: str | None) -> dict[str, str]:
    environ = {name: value for name, value in {**GOOD, **given}.items() if value is not None}
    with pytest.raises(SettingsError) as caught:
        kind.load(environ)
    return dict(line.split(": ", 1) for line in caught.value.faults)


def load(**given: str) -> RunSettings:
    return RunSettings.load({**GOOD, **given})


def test_defaults_are_those_of_the_contract() -> None:
    loaded = load()
    assert {name: getattr(loaded, name.lower()) for name in DEFAULTS} == DEFAULTS


NUMBER = "between {} and {}, got {!r}".format
WRONG = [
    ("DB_DSN", "", "is required"),
    ("DB_DSN", " ", "must be a libpq URI"),
    ("DB_DSN", "nonsense", "must be a libpq URI"),
    ("DB_DSN", "mysql://h/db?charset=x", "must be a libpq URI"),
    ("DB_DSN", "host=h port=notaport", "with a port between 1 and 65535"),
    ("DB_DSN", "postgresql://h:70000/db", "with a port between 1 and 65535"),
    ("DB_DSN", "host=h no_such_option=1", "must be a libpq URI"),
    ("CAMPAIGN_ID", "", "is required"),
    ("CAMPAIGN_ID", "summer sale", "1 to 80 of A-Z a-z 0-9 . _ -, got 'summer sale'"),
    ("CAMPAIGN_ID", "x" * 81, "1 to 80"),
    ("CAMPAIGN_ID", "summer\n", "1 to 80"),
    ("CAMPAIGN_ID", "夏", "1 to 80"),
    ("MAIL_PROVIDER", "pigeon", "must be one of the known providers (http)"),
    ("MAIL_PROVIDER", "", "must be one of the known providers (http)"),
    ("MAIL_URL", "", "is required for MAIL_PROVIDER=http"),
    ("MAIL_URL", "api.example/mail", "must be an absolute http:// or https:// URL"),
    ("MAIL_URL", "ftp://api.example/mail", "must be an absolute"),
    ("MAIL_URL", "https://", "must be an absolute"),
    ("MAIL_URL", "https://api.example:99999/", "must be an absolute"),
    ("MAIL_URL", "https://api.example:0/", "must be an absolute"),
    ("MAIL_URL", "https://[::1/", "must be an absolute"),
    ("MAIL_URL", "https://api.example/a b", "must be an absolute"),
    ("MAIL_URL", "https://api.example/\nX: y", "must be an absolute"),
    ("MAIL_API_KEY", "two\nlines", "must be usable in a header"),
    ("MAIL_API_KEY", "nul\0", "must be usable in a header"),
    ("MAIL_API_KEY", "schlüssel", "must be usable in a header"),
    ("MAIL_API_KEY", " padded", "must be usable in a header"),
    ("MAIL_ACCOUNT", "a\tb", "must be 1 to 200 printable characters"),
    ("MAIL_ACCOUNT", "x" * 201, "must be 1 to 200 printable characters"),
    ("MAIL_RATE_PER_S", "hunter2", "between 0.1 and 100000, got something else"),
    ("MAIL_RATE_PER_S", "-.5e3", NUMBER("0.1", "100000", "-.5e3")),
    ("MAIL_RATE_PER_S", "9" * 30, "got something else"),
    ("MAIL_RATE_PER_S", "", NUMBER("0.1", "100000", "")),
    ("MAIL_RATE_PER_S", "0", NUMBER("0.1", "100000", "0")),
    ("MAIL_RATE_PER_S", "100001", NUMBER("0.1", "100000", "100001")),
    ("MAIL_RATE_PER_S", "nan", NUMBER("0.1", "100000", "nan")),
    ("MAIL_RATE_PER_S", "inf", NUMBER("0.1", "100000", "inf")),
    ("MAIL_CONNECT_TIMEOUT_S", "0", NUMBER("0.01", "300", "0")),
    ("MAIL_READ_TIMEOUT_S", "-1", NUMBER("0.01", "600", "-1")),
    ("SEND_CONCURRENCY", "0", "a whole number between 1 and 10000, got '0'"),
    ("SEND_CONCURRENCY", "", "a whole number between 1 and 10000, got ''"),
    ("SEND_CONCURRENCY", "2.5", "a whole number between 1 and 10000, got '2.5'"),
    ("BATCH_SIZE", "many", "a whole number between 1 and 10000, got something else"),
    ("LEASE_S", "0", "must be above 0 and at most 86400, got '0'"),
    ("LEASE_S", "8.9", "must be at least 9 (both time-outs + 2 s), is 8.9"),
    ("MAX_ATTEMPTS", "0", "a whole number between 1 and 1000"),
    ("RETRY_BACKOFF_BASE_S", "0", NUMBER("0.001", "86400", "0")),
    ("RETRY_BACKOFF_CAP_S", "29", "must be at least RETRY_BACKOFF_BASE_S (30), is 29"),
    ("IDEMPOTENCY_WINDOW_S", "0", "must be above 0, got '0'"),
    ("IDEMPOTENCY_WINDOW_S", "inf", "must be above 0, got 'inf'"),
    ("DEADLINE_S", "0", "must be above 0 and at most 604800"),
    ("SHUTDOWN_GRACE_S", "7.5", "must be at least 8 (both time-outs + 1 s), is 7.5"),
    ("FAILED_RATIO_LIMIT", "1.1", NUMBER("0", "1", "1.1")),
    ("FAILED_RATIO_LIMIT", "1%", "between 0 and 1, got something else"),
    ("LOG_FORMAT", "xml", "must be json or console, got something else"),
]


@pytest.mark.parametrize(("name", "value", "text"), WRONG)
def test_a_wrong_value_is_named_alone(name: str, value: str, text: str) -> None:
    faults = faults_of(**{name: value})
    assert set(faults) == {name}
    assert text in faults[name]


def test_every_setting_has_a_wrong_value_in_the_table() -> None:
    assert {name for name, _, _ in WRONG} == set(settings.all_names())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DB_DSN", "host=/run/postgresql dbname=members"),
        ("DB_DSN", "postgresql://a,b:5433/db?target_session_attrs=primary"),
        ("CAMPAIGN_ID", "x" * 80),
        ("CAMPAIGN_ID", "A.b_c-9"),
        ("MAIL_URL", "http://[::1]:8025/mail"),
        ("MAIL_RATE_PER_S", "0.1"),
        ("MAIL_RATE_PER_S", " 100000 "),
        ("LEASE_S", "9"),
        ("SHUTDOWN_GRACE_S", "8"),
        ("RETRY_BACKOFF_CAP_S", "30"),
        ("IDEMPOTENCY_WINDOW_S", "0.001"),
        ("IDEMPOTENCY_WINDOW_S", "1e300"),
        ("FAILED_RATIO_LIMIT", "0"),
        ("FAILED_RATIO_LIMIT", "1"),
        ("LOG_FORMAT", "console"),
    ],
)
def test_the_edge_of_what_is_allowed(name: str, value: str) -> None:
    load(**{name: value})


def test_all_wrong_settings_are_named_in_one_go_cross_checks_too() -> None:
    faults = faults_of(
        DB_DSN="?",
        CAMPAIGN_ID=None,
        MAIL_URL=None,
        MAIL_RATE_PER_S="fast",
        MAIL_READ_TIMEOUT_S="100",
        RETRY_BACKOFF_BASE_S="700",
        DEADLINE_S_FILE="/no/such/file",
    )
    assert list(faults) == [
        "DB_DSN",
        "CAMPAIGN_ID",
        "MAIL_URL",
        "MAIL_RATE_PER_S",
        "LEASE_S",
        "RETRY_BACKOFF_CAP_S",
        "DEADLINE_S",
        "SHUTDOWN_GRACE_S",
    ]


def test_a_wrong_time_out_is_told_without_what_would_follow_from_it() -> None:
    assert set(faults_of(MAIL_READ_TIMEOUT_S="x", LEASE_S="0.5")) == {"MAIL_READ_TIMEOUT_S"}


def test_a_command_checks_only_what_it_needs() -> None:
    wrong = {"MAIL_RATE_PER_S": "x", "MAIL_URL": "x"}
    assert DatabaseSettings.load({**GOOD, **wrong, "CAMPAIGN_ID": "?"}).db_dsn
    assert CampaignSettings.load({**GOOD, **wrong}).campaign_id == "summer-2026"
    assert set(faults_of(CampaignSettings, DB_DSN=None, CAMPAIGN_ID="?")) == {
        "DB_DSN",
        "CAMPAIGN_ID",
    }


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.all_names():
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(f"{name}_FILE", raising=False)
    with pytest.raises(SettingsError) as caught:
        settings.load_run()
    assert [line.split(":")[0] for line in caught.value.faults] == [*GOOD]
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    assert settings.load_database().db_dsn.get_secret_value() == GOOD["DB_DSN"]
    assert settings.load_campaign().campaign_id == GOOD["CAMPAIGN_ID"]
    assert settings.load_run().mail_rate_per_s == 500


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load().mail_rate_per_s = 1  # pyright: ignore[reportAttributeAccessIssue]


# --- NAME_FILE -----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_value_from_a_file_loses_its_line_end(tmp_path: Path, end: str) -> None:
    file = tmp_path / "key"
    file.write_bytes(f"k3y{end}".encode())
    key = load(MAIL_API_KEY_FILE=str(file)).mail_api_key
    assert key
    assert key.get_secret_value() == "k3y"


def test_every_setting_may_come_from_a_file(tmp_path: Path) -> None:
    given = {**GOOD, **{name: str(value) for name, value in DEFAULTS.items()}}
    given |= {"MAIL_API_KEY": "k", "MAIL_ACCOUNT": "a", "LOG_FORMAT": "json"}
    assert set(given) == set(settings.all_names())
    environ: dict[str, str] = {}
    for name, value in given.items():
        (tmp_path / name).write_text(f"{value}\n")
        environ[f"{name}_FILE"] = str(tmp_path / name)
    assert RunSettings.load(environ) == RunSettings.load(given)


def unreadable(tmp_path: Path, what: str) -> str:
    path = tmp_path / "value"
    match what:
        case "missing":
            pass
        case "directory":
            path.mkdir()
        case "binary":
            path.write_bytes(b"\xff\xfe")
        case "empty":
            path.write_text("\n")
        case "pipe":
            os.mkfifo(path)
        case "large":
            path.write_text("x" * 65_537)
        case "endless":
            return "/dev/zero"
        case _:
            return "nul\0"
    return str(path)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("missing", "cannot be read: No such file or directory"),
        ("directory", "is no regular file"),
        ("pipe", "is no regular file"),
        ("binary", "is not UTF-8 text"),
        ("empty", "is empty"),
        ("endless", "is no regular file"),
        ("large", "is larger than 65536 bytes"),
        ("impossible", "cannot be read: the path is not valid"),
    ],
)
def test_an_unreadable_file_is_told_with_its_setting(tmp_path: Path, what: str, text: str) -> None:
    faults = faults_of(DB_DSN=None, DB_DSN_FILE=unreadable(tmp_path, what))
    assert faults == {"DB_DSN": f"the file that DB_DSN_FILE names {text}"}


def test_a_value_and_a_file_for_it_are_one_too_many(tmp_path: Path) -> None:
    faults = faults_of(CAMPAIGN_ID_FILE=str(tmp_path / "unread"))
    assert faults == {
        "CAMPAIGN_ID": "given twice, as CAMPAIGN_ID and as CAMPAIGN_ID_FILE; keep one"
    }


def test_a_file_replaces_an_empty_value_and_an_empty_path_is_none(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("autumn")
    loaded = load(CAMPAIGN_ID="", CAMPAIGN_ID_FILE=str(tmp_path / "id"), DB_DSN_FILE="")
    assert loaded.campaign_id == "autumn"


# --- Derived values ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "concurrency"), [("0.1", 16), ("6.4", 16), ("100", 250), ("800", 2000), ("9000", 2000)]
)
def test_concurrency_follows_the_rate(rate: str, concurrency: int) -> None:
    assert load(MAIL_RATE_PER_S=rate).send_concurrency == concurrency
    assert load(MAIL_RATE_PER_S=rate, SEND_CONCURRENCY="7").send_concurrency == 7


def test_the_account_is_host_and_key() -> None:
    accounts = [
        load(MAIL_URL=url, MAIL_API_KEY=key).mail_account
        for url, key in [
            ("https://a.example/x", "k"),
            ("https://A.example:443/y?z", "k"),
            ("https://b.example/x", "k"),
            ("https://b.example/x", "other"),
            ("https://b.example/x", ""),
        ]
    ]
    assert accounts[0] == accounts[1]
    assert len(set(accounts)) == 4
    assert all(len(account) == 16 and int(account, 16) for account in accounts)
    assert load(MAIL_ACCOUNT="ours").mail_account == "ours"
    assert load(MAIL_ACCOUNT="").mail_account == load().mail_account


@pytest.mark.parametrize(
    ("window", "usable"),
    [("86400", 86_333), ("1000", 943), ("100", 88), ("7", -0.35), ("0.001", -6.99905)],
)
def test_the_usable_window_keeps_a_margin(window: str, usable: float) -> None:
    assert load(IDEMPOTENCY_WINDOW_S=window).usable_window_s == pytest.approx(usable)


def test_an_endless_window_fits_a_date() -> None:
    assert load(IDEMPOTENCY_WINDOW_S="1e300").usable_window_s < 4e9


def test_a_longer_window_is_never_less_usable() -> None:
    windows = [0.001, 1, 7, 100, 1_200, 1_201, 86_400, 1e9, 1e300]
    usable = [load(IDEMPOTENCY_WINDOW_S=str(window)).usable_window_s for window in windows]
    assert all(shorter <= longer for shorter, longer in pairwise(usable))


def test_a_provider_of_another_package_needs_no_url(monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed:
        names = frozenset({"pigeon"})

    monkeypatch.setattr(setting_checks, "entry_points", lambda group: Installed)
    environ = {**GOOD, "MAIL_PROVIDER": "pigeon"}
    del environ["MAIL_URL"]
    assert RunSettings.load(environ).mail_url is None
    assert "(http, pigeon)" in faults_of(MAIL_PROVIDER="dove")["MAIL_PROVIDER"]


def test_one_login_only() -> None:
    url = "https://user:geheim@api.example/"
    load(MAIL_URL=url)
    faults = faults_of(MAIL_URL=url, MAIL_API_KEY="k")
    assert set(faults) == {"MAIL_URL"}
    assert "geheim" not in faults["MAIL_URL"]


def test_slips_are_told_and_foreign_names_are_not() -> None:
    environ = {
        **GOOD,
        "MAIL_RATE_PER_SEC": "1",
        "DB_DNS": "x",
        "MAIL_API_KEY_FIL": "x",
        "MAIL_PORT": "25",
        "DB_HOST": "x",
        "KUBERNETES_SERVICE_HOST": "x",
        "PATH": "x",
    }
    assert RunSettings.load(environ).unknown == (
        "DB_DNS is not a setting; did you mean DB_DSN?",
        "MAIL_API_KEY_FIL is not a setting; did you mean MAIL_API_KEY_FILE?",
        "MAIL_RATE_PER_SEC is not a setting; did you mean MAIL_RATE_PER_S?",
    )
    assert environment.slips(settings.all_names(), GOOD) == ()


# --- Secrets -------------------------------------------------------------------------------------

# Begins with what no text of ours holds, so that finding it means that it leaked.
secret_texts = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters="'\\%@/?#:[] &"),
    min_size=1,
    max_size=30,
).map("s3cr".__add__)


@given(secret=secret_texts)
def test_no_secret_of_right_settings_is_shown(secret: str) -> None:
    environ = {
        "DB_DSN": f"host=h dbname=d user=u password='{secret}'",
        "CAMPAIGN_ID": "c",
        "MAIL_URL": f"https://h/p?token={secret}",
        "MAIL_API_KEY": secret,
    }
    loaded = RunSettings.load(environ)
    shown = f"{loaded} {loaded!r} {loaded.describe()} {loaded.model_dump_json()}"
    assert "s3cr" not in shown
    assert secret in loaded.secrets
    assert loaded.describe()["DB_DSN"] == "host=h dbname=d user=u"
    assert loaded.describe()["MAIL_URL"] == "https://h/p"
    assert loaded.describe()["MAIL_API_KEY"] == "set"


# A secret where it belongs but damaged, and where it does not belong at all.
MISPLACED = [
    ("DB_DSN", "postgresql:/u:{}@h"),
    ("DB_DSN", "host=h password='{}"),
    ("MAIL_API_KEY", "{}\n"),
    ("MAIL_URL", "ftp://u:{}@h/"),
    ("MAIL_URL", "https://u:{}@h:x/"),
    ("CAMPAIGN_ID", "postgresql://u:{}@h/d"),
    ("MAIL_RATE_PER_S", "password={}"),
    ("MAIL_RATE_PER_S", "{}"),
    ("BATCH_SIZE", "{}"),
    ("MAIL_PROVIDER", "{}"),
    ("LOG_FORMAT", "https://u:{}@h/"),
    ("LOG_FORMAT", "{}"),
    ("MAIL_ACCOUNT", "{}\n"),
]


@given(secret=secret_texts, where=st.sampled_from(MISPLACED))
def test_no_secret_of_a_wrong_setting_is_told(secret: str, where: tuple[str, str]) -> None:
    name, form = where
    faults = faults_of(**{name: form.format(secret)})
    assert name in faults
    assert not any("s3cr" in text for text in faults.values())


def test_a_dsn_in_place_of_a_database_name_is_not_shown() -> None:
    dsn = "host=h dbname='postgresql://u:geheim@h/d'"
    assert load(DB_DSN=dsn).describe()["DB_DSN"] == "host=h"


def test_importing_the_settings_is_light() -> None:
    code = "import sys, sender.settings; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"psycopg", "typer", "rich", "structlog", "aiohttp", "httpx"} & set(loaded)
