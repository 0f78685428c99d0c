"""Examines one problem on a device: each solver's refusal, or the speed and correctness of its kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import TYPE_CHECKING

from ..errors import DeviceError, SettingsError

if TYPE_CHECKING:
    from ..devices.base import Device
    from ..knowledge.record import Ratio
    from ..measure.base import Attempt, Measurer, Regime
    from ..ops.base import Work
    from ..search.base import Status
    from ..search.space import Config
    from ..settings import Settings
    from ..solvers.base import Problem
    from ..tuning.session import Outcome
    from ..tuning.tuner import Choice, Tuner

#: Kernels slower than the default by more than this factor are only probed, because they would delay the race.
FAR = 20.0
#: target duration of the race in seconds, and limits of its rounds
RACE_SECONDS, LEAST_ROUNDS, MOST_ROUNDS = 2.0, 7, 101
#: minimum seconds of one kernel's turn, including checks
ROUND = 5e-3
#: error probability of the interval of a ratio
ALPHA = 0.05


@dataclass
class Entrant:
    """A kernel that a solver offers, and its result."""

    solver: str
    config: Config
    attempt: Attempt
    #: seconds of each round of the race, or of the probe if it did not race
    samples: Sequence[float] = ()
    #: time of the default divided by the kernel's, from common rounds; None if it did not race
    speed: Ratio | None = None
    host: bool = False

    @property
    def quartiles(self) -> tuple[float, float, float] | None:
        """Lower quartile, median and upper quartile; None if the kernel was not timed."""
        if not self.samples:
            return None
        if len(self.samples) == 1:
            return (self.samples[0],) * 3
        low, middle, high = quantiles(self.samples, n=4, method="inclusive")
        return low, middle, high

    @property
    def status(self) -> Status:
        return self.attempt.status

    @property
    def is_faulty(self) -> bool:
        """Whether the kernel computes wrong results, crashes or hangs. A slow host operation is not faulty."""
        from ..knowledge.record import FAULTS

        return self.status in FAULTS and not self.host


@dataclass
class DriverReport:
    """The results for one problem."""

    problem: Problem
    #: the kernel without any knowledge, the kernel chosen now, and the origin of that choice
    default: Entrant
    chosen: Entrant
    origin: str
    regime: Regime
    #: arithmetic and memory traffic of one execution, or why they are unknown
    work: Work | str
    #: fastest first; kernels without a time last
    entrants: list[Entrant]
    #: solver -> why it does not accept the problem
    refused: Mapping[str, str]
    #: rounds of the race
    rounds: int
    #: with --tune: the outcome, or why there is nothing to tune
    tuned: Outcome | None = None
    untunable: str = ""


def examine(
    problem: Problem, device: Device, tuner: Tuner, settings: Settings, tune: bool, tell: Callable[[str], None]
) -> DriverReport:
    """Pose a problem, tune it if asked to, and time every solver's kernel against the others."""
    from ..measure.ceilings import work_of
    from ..measure.isolated import measurer_for
    from ..search.space import Config
    from ..tuning.tuner import Origin

    default = tuner.default(problem, device)
    measurer = measurer_for(device, settings)
    tell("making inputs and what the reference makes of them")
    refusal = measurer.pose(problem, settings.tune_seed, settings.tune_regime.lower())
    if refusal is not None:
        raise DeviceError(f"it cannot be measured: {refusal}", where=problem.key()[:300])
    # Tuning poses the same problem. The worker is already running, so the whole tuning time goes to candidates.
    tuned, untunable = _tune(problem, device, tuner, default, tell) if tune else (None, "")
    best = None if default.solver.host else tuner.known(problem, device, default).best
    accepting, refused = tuner.ask(problem, device)
    offers = [(default.solver, Config(default.config))]
    offers += [(s, Config(s.default(problem, device.target))) for s in accepting if s is not default.solver]
    picked = offers[0] if best is None else (best.solver, Config(best.config))
    offers += [picked] if picked not in offers else []
    entrants: list[Entrant] = []
    limit = float("inf")
    for n, (solver, config) in enumerate(offers, 1):
        tell(f"{n} of {len(offers)}: {solver.id}")
        attempt = measurer.attempt((solver.id, config), limit)
        entrants.append(Entrant(solver.id, config, attempt, attempt.samples, host=solver.host))
        if n == 1 and attempt.samples:
            limit = FAR * min(attempt.samples)
    rounds = _race(measurer, entrants, tell)
    first, chosen = entrants[0], entrants[offers.index(picked)]
    origin = Origin.DEFAULT.value if best is None else best.layer
    entrants.sort(key=lambda e: (q[1] if (q := e.quartiles) else float("inf"), e.solver))
    return DriverReport(
        problem, first, chosen, origin, measurer.regime(), work_of(problem), entrants, refused, rounds, tuned, untunable
    )


def _tune(
    problem: Problem, device: Device, tuner: Tuner, default: Choice, tell: Callable[[str], None]
) -> tuple[Outcome | None, str]:
    """Return the outcome of tuning, or why there is nothing to tune."""
    from ..tuning.progress import Progress

    if tuner.policy.strategy(problem.op) is None:
        how = tuner.settings.auto_tune_mode
        raise SettingsError(f"AUTO_TUNE_MODE = {how} tunes nothing", where="--tune", hint="set it to AUTO")
    if default.solver.host:
        return None, "only the host runs it"

    def report(p: Progress) -> None:
        gain = f", best so far {p.default_seconds / p.best_seconds:.2f} times the default" if p.best else ""
        tell(f"tuning, {p.phase}: {p.attempted} candidates in {p.elapsed:.0f} of {p.budget:.0f} s{gain}")

    tell("tuning")
    outcome = tuner.tune(problem, device, default, tuner.known(problem, device, default), report)
    return outcome, "" if outcome is not None else "there is one candidate only"


def _race(measurer: Measurer, entrants: Sequence[Entrant], tell: Callable[[str], None]) -> int:
    """Time the correct kernels that are not far behind, in turns. Returns the number of rounds."""
    from ..measure.statistics import ratio
    from ..search.base import Status

    racing = [e for e in entrants if e.status is Status.OK and not e.attempt.probed]
    if not racing:
        return 0
    each = sum(max(ROUND, min(e.attempt.samples)) for e in racing)
    rounds = min(max(round(RACE_SECONDS / each), LEAST_ROUNDS), MOST_ROUNDS)
    tell(f"{len(racing)} kernels, {rounds} rounds")
    race = measurer.race([(e.solver, e.config) for e in racing], rounds)
    for i, entrant in enumerate(racing):
        entrant.samples = race.samples[i]
        if i in race.fallen:
            entrant.attempt, entrant.samples = race.fallen[i], ()
    first = entrants[0]
    for entrant in racing:
        if first in racing and first.samples and entrant.samples:
            entrant.speed = ratio(first.samples, entrant.samples, ALPHA)
    return rounds
