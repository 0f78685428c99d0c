"""The search of a tuning session: the order of attempts, and the comparison of their times.

The default is attempted first, then the defaults of other solvers, records of similar problems, and the requests of the
solvers' strategies. Attempts lie seconds apart, and the machine's speed changes meanwhile. A promising candidate
therefore runs a few turns against an anchor (the default, or a much faster candidate). Its time is the anchor's time
multiplied by their ratio.

If the measurer compiles several candidates at once, candidates come in batches. Strategies then choose a whole batch
before they learn any of its results, and candidates of following solvers join the next batch. No attempt begins that
would probably exceed the budget. Strategies learn what earlier sessions saw, and only the best of it is attempted
again.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from .. import search
from ..devices.base import Target
from ..knowledge.key import Key
from ..knowledge.record import Measurement
from ..measure.base import Attempt, Candidate, Measurer
from ..measure.statistics import estimate, rough
from ..search.base import Status, Strategy, Trial
from ..search.space import Config, Space
from ..solvers.base import Config as AnyConfig
from ..solvers.base import Problem, Solver
from .contest import Contest, impossible
from .evidence import ENOUGH
from .progress import Watch

#: An attempt that is slower than the best by this factor is only probed.
LIMIT = 1.5
#: From this number of parallel compilations on, the default is compiled together with the first candidates: all of them
#: take hardly longer than one.
MANY = 4
#: Solvers within the factor PROMISING of the best get regular turns; others get one in SELDOM.
PROMISING, SELDOM = 2.0, 8
#: Following solvers attempt the configs that are within this factor of their solver's best.
FOLLOWED = 1.08
#: Turns that an attempt takes with the anchor, and further turns after a disturbance.
TURNS, MORE = 5, 20
#: Maximum number of probes of a slow candidate; and the slowdown of the anchor above which the candidate is attempted
#: once more.
PROBES, CONTENDED = 3, 1.25
#: Known candidates of each solver that are attempted again. For the others the strategy learns the earlier results.
KNOWN = 3
#: An attempt's duration is estimated from the last RECENT attempts: the share MOSTLY of them took no longer.
RECENT, MOSTLY = 12, 0.75
#: Candidates of the race: within this factor of the best, and at most this number.
NEAR, MOST_LEADERS = 1.1, 5
#: Candidates of the heat before the race: their factor and number, and the number of rounds.
HEAT_NEAR, HEAT_MOST, HEAT_ROUNDS = 1.35, 12, 10
#: The language in which the kernel's source alone determines its program.
WHOLE_TEXT = "c"
#: Share of the budget that one comparison of times may cost.
SHARE = 0.05


class CompileMode(enum.Enum):
    """How a candidate is compiled."""

    ALONE = "by itself, when it is attempted"
    TOGETHER = "ahead, with others"
    BEFORE = "not at all: another one has the same program"


@dataclass(frozen=True)
class TriedCandidate:
    """One attempted candidate, for curves and counts."""

    candidate: Candidate
    status: Status
    #: comparable with other candidates; infinite unless the status is OK
    seconds: float
    why: str
    #: seconds since the session began
    at: float


@dataclass(frozen=True)
class CorrectResult:
    """A correct candidate with its time."""

    candidate: Candidate
    seconds: float
    attempt: Attempt


@dataclass
class _Lane:
    """A solver with its space and strategy."""

    solver: Solver
    space: Space
    strategy: Strategy | None
    best: float = math.inf
    #: the config with that time, and the last config whose neighbours were attempted
    leader: AnyConfig | None = None
    descended: AnyConfig | None = None
    #: grows by one per turn of a promising solver, by more for others; the lane with the lowest value is next
    turns: float = 0.0


@dataclass
class Hunt:
    """Attempts candidates and stores the results."""

    problem: Problem
    target: Target
    measurer: Measurer
    watch: Watch
    barred: Callable[[str, AnyConfig], str | None]
    tell: Callable[[], None]
    found: dict[Candidate, CorrectResult] = field(default_factory=dict)
    faults: dict[Candidate, Attempt] = field(default_factory=dict)
    tried: list[TriedCandidate] = field(default_factory=list)
    #: candidates that earlier sessions saw and that are not attempted again
    seen: set[Candidate] = field(default_factory=set)
    #: number of those in `seen` that were timed
    timed_before: int = 0
    anchor: CorrectResult | None = None
    #: number of configs in all spaces, and whether all of them were attempted
    choices: int = 0
    ended: bool = False
    #: recent durations of attempts by solver and way of compiling, and waiting times of batches for compilation
    took: dict[tuple[str, CompileMode], deque[float]] = field(default_factory=dict)
    waited: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    #: of the current attempt
    way: CompileMode = CompileMode.ALONE
    compile_seconds: float = 0.0
    check_seconds: float = 0.0

    # ---- results -----------------------------------------------------------------------------------------------------

    @property
    def best(self) -> CorrectResult | None:
        return min(self.found.values(), key=lambda f: f.seconds, default=None)

    @property
    def failed(self) -> int:
        return sum(t.status is not Status.OK for t in self.tried)

    @property
    def compared(self) -> int:
        """Number of candidates that were timed, in this or earlier sessions."""
        return len(self.found) + self.timed_before

    @property
    def is_enough(self) -> bool:
        """Whether the search covered enough to state that nothing is faster."""
        return not self.watch.stopped and (self.ended or self.compared >= ENOUGH)

    @property
    def extent(self) -> str:
        """The number of compared candidates, in words."""
        return f"{self.compared:,} of {self.choices:,} candidates were compared"

    def leaders(self, baseline: CorrectResult, again: Collection[Candidate] = ()) -> list[Candidate]:
        """Return the candidates that race with a baseline: the fastest, its near rivals, and the best of ``again``.

        Candidates that were only probed are far behind.
        """
        ranked = [f for f in sorted(self.found.values(), key=lambda f: f.seconds) if f is not baseline]
        bound = NEAR * min(f.seconds for f in [baseline, *ranked])
        near = [f.candidate for f in ranked if f.seconds <= bound][:MOST_LEADERS]
        if not near:
            # A few turns give no certainty, and "the default is best" will be a final answer.
            near = [f.candidate for f in ranked if not f.attempt.probed][:1]
        return near + [f.candidate for f in ranked if f.candidate in again and f.candidate not in near][:1]

    def heat(self) -> None:
        """Measure all near candidates once more, together: a few turns each do not decide who belongs in the race."""
        if self.anchor is None:
            return
        ranked = sorted((f for f in self.found.values() if not f.attempt.probed), key=lambda f: f.seconds)
        near = [f for f in ranked if f.seconds <= HEAT_NEAR * ranked[0].seconds][:HEAT_MOST]
        while near and not self._affordable(sum(f.seconds for f in near), HEAT_ROUNDS):
            near.pop()
        if len(near) < 2 or self.watch.left() <= 0:
            return
        contest = self._turns([f.candidate for f in near], HEAT_ROUNDS)
        for i, found in enumerate(near, 1):
            if i in contest.fallen:
                self.discard(found.candidate, contest.fallen[i])
            elif 0 not in contest.fallen:
                seconds = self.anchor.seconds * estimate(contest.samples[i], contest.samples[0])
                self.found[found.candidate] = replace(found, seconds=seconds)

    def discard(self, candidate: Candidate, attempt: Attempt) -> None:
        """Move a correct candidate to the faults because it failed later on."""
        if self.found.pop(candidate, None) is None:
            return  # it stood in a contest twice
        self.faults[candidate] = attempt
        self.tried.append(TriedCandidate(candidate, attempt.status, math.inf, attempt.why, self.watch.elapsed))

    # ---- order of attempts -------------------------------------------------------------------------------------------

    def run(
        self,
        solvers: Sequence[Solver],
        strategy: Callable[[str], str | None],
        seed: int,
        seeds: Mapping[str, Sequence[AnyConfig]],
        known: Sequence[Measurement],
        gains: Mapping[Candidate, float],
        share: float,
        end: float,
    ) -> None:
        """Search until a share of the budget is used or no candidate is left.

        The default must have been attempted before.

        ``gains``: gains over the default that earlier sessions saw here; 0 marks an unusable candidate. No attempt
        begins that would not end before the share ``end`` is used.
        """
        lanes = {}
        for solver in solvers:
            if solver.why_not(self.problem, self.target) is None:
                lanes[solver.id] = self._lane(solver, strategy(solver.id), seed)
        self.choices = sum(_size(lane.space) for lane in lanes.values())
        followers = _followers(lanes.values())
        first = [(lanes[s], config) for s, config in self._first(lanes, seeds, self._learn(lanes, known, gains))]
        if self._batches(first, share, end) is None or not self._descend(lanes.values(), share, end):
            return
        following: list[tuple[_Lane, AnyConfig]] = []
        while batch := following + self._asked(lanes, self.measurer.ahead - len(following)):
            seconds = self._batches(batch, share, end)
            if seconds is None:
                return
            good = [pair for pair, s in zip(batch, seconds, strict=True) if s <= FOLLOWED * pair[0].best]
            if not self._descend([lane for lane, _ in batch], share, end):
                return
            good += [(lane, lane.leader) for lane, _ in batch if lane.leader is not None]
            follow = [(other, config) for lane, config in good for other in followers.get(lane.solver.id, ())]
            tried = {one.candidate for one in self.tried} | self.seen
            new = {who: (at, config) for at, config in follow if (who := plain((at.solver.id, config))) not in tried}
            following = [*new.values()]
        self.ended = True

    def _descend(self, lanes: Iterable[_Lane], share: float, end: float) -> bool:
        """For each new best config of a solver, attempt its neighbours that differ in one argument of the same program.

        They need no compilation and therefore little time. Returns False when the time is used up.
        """
        for lane in lanes:
            while (leader := lane.leader) is not None and leader != lane.descended and self._promises(lane):
                lane.descended = leader
                near = self._around(lane, leader)
                for _, config in near:
                    self.measurer.alike(plain((lane.solver.id, config)), plain((lane.solver.id, leader)))
                if self._batches(near, share, end, compiled=True) is None:
                    return False
        return True

    def _promises(self, lane: _Lane) -> bool:
        best = self.best
        return best is not None and lane.best <= PROMISING * best.seconds

    def _around(self, lane: _Lane, config: AnyConfig) -> list[tuple[_Lane, AnyConfig]]:
        """Return the untried configs that differ in one parameter and keep the same program."""
        if lane.solver.language != WHOLE_TEXT:
            return []
        tried = {one.candidate for one in self.tried} | self.seen
        text = lane.solver.source(self.problem, config, self.target)
        found: list[tuple[_Lane, AnyConfig]] = []
        for name, values in lane.space.params.items():
            for value in values:
                near = {**config, name: value}
                is_new = near in lane.space and plain((lane.solver.id, near)) not in tried
                if is_new and lane.solver.source(self.problem, near, self.target) == text:
                    found.append((lane, near))
        return found

    def _lane(self, solver: Solver, name: str | None, seed: int) -> _Lane:
        space = solver.space(self.problem, self.target)
        lane = _Lane(solver, space, None if name is None else search.create(name, space, seed))
        for tried in self.tried:  # the default
            if tried.candidate[0] == solver.id:
                self._told(lane, tried)
        return lane

    def _learn(
        self, lanes: Mapping[str, _Lane], known: Sequence[Measurement], gains: Mapping[Candidate, float]
    ) -> list[Candidate]:
        """Tell strategies what was measured and seen before. Return the best candidates, which are attempted again."""
        again: list[Candidate] = []
        anchor = self.anchor
        bound = max(gains.values(), default=0.0) / HEAT_NEAR
        for lane in lanes.values():
            mine = [m for m in known if m.key.solver == lane.solver.id and m.config in lane.space]
            mine.sort(key=lambda m: (not m.evidence.confirmed, -m.evidence.gain.median, m.digest))
            told = {c: gain for c, gain in gains.items() if c[0] == lane.solver.id and c[1] in lane.space}
            told |= {plain((m.key.solver, m.config)): m.evidence.gain.median for m in mine[::-1] if self._fits(lane, m)}
            near = sorted((c for c in told if told[c] >= bound), key=lambda c: -told[c])
            best = list(dict.fromkeys([*(plain((m.key.solver, m.config)) for m in mine), *near]))[:KNOWN]
            again += best
            for candidate, gain in told.items():
                if anchor is not None and candidate not in best and candidate not in self.found:
                    # the gain over the default at that time, applied to the default's time now
                    seconds = anchor.seconds / gain if gain > 0 else math.inf
                    status = Status.OK if gain > 0 and self.barred(*candidate) is None else Status.FAILED
                    self._told(lane, TriedCandidate(candidate, status, seconds, "seen before", self.watch.elapsed))
                    self.seen.add(candidate)
                    self.timed_before += status is Status.OK
        return again

    def _fits(self, lane: _Lane, m: Measurement) -> bool:
        """Whether an earlier measurement applies to this session's anchor."""
        same = m.key == Key.of(self.problem, self.target, lane.solver, m.config)
        return same and self.anchor is not None and self.anchor.candidate == plain(m.evidence.default)

    def _first(
        self, lanes: Mapping[str, _Lane], seeds: Mapping[str, Sequence[AnyConfig]], again: Sequence[Candidate]
    ) -> Iterator[Candidate]:
        """Yield the candidates to attempt before strategies are asked: each once, and only those in their spaces."""
        wanted = [plain((s, lane.solver.default(self.problem, self.target))) for s, lane in lanes.items()]
        wanted += again
        wanted += [plain((s, config)) for s in lanes for config in seeds.get(s, ())]
        seen = {tried.candidate for tried in self.tried} | self.seen
        for candidate in dict.fromkeys(wanted):
            if candidate not in seen and candidate[1] in lanes[candidate[0]].space:
                yield candidate

    def _asked(self, lanes: dict[str, _Lane], count: int) -> list[tuple[_Lane, AnyConfig]]:
        """Ask strategies for up to ``count`` candidates. Lanes without further candidates are removed."""
        batch: list[tuple[_Lane, AnyConfig]] = []
        while len(batch) < count and (lane := self._next(lanes)) is not None:
            assert lane.strategy is not None
            asked = lane.strategy.ask(1)
            if asked:
                batch.append((lane, asked[0]))
            else:
                del lanes[lane.solver.id]
        return batch

    def _next(self, lanes: Mapping[str, _Lane]) -> _Lane | None:
        """Choose the lane with the next turn; solvers far behind the best rarely get one."""
        open_ = [lane for lane in lanes.values() if lane.strategy is not None]
        if not open_:
            return None
        lane = min(open_, key=lambda lane: lane.turns)
        best = min(lane.best for lane in lanes.values())
        lane.turns += 1 if lane.best <= PROMISING * best else SELDOM
        return lane

    # ---- one candidate -----------------------------------------------------------------------------------------------

    def _batches(
        self, wanted: Sequence[tuple[_Lane, AnyConfig]], share: float, end: float, compiled: bool = False
    ) -> list[float] | None:
        """Attempt candidates, compiled in batches, and return their seconds; None if the time ends first.

        ``compiled``: their programs exist already.
        """
        seconds: list[float] = []
        while len(seconds) < len(wanted):
            batch = wanted[len(seconds) : len(seconds) + self.measurer.ahead]
            while len(batch) > 1 and self._expected(batch, compiled) > self.watch.left(end):
                batch = batch[:-1]
            if self.watch.left(share) <= 0 or self._expected(batch, compiled) > self.watch.left(end):
                return None
            candidates = [plain((lane.solver.id, config)) for lane, config in batch]
            if not compiled:
                self.measurer.prepare([c for c in candidates if self.barred(*c) is None])
            waited, self.way = 0.0, _way(batch, compiled)
            for (lane, config), candidate in zip(batch, candidates, strict=True):
                begin = self.watch.elapsed
                if self.watch.left(share) <= 0 or not self.measurer.ready(candidate, self.watch.left(end)):
                    return None
                waited += self.watch.elapsed - begin
                self.compile_seconds += self.watch.elapsed - begin
                seconds.append(self._turn(lane, config))
            if self.way is CompileMode.TOGETHER:
                self.waited.append(waited)
        return seconds

    def _expected(self, batch: Sequence[tuple[_Lane, AnyConfig]], compiled: bool) -> float:
        """Estimate the seconds of a batch from those of earlier batches."""
        way = _way(batch, compiled)
        alike = [s for (_, theirs), took in self.took.items() for s in took if theirs is way]
        every = alike or [s for took in self.took.values() for s in took]
        each = [_mostly(self.took.get((lane.solver.id, way)) or every) for lane, _ in batch]
        return sum(each) + (_mostly(self.waited) if way is CompileMode.TOGETHER else 0.0)

    def _turn(self, lane: _Lane, config: AnyConfig) -> float:
        tried = self.attempt((lane.solver.id, config))
        self._told(lane, tried)
        return tried.seconds

    def _told(self, lane: _Lane, tried: TriedCandidate) -> None:
        if tried.seconds < lane.best:
            lane.best, lane.leader = tried.seconds, tried.candidate[1]
        if lane.strategy is not None and tried.candidate[1] in lane.space:
            lane.strategy.tell([Trial(tried.candidate[1], tried.status, tried.seconds, tried.why)])

    @property
    def opens_together(self) -> bool:
        """Whether the default is compiled with the next candidates.

        Alone it would take longer than others in batches, and estimates would be too high.
        """
        return self.measurer.beside or self.measurer.ahead >= MANY

    def open(self, default: Candidate, waited: float) -> TriedCandidate:
        """Attempt the default. ``waited``: seconds until it was compiled."""
        tried = self.attempt(default)
        if self.opens_together:
            self.took.clear()  # the first attempt includes costs that later ones do not have
            if not self.measurer.beside:
                self.waited.append(waited)
        return tried

    def attempt(self, candidate: Candidate) -> TriedCandidate:
        """Attempt a candidate, compare it with the anchor, and store the result."""
        candidate, begin = plain(candidate), self.watch.elapsed
        reason = self.barred(*candidate)
        attempt = Attempt(Status.FAILED, f"barred: {reason}") if reason is not None else self._measure(candidate)
        seconds = math.inf
        if attempt.status is Status.OK:
            attempt, seconds = self._compare(candidate, attempt)
        tried = TriedCandidate(candidate, attempt.status, seconds, attempt.why, self.watch.elapsed)
        self.tried.append(tried)
        if attempt.status is Status.OK:
            found = CorrectResult(candidate, seconds, attempt)
            self.found[candidate] = found
            if self.anchor is None or seconds < self.anchor.seconds / LIMIT:
                self.anchor = found
        elif reason is None:
            self.faults[candidate] = attempt
        if reason is None:
            took = self.took.setdefault((candidate[0], self.way), deque(maxlen=RECENT))
            took.append(self.watch.elapsed - begin)
        self.tell()
        return tried

    def _measure(self, candidate: Candidate) -> Attempt:
        best = self.best
        limit = math.inf if best is None else LIMIT * best.seconds
        attempt = self._attempt(candidate, limit)
        cost = attempt.compile_seconds + attempt.check_seconds
        self.compile_seconds += attempt.compile_seconds
        self.check_seconds += attempt.check_seconds
        # The candidate may be slow, or another program may have used the processor. More probes cost less than the
        # compilation.
        probes: list[float] = []
        while attempt.probed and len(probes) < PROBES and sum(probes) < cost:
            probes += attempt.samples
            attempt = self._attempt(candidate, limit)
        if attempt.probed:
            least = min([*probes, *attempt.samples])
            attempt = replace(attempt, samples=(least,))
            if least < limit * PROMISING and (slower := self._contention()) > CONTENDED:
                attempt = self._attempt(candidate, limit * slower)
        return attempt

    def _attempt(self, candidate: Candidate, limit: float) -> Attempt:
        attempt = self.measurer.attempt(candidate, limit)
        wrong = impossible(attempt.samples)
        if attempt.status is Status.OK and (wrong or not attempt.samples):
            return Attempt(Status.WRONG, wrong or "it was not timed")
        return attempt

    def _contention(self) -> float:
        """Return the anchor's present time over its earlier time."""
        if self.anchor is None:
            return 1.0
        samples = self.measurer.race([self.anchor.candidate], TURNS).samples[0]
        return min(samples) / self.anchor.seconds if samples and not impossible(samples) else 1.0

    def _compare(self, candidate: Candidate, attempt: Attempt) -> tuple[Attempt, float]:
        """Return the attempt, and seconds that are comparable with those of other candidates."""
        own = min(attempt.samples)
        if self.anchor is None or attempt.probed or not self._affordable(own, TURNS):
            return attempt, own
        anchor = self.anchor
        contest = self._turns([candidate], TURNS)
        if 0 in contest.fallen:
            self.discard(anchor.candidate, contest.fallen[0])
            self.anchor = self.best
        if 1 in contest.fallen:
            return contest.fallen[1], math.inf
        if 0 in contest.fallen:
            return attempt, own
        return attempt, anchor.seconds * estimate(contest.samples[1], contest.samples[0])

    def _turns(self, candidates: Sequence[Candidate], rounds: int) -> Contest:
        """Run a few turns of the anchor and others; more if the samples are rough."""
        assert self.anchor is not None
        contest = Contest([self.anchor.candidate, *candidates])
        contest.run(self.measurer, rounds)
        times = [contest.samples[i] for i in contest.running]
        disturbed = 0 not in contest.fallen and any(rough(times[0], t) for t in times[1:])
        if disturbed and self._affordable(sum(median(t) for t in times[1:]), MORE):
            contest.run(self.measurer, MORE)
        return contest

    def _affordable(self, seconds: float, rounds: int) -> bool:
        """Whether the budget allows rounds of the anchor and of others that take ``seconds`` together."""
        return self.anchor is not None and (self.anchor.seconds + seconds) * rounds <= SHARE * self.watch.budget


def _followers(lanes: Iterable[_Lane]) -> dict[str, list[_Lane]]:
    """Return for each searching solver the solvers that follow it: same configs, but more compilation for each.

    Generic and specialised kernels of a family behave alike: a good config of one is good for the other.
    """
    found: dict[str, list[_Lane]] = {}
    leaders: dict[str, _Lane] = {}
    for lane in sorted(lanes, key=lambda lane: lane.solver.tuned_only):
        leader = leaders.setdefault(lane.space.hash, lane)
        if leader is not lane and lane.solver.tuned_only and not leader.solver.tuned_only:
            found.setdefault(leader.solver.id, []).append(lane)
            lane.strategy = None
    return found


def _way(batch: Sequence[object], compiled: bool) -> CompileMode:
    if compiled:
        return CompileMode.BEFORE
    return CompileMode.TOGETHER if len(batch) > 1 else CompileMode.ALONE


def _size(space: Space) -> int:
    """Return the number of configs of a space. For a large one, the constraint is not applied."""
    return space.combinations if space.rows is None else len(space.rows)


def _mostly(seconds: Collection[float]) -> float:
    """Return the value that the share MOSTLY of the seconds does not exceed; 0 if there are none."""
    ranked = sorted(seconds)
    return ranked[math.ceil(MOSTLY * (len(ranked) - 1))] if ranked else 0.0


def plain(candidate: Candidate) -> Candidate:
    """Return the candidate with a config that can be hashed and compared."""
    return candidate[0], Config(candidate[1])
