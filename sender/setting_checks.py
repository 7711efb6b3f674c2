"""Checks and defaults that a type and bounds cannot say: of one value, or beside the values above.

Each raises `ValueError` with the end of a sentence that begins with the setting's name, and never
repeats a secret in it. A check that needs a setting which is itself wrong passes: that one is told.
"""

import contextlib
import re
import sys
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import entry_points
from urllib.parse import SplitResult, urlsplit

from pydantic import SecretStr, ValidationInfo

BUILT_IN_PROVIDERS = ("http",)
PROVIDER_GROUP = "sender.providers"

_VISIBLE = re.compile(r"[\x21-\x7e]+")
_HEADER = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_LONGEST_URL = 2_000
_LONGEST_ACCOUNT = 200
DEFAULT_PORTS = {"http": 80, "https": 443}


def dsn_parts(dsn: str) -> dict[str, str]:
    """Split a libpq URI or conninfo into its parts.

    Raises:
        ValueError: if libpq does not understand it, or a port is none.
    """
    # Here and not above: `sender --help` and an import of the settings stay cheap.
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    complaint = "must be a libpq URI (postgresql://user@host/db) or conninfo (host=... dbname=...)"
    if "\0" in dsn or not dsn.strip():
        raise ValueError(complaint)
    try:
        parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    except ProgrammingError:
        raise ValueError(complaint) from None
    for port in filter(None, parts.get("port", "").split(",")):
        if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65_536):
            raise ValueError(f"{complaint}, with a port between 1 and 65535")
    return parts


def url_parts(url: str) -> SplitResult:
    """Split an absolute http or https URL.

    Raises:
        ValueError: if it is anything else.
    """
    if len(url) <= _LONGEST_URL and _VISIBLE.fullmatch(url):
        with contextlib.suppress(ValueError):
            parts = urlsplit(url)
            if parts.scheme in DEFAULT_PORTS and parts.hostname and parts.port != 0:
                return parts
    raise ValueError("must be an absolute http:// or https:// URL")


def dsn(value: SecretStr) -> SecretStr:
    """DB_DSN must be what libpq takes."""
    dsn_parts(value.get_secret_value())
    return value


def provider(name: str) -> str:
    """MAIL_PROVIDER must be one this installation knows."""
    if name not in BUILT_IN_PROVIDERS:
        installed = entry_points(group=PROVIDER_GROUP).names
        if name not in installed:
            known = ", ".join(sorted({*BUILT_IN_PROVIDERS, *installed}))
            raise ValueError(f"must be one of the known providers ({known})")
    return name


def api_key(value: SecretStr | None) -> SecretStr | None:
    """MAIL_API_KEY must be fit for a header."""
    if value and not _HEADER.fullmatch(value.get_secret_value()):
        raise ValueError(
            "must be usable in a header: printable ASCII, no line breaks, no blank at either end"
        )
    return value


def url(value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
    """MAIL_URL must be there for the providers that post to it, and hold no second login."""
    if value is None:
        if info.data.get("mail_provider") == "http":
            raise ValueError("is required for MAIL_PROVIDER=http")
        return None
    parts = url_parts(value.get_secret_value())
    if "@" in parts.netloc and info.data.get("mail_api_key"):
        raise ValueError("must not hold a user when MAIL_API_KEY is set: there is one login only")
    return value


def account(value: str) -> str:
    """MAIL_ACCOUNT is a key of a table and stands in logs."""
    if not (value.isprintable() and len(value) <= _LONGEST_ACCOUNT):
        raise ValueError(f"must be 1 to {_LONGEST_ACCOUNT} printable characters")
    return value


def account_from_url_and_key(value: object, info: ValidationInfo) -> object:
    """Name the account by default: the same host and key share one limit."""
    if value not in (None, ""):
        return value
    where = str(info.data.get("mail_provider"))
    url, key = info.data.get("mail_url"), info.data.get("mail_api_key")
    if url:
        parts = url_parts(url.get_secret_value())
        where = f"{parts.hostname}:{parts.port or DEFAULT_PORTS[parts.scheme]}"
    secret = key.get_secret_value() if key else ""
    return sha256(f"{where}\n{secret}".encode()).hexdigest()[:16]


def concurrency_from_rate(value: object, info: ValidationInfo) -> object:
    """Enough requests in flight by default for the rate at 2.5 s latency."""
    if value is not None:
        return value
    return round(min(2_000, max(16, 2.5 * info.data.get("mail_rate_per_s", 0))))


def outlasts_a_request(spare_s: float) -> Callable[[float, ValidationInfo], float]:
    """Build the check that a time covers both time-outs and `spare_s`."""

    def check(value: float, info: ValidationInfo) -> float:
        try:
            least = info.data["mail_connect_timeout_s"] + info.data["mail_read_timeout_s"] + spare_s
        except KeyError:
            return value
        if value < least:
            why = f"(both time-outs + {spare_s:g} s)"
            raise ValueError(f"must be at least {least:g} {why}, is {value:g}")
        return value

    return check


def cap_above_base(value: float, info: ValidationInfo) -> float:
    """RETRY_BACKOFF_CAP_S must not be below the base."""
    base = info.data.get("retry_backoff_base_s", 0)
    if value < base:
        raise ValueError(f"must be at least RETRY_BACKOFF_BASE_S ({base:g}), is {value:g}")
    return value


def format_for_this_output(value: object) -> object:
    """Text for a terminal, json for everything else, by default."""
    if value not in (None, ""):
        return value
    return "console" if sys.stdout.isatty() else "json"


def none_if_empty(value: object) -> object:
    """An optional text set to nothing is not set."""
    return None if value == "" else value


def dsn_shown(dsn: str) -> str:
    """Host, port, database and user of `dsn`; nothing else of it may be seen."""
    parts = dsn_parts(dsn)
    seen = [(name, parts[name]) for name in ("host", "port", "dbname", "user") if name in parts]
    # libpq takes a whole second DSN, password and all, for a dbname.
    return " ".join(f"{k}={v}" for k, v in seen if "=" not in v and "://" not in v)


def url_shown(url: str) -> str:
    """`url` without user, password, query and fragment."""
    parts = url_parts(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
