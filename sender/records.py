"""What a finish tells the database, and which outcomes its answer says were written.

Pure: rows are matched to outcomes here, and what an outcome means was decided before.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from sender.arrays import id_array
from sender.domain import Fate, Lease, Outcome, State, Target, content_hash


@dataclass(frozen=True, slots=True)
class Record:
    """Outcomes on their way into the table, sorted by what has to be written of them.

    Attributes:
        plain: first attempts that were accepted; only their ids travel.
        others: everything else.
        numbers: the leases' numbers within this record.
    """

    plain: list[Outcome]
    others: list[Outcome]
    numbers: dict[Lease, int]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], fates: Mapping[Lease, Fate]) -> Self:
        """Sort outcomes; `fates` names every lease they belong to."""
        plain = [o for o in outcomes if _is_plain_sent(o)]
        others = [o for o in outcomes if not _is_plain_sent(o)]
        return cls(plain, others, {x: n for n, x in enumerate(fates)})

    def values(self, fates: Mapping[Lease, Fate]) -> dict[str, str]:
        """What `queries.record.FINISH` wants to know of them."""
        outcomes = [*self.plain, *self.others]
        told = [*self.others, *_stamps_to_keep(outcomes, fates)]
        return {
            "batches": json.dumps(_fates(outcomes, fates, self.numbers)),
            "others": json.dumps([_as_json(o, self.numbers) for o in told]),
            "sent_ids": id_array(o.target.member_id for o in self.plain),
            "sent_fates": id_array(self.numbers[o.target.lease] for o in self.plain),
        }

    def held(self, answer: Any) -> set[Lease]:
        """The leases that carried their fence still."""
        return {x for x, n in self.numbers.items() if n in set(answer.held)}

    def taken(self, answer: Any) -> list[Outcome]:
        """The outcomes that were written."""
        held = self.held(answer)
        return _taken(self.plain, answer.sent, held) + _taken(self.others, answer.others, held)


def _is_plain_sent(outcome: Outcome) -> bool:
    return outcome.state is State.SENT and outcome.target.lease.batch_no is not None


def _stamps_to_keep(outcomes: Sequence[Outcome], fates: Mapping[Lease, Fate]) -> list[Outcome]:
    """Rows of a batch that was lost before and is done now, if they end without an outcome.

    They were skipped, and the lost claim may have sent them: the age of their key goes to the row,
    or a member who opts in again one day would be mailed under it as if it were new. Those that
    have an outcome by now are not first attempts any more and the statement passes over them.
    """
    lost = [x for x, fate in fates.items() if fate is Fate.DONE and x.found_key_used_at is not None]
    settled: set[Target] = {o.target for o in outcomes} if lost else set()
    return [
        Outcome(t, State.PENDING, key_used_at=t.key_used_at)
        for x in lost
        for t in x.targets
        if t not in settled
    ]


def _taken(
    outcomes: Sequence[Outcome], members: Iterable[int], held: Collection[Lease]
) -> list[Outcome]:
    """The outcomes that were written, by their members.

    A process that lost a batch and claimed it again may hold two outcomes of one member; the one
    under the lease that is held was written.
    """
    taken: dict[int, Outcome] = {}
    written = set(members)
    for outcome in outcomes:
        member = outcome.target.member_id
        if member in written and (member not in taken or outcome.target.lease in held):
            taken[member] = outcome
    return list(taken.values())


def _as_json(outcome: Outcome, numbers: Mapping[Lease, int]) -> dict[str, object]:
    target, used = outcome.target, outcome.key_used_at
    return {
        "member_id": target.member_id,
        "n": None if target.lease.batch_no is None else numbers[target.lease],
        "claim_id": str(target.lease.claim_id),
        "state": outcome.state,
        "charged": int(outcome.charged),
        # A batch that was lost before this claim: its claim ended without a known answer.
        "unknown": int(outcome.unknown) + (target.lease.found_key_used_at is not None),
        "delay_s": outcome.delay_s,
        "key_used_at": used and used.isoformat(),
        "content_hash": used and content_hash(target.email, target.variables).hex(),
        "reason": outcome.reason,
    }


def _fates(
    outcomes: Sequence[Outcome], fates: Mapping[Lease, Fate], numbers: Mapping[Lease, int]
) -> list[dict[str, object]]:
    tally = {x.claim_id: dict.fromkeys(State, 0) for x in fates}
    for outcome in outcomes:
        tally[outcome.target.lease.claim_id][outcome.state] += 1
    return [
        {
            "n": numbers[x],
            "batch_no": x.batch_no,
            "claim_id": str(x.claim_id),
            "fate": fate,
            "found": x.found_key_used_at and x.found_key_used_at.isoformat(),
            "sent": tally[x.claim_id][State.SENT],
            "failed": tally[x.claim_id][State.FAILED],
            "in_doubt": tally[x.claim_id][State.IN_DOUBT],
            "deferred": tally[x.claim_id][State.PENDING],
        }
        for x, fate in fates.items()
        if x.batch_no is not None
    ]
