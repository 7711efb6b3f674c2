"""What a `Retry-After` field says, in seconds. Pure: the clock is an argument."""

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

_SECONDS = re.compile(r"-?\d+(\.\d*)?", re.ASCII)


def retry_after_s(value: str | None, date: str | None, now: datetime) -> float | None:
    """Read a `Retry-After` field.

    A date is judged against the answer's own `Date`, so that a wrong clock here does not matter;
    only an answer without one is judged against `now`.

    Args:
        value: the field as received: seconds or an HTTP-date, or None.
        date: the answer's `Date` field, or None.
        now: the local wall clock, with a time zone.

    Returns:
        Seconds to wait, at least 0, or None if the field is missing or says nothing readable.
    """
    if value is None:
        return None
    text = value.strip()
    if _SECONDS.fullmatch(text):
        return max(0.0, float(text))
    until = _http_date(text)
    if until is None:
        return None
    since = _http_date(date) if date else None
    return max(0.0, (until - (since or now)).total_seconds())


def _http_date(text: str) -> datetime | None:
    """Any of the three forms of RFC 9110, or None. A date without a zone is UTC."""
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
