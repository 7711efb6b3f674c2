"""The pictures of the README, out of the figures of `bench database` and `bench rate`.

    python -m bench.plot [FOLDER]

Reads `database.json` and all `rate*.json` in FOLDER (bench/results), which may each hold some of
the limits, and writes `claim.png` and `rate.png` there. Needs matplotlib: uv sync --group bench.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

FOLDER = Path(__file__).with_name("results")
BLUE, ORANGE, GREY = "#1f5fa8", "#d1601d", "#8a8a8a"

LINES = {
    "usual, snapshot held": ("usual queue, a snapshot held open", ORANGE, "-"),
    "usual": ("usual queue", ORANGE, "--"),
    "ours, snapshot held": ("sender, a snapshot held open", BLUE, "-"),
    "ours": ("sender", BLUE, "--"),
}


def main() -> None:
    """Draw both."""
    folder = Path(sys.argv[1]) if sys.argv[1:] else FOLDER
    plt.rcParams.update(
        {
            "font.size": 11,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
        }
    )
    draw_claims(json.loads((folder / "database.json").read_text()), folder / "claim.png")
    rates = [json.loads(path.read_text()) for path in sorted(folder.glob("rate*.json"))]
    cells = [cell for found in rates for cell in found["result"]["cells"]]
    draw_rates(cells, folder / "rate.png")


def _plain(axis: Any) -> None:
    """1,000 and not 10 to the third; the steps between have no name."""
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def draw_claims(found: dict[str, Any], out: Path) -> None:
    """How long a claim takes as a campaign goes on: the median, and up to the 99th percentile."""
    figure, axes = plt.subplots(figsize=(8, 4.6))
    result = found["result"]
    for name, (label, colour, style) in LINES.items():
        parts = result["trials"][name]["statements"]["claim"]["parts"]
        at = [5 + 10 * i for i, part in enumerate(parts) if part["wall_p50_ms"]]
        shown = [part for part in parts if part["wall_p50_ms"]]
        middle = [part["wall_p50_ms"] for part in shown]
        axes.plot(
            at, middle, style, color=colour, label=label, linewidth=2, marker="o", markersize=4
        )
        axes.fill_between(
            at,
            middle,
            [part["wall_p99_ms"] for part in shown],
            color=colour,
            alpha=0.12,
            linewidth=0,
        )
    axes.set_yscale("log")
    _plain(axes.yaxis)
    axes.set_xlim(0, 100)
    axes.set_xlabel(f"% of a campaign of {result['rows']:,} targets done")
    axes.set_ylabel(f"ms to claim {result['rows_a_claim']} targets")
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_title("Claim time: median, shaded to the 99th percentile", loc="left", fontsize=11)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.0, -0.14), ncols=2)
    _save(figure, out)


def draw_rates(cells: list[dict[str, Any]], out: Path) -> None:
    """The rate that the provider saw, against its latency, for each limit."""
    figure, axes = plt.subplots(figsize=(8, 4.6))
    for limit in sorted({cell["limit_per_s"] for cell in cells}):
        axes.axhline(limit, color=GREY, linewidth=0.8, linestyle=":")
        axes.annotate(
            f"limit {limit:,g}/s", (1.02, limit), xycoords=("axes fraction", "data"),
            va="center", color=GREY, fontsize=10,
        )  # fmt: skip
        _line(axes, cells, limit, 0, ("bare aiohttp loop", GREY, "none", "x"))
        _line(axes, cells, limit, 1, ("sender, one process", BLUE, "-", "o"))
        _line(axes, cells, limit, 4, ("sender, four processes", ORANGE, "--", "s"))
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain(axes.xaxis)
    _plain(axes.yaxis)
    axes.set_xticks(sorted({cell["latency_ms"] for cell in cells}))
    axes.set_xlabel("latency of the provider, ms")
    axes.set_ylabel("requests/s that it received")
    axes.grid(axis="y", color="#eeeeee", linewidth=0.7)
    axes.set_title("Rate against latency, 4 % of the targets refused once", loc="left", fontsize=11)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(
        once.values(),
        once.keys(),
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(0.0, -0.14),
        ncols=3,
    )
    _save(figure, out)


def _line(
    axes: Axes, cells: list[dict[str, Any]], limit: float, processes: int, look: tuple[str, ...]
) -> None:
    label, colour, style, marker = look
    points = sorted(
        (cell["latency_ms"], cell["share"] * limit)
        for cell in cells
        if cell["limit_per_s"] == limit and cell["processes"] == processes
    )
    if points:
        axes.plot(
            *zip(*points, strict=True), linestyle=style, color=colour, marker=marker,
            markersize=9 if marker == "x" else 5, linewidth=1.6, label=label, alpha=0.9,
        )  # fmt: skip


def _save(figure: Any, out: Path) -> None:
    figure.savefig(out, dpi=150, bbox_inches="tight")
    plt.close(figure)
    print(out)


if __name__ == "__main__":
    main()
