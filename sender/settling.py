"""`sender resolve` and `sender requeue`: settle rows in doubt, try failed rows again.

Owns which rows a person may touch. Must never touch a row that a run holds, nor one that was sent.
Safe to repeat: a row that is settled already is left and told.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, LiteralString

import psycopg
import stamina
from psycopg import AsyncConnection
from psycopg.rows import scalar_row

from sender import members, queries
from sender.actions import Author, changing
from sender.domain import State
from sender.errors import SettingsError
from sender.locks import at_once, briefly
from sender.settings import CampaignSettings

_LOCKS_PATIENCE_S: Final = 30.0
# Rows of one statement: what the application may have to wait for, well below a tenth of a second.
_SLICE: Final = 1_000
_PAGE: Final = 100_000
_SHOWN: Final = 10

# Rolled back for certain, so the same statement may be run again: serialisation, deadlock, lock
# time-out.
_PASSING: Final = frozenset({"40001", "40P01", "55P03"})


@dataclass(slots=True, frozen=True)
class Settling:
    """One way to settle rows.

    Attributes:
        action: its name in the record.
        state: the only state whose rows it touches.
        query: the statement.
        told: what becomes of the rows, for people.
    """

    action: str
    state: State
    query: LiteralString
    told: str


_AGAIN: Final = "tried again by the next sender run, or by one that is running"
REQUEUE: Final = Settling("requeue", State.FAILED, queries.actions.REQUEUE, _AGAIN)
RESOLVE: Final[Mapping[str, Settling]] = {
    "sent": Settling(
        "resolve_sent", State.IN_DOUBT, queries.actions.RESOLVE_SENT, "taken for sent"
    ),
    "pending": Settling("resolve_pending", State.IN_DOUBT, queries.actions.RESOLVE_PENDING, _AGAIN),
}


@dataclass(slots=True)
class Settlement:
    """What was settled.

    Attributes:
        settled: how many rows.
        left: named members that were left as they are, by what they are.
    """

    campaign: str
    settling: Settling
    settled: int = 0
    left: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def to_json(self) -> dict[str, object]:
        """The same as JSON can hold it."""
        told: dict[str, object] = {"campaign": self.campaign, "action": self.settling.action}
        return told | {"settled": self.settled, "left": self.left}

    def lines(self) -> list[str]:
        """The same for people."""
        was, is_ = ("was", "is") if self.settled == 1 else ("were", "are")
        was = f"{_rows(self.settled)} that {was} {_words(self.settling.state)}"
        told = f"{was} {is_} {self.settling.told}"
        left = [
            f"{_rows(len(ids))} left: {_words(state)}, {_listed(ids)}"
            for state, ids in self.left.items()
        ]
        return [told, *left]


async def settle(
    settings: CampaignSettings, settling: Settling, author: Author, named: Sequence[int] | None
) -> Settlement:
    """Settle rows, a thousand in a transaction, and keep who did it and what they were.

    Args:
        settings: which campaign, where.
        settling: `REQUEUE` or one of `RESOLVE`.
        author: kept with each row.
        named: the members by id, or None for all in the state that `settling` is about.

    Raises:
        CampaignError: the campaign has no rows.
        SettingsError: no member is named, or one that the campaign does not have; nothing was
            changed.
        ConfigurationError: schema or rights are wrong.
        DatabaseUnavailable: the database does not answer, or others hold the rows. What was settled
            stays settled.
    """
    campaign, done = settings.campaign_id, Settlement(settings.campaign_id, settling)
    record = {"action": settling.action, "by": author.by, "why": author.why}
    async with changing(settings, touches_rows=True) as conn:
        if named is not None:
            await _check(conn, campaign, settling.state, named)
        async for ids in _slices(conn, campaign, settling.state, named):
            values = {"campaign": campaign, "ids": list(ids), **record}
            settled = await _settle_slice(conn, settling.query, values)
            done.settled += len(settled)
            others = [member for member in ids if member not in settled]
            for member, state in await _told_states(conn, campaign, others):
                done.left.setdefault(state or "gone", []).append(member)
    return done


async def _check(
    conn: AsyncConnection[Any], campaign: str, state: State, named: Sequence[int]
) -> None:
    """Refuse an empty list, and one that was made for another campaign, before anything changes."""
    if not named:
        values = {"campaign": campaign, "state": state}
        async with briefly(conn):
            found = await (await conn.execute(queries.actions.COUNT_IN_STATE, values)).fetchone()
        count = _rows(found[0] if found else 0)
        fault = f"{count} of campaign {campaign} are {_words(state)}"
        raise SettingsError([f"name some with --member or --file, or all with --all: {fault}"])
    unknown: list[int] = []
    for ids in _cut(named):
        told = await _told_states(conn, campaign, ids)
        unknown += [member for member, state in told if state is None]
    if unknown:
        fault = f"campaign {campaign} does not have {_listed(unknown)}; nothing was changed"
        raise SettingsError([fault])


def _cut(named: Sequence[int]) -> list[Sequence[int]]:
    return [named[start : start + _SLICE] for start in range(0, len(named), _SLICE)]


async def _slices(
    conn: AsyncConnection[Any], campaign: str, state: State, named: Sequence[int] | None
) -> AsyncIterator[Sequence[int]]:
    """The members to settle; all in the state are looked up page by page, each row met once."""
    if named is not None:
        for ids in _cut(named):
            yield ids
        return
    first = members.LOWEST
    while first <= members.HIGHEST:
        cursor = conn.cursor(row_factory=scalar_row)
        values = {"campaign": campaign, "state": state, "first": first, "limit": _PAGE}
        async with briefly(conn):
            page = await (await cursor.execute(queries.actions.IN_STATE, values)).fetchall()
        for ids in _cut(page):
            yield ids
        if len(page) < _PAGE:
            return
        first = page[-1] + 1


async def _settle_slice(
    conn: AsyncConnection[Any], query: LiteralString, values: Mapping[str, object]
) -> set[int]:
    """Settle one slice; waits for locks of the application, a little at a time."""
    async for attempt in stamina.retry_context(
        on=_is_passing, attempts=None, timeout=_LOCKS_PATIENCE_S, wait_initial=0.1, wait_max=1.0
    ):
        with attempt:
            return set(await at_once(conn, query, values, scalar_row))
    raise AssertionError("attempts end with a result or an error")


async def _told_states(
    conn: AsyncConnection[Any], campaign: str, ids: Sequence[int]
) -> list[tuple[int, str | None]]:
    if not ids:
        return []
    values = {"campaign": campaign, "ids": list(ids)}
    async with briefly(conn):
        return await (await conn.execute(queries.actions.TOLD_STATES, values)).fetchall()


def _is_passing(error: Exception) -> bool:
    return isinstance(error, psycopg.Error) and error.sqlstate in _PASSING


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _words(state: str) -> str:
    return state.replace("_", " ")


def _listed(ids: Sequence[int]) -> str:
    more = f" and {len(ids) - _SHOWN:,} more" if len(ids) > _SHOWN else ""
    members = "member" if len(ids) == 1 else "members"
    return f"{members} {', '.join(map(str, ids[:_SHOWN]))}{more}"
