"""Output of `tunewright explain`: a table of layers, details of some, and what to tune next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..runtime.insight.explanation import OPTIMIZED_OUT, State
from .kb.view import config_text, evidence_rows, gain_lines, gain_text, grid, plural, problem_text, safe, stacked
from .shared.console import cell, console, milliseconds, size, table

if TYPE_CHECKING:
    from rich.table import Table

    from ..measure.ceilings import Ceilings
    from ..runtime.insight.explain import Explanation, Opinion, Proof, RunnerUp
    from ..runtime.requests.compiled import CompiledModel

#: terminal width from which on rows are not split
WIDE = 100
#: number of problems that are suggested for tuning
NEXT = 3
#: number of fused operations, nodes and layers that are listed by name
NAMED = 4
_ORIGINS = {"user knowledge base": "user", "system knowledge base": "system", "tuning file": "file", "lockfile": "lock",
            "model file": "model"}  # fmt: skip


# ---- totals ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Next:
    """A problem that takes longer than its roofline, and whose kernel can be searched for."""

    problem: str
    layers: tuple[str, ...]
    seconds: float
    #: the part of ``seconds`` above the roofline
    lost: float
    origin: str
    #: number of candidates measured here already, and their maximum number
    measured: int
    candidates: int

    @property
    def share(self) -> float:
        return 1 - self.lost / self.seconds

    def to_json(self) -> dict[str, Any]:
        return {
            "problem": self.problem,
            "layers": list(self.layers),
            "ms": self.seconds * 1e3,
            "lost_ms": self.lost * 1e3,
            "share": self.share,
            "origin": self.origin,
            "measured": self.measured,
            "candidates": self.candidates,
        }


@dataclass(frozen=True)
class LayersSummary:
    """The summary of all layers of a model."""

    #: number of layers by origin; provisional ones count separately
    origins: Mapping[str, int]
    #: Seconds of all layers in one inference; number of inferences; seconds of the layers with a roofline, and their
    #: minimum by it.
    seconds: float
    inferences: int
    roofed: float
    floor: float
    ceilings: Mapping[str, Ceilings]
    next: tuple[Next, ...]

    def to_json(self) -> dict[str, Any]:
        tops = {
            name: {"flops": top.flops, "bandwidth": top.bandwidth} if not top.why else {"why": top.why}
            for name, top in self.ceilings.items()
        }
        timed = {"ms": self.seconds * 1e3, "inferences": self.inferences, "floor_ms": self.floor * 1e3}
        return {
            "origins": dict(self.origins),
            "time": timed if self.inferences else None,
            "ceilings": tops,
            "next": [each.to_json() for each in self.next],
        }


def summary(layers: Sequence[Explanation]) -> LayersSummary:
    """Compute the summary of all layers."""
    timed = [(each, each.timing) for each in layers if each.timing is not None and each.is_leaf]
    roofed = [(each, timing) for each, timing in timed if each.roofline.share is not None]
    tops = {_place(each): each.roofline.ceilings for each in layers if each.roofline.ceilings is not None}
    return LayersSummary(
        Counter(_group(each) for each in layers),
        sum(timing.seconds for _, timing in timed),
        max((timing.inferences for _, timing in timed), default=0),
        sum(timing.seconds for _, timing in roofed),
        sum(each.roofline.floor for each, _ in roofed),
        tops,
        tuple(_next(layers)),
    )


def _place(each: Explanation) -> str:
    if each.on_host:
        return "the host"
    return each.device


def _group(each: Explanation) -> str:
    return f"{each.origin} (provisional)" if each.match is not None and each.match.differs else each.origin


def _next(layers: Iterable[Explanation]) -> list[Next]:
    """Return the problems with the most time above the roofline; problems without measurements here come first.

    Layers with the same problem are tuned together.
    """
    found: dict[tuple[str, str, str], list[tuple[Explanation, float, float]]] = {}
    for each in layers:
        share = each.roofline.share
        if each.timing is not None and share is not None and each.candidates > 1:
            lost = each.timing.seconds * max(0.0, 1 - share)
            found.setdefault((each.problem, each.solver, each.why), []).append((each, each.timing.seconds, lost))
    rows = []
    for (problem, _, why), some in found.items():
        names = tuple(each.name for each, _, _ in some)
        seconds, lost = sum(seconds for _, seconds, _ in some), sum(lost for _, _, lost in some)
        rows.append(Next(problem, names, seconds, lost, why, some[0][0].measured, some[0][0].candidates))
    rows.sort(key=lambda row: (row.measured > 0, -row.lost))
    return [row for row in rows[:NEXT] if row.lost > 0]


# ---- the table ------------------------------------------------------------------------------------------------------


def show_requests(compiled: CompiledModel) -> None:
    """Print how requests are served, if that was chosen for the model. Layers are those of one example."""
    if not compiled.streams_origin:
        return
    together = f", {compiled.size} of them together" if compiled.size > 1 else ""
    counts = f"{plural(compiled.optimal_requests, 'request')} on {plural(compiled.streams.count, 'stream')}"
    console().print(f"served with {counts}{together}: {compiled.streams_origin}", markup=False, soft_wrap=True)


def show_table(layers: Sequence[Explanation], about: LayersSummary, title: str, again: str) -> None:
    """Print one row per layer that runs, then the totals. ``again``: the command that tunes the model."""
    out = console()
    out.print(cell(title), style="bold", soft_wrap=True)
    out.print()
    out.print(layers_table(layers, about, wide=out.width >= WIDE))
    out.print()
    for text in totals(about):
        out.print(cell(text))
    if about.next:
        out.print()
        out.print("What to tune next, by the time that the roofline does not account for:")
        out.print(next_grid(about.next))
        out.print(cell(f"\n{again}"), soft_wrap=True)


def next_grid(rows: Sequence[Next]) -> Table:
    from rich.table import Table

    made = Table.grid(padding=(0, 1))
    for number, row in enumerate(rows, 1):
        what = f"{_some(row.layers)}: {milliseconds(row.seconds)} ms at {row.share:.0%}, {row.origin}, "
        what += candidates_text(row.candidates, row.measured)
        made.add_row(f"{number}.", stacked(what, problem_text(row.problem)))
    return made


def layers_table(layers: Sequence[Explanation], about: LayersSummary, wide: bool = True) -> Table:
    """Make the table of layers without empty columns. If not ``wide``, time and share are in one column."""
    shown = [each for each in layers if each.origin != OPTIMIZED_OUT]
    gains = any(each.found is not None or _stays(each) for each in shown)
    timed, roofed = about.inferences > 0, any(each.roofline.share is not None for each in shown)
    times = [">ms", ">share"] if wide else [">ms\nshare"]
    made = table("layer and kernel", "from", *([">gain"] * gains), *(times * timed), *([">roof"] * roofed))
    made.columns[1].no_wrap = True
    for each in shown:
        cells: list[Any] = [stacked(safe(each.name), what_runs(each)), cell(origin_lines(each))]
        if gains:
            cells.append(gain_cell(each))
        if timed:
            cells += time_cells(each, about) if wide else ["\n".join(time_cells(each, about))]
        if roofed:
            cells.append("-" if each.roofline.share is None else f"{each.roofline.share:.0%}")
        made.add_row(*cells)
    return made


def what_runs(each: Explanation) -> str:
    """Return the operation with everything fused into it, and the kernel with its config."""
    op = " + ".join(name.removeprefix("tunewright::") for name in [each.op, *each.fused[:NAMED]])
    op += f" + {len(each.fused) - NAMED} more" if len(each.fused) > NAMED else ""
    inside = f" in {each.inside}" if each.inside else ""
    if each.kernel == each.origin:
        return safe(f"{op}{inside}")
    kernel = f"{each.kernel} {config_text(each.config)}".rstrip()
    return safe(f"{op}{inside}: {kernel}")


def origin_lines(each: Explanation) -> str:
    """Return the origin in short lines for a narrow column."""
    lines = [_ORIGINS.get(each.origin, each.origin)]
    if each.match is not None and each.match.differs:
        lines += ["provisional:", *each.match.differs]
    return "\n".join(lines)


def gain_cell(each: Explanation) -> str:
    if _stays(each):
        return "none"
    return "-" if each.found is None else gain_lines(each.found.measurement.evidence.gain)


def _stays(each: Explanation) -> bool:
    """Whether the layer was measured and nothing faster than the default was found."""
    if each.found is None:
        return each.measured > 0 and each.origin != "heuristic"
    if each.match is not None and each.match.differs:
        return False  # the default on that device may differ from the one here
    m = each.found.measurement
    return (m.key.solver, m.config) == m.evidence.default


def time_cells(each: Explanation, about: LayersSummary) -> tuple[str, str]:
    if each.timing is None:
        return "-", "-"
    share = f"{each.timing.seconds / about.seconds:.1%}" if each.is_leaf and about.seconds else "-"
    return milliseconds(each.timing.seconds), share


def totals(about: LayersSummary) -> Iterable[str]:
    """Yield the totals of all layers as sentences."""
    counts = ", ".join(f"{n} {origin}" for origin, n in about.origins.items() if origin != OPTIMIZED_OUT)
    gone = about.origins.get(OPTIMIZED_OUT, 0)
    yield f"Layers by origin: {counts or 'none'}{f'; {gone} optimized out' if gone else ''}."
    if about.inferences:
        roof = f", {about.floor / about.roofed:.0%} of the roofline" if about.roofed else ""
        times = plural(about.inferences, "inference")
        yield f"All layers: {milliseconds(about.seconds)} ms{roof} (medians of {times}, with a wait after each layer)."
    for name, top in about.ceilings.items():
        if top.why:
            yield f"No roofline for {name}: {top.why}."
        else:
            yield (
                f"Roofline of {name}, measured: {top.flops / 1e9:,.0f} GFLOP/s in fp32, "
                f"{top.bandwidth / 1e9:,.1f} GB/s from memory."
            )
    if about.roofed:
        yield "A layer may be above 100 %: Winograd needs less arithmetic, and data may come from a cache."


def _some(names: Sequence[str]) -> str:
    more = len(names) - 1
    return safe(names[0]) + (f" and {more} more like it" if more else "")


# ---- everything about a layer ---------------------------------------------------------------------------------------


def show_layers(layers: Sequence[Explanation], about: LayersSummary) -> None:
    """Print the details of layers one after the other."""
    out = console()
    for n, each in enumerate(layers):
        if n:
            out.print()
        out.print(cell(safe(each.name)), style="bold", soft_wrap=True)
        out.print(grid(layer_rows(each, about)))
        if each.solver:
            out.print("  solvers")
            out.print(opinions_table(each))


def layer_rows(each: Explanation, about: LayersSummary) -> Iterable[tuple[str, object]]:
    yield "operation", safe(" + ".join([each.op, *each.fused]))
    if each.inside:
        yield "inside", safe(each.inside)
    if each.nodes not in ((), (each.name,)):
        yield "stands for", safe(", ".join(each.nodes))
    if each.problem:
        yield "problem", safe(each.problem)
    yield "device", _place(each)
    if each.solver:
        yield "kernel", candidate_text(each.solver, each.config)
    stays = ": nothing that was measured is faster than the default beyond noise"
    yield "origin", f"{each.why}{stays}" if _stays(each) else each.why
    if each.found is not None:
        yield from proof_rows(each.found)
    if each.nearest:
        yield "nearest", safe(each.nearest)
    if each.heuristic:
        yield "heuristic", safe(each.heuristic)
    if not each.solver and each.solvers:
        yield "solvers", f"nobody was asked: {each.solvers[0].why}"
    if each.solver:
        yield "runner-up", runner_up_text(each.runner_up)
        some = candidates_text(each.candidates, each.measured)
        yield "search", some if each.candidates else "never tuned: it runs on the host"
    for one in each.barred:
        yield "barred", f"{candidate_text(one.solver, one.config)}, {safe(one.why)}"
    yield from time_rows(each, about)
    if each.note:
        yield "note", safe(each.note)


def candidates_text(candidates: int, measured: int) -> str:
    """Describe the candidates of a search. A knowledge base keeps only the measurements of the best ones."""
    kept = f"measurements of {measured} kept" if measured else "none measured"
    return f"up to {plural(candidates, 'candidate')}, {kept}"


def candidate_text(solver: str, config: Mapping[str, Any]) -> str:
    return f"{safe(solver)} {config_text(config)}".rstrip()


def proof_rows(found: Proof) -> Iterable[tuple[str, object]]:
    m = found.measurement
    yield "measured", f"{m.date}, tunewright {safe(m.tool)}, record {m.digest[:10]} of the {found.layer}"
    for name, value in evidence_rows(m.evidence):
        yield {"time": "took"}.get(name, name), value  # there is another time: the one in this model


def runner_up_text(one: RunnerUp | None) -> str:
    if one is None:
        return "none: no other solver accepts the problem"
    gain = f", gain {gain_text(one.found.measurement.evidence.gain)}" if one.found is not None else ""
    return f"{candidate_text(one.solver, one.config)}{gain}: {safe(one.why)}"


def operations(flops: float) -> str:
    """Format a number of operations for display: 512 FLOP, 1.5 kFLOP, 12 MFLOP, 7.8 GFLOP."""
    for unit in ("FLOP", "kFLOP", "MFLOP"):
        if flops < 1000:
            return f"{flops:.3g} {unit}"
        flops /= 1000
    return f"{flops:,.3g} GFLOP"


def time_rows(each: Explanation, about: LayersSummary) -> Iterable[tuple[str, object]]:
    timing, roof = each.timing, each.roofline
    if timing is not None:
        spread = f"quartiles {milliseconds(timing.lower)} to {milliseconds(timing.upper)}"
        calls = f", {plural(timing.calls, 'call')} each" if timing.calls > 1 else ""
        share = f"{timing.seconds / about.seconds:.1%} of all layers; " if each.is_leaf and about.seconds else ""
        times = plural(timing.inferences, "inference")
        yield "in the model", f"{milliseconds(timing.seconds)} ms, {share}{spread}, {times}{calls}"
    if roof.work is not None:
        yield "work", f"{operations(roof.work.flops)}, {size(roof.work.bytes)} of inputs and results"
    if roof.share is not None and roof.ceilings is not None:
        top = roof.ceilings
        peak = f"{top.flops / 1e9:,.0f} GFLOP/s" if roof.bound == "arithmetic" else f"{top.bandwidth / 1e9:,.1f} GB/s"
        least = f"{milliseconds(roof.floor)} ms" if roof.floor >= 1e-6 else f"{roof.floor * 1e9:.3g} ns"
        floor = f"at least {least} at {peak}, bound by {roof.bound}"
        above = "; less arithmetic (Winograd) or data from a cache" if roof.share > 1 else ""
        yield "roofline", f"{roof.share:.0%}: {floor}{above}"
    elif each.solver:
        yield "roofline", f"not known: {safe(roof.why)}"


def opinions_table(each: Explanation) -> Any:
    from rich.padding import Padding

    made = table("solver", "state", "what it said, what was measured")
    made.columns[0].no_wrap = made.columns[1].no_wrap = True
    for one in each.solvers:
        made.add_row(cell(safe(one.solver)), str(one.state), cell(opinion_text(one)))
    return Padding(made, (0, 0, 0, 4))


def opinion_text(one: Opinion) -> str:
    text = safe(one.why)
    if one.state is State.MEASURED and one.found is not None:
        text = f"{config_text(one.config or {})}: {gain_text(one.found.measurement.evidence.gain)}, {text}"
    return f"{text}; measurements of {plural(one.measured, 'config')} kept" if one.measured else text
