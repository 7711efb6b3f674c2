"""`sender status`: where a campaign stands, from the ledger, at one moment. Changes nothing."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from psycopg import AsyncConnection
from psycopg.rows import class_row, dict_row

from sender import queries
from sender.domain import Control, Counts
from sender.errors import CampaignError
from sender.reading import reading
from sender.settings import CampaignSettings
from sender.telemetry.redaction import redactor

_clean = redactor()


@dataclass(slots=True, frozen=True)
class Failure:
    """A target that did not get its mail, or may not have.

    Attributes:
        state: failed or in_doubt; `sender failures` may list others.
        attempts: charged attempts.
        outcome_at: when the last outcome was recorded.
        key_used_at: since when the provider may have the mail, or None if it surely has not.
    """

    member_id: int
    state: str
    attempts: int
    reason: str | None
    outcome_at: datetime | None
    key_used_at: datetime | None = None


@dataclass(slots=True, frozen=True)
class Steering:
    """What a person wants of the campaign, and who said so why."""

    control: str = Control.RUN
    control_at: datetime | None = None
    control_by: str | None = None
    control_why: str | None = None


@dataclass(slots=True, frozen=True)
class Status:
    """Where a campaign stands.

    Attributes:
        counts: each row once.
        rate_per_s: mails accepted a second over the last minute, by all runs; 0 if none.
        eta_s: seconds to the end at that rate, or None if nothing moves, all is done, or
            the campaign is paused or cancelled.
        blocked_until: the provider asked an account to wait until then, or None.
        next_due: when the next open row may be tried again, or None.
        last_failures: newest first, at most five.
    """

    campaign: str
    steering: Steering
    counts: Counts
    rate_per_s: float
    eta_s: float | None
    blocked_until: datetime | None
    next_due: datetime | None
    last_failures: tuple[Failure, ...]

    def to_json(self) -> dict[str, object]:
        """The same as JSON can hold it: the counts and the control at the top level."""
        flat: dict[str, object] = {"campaign": self.campaign, **asdict(self.steering)}
        flat |= {**asdict(self.counts), "total": self.counts.total, "open": self.counts.open}
        rest = ("rate_per_s", "eta_s", "blocked_until", "next_due")
        flat |= {name: getattr(self, name) for name in rest}
        failures = [asdict(each) | {"reason": _clean(each.reason)} for each in self.last_failures]
        return flat | {"last_failures": failures}

    def lines(self) -> Iterator[str]:
        """The same for people."""
        yield f"campaign {self.campaign}: {self._where()}"
        total = self.counts.total
        for name, count in asdict(self.counts).items():
            yield f"  {name:<9}{count:>12,}{count / total:>9.1%}"
        yield f"  {'total':<9}{total:>12,}"
        if self.rate_per_s:
            left = "" if self.eta_s is None else f", about {_span(self.eta_s)} to the end"
            yield f"rate {self.rate_per_s:,.1f}/s over the last minute{left}"
        if self.blocked_until:
            yield f"the provider asked to wait until {_clock(self.blocked_until)}"
        if self.next_due and self.counts.open:
            yield f"rows wait to be tried again, the first from {_clock(self.next_due)}"
        if self.last_failures:
            yield "last failures (all of them: sender failures)"
        for failure in self.last_failures:
            why = _clean(failure.reason) or "no reason recorded"
            yield f"  member {failure.member_id}  {failure.state}  {why}"

    def line(self) -> str:
        """The same in short, on one line."""
        counts = self.counts
        told = [f"{counts.sent:,} of {counts.total:,} sent ({counts.sent / counts.total:.1%})"]
        told += [f"{counts.open:,} open"]
        others = {"failed": counts.failed, "in doubt": counts.in_doubt, "skipped": counts.skipped}
        told += [f"{count:,} {name}" for name, count in others.items() if count]
        told += [f"{self.rate_per_s:,.1f}/s"] if self.rate_per_s else []
        told += [f"about {_span(self.eta_s)} to the end"] if self.eta_s is not None else []
        return f"{self._where()}: {', '.join(told)}"

    def _where(self) -> str:
        steering = self.steering
        if steering.control != Control.RUN:
            by = f" by {steering.control_by}" if steering.control_by else ""
            why = f": {steering.control_why}" if steering.control_why else ""
            return f"{steering.control}{by}{why}"
        if not self.counts.open:
            return "done"
        return "running" if self.counts.sending or self.rate_per_s else "open, nothing is running"


async def status(settings: CampaignSettings) -> Status:
    """Look at the campaign.

    Raises:
        CampaignError: it has no rows.
        SchemaError: the database is not migrated.
        DatabaseUnavailable: it does not answer.
    """
    campaign = {"campaign": settings.campaign_id}
    async with reading(settings.db_dsn.get_secret_value(), at_one_moment=True) as conn:
        ledger = await _row(conn, queries.reports.STATUS, campaign)
        if ledger is None:
            raise CampaignError(no_rows(settings.campaign_id))
        cursor = conn.cursor(row_factory=class_row(Steering))
        steering = await (await cursor.execute(queries.reports.CONTROL, campaign)).fetchone()
        waiting = await _row(conn, queries.reports.WAITING, campaign) or {}
        cursor = conn.cursor(row_factory=class_row(Failure))
        failures = await (await cursor.execute(queries.reports.LAST_FAILURES, campaign)).fetchall()
    sent_lately, over_s = ledger.pop("last_minute"), ledger.pop("over_s")
    rate = sent_lately / max(over_s, 1.0) if sent_lately else 0.0
    counts, steering = Counts(**ledger), steering or Steering()
    moves = steering.control == Control.RUN
    return Status(
        campaign=settings.campaign_id,
        steering=steering,
        counts=counts,
        rate_per_s=round(rate, 1),
        eta_s=round(counts.open / rate) if rate and counts.open and moves else None,
        last_failures=tuple(failures),
        **waiting,
    )


def no_rows(campaign: str) -> str:
    """Tell that a campaign has no rows, and what to look at."""
    return (
        f"CAMPAIGN_ID: campaign {campaign} has no rows in campaign_targets; "
        "is the name right, and is the list loaded?"
    )


async def _row(
    conn: AsyncConnection[Any], query: Any, values: dict[str, str]
) -> dict[str, Any] | None:
    cursor = conn.cursor(row_factory=dict_row)
    return await (await cursor.execute(query, values)).fetchone()


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min" if minutes else f"{rest} s"


def _clock(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
