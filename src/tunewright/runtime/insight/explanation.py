"""The explanation of a layer by `explain`, as data."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from tunewright.knowledge.key import KeyMatch
from tunewright.knowledge.record import Measurement, Ratio
from tunewright.measure.ceilings import Ceilings
from tunewright.ops.base import Work
from tunewright.search.space import Config

#: origins of layers that needed no choice
OPTIMIZED_OUT, CONTROL, FROM_SHAPES, LATE = "optimized out", "control flow", "from shapes", "chosen as it runs"


class State(enum.StrEnum):
    """The state of a solver for a layer."""

    CHOSEN = "chosen"
    MEASURED = "measured"
    BARRED = "barred"  # its default crashed, hung or was wrong here
    ACCEPTS = "accepts"  # accepts the problem, but was never measured
    REFUSES = "refuses"
    UNASKED = "unasked"  # the layer has no problem to solve


@dataclass(frozen=True)
class Proof:
    """A measurement, and the layer of the knowledge base that holds it."""

    layer: str
    measurement: Measurement

    def to_json(self) -> dict[str, Any]:
        m = self.measurement
        e = m.evidence
        return {
            "layer": self.layer,
            "gain": _ratio(e.gain),
            "control": _ratio(e.control),
            "confirmed": e.confirmed,
            "default": {"solver": e.default[0], "config": dict(e.default[1])},
            "ms": e.seconds * 1e3,
            "lower_ms": e.lower * 1e3,
            "upper_ms": e.upper * 1e3,
            "samples": len(e.samples),
            "error": e.error,
            "regime": e.regime,
            "problem": m.key.problem,
            "date": m.date,
            "tool": m.tool,
            "digest": m.digest,
        }


@dataclass(frozen=True)
class Opinion:
    """A solver of the layer's operation, with its answer and its measurements."""

    solver: str
    state: State
    why: str
    #: the measured config, or the default of a solver that accepts
    config: Config | None = None
    found: Proof | None = None
    #: how many of its configs a knowledge base has measured for this problem on this device
    measured: int = 0


@dataclass(frozen=True)
class RunnerUp:
    """The next best candidate, as far as it is known."""

    solver: str
    config: Config
    why: str
    found: Proof | None = None


@dataclass(frozen=True)
class Barred:
    """A candidate that must not run: it crashed, hung or was wrong."""

    solver: str
    config: Config
    why: str


@dataclass(frozen=True)
class Timing:
    """Seconds of a layer in one inference (all its calls), over several inferences: median and quartiles."""

    seconds: float
    lower: float
    upper: float
    calls: int
    inferences: int


@dataclass(frozen=True)
class Roofline:
    """How near a layer comes to the device's limits. ``why``: the reason if that is unknown; empty otherwise."""

    #: the work of one call
    work: Work | None = None
    ceilings: Ceilings | None = None
    #: the least seconds that the layer takes in one inference, and its bound: arithmetic or memory
    floor: float = 0.0
    bound: str = ""
    #: Floor divided by time. It exceeds 1 if an algorithm needs less arithmetic (Winograd), or a cache holds the data.
    share: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Explanation:
    """A layer: a step of a plan."""

    name: str
    op: str
    #: the body or segment that contains it; empty in the main plan
    inside: str
    #: operations that were fused into it, and the nodes of the model that it stands for
    fused: tuple[str, ...]
    nodes: tuple[str, ...]
    device: str
    on_host: bool
    #: the key of the problem; empty if there is nothing to solve
    problem: str
    kernel: str
    #: empty if no choice was needed
    solver: str
    config: Config
    #: where the choice comes from, or why there was none
    origin: str
    #: how the stored answer fits, and the answer
    match: KeyMatch | None = None
    found: Proof | None = None
    runner_up: RunnerUp | None = None
    #: every solver of the operation, the chosen one first
    solvers: tuple[Opinion, ...] = ()
    barred: tuple[Barred, ...] = ()
    #: for a default or a choice of the heuristic: why no stored answer could be used
    nearest: str = ""
    #: what the heuristic predicted, or why it abstained; empty if it was not asked
    heuristic: str = ""
    #: the most candidates (solver and config) that a search could choose from; constraints may leave fewer
    candidates: int = 0
    #: how many of them a knowledge base has measured for this problem on this device (sessions keep their leaders')
    measured: int = 0
    timing: Timing | None = None
    roofline: Roofline = field(default_factory=Roofline)
    #: further remarks
    note: str = ""

    @property
    def why(self) -> str:
        """The origin in words. A provisional answer names the fields that differ."""
        provisional = self.match is not None and bool(self.match.differs)
        return f"{self.origin} ({self.match})" if provisional else self.origin

    @property
    def is_leaf(self) -> bool:
        """Whether it takes time of its own. Control flow does not: its time is that of its bodies."""
        return self.origin != CONTROL

    def to_json(self) -> dict[str, Any]:
        """Return plain data, which docs/explain.md describes."""
        return {
            "name": self.name,
            "op": self.op,
            "inside": self.inside,
            "fused": list(self.fused),
            "nodes": list(self.nodes),
            "device": self.device,
            "on_host": self.on_host,
            "problem": self.problem,
            "kernel": self.kernel,
            "solver": self.solver,
            "config": dict(self.config),
            "origin": self.origin,
            "match": None if self.match is None else {"kind": str(self.match.kind), "differs": [*self.match.differs]},
            "evidence": _proof(self.found),
            "runner_up": None if self.runner_up is None else _candidate(self.runner_up),
            "solvers": [{**_candidate(o), "state": str(o.state), "measured": o.measured} for o in self.solvers],
            "barred": [{"solver": b.solver, "config": dict(b.config), "why": b.why} for b in self.barred],
            "nearest": self.nearest,
            "heuristic": self.heuristic,
            "candidates": self.candidates,
            "measured": self.measured,
            "time": None if self.timing is None else _timing(self.timing),
            "roofline": _roofline(self.roofline),
            "note": self.note,
        }


def _ratio(ratio: Ratio) -> dict[str, Any]:
    return {"median": ratio.median, "low": ratio.low, "high": ratio.high, "pairs": ratio.pairs}


def _proof(found: Proof | None) -> dict[str, Any] | None:
    return None if found is None else found.to_json()


def _candidate(one: RunnerUp | Opinion) -> dict[str, Any]:
    config = None if one.config is None else dict(one.config)
    return {"solver": one.solver, "config": config, "why": one.why, "evidence": _proof(one.found)}


def _timing(timing: Timing) -> dict[str, Any]:
    return {
        "ms": timing.seconds * 1e3,
        "lower_ms": timing.lower * 1e3,
        "upper_ms": timing.upper * 1e3,
        "calls": timing.calls,
        "inferences": timing.inferences,
    }


def _roofline(roofline: Roofline) -> dict[str, Any]:
    work, ceilings = roofline.work, roofline.ceilings
    known = ceilings is not None and not ceilings.why
    return {
        "flops": None if work is None else work.flops,
        "bytes": None if work is None else work.bytes,
        "peak_flops": ceilings.flops if ceilings is not None and known else None,
        "peak_bandwidth": ceilings.bandwidth if ceilings is not None and known else None,
        "floor_ms": roofline.floor * 1e3 if known else None,
        "bound": roofline.bound,
        "share": roofline.share,
        "why": roofline.why,
    }
