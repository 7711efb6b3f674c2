"""`sender check`: is everything a run needs in place? All faults at once, nothing sent."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, LiteralString

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import tuple_row

from sender import environment, queries, setting_checks
from sender.database import connect, describe, is_transient
from sender.domain import Control
from sender.errors import (
    ConfigurationError,
    RightsError,
    SchemaError,
    SenderError,
    SettingsError,
)
from sender.locks import briefly, naming_holders
from sender.rights import check_rights
from sender.schema import check_schema
from sender.settings import CampaignSettings, DatabaseSettings, RunSettings, all_names
from sender.status import no_rows

_PATIENCE_S: Final = 5.0

FAULT_EXIT_CODE: Final = ConfigurationError.exit_code


@dataclass(slots=True, frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: a setting's name, or database, schema, rights, campaign, provider.
        verdict: a run can do with it, cannot, or can but may surprise.
        text: what was found; no secret.
    """

    subject: str
    verdict: Literal["ok", "fault", "note"]
    text: str


async def check(environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Look at everything.

    Args:
        environ: where the settings are; the process environment if None.

    Returns:
        A finding for each setting, then the database, the schema, the rights, the campaign and the
        provider, as far as the settings lead there.
    """
    findings = list(_settings(environ))
    findings += [finding async for finding in _database(environ)]
    findings += [finding async for finding in _provider(environ)]
    return findings


def _settings(environ: Mapping[str, str] | None) -> Iterator[Finding]:
    faults: dict[str, str] = {}
    shown: Mapping[str, object] = {}
    try:
        shown = RunSettings.load(environ).describe()
    except SettingsError as error:
        faults = {name: text for name, _, text in (line.partition(": ") for line in error.faults)}
    for name in all_names():
        if name in faults:
            yield Finding(name, "fault", faults[name])
        else:
            yield Finding(name, "ok", str(shown.get(name, "")))
    for line in environment.slips(all_names(), environ):
        name, _, text = line.partition(" ")
        yield Finding(name, "note", text)


async def _database(environ: Mapping[str, str] | None) -> AsyncIterator[Finding]:
    try:
        dsn = DatabaseSettings.load(environ).db_dsn.get_secret_value()
    except SettingsError:
        return  # told already
    try:
        async with (
            await connect(dsn, within_s=_PATIENCE_S) as conn,
            naming_holders(conn, "a run waits for it, at the start for 30 s"),
        ):
            conn.prepare_threshold = None  # few statements, and a pooler may be in between
            version = conn.info.server_version
            yield Finding("database", "ok", f"PostgreSQL {version // 10_000}.{version % 10_000}")
            async with briefly(conn):
                await check_schema(conn)
            yield Finding("schema", "ok", "migrated")
            await check_rights(conn)
            yield Finding("rights", "ok", f"role {conn.info.user} may do what a run does")
            yield await _campaign(conn, environ)
    except SenderError as error:
        yield Finding(_subject(error), "fault", str(error))
    except psycopg.Error as error:
        if not is_transient(error):
            raise
        yield Finding("database", "fault", f"stopped answering ({describe(error)})")


def _subject(error: SenderError) -> str:
    """What a fault of the database is about."""
    match error:
        case SchemaError():
            return "schema"
        case RightsError():
            return "rights"
        case _:
            return "database"


async def _campaign(conn: AsyncConnection[Any], environ: Mapping[str, str] | None) -> Finding:
    try:
        campaign = CampaignSettings.load(environ).campaign_id
    except SettingsError:
        return Finding("campaign", "note", "not looked at: CAMPAIGN_ID is wrong")
    if await _first(conn, queries.reports.CAMPAIGN, campaign) != (True,):
        return Finding("campaign", "fault", no_rows(campaign))
    control, *_ = await _first(conn, queries.reports.CONTROL, campaign) or (Control.RUN,)
    if control != Control.RUN:
        return Finding("campaign", "note", f"{campaign} is {control}: a run sends nothing")
    return Finding("campaign", "ok", f"{campaign} has rows")


async def _first(
    conn: AsyncConnection[Any], query: LiteralString, campaign: str
) -> tuple[Any, ...] | None:
    cursor = conn.cursor(row_factory=tuple_row)
    async with briefly(conn):
        return await (await cursor.execute(query, {"campaign": campaign})).fetchone()


async def _provider(environ: Mapping[str, str] | None) -> AsyncIterator[Finding]:
    url = environment.read(["MAIL_URL"], environ)[0].get("MAIL_URL", "")
    try:
        parts = setting_checks.url_parts(url)
    except ValueError:
        return  # told already, or not this provider's way
    port = parts.port or setting_checks.DEFAULT_PORTS[parts.scheme]
    where = f"{parts.hostname}:{port}"
    try:
        async with asyncio.timeout(_PATIENCE_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except (OSError, TimeoutError) as error:
        why = getattr(error, "strerror", None) or "no answer"
        yield Finding("provider", "fault", f"{where} cannot be reached: {why}")
    else:
        writer.close()
        yield Finding("provider", "ok", f"{where} takes connections; nothing was sent")
