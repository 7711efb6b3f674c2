"""What the commands that change a campaign do once their arguments are read."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from sender.commands import json_text, warn
from sender.domain import Control
from sender.errors import SettingsError

if TYPE_CHECKING:
    from sender.settling import Settling


@dataclass(slots=True, frozen=True)
class Rows:
    """Which rows the arguments name.

    Attributes:
        members: ids, one by one.
        file: path of a list of them, `-` for standard input, or None.
        everyone: all that can be settled instead.
    """

    members: Sequence[int]
    file: str | None
    everyone: bool

    def named(self) -> list[int] | None:
        """The members by id, or None for everyone. Raises `SettingsError`."""
        from sender.members import named

        if not self.everyone:
            return named(self.members, self.file)
        if self.members or self.file is not None:
            raise SettingsError(["--all: not together with --member or --file"])
        return None


def steer(wish: Control, *, by: str, why: str, as_json: bool) -> None:
    """`sender pause`, `sender resume` and `sender cancel`."""
    from sender.actions import Author
    from sender.settings import load_campaign
    from sender.steering import steer as work

    settings, author = load_campaign(), Author.of(by, why)
    warn(settings.unknown)
    steered = asyncio.run(work(settings, wish, author))
    print(json_text(asdict(steered)) if as_json else steered.line())


def resolve(verdict: str, rows: Rows, *, by: str, why: str, as_json: bool) -> None:
    """`sender resolve`: settle rows in doubt as sent or as pending."""
    from sender.settling import RESOLVE

    _settle(RESOLVE[verdict], rows, by=by, why=why, as_json=as_json)


def requeue(rows: Rows, *, by: str, why: str, as_json: bool) -> None:
    """`sender requeue`: failed rows become pending again."""
    from sender.settling import REQUEUE

    _settle(REQUEUE, rows, by=by, why=why, as_json=as_json)


def _settle(settling: "Settling", rows: Rows, *, by: str, why: str, as_json: bool) -> None:
    import stamina.instrumentation

    from sender.actions import Author
    from sender.settings import load_campaign
    from sender.settling import settle

    stamina.instrumentation.set_on_retry_hooks([])  # they would print among the answer's lines
    settings, author = load_campaign(), Author.of(by, why)
    warn(settings.unknown)
    done = asyncio.run(settle(settings, settling, author, rows.named()))
    print(json_text(done.to_json()) if as_json else "\n".join(done.lines()))
