"""Checks of single values that a type and bounds cannot say. Pure; each raises `ValueError`.

The text of each error ends the sentence "NAME: ..." and never repeats the value: some are secrets.
"""

import re
from hashlib import sha256
from importlib.metadata import entry_points
from urllib.parse import SplitResult, urlsplit

BUILT_IN_PROVIDERS = ("http",)
PROVIDER_GROUP = "sender.providers"

_VISIBLE = re.compile(r"[\x21-\x7e]+")
_HEADER = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_LONGEST_URL = 2000
_DEFAULT_PORTS = {"http": 80, "https": 443}


def dsn_parts(dsn: str) -> dict[str, str]:
    """Split a libpq URI or conninfo into its parts.

    Raises:
        ValueError: if libpq does not understand it, or a port is none.
    """
    # Here and not above: `sender --help` and an import of the settings stay cheap.
    from psycopg import ProgrammingError  # noqa: PLC0415
    from psycopg.conninfo import conninfo_to_dict  # noqa: PLC0415

    complaint = "must be a libpq URI (postgresql://user@host/db) or conninfo (host=... dbname=...)"
    if "\0" in dsn:
        raise ValueError(complaint)
    try:
        parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    except ProgrammingError:
        raise ValueError(complaint) from None
    for port in filter(None, parts.get("port", "").split(",")):
        if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65_536):
            raise ValueError(f"{complaint}, with a port between 1 and 65535")
    return parts


def check_url(url: str) -> SplitResult:
    """Split an absolute http or https URL.

    Raises:
        ValueError: if it is anything else.
    """
    if len(url) <= _LONGEST_URL and _VISIBLE.fullmatch(url):
        try:
            parts = urlsplit(url)
            usable = parts.scheme in _DEFAULT_PORTS and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if usable:
            return parts
    raise ValueError("must be an absolute http:// or https:// URL")


def check_header_value(value: str) -> None:
    """Make sure that `value` may stand in an HTTP header.

    Raises:
        ValueError: on control characters, line breaks, blanks at an end, or anything beyond ASCII.
    """
    if not _HEADER.fullmatch(value):
        raise ValueError(
            "must be usable in a header: printable ASCII, no line breaks, no blank at either end"
        )


def check_provider(name: str) -> None:
    """Make sure that `name` is a provider this installation knows.

    Raises:
        ValueError: naming the known ones.
    """
    if name not in BUILT_IN_PROVIDERS:
        installed = entry_points(group=PROVIDER_GROUP).names
        if name not in installed:
            known = ", ".join(sorted({*BUILT_IN_PROVIDERS, *installed}))
            raise ValueError(f"must be one of the known providers ({known})")


def account_of(provider: str, url: str | None, key: str | None) -> str:
    """Name the account whose limit is shared: the same host and key are the same account."""
    where = provider
    if url:
        parts = check_url(url)
        where = f"{parts.hostname}:{parts.port or _DEFAULT_PORTS[parts.scheme]}"
    return sha256(f"{where}\n{key or ''}".encode()).hexdigest()[:16]


def dsn_shown(dsn: str) -> str:
    """Host, port, database and user of `dsn`; nothing else of it may be seen."""
    parts = dsn_parts(dsn)
    seen = [(name, parts[name]) for name in ("host", "port", "dbname", "user") if name in parts]
    # libpq takes a whole second DSN, password and all, for a dbname.
    return " ".join(f"{k}={v}" for k, v in seen if "=" not in v and "://" not in v)


def url_shown(url: str) -> str:
    """`url` without user, password, query and fragment."""
    parts = check_url(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
