"""What the demo says in the end, worked out from the provider's record and the ledger. Pure.

The provider's record is the truth about mails, the ledger about what people would be told. Must
never take one for the other: a member is lost if the first knows no mail and the second no reason.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

SHORTEST_STEADY_S = 2.0
_START_S = 1.0

type Request = tuple[float, str | None, int]
"""One request as the provider saw it: monotonic time, idempotency key, status answered."""


@dataclass(slots=True, frozen=True)
class Told:
    """What the ledger says of a member whose mail is not recorded as sent."""

    state: str
    reason: str | None


@dataclass(slots=True, frozen=True)
class Tally:
    """What every member got; each is counted in one field, so they add up to the list.

    Attributes:
        once: got one mail.
        twice: got more than one: the promise is broken.
        not_delivered: got none and the ledger says why: how many, by state and reason.
        lost: got none and nobody would ever know: still open, or recorded as sent.
    """

    once: int
    twice: int
    not_delivered: Mapping[str, int]
    lost: int

    @property
    def exit_code(self) -> int:
        """1 if anyone was mailed twice or lost, else 0."""
        return 1 if self.twice or self.lost else 0


def tally(members: Iterable[int], mails: Mapping[int, int], told: Mapping[int, Told]) -> Tally:
    """Hold the provider's record against the ledger.

    Args:
        members: everyone on the list.
        mails: mails by member, those who got none left out.
        told: members the ledger does not have as sent.

    Returns:
        What every member got.
    """
    once = twice = lost = 0
    reasons: Counter[str] = Counter()
    for member in members:
        got = mails.get(member, 0)
        if got > 1:
            twice += 1
        elif got == 1:
            once += 1
        elif reason := _reason(told.get(member)):
            reasons[reason] += 1
        else:
            lost += 1
    return Tally(once, twice, dict(sorted(reasons.items())), lost)


def _reason(told: Told | None) -> str | None:
    """Why somebody got no mail, or None if that is nowhere to be found."""
    if told is None or told.state not in ("failed", "in_doubt", "skipped"):
        return None
    if told.state == "skipped":
        return "skipped: opted out"
    return f"{told.state}: {told.reason}" if told.reason else None


@dataclass(slots=True, frozen=True)
class Run:
    """One `sender run` of the demo.

    Attributes:
        exit_code: as a shell tells it: 137 for a process that kill -9 ended.
        end: why it ended, in its own last words.
        seconds: from its start to its end.
        requests: requests the provider received from it.
        rate_per_s: requests a second over its steady part, or None if that is shorter than 2 s.
        peak_memory_mib: most resident memory, or None where the system does not tell.
    """

    exit_code: int
    end: str
    seconds: float
    requests: int
    rate_per_s: float | None
    peak_memory_mib: float | None


@dataclass(slots=True, frozen=True)
class Figures:
    """Everything the demo tells.

    Attributes:
        members: how many were on the list.
        tally: what they got.
        repeats_absorbed: requests for a mail that was out already; the key kept them from being a
            second one.
        most_in_any_second: most requests the provider received in any sliding second.
        refused_for_rate: requests it answered with 429.
        limit_per_s: the limit both runs were given.
        lease_s: after how many seconds the second run could take what the first had in hand.
        runs: the killed one and the one that went on.
        seconds: the whole demo.
    """

    members: int
    tally: Tally
    repeats_absorbed: int
    most_in_any_second: int
    refused_for_rate: int
    limit_per_s: float
    lease_s: float
    runs: Sequence[Run]
    seconds: float

    def to_json(self) -> dict[str, object]:
        """The same as one JSON object, what members got at its top level."""
        flat = asdict(self)
        got = flat.pop("tally")
        return {
            "ok": self.tally.exit_code == 0,
            "members": flat.pop("members"),
            "delivered_once": got["once"],
            "delivered_twice": got["twice"],
            "not_delivered": got["not_delivered"],
            "lost": got["lost"],
            **flat,
        }


def rate_until(requests: Sequence[Request], end: float) -> float | None:
    """Requests a second of a run that was killed at `end`: from 1 s after its first request.

    Returns:
        The rate, or None if that is shorter than 2 s.
    """
    return _rate(requests, [(requests[0][0] + _START_S, end)]) if requests else None


def rate_after(
    requests: Sequence[Request], before: Sequence[Request], leases_end: float
) -> float | None:
    """Requests a second of the run that went on, while it had members nobody had asked for.

    That is from 1 s after its first request to the last first request for a member, without the
    wait for the killed run's leases: from the last first request before they ended to the next one.

    Args:
        requests: those of the run.
        before: those of the killed one.
        leases_end: when the killed run's leases had ended, monotonic seconds.

    Returns:
        The rate, or None if that is shorter than 2 s.
    """
    seen = {key for _, key, _ in before}
    first: list[float] = []
    for at, key, _ in requests:
        if key not in seen:
            seen.add(key)
            first.append(at)
    if not first:
        return None
    begin = requests[0][0] + _START_S
    early = [at for at in first if at < leases_end]
    late = first[len(early) :]
    parts = [(begin, early[-1])] if early else []
    parts += [(max(begin, late[0]), late[-1])] if late else []
    return _rate(requests, parts)


def _rate(requests: Sequence[Request], parts: Sequence[tuple[float, float]]) -> float | None:
    parts = [(begin, end) for begin, end in parts if begin < end]
    seconds = sum(end - begin for begin, end in parts)
    if seconds < SHORTEST_STEADY_S:
        return None
    count = sum(begin < at <= end for at, _, _ in requests for begin, end in parts)
    return count / seconds
