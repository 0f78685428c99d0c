"""Output of `tunewright kb`: record filters, the answers that follow from records, and texts for tables."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..shared.console import cell, milliseconds, number, size, table

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from tunewright.knowledge.key import Where
    from tunewright.knowledge.record import AnyRecord, Evidence, Fault, Measurement, Ratio, Survey

#: shown characters of a digest, and the minimum in an argument
DIGEST, LEAST = 10, 4
#: shown characters of a problem and of a config; JSON has all
LONGEST = 160
#: number of candidates of a survey that are shown
SIGHTINGS = 5
#: marks of a sparkline, and its width
MARKS, WIDTH = "▁▂▃▄▅▆▇█", 32
_TYPES = {"bfloat": "bf", "float": "f", "uint": "u", "int": "i"}


# ---- which records, and what follows from them ---------------------------------------------------------------------


@dataclass(frozen=True)
class Filter:
    """A filter for records. An empty text matches every record."""

    op: str = ""
    device: str = ""
    processor: str = ""
    solver: str = ""

    def __call__(self, record: AnyRecord) -> bool:
        where = record.key.where
        return (
            self.op.lower() in ("", (op := op_of(record.key.problem)).lower(), op.rpartition("::")[2].lower())
            and self.device.lower().partition(".")[0] in ("", where.device)
            and self.processor.lower() in where.processor.lower()
            and self.solver.lower() in record.key.solver.lower()
        )


def op_of(problem: str) -> str:
    """Return the operation of a problem's key."""
    return problem.partition("(")[0]


def split(records: Iterable[AnyRecord]) -> tuple[list[Measurement], list[Fault], list[Survey]]:
    """Split records into measurements, faults and surveys."""
    from tunewright.knowledge.record import Fault, Measurement

    measurements: list[Measurement] = []
    faults: list[Fault] = []
    surveys: list[Survey] = []
    for record in records:
        if isinstance(record, Measurement):
            measurements.append(record)
        elif isinstance(record, Fault):
            faults.append(record)
        else:
            surveys.append(record)
    return measurements, faults, surveys


@dataclass(frozen=True)
class Standing:
    """A measurement among those of its problem and place. ``why``: what prevents it from answering, or empty."""

    layer: str
    record: Measurement
    why: str = ""


@dataclass(frozen=True)
class KnownProblem:
    """What is known about a problem in a place. Measurements that can answer come first, best first."""

    problem: str
    where: Where
    standings: tuple[Standing, ...]

    @property
    def answer(self) -> Standing | None:
        """The first measurement, or None if none is faster than the default."""
        return self.standings[0] if not self.standings[0].why else None

    @property
    def is_default(self) -> bool:
        """Whether the answer is the default itself, because a session found nothing faster."""
        answer = self.answer
        return answer is not None and (answer.record.key.solver, answer.record.config) == answer.record.evidence.default

    @property
    def shown(self) -> Standing:
        """The measurement for a table: the answer, or the newest of the rest."""
        return self.answer or max(self.standings, key=lambda s: (s.record.date, s.record.digest))

    @property
    def open(self) -> str:
        """Progress of the newest search if it was left open whether something is faster, else an empty text."""
        from tunewright.tuning.evidence import EXTENT

        found = [s.record for s in self.standings if EXTENT in s.record.evidence.environment]
        newest = max(found, key=lambda m: (m.date, m.digest), default=None)
        if newest is None or newest.evidence.confirmed:
            return ""
        return f"open, {safe(newest.evidence.environment[EXTENT])}"


def known(layers: Mapping[str, Iterable[AnyRecord]]) -> list[KnownProblem]:
    """Return every problem in every place, with the answer that it had in that place when it was measured.

    ``layers`` is in order of precedence. No device is opened: `tuning.lookup` decides whether an answer fits this
    machine.
    """
    groups: dict[tuple[str, Where], list[tuple[str, Measurement]]] = defaultdict(list)
    barred: list[Fault] = []
    for layer, records in layers.items():
        measurements, faults, _ = split(records)
        barred += faults
        for m in measurements:
            groups[m.key.problem, m.key.where].append((layer, m))
    by_candidate: dict[object, list[Fault]] = defaultdict(list)
    for fault in barred:
        by_candidate[fault.key.solver, fault.config].append(fault)
    order = sorted(groups, key=lambda at: (place(at[1]), str(at[1]), at[0]))
    return [KnownProblem(*at, _standings(groups[at], list(layers), by_candidate)) for at in order]


def _standings(
    group: Sequence[tuple[str, Measurement]], layers: Sequence[str], faults: Mapping[object, Sequence[Fault]]
) -> tuple[Standing, ...]:
    from tunewright.knowledge.database import better, newest
    from tunewright.knowledge.key import KeyMatch, MatchKind

    counts: dict[object, tuple[str, Measurement]] = {}
    for layer in layers:
        found = newest(m for name, m in group if name == layer)
        found.sort(key=lambda m: (m.evidence.regime != "warm", m.date, m.digest))
        for m in reversed(found):
            counts.setdefault((m.key.solver, m.config), (layer, m))
    why: dict[tuple[str, str], str] = {}
    for layer, m in group:
        counting = counts[m.key.solver, m.config]
        if counting != (layer, m):
            why[layer, m.digest] = f"{counting[1].digest[:DIGEST]} counts for this candidate"
        else:
            why[layer, m.digest] = _unusable(m) or _barred(m, faults.get((m.key.solver, m.config), ()))
    ranked = better((KeyMatch(MatchKind.EXACT), m) for layer, m in counts.values() if not why[layer, m.digest])
    first = [Standing(counts[m.key.solver, m.config][0], m) for _, m in ranked]
    first.sort(key=lambda s: layers.index(s.layer))
    rest = [Standing(layer, m, why[layer, m.digest]) for layer, m in group if why[layer, m.digest]]
    rest.sort(key=lambda s: (s.record.date, s.record.digest), reverse=True)
    return (*first, *rest)


def _unusable(m: Measurement) -> str:
    if m.evidence.gain.low < 1:
        return "not faster than the default beyond noise"
    return "" if m.evidence.confirmed else "not confirmed on samples of its own"


def _barred(m: Measurement, faults: Sequence[Fault]) -> str:
    """Like `Lookup.barred`, for the place where it was measured."""
    for fault in faults:
        one, other = fault.key.where, m.key.where
        same = (one.device, one.processor, one.runtime, one.software) == (
            other.device, other.processor, other.runtime, other.software
        )  # fmt: skip
        is_default = (m.key.solver, m.config) == m.evidence.default
        if same and fault.key.version == m.key.version and (not is_default or fault.key.problem == m.key.problem):
            return f"barred: {fault.status.lower()} on {fault.date[:10]}"
    return ""


# ---- texts for people ----------------------------------------------------------------------------------------------


def safe(text: object) -> str:
    """Escape control characters in a record's text, so that it cannot control the terminal."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(text))


def short(text: str, most: int = LONGEST) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def problem_text(problem: str) -> str:
    """Shorten a problem for a table: short types, no attributes, and only the names of fused steps."""
    bare, depth = [], 0
    for c in safe(problem):
        depth += c == "{"
        if not depth:
            bare.append(c)
        depth -= c == "}" and depth > 0
    text = re.sub(r"\b(bfloat|float|uint|int)(?=\d+\[)", lambda found: _TYPES[found[1]], "".join(bare))
    text = text.replace("]!", "]")
    main, *steps = text.split(" | ")
    return short(" | ".join([main.strip(), *(step.partition("(")[0] for step in steps)]))


def config_text(config: Mapping[str, Any], most: int = LONGEST) -> str:
    return short(safe(" ".join(f"{name}={config[name]}" for name in sorted(config))), most)


def place(where: Where) -> str:
    """Describe the place of a record in one line."""
    units = f"{where.units} unit{'s' if where.units != 1 else ''}"
    return safe(f"{where.processor} ({where.device}, {units}), {where.runtime}")


def gain_text(ratio: Ratio) -> str:
    from tunewright.measure.statistics import unknown

    if unknown(ratio):
        return f"about {ratio.median:.2f}x (too few turns for an interval)"
    return f"{ratio.median:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"


def gain_lines(ratio: Ratio) -> str:
    """Format a gain and its interval in two lines, for a column."""
    from tunewright.measure.statistics import unknown

    if unknown(ratio):
        return f"{ratio.median:.2f}x\n?"
    return f"{ratio.median:.2f}x\n{ratio.low:.2f}-{ratio.high:.2f}"


def sparkline(samples: Sequence[float]) -> str:
    """Draw samples in order, lowest mark for the smallest. Many samples are grouped, each group by its median."""
    from statistics import median

    n = min(len(samples), WIDTH)
    parts = [median(samples[len(samples) * i // n : len(samples) * (i + 1) // n]) for i in range(n)]
    low, span = min(parts, default=0.0), max(parts, default=0.0) - min(parts, default=0.0)
    return "".join(MARKS[int((p - low) / span * (len(MARKS) - 1) + 0.5)] if span else MARKS[0] for p in parts)


def plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


# ---- tables --------------------------------------------------------------------------------------------------------


def answers_table(rows: Sequence[KnownProblem], solvers: Collection[str]) -> Table:
    """Make the table for rows of one place, with two lines each to fit 80 columns. ``solvers``: those that exist."""
    made = table("problem and kernel", ">gain", "from", ">date, record")
    for row in rows:
        s = row.shown
        kernel, ratio = f"the default stays: {row.open or s.why}", "-"
        if row.answer:
            kernel = f"{safe(s.record.key.solver)} {config_text(s.record.config)}".rstrip()
            kernel += "" if s.record.key.solver in solvers else ", a solver that is not here"
        if row.is_default:
            kernel += ", the default: nothing is faster"
        elif row.answer:
            ratio = gain_lines(s.record.evidence.gain)
        date = f"{s.record.date[:10]}\n{s.record.digest[:DIGEST]}"
        made.add_row(stacked(problem_text(row.problem), kernel), ratio, cell(s.layer), date)
    return made


def stacked(first: str, *others: str) -> Group:
    """Stack texts vertically. All but the first are indented, also where they wrap."""
    from rich.console import Group
    from rich.padding import Padding

    return Group(cell(first), *(Padding(cell(text), (0, 0, 0, 4)) for text in others))


def faults_table(faults: Sequence[tuple[str, Fault]]) -> Table:
    made = table("candidate, problem and reason", "fault", "from", ">date, record")
    for layer, fault in faults:
        what = f"{safe(fault.key.solver)} {config_text(fault.config)}".rstrip()
        text = stacked(what, problem_text(fault.key.problem), short(safe(fault.why)))
        date = f"{fault.date[:10]}\n{fault.digest[:DIGEST]}"
        made.add_row(text, fault.status.lower(), cell(layer), date)
    return made


def grid(rows: Iterable[tuple[str, object]]) -> Table:
    """Make a table of names and values below a heading."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(f"  {name}", cell(value))
    return made


def record_grid(record: AnyRecord, layer: str) -> Table:
    """Make a table of everything in one record except its problem."""
    from tunewright.knowledge.record import Fault, Measurement

    key = record.key
    rows: list[tuple[str, object]] = [
        ("processor", f"{safe(key.where.processor)} ({safe(key.where.device)}, {plural(key.where.units, 'unit')})"),
        ("architecture", safe(key.where.arch)),
        ("runtime", f"{safe(key.where.runtime)}; {safe(key.where.software)}"),
        ("options", safe(key.where.options) or "none"),
        ("solver", f"{safe(key.solver)} {safe(key.version)}"),
        ("config", config_text(record.config, 1 << 16) or "none: it has no parameters"),
        ("source", f"{safe(key.source)} (digest of the kernel's text)"),
        ("space", f"{safe(key.space)} (digest of the configs)"),
    ]
    if isinstance(record, Measurement):
        rows += evidence_rows(record.evidence)
    elif isinstance(record, Fault):
        rows += [("fault", f"{record.status.lower()}: {safe(record.why)}")]
    else:
        rows += survey_rows(record)
    rows += [("date", f"{record.date}, tunewright {safe(record.tool)}"), ("from", layer), ("record", record.digest)]
    return grid(rows)


def survey_rows(survey: Survey) -> Iterable[tuple[str, object]]:
    """Yield the rows of a survey for `grid`, best candidates first."""
    usable = sorted((s for s in survey.seen if s.gain), key=lambda s: -s.gain)
    yield "default", f"{milliseconds(survey.seconds)} ms"
    yield "regime", survey.regime
    unusable = len(survey.seen) - len(usable)
    yield "seen", f"{plural(len(survey.seen), 'candidate')}" + (f", {unusable} not usable" if unusable else "")
    for s in usable[:SIGHTINGS]:
        yield "", f"{s.gain:.2f}x  {safe(s.solver)} {config_text(s.config)}".rstrip()
    if len(usable) > SIGHTINGS:
        yield "", f"and {len(usable) - SIGHTINGS:,} slower ones (--json)"


def evidence_rows(e: Evidence) -> Iterable[tuple[str, object]]:
    """Yield the rows of a measurement's evidence for `grid`."""
    spread = f"quartiles {milliseconds(e.lower)} to {milliseconds(e.upper)}, {plural(len(e.samples), 'sample')}"
    yield "time", f"{milliseconds(e.seconds)} ms ({spread})"
    if e.samples:
        edges = f"{milliseconds(min(e.samples))} to {milliseconds(max(e.samples))}"
        yield "samples", f"{sparkline(e.samples)}  {edges} ms, in order"
    default = f"{safe(e.default[0])} {config_text(e.default[1])}".rstrip()
    found = "confirmed on samples of its own" if e.confirmed else "not confirmed"
    yield "gain", f"{gain_text(e.gain)} over {default}, {plural(e.gain.pairs, 'pair')}, {found}"
    if e.control.pairs:  # a network is not measured against itself
        yield "control", f"{gain_text(e.control)}: the default against itself, {plural(e.control.pairs, 'pair')}"
    yield "error", f"{number(e.error)} of the largest element"
    yield "regime", f"{e.regime}, {e.copies} cop{'y' if e.copies == 1 else 'ies'}, {size(e.nbytes)}"
    if e.environment:
        yield "environment", safe(", ".join(f"{name} {value}" for name, value in sorted(e.environment.items())))
