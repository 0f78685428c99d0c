"""What `explain` says about a layer, as data."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from tunewright.knowledge.key import KeyMatch
from tunewright.knowledge.record import Measurement, Ratio
from tunewright.measure.ceilings import Ceilings
from tunewright.ops.base import Work
from tunewright.search.space import Config

#: origins of layers for which nobody had to choose
OPTIMIZED_OUT, CONTROL, FROM_SHAPES, LATE = "optimized out", "control flow", "from shapes", "chosen as it runs"


class State(enum.StrEnum):
    """What is known of a solver and a layer."""

    CHOSEN = "chosen"
    MEASURED = "measured"
    BARRED = "barred"  # its default crashed, hung or was wrong here
    ACCEPTS = "accepts"  # and was never measured
    REFUSES = "refuses"
    UNASKED = "unasked"  # nobody has to solve anything


@dataclass(frozen=True)
class Proof:
    """A measurement, and the knowledge base that has it."""

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
    """A solver that has to do with the layer's operation: what it said, and what was measured of it."""

    solver: str
    state: State
    why: str
    #: of what was measured, or the default of one that accepts
    config: Config | None = None
    found: Proof | None = None
    #: of how many of its configs a knowledge base has measurements for this problem on this device
    measured: int = 0


@dataclass(frozen=True)
class RunnerUp:
    """The next best candidate, as far as that is known."""

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
    """How near a layer comes to what the device can do. ``why``: what keeps that from being said; empty if nothing."""

    #: of one call
    work: Work | None = None
    ceilings: Ceilings | None = None
    #: seconds that the layer takes at least in one inference, and what binds it: arithmetic or memory
    floor: float = 0.0
    bound: str = ""
    #: floor through time. Above 1 where an algorithm needs less arithmetic (Winograd), or data comes from a cache
    share: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Explanation:
    """A layer: a step of a plan."""

    name: str
    op: str
    #: the body or segment that it is in; empty in the main plan
    inside: str
    #: operations that were fused into it, and the nodes of the model that it stands for
    fused: tuple[str, ...]
    nodes: tuple[str, ...]
    device: str
    on_host: bool
    #: its key; empty where nothing has to be solved
    problem: str
    kernel: str
    #: empty where nobody had to choose
    solver: str
    config: Config
    #: where the choice comes from, or why there was none
    origin: str
    #: how the stored answer fits, and the answer
    match: KeyMatch | None = None
    found: Proof | None = None
    runner_up: RunnerUp | None = None
    #: everyone who has to do with the operation, the chosen one first
    solvers: tuple[Opinion, ...] = ()
    barred: tuple[Barred, ...] = ()
    #: of a default, and of the heuristic's: why nothing that is stored could be used
    nearest: str = ""
    #: what the heuristic predicted, or why it abstained; empty where it was not asked
    heuristic: str = ""
    #: among how many candidates (solver and config) a search could choose at most; constraints may leave fewer
    candidates: int = 0
    #: of how many a knowledge base has measurements for this problem on this device (sessions keep their leaders')
    measured: int = 0
    timing: Timing | None = None
    roofline: Roofline = field(default_factory=Roofline)
    #: what else there is to know
    note: str = ""

    @property
    def why(self) -> str:
        """The origin in words; a provisional answer is marked with the fields that differ."""
        provisional = self.match is not None and bool(self.match.differs)
        return f"{self.origin} ({self.match})" if provisional else self.origin

    @property
    def is_leaf(self) -> bool:
        """Whether it takes time of its own: control flow contains what its bodies take."""
        return self.origin != CONTROL

    def to_json(self) -> dict[str, Any]:
        """Plain data; docs/explain.md describes it."""
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
