"""A tuning session: search, race the leaders, confirm the winner against the default, and report the result.

The default takes part in every phase and stays unless a candidate is faster beyond noise. All decisions follow from the
measurer's answers and the seed, so with a scripted clock they repeat exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..devices.base import Target
from ..errors import DeviceError
from ..knowledge.key import Key
from ..knowledge.record import FAULTS, Fault, Measurement, Ratio, Survey
from ..measure.base import Candidate, Measurer, Regime
from ..measure.statistics import UNKNOWN, unknown
from ..search.base import Status
from ..solvers.base import Config, Problem, Solver
from ..solvers.base import solvers as registered
from . import evidence
from .candidate_search import CorrectResult, Hunt, TriedCandidate, plain
from .contest import ALPHA, FUTILE, Confirmation, Contest, ContestVerdict, confirm, race
from .progress import Progress, Watch

#: Shares of the budget at which the search and the race end; the rest belongs to the confirmation.
SEARCH_SHARE, RACE_SHARE = 0.65, 0.80
#: The share for the search if the caller decides; the rest is for comparing the fastest once more.
ONLY_SEARCH_SHARE = 0.92


@dataclass(frozen=True)
class Outcome:
    """Result of a session."""

    #: the candidate to use from now on
    chosen: Candidate
    #: whether it differs from the default
    changed: bool
    #: the reason in words
    reason: str
    #: confirmed gain of the chosen candidate over the default, and the ratio of the control
    gain: Ratio | None = None
    control: Ratio | None = None
    #: fault of the default itself; the best correct candidate then replaces it without having to show a gain
    default_fault: str | None = None
    records: tuple[Measurement, ...] = ()
    faults: tuple[Fault, ...] = ()
    #: results for every candidate except faults; None if only the default was examined
    survey: Survey | None = None
    #: every examined candidate, in order
    trials: tuple[TriedCandidate, ...] = ()
    #: seconds by phase (search, race, confirm), and those spent on compiling and checking
    seconds: Mapping[str, float] = field(default_factory=dict)
    #: whether nothing was found to be faster, but the search was too short to rule it out
    is_open: bool = False
    #: whether no strategy had a candidate left
    ended: bool = False

    @property
    def attempted(self) -> int:
        return len(self.trials)

    @property
    def failed(self) -> int:
        return sum(t.status is not Status.OK for t in self.trials)


def _nothing_is_barred(solver: str, config: Config) -> None:
    return None


@dataclass(frozen=True)
class SessionSubject:
    """What a session is about: a problem, where it runs, and the solvers among which it chooses."""

    problem: Problem
    target: Target
    default: Candidate
    solvers: Sequence[Solver]


@dataclass(frozen=True)
class MeasuringPlan:
    """How long to measure, and how."""

    seconds: float
    seed: int = 0
    regime: str = "cold"


@dataclass(frozen=True)
class SearchPlan(MeasuringPlan):
    """How to search for candidates."""

    #: Name of a strategy, or a function from a solver's id to the strategy for its space. For None only the solver's
    #: default and seeds are attempted.
    strategy: Callable[[str], str | None] | str = "auto"
    #: returns why a candidate must not be attempted, or None
    barred: Callable[[str, Config], str | None] = _nothing_is_barred
    #: if False, all time goes to the search, and the caller decides between the fastest candidates
    decide: bool = True


@dataclass(frozen=True)
class EarlierResults:
    """What is known about a problem before a session."""

    #: configs to try first, by solver
    seeds: Mapping[str, Sequence[Config]] = field(default_factory=dict)
    #: earlier measurements here; the best are measured again
    known: Sequence[Measurement] = ()
    #: results of earlier sessions; of those that apply, only the best candidates are attempted again
    surveys: Sequence[Survey] = ()


@dataclass(frozen=True)
class SessionHooks:
    """Functions that a session calls."""

    #: called with the current outcome if an exception, such as that of Ctrl-C, ends the session
    keep: Callable[[Outcome], None] | None = None
    #: called after each step
    report: Callable[[Progress], None] | None = None
    #: asked before each step; after a stop nothing changes, and results are kept as unconfirmed
    stop: Callable[[], bool] | None = None
    clock: Callable[[], float] = time.monotonic


def tune(
    subject: SessionSubject,
    measurer: Measurer,
    plan: SearchPlan,
    earlier: EarlierResults | None = None,
    hooks: SessionHooks | None = None,
) -> Outcome:
    """Find the fastest correct candidate within a time limit."""
    earlier, hooks = earlier or EarlierResults(), hooks or SessionHooks()
    problem, target, solvers, default = subject.problem, subject.target, subject.solvers, plain(subject.default)
    watch = Watch(plan.seconds, hooks.stop, hooks.clock)
    fit = [s for s in solvers if s.why_not(problem, target) is None]
    seeds = {s.id: [*earlier.seeds.get(s.id, ()), *s.likely(problem, target)] for s in fit}
    strategy = plan.strategy
    pick = (lambda solver: strategy) if isinstance(strategy, str) else strategy
    measurer.expect(plan.seconds)
    refusal = measurer.pose(problem, plan.seed, plan.regime)
    if refusal is not None:
        return Outcome(default, False, f"it cannot be measured: {refusal}")
    session = _Session(problem, target, _by_id(solvers), measurer, watch, default, earlier.known, hooks.report)
    hunt = session.hunt = Hunt(problem, target, measurer, watch, plan.barred, lambda: session.tell("search"))
    shares = (SEARCH_SHARE, RACE_SHARE) if plan.decide else (ONLY_SEARCH_SHARE, 1.0)
    watch.enter("search")
    try:
        begin = watch.elapsed
        if hunt.opens_together:  # the default is compiled together with the next candidates
            some = [who for who in opening(problem, target, default, fit, seeds) if plan.barred(*who) is None]
            measurer.prepare(some[: measurer.ahead])
        measurer.ready(default, watch.left())  # waiting for compilation does not count for the attempt
        first = hunt.open(default, watch.elapsed - begin)
        hunt.run(solvers, pick, plan.seed, seeds, earlier.known, session.seen(earlier.surveys), *shares)
        if not hunt.found:
            why = f"no candidate is correct; the default: {first.why}"
            return session.outcome(default, why, default_fault=first.why or str(first.status))
        hunt.heat()
        return session.settle() if plan.decide else session.leave_open()
    except BaseException as error:  # mainly for Ctrl-C
        if hooks.keep is not None:
            hooks.keep(session.outcome(default, f"broken off: {type(error).__name__}"))
        raise


def opening(
    problem: Problem,
    target: Target,
    default: Candidate,
    solvers: Sequence[Solver],
    seeds: Mapping[str, Sequence[Config]],
) -> list[Candidate]:
    """Return the candidates that a search attempts first in any case.

    These are the default, then the defaults of solvers that accept the problem, then seeds and likely configs.
    """
    wanted = [plain(default), *(plain((s.id, s.default(problem, target))) for s in solvers)]
    for s in solvers:
        wanted += [plain((s.id, config)) for config in (*seeds.get(s.id, ()), *s.likely(problem, target))]
    return list(dict.fromkeys(wanted))


def duel(
    subject: SessionSubject,
    candidate: Candidate,
    measurer: Measurer,
    plan: MeasuringPlan,
    hooks: SessionHooks | None = None,
) -> Measurement | Fault:
    """Measure one candidate against the default now.

    Returns its measurement, confirmed if it is still faster; or its fault.

    Raises `DeviceError` if it cannot be measured: the problem cannot be posed, the default is faulty, or the candidate
    does not compile here. If noise prevents a decision, the interval of the measurement contains 1; the caller may try
    again.
    """
    hooks = hooks or SessionHooks()
    problem, target, default, candidate = subject.problem, subject.target, plain(subject.default), plain(candidate)
    watch = Watch(plan.seconds, hooks.stop, hooks.clock)
    refusal = measurer.pose(problem, plan.seed, plan.regime)
    if refusal is not None:
        raise DeviceError(f"cannot be measured: {refusal}", where=problem.key())
    session = _Session(problem, target, _by_id(subject.solvers), measurer, watch, default, (), None)
    hunt = session.hunt = Hunt(problem, target, measurer, watch, _nothing_is_barred, lambda: None)
    for who in dict.fromkeys((default, candidate)):
        hunt.attempt(who)
    contest = Contest([default, default, candidate])
    found = Confirmation(ContestVerdict.FALLEN, Ratio.one(), Ratio.one())
    if default in hunt.found and candidate in hunt.found:
        found = confirm(contest, measurer, watch)
        for row, attempt in contest.fallen.items():
            hunt.discard(contest.entrants[row], attempt)
    for who in (candidate, default):
        bad = hunt.faults.get(who)
        if bad is not None:
            if who == candidate and bad.status in FAULTS:
                return session.fault(who)
            raise DeviceError(bad.why, where=f"{who[0]} {dict(who[1])}", hint="it cannot be measured here")
    confirmed = found.verdict is ContestVerdict.GAIN
    samples = contest.samples[2]
    return session.measurement(candidate, samples, found.gain, found.control, confirmed, default)


def _by_id(solvers: Sequence[Solver]) -> dict[str, Solver]:
    """Return all registered solvers and those that take part, since the default's solver may not be searched."""
    return {s.id: s for s in (*registered(), *solvers)}


@dataclass
class _Session:
    """State that the phases of a session share."""

    problem: Problem
    target: Target
    solvers: Mapping[str, Solver]
    measurer: Measurer
    watch: Watch
    default: Candidate
    known: Sequence[Measurement]
    report: Callable[[Progress], None] | None
    hunt: Hunt = field(init=False)
    before: Mapping[str, str] = field(default_factory=evidence.environment)
    regime: Regime = field(init=False)

    def __post_init__(self) -> None:
        self.regime = self.measurer.regime()

    def tell(self, phase: str) -> None:
        if self.report is not None:
            best, hunt = self.hunt.best, self.hunt
            default = hunt.found.get(self.default)
            self.report(
                Progress(
                    phase, len(hunt.tried), hunt.failed, best.candidate if best else None,
                    best.seconds if best else float("inf"), default.seconds if default else float("inf"),
                    self.watch.elapsed, self.watch.budget,
                )
            )  # fmt: skip

    # ---- from leaders to an outcome ----------------------------------------------------------------------------------

    def settle(self) -> Outcome:
        """Race, confirm and decide. If a candidate fails on the way, it is removed and the others start over."""
        hunt = self.hunt
        while True:
            baseline = hunt.found.get(self.default) or hunt.best
            if baseline is None:
                return self.outcome(self.default, "no candidate stayed correct", default_fault=self._default_fault())
            # candidates confirmed earlier are measured again, to notice if they are no longer better than the default
            before = {plain((m.key.solver, m.config)) for m in self.known if m.evidence.confirmed}
            raced = Contest([baseline.candidate] * 2 + hunt.leaders(baseline, before))
            picked = self._race(raced)
            if self._fell(raced):
                continue
            final = Contest([baseline.candidate] * 2 + ([raced.entrants[picked]] if picked is not None else []))
            found = None
            if picked is not None and not self.watch.stopped:
                self.watch.enter("confirm")
                found = confirm(final, self.measurer, self.watch)
                self.tell("confirm")
                if self._fell(final):
                    continue
            return self._conclude(baseline, raced, final, found)

    def leave_open(self) -> Outcome:
        """Return the fastest candidates as unconfirmed records; or the default as the answer if none is near it."""
        hunt = self.hunt
        baseline = hunt.found.get(self.default) or hunt.best
        assert baseline is not None
        leaders = hunt.leaders(baseline)
        faster = [who for who in leaders if hunt.found[who].seconds < baseline.seconds]
        is_answer = hunt.is_enough and not faster
        made = [self._of_default(baseline.candidate, (), Ratio.one(), is_answer)]
        for who in leaders:
            gain = Ratio(baseline.seconds / hunt.found[who].seconds, 1 / UNKNOWN, UNKNOWN, 0)
            made.append(self.measurement(who, (), gain, Ratio.one(), False, baseline.candidate))
        reason = f"nothing seems faster: {hunt.extent}" if is_answer else f"open: {hunt.extent}, none seems faster"
        if faster:
            solver, config = faster[0]
            reason = f"{len(faster)} of {len(hunt.found)} candidates seem faster than the default"
            reason += f", first {solver} {dict(config)}: {made[1].evidence.gain.median:.3f} times as fast"
        records = tuple(m for m in made if not self._would_demote(m))
        found = self.outcome(baseline.candidate, reason, default_fault=self._default_fault(), records=records)
        return replace(found, is_open=not hunt.is_enough)

    def _race(self, raced: Contest) -> int | None:
        """Return the row to confirm, or None. A single leader goes straight to the confirmation."""
        leaders = raced.leaders
        if self.watch.left() <= 0 or len(leaders) == 1:
            return leaders[0] if leaders else None
        self.watch.enter("race")
        picked = race(raced, self.measurer, self.watch, RACE_SHARE)
        self.tell("race")
        return picked

    def _fell(self, contest: Contest) -> bool:
        """Remove failed candidates. Returns whether to start over: the baseline failed, or no leader is left."""
        for row, attempt in contest.fallen.items():
            self.hunt.discard(contest.entrants[row], attempt)
        return contest.upset or (bool(contest.fallen) and not contest.leaders)

    def _conclude(self, baseline: CorrectResult, raced: Contest, final: Contest, found: Confirmation | None) -> Outcome:
        won = found is not None and found.verdict is ContestVerdict.GAIN
        chosen = final.entrants[2] if won else baseline.candidate
        fault = self._default_fault()
        records = self._records(baseline, raced, final, found)
        reason = self._reason(raced, final, found)
        if fault is not None:
            reason = f"the default is faulty ({fault}), {chosen[0]} replaces it: {reason}"
        gain, control = (found.gain, found.control) if found is not None else (None, None)
        outcome = self.outcome(chosen, reason, gain if won else None, control, fault, records)
        return replace(outcome, is_open=not won and self._is_open(raced, found))

    def _reason(self, raced: Contest, final: Contest, found: Confirmation | None) -> str:
        if found is None:
            if self.watch.stopped:
                return "stopped before anything was confirmed"
            if self._is_open(raced, found):
                return f"open: the time was too short, {self.hunt.extent}"
            what = "nothing else is near" if len(raced.entrants) == 2 else "no significant gain in the race"
            return f"{what}: {self.hunt.extent}"
        solver, config = final.entrants[2]
        gain, control = found.gain, found.control
        begin = f"open: {self.hunt.extent}; " if self._is_open(raced, found) else ""
        begin += f"{solver} {dict(config)}: {found.verdict.value}"
        if unknown(gain):
            return begin
        spread = f"{gain.low:.3f} to {gain.high:.3f} in {gain.pairs} pairs"
        noise = f"the default over itself {control.low:.3f} to {control.high:.3f}"
        return f"{begin}, {gain.median:.3f} times as fast ({spread}; {noise})"

    def _default_fault(self) -> str | None:
        """Return the latest fault of the default; None if it is correct."""
        if self.default in self.hunt.found:
            return None
        return next(t.why or str(t.status) for t in reversed(self.hunt.tried) if t.candidate == self.default)

    def _is_open(self, raced: Contest, found: Confirmation | None) -> bool:
        """Whether it is still unknown if a candidate is faster than the default."""
        if found is None:  # no candidate was left to confirm, because of the race or for lack of time
            short = any(unknown(raced.gain(row, FUTILE)) for row in raced.leaders)
        else:
            short = found.verdict in (ContestVerdict.NOISY, ContestVerdict.SHORT)
        is_gain = found is not None and found.verdict is ContestVerdict.GAIN
        return not is_gain and (short or not self.hunt.is_enough)

    def _of_default(self, who: Candidate, samples: Sequence[float], control: Ratio, is_answer: bool) -> Measurement:
        """Return the record of the default: an answer, or a note of how far the search came."""
        made = self.measurement(who, samples, Ratio.one(), control, is_answer, who)
        about = {**made.evidence.environment, evidence.EXTENT: self.hunt.extent}
        return replace(made, evidence=replace(made.evidence, environment=about))

    # ---- records -----------------------------------------------------------------------------------------------------

    def _records(
        self, baseline: CorrectResult, raced: Contest, final: Contest, found: Confirmation | None
    ) -> tuple[Measurement, ...]:
        control = found.control if found is not None else raced.gain(1, ALPHA)
        is_answer = not self._is_open(raced, found) and not self.watch.stopped
        own = final.samples[0] or raced.samples[0]
        made = [self._of_default(baseline.candidate, own, control, is_answer)]
        if found is not None:
            won = found.verdict is ContestVerdict.GAIN
            made.append(
                self.measurement(
                    final.entrants[2], final.samples[2], found.gain, found.control, won, baseline.candidate
                )
            )
        for row, candidate in enumerate(raced.entrants):
            if row > 1 and candidate in self.hunt.found and (found is None or candidate != final.entrants[2]):
                gain = raced.gain(row, ALPHA)
                if not gain.pairs:  # there was no time to race it
                    gain = replace(gain, median=baseline.seconds / self.hunt.found[candidate].seconds)
                samples = raced.samples[row]
                made.append(self.measurement(candidate, samples, gain, raced.gain(1, ALPHA), False, baseline.candidate))
        return tuple(m for m in made if not self._would_demote(m))

    def _would_demote(self, m: Measurement) -> bool:
        """Whether a weaker measurement would replace a confirmed one, since the newest of a candidate counts."""
        if m.evidence.confirmed:
            return False
        gain, default = m.evidence.gain, m.evidence.default
        earlier = [k.evidence for k in self.known if k.key == m.key and k.config == m.config and k.evidence.confirmed]
        return any(k.default != default or gain.high >= k.gain.low for k in earlier)

    def measurement(
        self, who: Candidate, samples: Sequence[float], gain: Ratio, control: Ratio, confirmed: bool, default: Candidate
    ) -> Measurement:
        """Return a record; without samples of a contest it holds those of the attempt."""
        attempt = self.hunt.found[who].attempt
        return evidence.measurement(
            self.problem, self.target, self.solvers[who[0]], who[1],
            evidence.ContestSamples(samples or attempt.samples, attempt.error, gain, control, confirmed, default),
            self.regime, self.before,
        )  # fmt: skip

    def seen(self, surveys: Sequence[Survey]) -> dict[Candidate, float]:
        """Return the gains in surveys that apply to this session: over the same default in the same place."""
        solver, found = self.solvers.get(self.default[0]), dict[Candidate, float]()
        if solver is None or not surveys:
            return found
        here = Key.of(self.problem, self.target, solver, self.default[1])
        for survey in sorted(surveys, key=lambda s: (s.date, s.digest)):
            if (survey.key, survey.config, survey.regime) == (here, self.default[1], self.regime.kind):
                for s in survey.seen:
                    if s.solver in self.solvers and self.solvers[s.solver].version == s.version:
                        found[s.solver, s.config] = s.gain
        return found

    def survey(self) -> Survey | None:
        """Return the survey of this session; None if no candidate besides the baseline gave a result.

        Faults have records of their own, and barred candidates were not examined.
        """
        hunt = self.hunt
        baseline = hunt.found.get(self.default) or hunt.best
        if baseline is None:
            return None
        gains = {who: 0.0 for who, attempt in hunt.faults.items() if attempt.status not in FAULTS}
        gains |= {who: baseline.seconds / found.seconds for who, found in hunt.found.items()}
        gains = {who: gain for who, gain in gains.items() if who[0] in self.solvers}
        if not gains.keys() - {baseline.candidate}:
            return None
        return evidence.survey(
            self.problem, self.target, self.solvers, baseline.candidate, baseline.seconds, gains, self.regime
        )

    def fault(self, who: Candidate) -> Fault:
        attempt = self.hunt.faults[who]
        return evidence.fault(self.problem, self.target, self.solvers[who[0]], who[1], attempt.status, attempt.why)

    def outcome(
        self, chosen: Candidate, reason: str, gain: Ratio | None = None, control: Ratio | None = None,
        default_fault: str | None = None, records: tuple[Measurement, ...] = (),
    ) -> Outcome:  # fmt: skip
        self.watch.enter("")
        hunt = self.hunt
        faults = tuple(self.fault(who) for who, attempt in hunt.faults.items() if attempt.status in FAULTS)
        seconds = {**self.watch.spent, "compile": hunt.compile_seconds, "check": hunt.check_seconds}
        return Outcome(
            chosen, chosen != self.default, reason, gain, control, default_fault, records, faults,
            self.survey(), tuple(hunt.tried), seconds, ended=hunt.ended,
        )  # fmt: skip
