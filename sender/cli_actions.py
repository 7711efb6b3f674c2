"""The commands that change a campaign: their arguments and their help."""

from typing import Annotated, Literal

import typer

from sender import commands_actions
from sender.commands_actions import Rows
from sender.domain import Control
from sender.exits import ending

_By = Annotated[str, typer.Option("--by", metavar="NAME", help="Who does it; kept.")]
_Why = Annotated[str, typer.Option("--why", metavar="TEXT", help="Why, in a line; kept.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
_Members = Annotated[
    list[int] | None,
    typer.Option("--member", metavar="ID", help="A member; repeatable."),
]
_File = Annotated[
    str | None,
    typer.Option(
        "--file",
        metavar="FILE",
        help="Lines that begin with a member id, as of `sender failures --csv`; - for stdin.",
    ),
]
_All = Annotated[bool, typer.Option("--all", help="Every row that can be, instead of named ones.")]


def add_to(app: typer.Typer) -> None:
    """Make these commands part of the program, in this order."""
    for command in (pause, resume, cancel, resolve, requeue):
        app.command()(command)


def pause(by: _By, why: _Why, as_json: _AsJson = False) -> None:
    """Stop every run of the campaign within 2 s.

    Requests in flight end and are recorded, other rows are handed back. Until `sender resume` a run
    that is started ends at once, with exit code 0. Needs DB_DSN and CAMPAIGN_ID.
    """
    _steer(Control.PAUSED, by, why, as_json)


def resume(by: _By, why: _Why, as_json: _AsJson = False) -> None:
    """Let a paused or cancelled campaign run again.

    The next `sender run` goes on where the last one stopped; this starts none. Says who held the
    campaign and why. Needs DB_DSN and CAMPAIGN_ID.
    """
    _steer(Control.RUN, by, why, as_json)


def cancel(by: _By, why: _Why, as_json: _AsJson = False) -> None:
    """Stop every run of the campaign within 2 s, for good.

    Like pause, but a later pause does not replace it: nothing but an explicit `sender resume` lets
    the campaign run again. Needs DB_DSN and CAMPAIGN_ID.
    """
    _steer(Control.CANCELLED, by, why, as_json)


def resolve(
    verdict: Annotated[
        Literal["sent", "pending"],
        typer.Option("--as", help="sent: the provider has the mail; pending: it surely has not."),
    ],
    by: _By,
    why: _Why,
    member: _Members = None,
    file: _File = None,
    everyone: _All = False,
    as_json: _AsJson = False,
) -> None:
    """Settle rows in doubt, once somebody knows.

    Members in doubt may or may not have got the mail: look at the provider's log first. As pending
    they are mailed by the next run, and whoever has the mail already may get it twice. Other rows
    are left and told. Who, when, why and what the row was stays in campaign_actions. Needs DB_DSN
    and CAMPAIGN_ID.
    """
    rows = Rows(member or (), file, everyone)
    raise typer.Exit(
        ending(lambda: commands_actions.resolve(verdict, rows, by=by, why=why, as_json=as_json))
    )


def requeue(
    by: _By,
    why: _Why,
    member: _Members = None,
    file: _File = None,
    everyone: _All = False,
    state: Annotated[
        Literal["failed"], typer.Option(help="Only rows that failed; see resolve for in_doubt.")
    ] = "failed",
    as_json: _AsJson = False,
) -> None:
    """Put failed rows back, to be tried again.

    Correct what made them fail first; their attempts are counted anew. Other rows are left and
    told, and whoever opted out stays skipped. Who, when, why and what the row was stays in
    campaign_actions. Needs DB_DSN and CAMPAIGN_ID.
    """
    del state
    rows = Rows(member or (), file, everyone)
    raise typer.Exit(
        ending(lambda: commands_actions.requeue(rows, by=by, why=why, as_json=as_json))
    )


def _steer(wish: Control, by: str, why: str, as_json: bool) -> None:
    raise typer.Exit(ending(lambda: commands_actions.steer(wish, by=by, why=why, as_json=as_json)))
