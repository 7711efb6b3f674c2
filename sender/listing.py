"""How `sender failures` is printed: text, CSV or JSON, row by row, however long the list is.

Must never print an address: reasons are our own words, and are cleaned as every line of the log is.
"""

import csv
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Final

from sender.status import Failure
from sender.telemetry.redaction import redactor

# What a spreadsheet takes for the beginning of a formula; the last four are full-width.
_FORMULA: Final = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_NO_REASON: Final = "no reason recorded"

_clean = redactor()


async def write(found: AsyncIterator[Failure], states: Sequence[str], form: str) -> None:
    """Print failures to standard output.

    Args:
        found: the rows.
        states: which were asked for.
        form: text, csv or json.
    """
    match form:
        case "csv":
            await _write_csv(found)
        case "json":
            await _write_json(found)
        case _:
            await _write_text(found, states)


async def _write_csv(found: AsyncIterator[Failure]) -> None:
    """A head and a line a row; nothing at all if the first cannot be looked up."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    head = [field.name for field in fields(Failure)]
    async for failure in found:
        if head:
            writer.writerow(head)
            head = []
        writer.writerow(_cells(failure))
    if head:
        writer.writerow(head)


def _cells(failure: Failure) -> list[object]:
    """The fields of a row; a spreadsheet must not take a provider's word for a formula."""
    reason = _clean(failure.reason) or ""
    if reason.lstrip().startswith(_FORMULA):
        reason = f"'{reason}"
    times = [at.isoformat() if at else "" for at in (failure.outcome_at, failure.key_used_at)]
    return [failure.member_id, failure.state, failure.attempts, reason, *times]


async def _write_json(found: AsyncIterator[Failure]) -> None:
    """One array, a row a line."""
    before = "["
    async for failure in found:
        row = asdict(failure) | {"reason": _clean(failure.reason)}
        print(f"{before}\n  {json.dumps(row, default=str)}", end="")
        before = ","
    print("[]" if before == "[" else "\n]")


async def _write_text(found: AsyncIterator[Failure], states: Sequence[str]) -> None:
    count = 0
    async for failure in found:
        if not count:
            print(_line("member", "state", "attempts", "key used since", "last outcome", "reason"))
        count += 1
        reason = _clean(failure.reason) or _NO_REASON
        times = _clock(failure.key_used_at), _clock(failure.outcome_at)
        print(_line(failure.member_id, failure.state, failure.attempts, *times, reason))
    print(f"{count or 'no'} targets are {' or '.join(states)}")


def _line(*cells: object) -> str:
    member, state, attempts, key, outcome, reason = map(str, cells)
    return f"{member:>12}  {state:<9}{attempts:>9}  {key:<20}  {outcome:<20}  {reason}"


def _clock(moment: datetime | None) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}" if moment else "-"
