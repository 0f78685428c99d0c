"""Build the records of a session from samples: measurements, faults, surveys, and the environment."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .._version import __version__
from ..devices.base import Target
from ..knowledge.key import Key
from ..knowledge.record import MOST_BYTES, MOST_SEEN, Evidence, Fault, Measurement, Ratio, Sighting, Survey, now
from ..measure.base import Candidate, Regime
from ..search.base import Status
from ..search.space import Config as Plain
from ..solvers import problem_json
from ..solvers.base import Config, Problem, Solver

#: Samples that a record keeps; its quartiles are those of all samples.
KEPT = 64
#: Characters of a reason that a record keeps.
LONGEST_WHY = 2000
#: A search that compared this number of candidates, or all candidates, may state that nothing is faster.
ENOUGH = 24
#: Key in the environment of a default's record: how many candidates the search has compared.
EXTENT = "searched"
#: After this number of sessions without progress on an open problem, loads stop retrying it; `tune` still retries.
FRUITLESS = 3


def environment() -> dict[str, str]:
    """Describe the software, the machine and its load before a measurement."""
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cores": str(os.cpu_count()),
        "load before": load(),
    }


def load() -> str:
    """Return the machine's load: the mean number of runnable processes in the last minute."""
    try:
        return f"{os.getloadavg()[0]:.2f}"
    except (OSError, AttributeError):  # AttributeError: the platform has no getloadavg
        return "unknown"


@dataclass(frozen=True)
class ContestSamples:
    """How a candidate did against the default."""

    samples: Sequence[float]
    #: largest error of its results
    error: float
    gain: Ratio
    #: the ratio of the default over itself
    control: Ratio
    confirmed: bool
    default: Candidate


def measurement(
    problem: Problem, target: Target, solver: Solver, config: Config, result: ContestSamples, regime: Regime,
    before: Mapping[str, str],
) -> Measurement:  # fmt: skip
    """Make a measurement record dated now. ``before``: the `environment` when measuring began."""
    samples, default = result.samples, result.default
    lower, middle, upper = (float(q) for q in np.quantile(np.asarray(samples, np.float64), (0.25, 0.5, 0.75)))
    kept = sorted({round(i * (len(samples) - 1) / (KEPT - 1)) for i in range(KEPT)})  # evenly over all rounds
    found = Evidence(
        middle, lower, upper, tuple(float(samples[i]) for i in kept), float(result.error), result.gain,
        result.control, result.confirmed,
        (default[0], Plain(default[1])), regime.kind, regime.copies, regime.nbytes, {**before, "load after": load()},
    )  # fmt: skip
    key = Key.of(problem, target, solver, config)
    what = problem_json.to_json(problem)
    return Measurement(key, Plain(config), found, what, problem.family(), problem.sizes, now(), __version__)


def is_given_up(known: Iterable[Measurement], default: Candidate) -> bool:
    """Whether the last sessions left a problem open without any progress from one to the next."""
    mine = [m for m in known if (m.key.solver, m.config) == default == m.evidence.default]
    last = sorted(mine, key=lambda m: (m.date, _reached(m)))[-FRUITLESS:]
    return len(last) == FRUITLESS and len({_reached(m) for m in last}) == 1


def _reached(m: Measurement) -> int:
    """Return how many candidates the search behind a default's record compared, capped at `ENOUGH`."""
    number = m.evidence.environment.get(EXTENT, "").partition(" ")[0].replace(",", "")
    return min(int(number), ENOUGH) if number.isdecimal() else 0


def fault(problem: Problem, target: Target, solver: Solver, config: Config, status: Status, why: str) -> Fault:
    """Make a fault record dated now."""
    key = Key.of(problem, target, solver, config)
    return Fault(key, Plain(config), status, why[:LONGEST_WHY], now(), __version__)


def survey(
    problem: Problem, target: Target, solvers: Mapping[str, Solver], default: Candidate, seconds: float,
    gains: Mapping[Candidate, float], regime: Regime,
) -> Survey:  # fmt: skip
    """Make a survey record dated now.

    ``seconds``: time of the default; gains are relative to it. If there are too many candidates, the best are kept.
    """
    ranked = sorted(gains.items(), key=lambda pair: -pair[1])[:MOST_SEEN]
    seen = tuple(Sighting(s, solvers[s].version, Plain(config), float(gain)) for (s, config), gain in ranked)
    key = Key.of(problem, target, solvers[default[0]], default[1])
    found = Survey(
        key, Plain(default[1]), float(seconds), seen, regime.kind, problem_json.to_json(problem), problem.family(),
        problem.sizes, now(), __version__,
    )  # fmt: skip
    while len(found.text) > MOST_BYTES and found.seen:
        found = replace(found, seen=found.seen[: len(found.seen) // 2])
    return found
