"""The commands and their help. Thin: reads arguments, nothing else."""

import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sender import cli_actions, commands
from sender.exits import ending
from sender.help_text import EXIT_CODES, environment_table

_USAGE_ERROR = 2
_WRONG_SETTINGS = 78


class _Program(TyperGroup):
    """Adds the environment and the exit codes to the help, read only when it is asked for."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write("\n" + environment_table() + "\n\n" + EXIT_CODES + "\n")


app = typer.Typer(
    name="sender",
    cls=_Program,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def main() -> int:
    """Run the command that the arguments name."""
    try:
        app()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        wrong = code == _USAGE_ERROR and sys.argv[1:2] == ["run"]
        return _WRONG_SETTINGS if wrong else code
    return 0


def _print_version(value: bool) -> None:
    if value:
        print(f"sender {version('sender')}")
        raise typer.Exit


def _known_states(value: str) -> str:
    from sender.failures import STATES

    if not value or not set(value.split(",")) <= set(STATES):
        raise typer.BadParameter(f"must be some of {','.join(STATES)}")
    return value


@app.callback()
def program(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Mail each member of a campaign exactly once.

    Reads the members from the PostgreSQL table campaign_targets and posts one request a mail to the
    provider, at the provider's rate. Start it as often as you like, several at a time, and kill it
    whenever you must: whoever starts next goes on, and nobody gets the mail two times.

    New here? Try `sender demo`: it needs no database, no provider and no settings. For real:
    migrate, check, run, and look with status and failures. The commands stand in that order; those
    after them stop a campaign and settle what a run could not.
    """


@app.command()
def demo(
    targets: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many members.")] = 5_000,
    as_json: _AsJson = False,
) -> None:
    """Show the whole thing on this machine; nothing to set up.

    Starts a database and a provider with faults, mails made-up members, kills the run in the
    middle, starts it again, and tells what every member got. Takes under a minute.
    """
    raise typer.Exit(ending(lambda: commands.demo(targets=targets, as_json=as_json)))


@app.command()
def migrate(
    plan: Annotated[bool, typer.Option("--plan", help="Print the SQL, change nothing.")] = False,
) -> None:
    """Bring the database to the schema this version needs.

    Safe beside a busy application and safe to repeat. Needs DB_DSN only.
    """
    raise typer.Exit(ending(lambda: commands.migrate(plan_only=plan)))


@app.command()
def check(as_json: _AsJson = False) -> None:
    """Say all that would stop a run, at once; send nothing.

    Looks at every setting, the database, its schema, the campaign and whether the provider can be
    reached. Exit code 0 if a run can start, else 78.
    """
    raise typer.Exit(ending(lambda: commands.check(as_json=as_json)))


@app.command()
def run() -> None:
    """Send the campaign until done, deadline or SIGTERM.

    All it needs comes from the environment; see `sender --help`. Run `sender check` first.
    """
    raise typer.Exit(ending(commands.run))


@app.command()
def status(
    watch: Annotated[
        bool, typer.Option("--watch", help="Again every 2 s until no row is open, or Ctrl-C.")
    ] = False,
    as_json: _AsJson = False,
) -> None:
    """Tell where the campaign stands.

    Counts that add up, the rate, the time left, the last failures. With --watch it is drawn again
    in place on a terminal, and is a line a round elsewhere (with --json an object a line); a
    database that is away is told and waited for, and a look that takes long comes less often. Needs
    DB_DSN and CAMPAIGN_ID.
    """
    look = commands.watch if watch else commands.status
    raise typer.Exit(ending(lambda: look(as_json=as_json)))


@app.command()
def failures(
    state: Annotated[
        str,
        typer.Option(
            callback=_known_states, help="Any of failed,in_doubt,skipped,pending,sending."
        ),
    ] = "failed,in_doubt",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV for a spreadsheet.")] = False,
    as_json: _AsJson = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this many.")] = None,
) -> None:
    """List who did not get the mail, and why.

    Needs DB_DSN and CAMPAIGN_ID.
    """
    if as_csv and as_json:
        raise typer.BadParameter("not together with --json", param_hint="--csv")
    form = "csv" if as_csv else "json" if as_json else "text"
    states = state.split(",")
    raise typer.Exit(ending(lambda: commands.failures(states=states, form=form, limit=limit)))


cli_actions.add_to(app)


@app.command("fake-provider")
def fake_provider(
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 takes any.")] = 8025,
    limit_per_s: Annotated[float | None, typer.Option(help="Answer 429 above this rate.")] = None,
    latency_s: Annotated[float | None, typer.Option(help="Seconds before an answer.")] = None,
    window_s: Annotated[float | None, typer.Option(help="Seconds a key is remembered.")] = None,
    first_503: Annotated[
        float | None, typer.Option("--first-503", help="Share that gets 503 the first time.")
    ] = None,
    permanent_422: Annotated[
        float | None, typer.Option("--permanent-422", help="Share that gets 422 every time.")
    ] = None,
    accept_then_cut: Annotated[
        float | None, typer.Option(help="Share accepted, then cut off without an answer.")
    ] = None,
    options: Annotated[
        str | None, typer.Option(help="More options as a JSON object, or @FILE.")
    ] = None,
) -> None:
    """Serve a strict made-up provider to try a run against.

    The one of the demo and the tests. Prints where it listens, remembers every key, and refuses
    whatever breaks the rules.
    """
    given = {
        "limit_per_s": limit_per_s,
        "latency_s": latency_s,
        "window_s": window_s,
        "first_503": first_503,
        "permanent_422": permanent_422,
        "accept_then_cut": accept_then_cut,
    }
    raise typer.Exit(
        ending(lambda: commands.fake_provider(host=host, port=port, more=options, options=given))
    )
