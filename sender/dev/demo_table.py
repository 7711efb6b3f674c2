"""The demo's last words for people: a table of what every member got, and the verdict."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from sender.dev.demo_figures import SHORTEST_STEADY_S, Figures, Run

_PASSED = "Everyone was mailed at most once, and nobody was lost."


def show(figures: Figures, console: Console) -> None:
    """Print the table and the verdict.

    Args:
        figures: what happened.
        console: where to.
    """
    table = Table(show_header=False, title="What happened", title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for section in (_members(figures), _traffic(figures), _runs(figures)):
        for name, value in section:
            table.add_row(name, value)
        table.add_section()
    console.print(table)
    console.print(verdict(figures))


def verdict(figures: Figures) -> str:
    """One sentence: kept, or how the promise was broken."""
    tally = figures.tally
    if tally.exit_code == 0:
        return _PASSED
    return f"BROKEN: {tally.twice:,} mailed twice, {tally.lost:,} lost."


def _members(figures: Figures) -> Iterator[tuple[str, str]]:
    tally = figures.tally
    yield "members", f"{figures.members:,}"
    yield "  delivered once", f"{tally.once:,}"
    yield "  delivered twice", f"{tally.twice:,}"
    yield "  not delivered, with a reason", f"{sum(tally.not_delivered.values()):,}"
    for reason, count in tally.not_delivered.items():
        yield f"    {reason}", f"{count:,}"
    yield "  lost", f"{tally.lost:,}"


def _traffic(figures: Figures) -> Iterator[tuple[str, str]]:
    yield "repeats absorbed by the key", f"{figures.repeats_absorbed:,}"
    for run, name in zip(figures.runs, ("first", "second"), strict=False):
        yield f"rate held by the {name} run", _rate(run)
    yield "most requests in any second", f"{figures.most_in_any_second:,}"
    yield "requests refused as too fast (429)", f"{figures.refused_for_rate:,}"


def _runs(figures: Figures) -> Iterator[tuple[str, str]]:
    for run, name in zip(figures.runs, ("first", "second"), strict=False):
        memory = "" if run.peak_memory_mib is None else f", {run.peak_memory_mib:.0f} MiB at most"
        yield f"{name} run", f"{run.seconds:.1f} s{memory}"
        yield "  exit code", f"{run.exit_code} ({run.end or 'killed'})"
    yield "the whole demo", f"{figures.seconds:.1f} s"


def _rate(run: Run) -> str:
    if run.rate_per_s is None:
        return f"steady for less than {SHORTEST_STEADY_S:.0f} s"
    return f"{run.rate_per_s:.1f}/s"
