"""``tunewright replay``: compares search strategies on recorded tables, without hardware."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SettingsError
from .shared.console import console, note, working
from .shared.console import table as grid

if TYPE_CHECKING:
    from ..search.replay import Summary, Table

FRACTIONS = (0.95, 0.98, 0.99)
#: colours that colour-blind people can distinguish (Okabe and Ito), strongest first
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def replay(
    tables: Annotated[
        list[Path],
        typer.Argument(metavar="TABLE...", help="kernel_tuner cache files or our own tables, also gzipped."),
    ],
    strategy: Annotated[str, typer.Option(help="Names, separated by commas; `all` for all of them.")] = "auto,random",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each strategy.")] = 100,
    budget: Annotated[int, typer.Option(min=1, help="Evaluations of each run.")] = 200,
    batch: Annotated[int, typer.Option(min=1, help="Configs per request.")] = 1,
    plot: Annotated[
        Path, typer.Option(help="Draw the best-so-far curves to this file; needs matplotlib.", dir_okay=False)
    ] = Path("replay.png"),
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Print only.")] = False,
) -> None:
    """Replay strategies on recorded tables: how close they come to the optimum, how soon, at what cost.

    Example: tunewright replay A100.json.gz --strategy auto,genetic,random --seeds 100 --plot curves.png
    """
    from ..search import names
    from ..search.replay import Summary, load
    from ..search.replay import replay as run_once

    known = names()
    wanted = known if strategy.strip() == "all" else [name.strip() for name in strategy.split(",") if name.strip()]
    if not wanted or (unknown := [name for name in wanted if name not in known]):
        what = f"there is no strategy {unknown[0]!r}" if wanted else "no strategy is named"
        raise SettingsError(what, where="--strategy", hint=f"one of: {', '.join(known)}")
    pyplot = None if no_plot else _pyplot()  # fails before the work if matplotlib is missing
    loaded = [load(path) for path in tables]
    results: list[tuple[Table, list[Summary]]] = []
    for table in loaded:
        summaries = []
        for name in dict.fromkeys(wanted):
            with working(f"{name} on {table.name}"):
                runs = [run_once(table, name, seed=seed, budget=budget, batch=batch) for seed in range(seeds)]
            summaries.append(Summary(name, runs))
        results.append((table, summaries))
        _print(table, summaries, budget)
    if pyplot is not None:
        _draw(pyplot, results, budget, plot)
        note(f"curves written to {plot}")


def _print(table: Table, summaries: list[Summary], budget: int) -> None:
    marks = sorted({mark for mark in (25, 50, 100, 200, 400, 800) if mark < budget} | {budget})
    hard = table.share_within(FRACTIONS[0])
    out = grid(
        "strategy",
        *(f">@{mark}" for mark in marks),
        *(f">to {fraction:.0%}" for fraction in FRACTIONS),
        ">failed",
        ">repeats",
        ">ms/ask",
        title=f"{table.name}: {len(table.trials)} configs, {hard:.2%} within 5 % of the optimum",
    )
    for summary in summaries:
        reached = [summary.median_to(fraction) for fraction in FRACTIONS]
        failed = sum(run.failures for run in summary.runs) / len(summary.runs)
        out.add_row(
            summary.strategy,
            *(f"{summary.median_at(mark):.3f}" for mark in marks),
            *("-" if count == math.inf else f"{count:.0f}" for count in reached),
            f"{failed:.1f}",
            str(sum(run.repeats for run in summary.runs)),
            f"{summary.milliseconds:.2f}",
        )
    console().print(out)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise SettingsError(
            "matplotlib is not installed", where="--plot", hint="pip install tunewright[plot], or give --no-plot"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _draw(pyplot: Any, results: list[tuple[Table, list[Summary]]], budget: int, path: Path) -> None:
    """Draw median and quartiles of optimum / best so far, one panel per table."""
    import numpy as np

    columns = min(3, len(results))
    rows = math.ceil(len(results) / columns)
    style = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "axes.titlesize": 11}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(
            rows, columns, figsize=(max(7.2, 5.2 * columns), 4.4 * rows), squeeze=False, layout="constrained"
        )
        for panel in axes.flat[len(results) :]:
            panel.set_axis_off()
        for panel, (table, summaries) in zip(axes.flat, results, strict=False):
            lowest = 1.0
            for i, summary in enumerate(summaries):
                # the curve of a run that exhausted the space stays constant
                length = max(1, min(budget, max(len(run.curve) for run in summary.runs)))
                curves = np.array([[run.at(n) for n in range(1, length + 1)] for run in summary.runs])
                low, middle, high = np.quantile(curves, (0.25, 0.5, 0.75), axis=0)
                at, colour = np.arange(1, length + 1), COLOURS[i % len(COLOURS)]
                dash = ("-", "--", ":")[i // len(COLOURS) % 3]
                panel.plot(at, middle, dash, color=colour, linewidth=2.0, label=summary.strategy, zorder=3)
                panel.fill_between(at, low, high, color=colour, alpha=0.13, linewidth=0)
                lowest = min(lowest, float(low[min(9, length - 1)]))
            for fraction in FRACTIONS[:1]:
                panel.axhline(fraction, color="0.55", linewidth=0.8, linestyle=(0, (4, 4)), zorder=1)
                panel.annotate(
                    f"{fraction:.0%}",
                    (1.0, fraction),
                    xycoords=("axes fraction", "data"),
                    xytext=(3, 0),
                    textcoords="offset points",
                    va="center",
                    color="0.45",
                    fontsize=8,
                )
            panel.set_title(table.name, loc="left")
            panel.set_xlim(1, budget)
            # The first ten evaluations are chance, so the axis starts at the values after them.
            panel.set_ylim(max(0.0, math.floor(lowest * 20 - 0.5) / 20), 1.01)
            panel.set_xlabel("evaluations")
            panel.set_ylabel("optimum / best found")
            panel.set_axisbelow(True)
            panel.grid(axis="y", color="0.92")
            panel.legend(frameon=False, loc="lower right")
        runs = len(results[0][1][0].runs)
        figure.suptitle(f"Best so far: median and quartiles of {runs} runs", x=0.01, ha="left", fontsize=12)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


COMMANDS = (replay,)
