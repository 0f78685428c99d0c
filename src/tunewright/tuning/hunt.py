"""The search of a tuning session: which candidates are attempted, in which order, and how their times are compared.

The default comes first, then the defaults of the other solvers, then records of similar problems, then the requests of
the solvers' strategies. Attempts lie seconds apart, and the machine changes meanwhile. So a promising candidate takes a
few turns with an anchor (the default, or one that is much faster), and its time is the anchor's times their ratio.

Where a measurer compiles several at the same time, candidates come in batches: strategies are asked for all of a batch
before they are told of any, and those that follow it are part of the next one. Nothing begins that, going by what
others took, could not end in time. What earlier sessions saw is told to strategies, and only the best of it attempted
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
from ..search.base import Status, Strategy, Trial
from ..search.space import Config, Space
from ..solvers.base import Config as AnyConfig
from ..solvers.base import Problem, Solver
from .contest import Contest, impossible
from .evidence import ENOUGH
from .key import Key
from .measure import Attempt, Candidate, Measurer
from .progress import Watch
from .record import Measurement
from .statistics import estimate, rough

#: an attempt that is slower than the best by this factor is only probed
LIMIT = 1.5
#: this number, compiled at the same time, takes hardly longer than one: the first ones go with the default
MANY = 4
#: solvers within this factor of the best get turns, the others one where those get SELDOM
PROMISING, SELDOM = 2.0, 8
#: a config within this factor of its solver's best is attempted by the solvers that follow it
FOLLOWED = 1.08
#: turns that an attempt takes with the anchor, and how many more where something disturbs them
TURNS, MORE = 5, 20
#: a slow probe is repeated so often, and once more when the anchor, too, is slower than it was by this factor
PROBES, CONTENDED = 3, 1.25
#: known candidates of each solver that are attempted again; of the others the strategy is told what was measured
KNOWN = 3
#: an attempt's time is estimated from this number of the last attempts: this share of them took no longer
RECENT, MOSTLY = 12, 0.75
#: candidates in the race: within this factor of the best, and at most this number
NEAR, MOST_LEADERS = 1.1, 5
#: who takes part in the heat before it, and over how many rounds
HEAT_NEAR, HEAT_MOST, HEAT_ROUNDS = 1.35, 12, 10
#: the language in which a kernel's text is all that its program is made from
WHOLE_TEXT = "c"
#: the share of the budget that turns may cost which make times comparable, at one time
SHARE = 0.05


class Way(enum.Enum):
    """How a candidate is compiled."""

    ALONE = "by itself, when it is attempted"
    TOGETHER = "ahead, with others"
    BEFORE = "not at all: another one has the same program"


@dataclass(frozen=True)
class Tried:
    """One candidate that was looked at, for curves and counts."""

    candidate: Candidate
    status: Status
    #: as compared with the others; infinite unless OK
    seconds: float
    why: str
    #: when, in seconds since the session began
    at: float


@dataclass(frozen=True)
class Found:
    """A candidate that is correct."""

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
    #: the config that took it, and the last one around which was looked
    leader: AnyConfig | None = None
    descended: AnyConfig | None = None
    #: advances by one with each turn of a promising solver, by more with others: the lowest is next
    turns: float = 0.0


@dataclass
class Hunt:
    """Attempts candidates and remembers what came of them."""

    problem: Problem
    target: Target
    measurer: Measurer
    watch: Watch
    barred: Callable[[str, AnyConfig], str | None]
    tell: Callable[[], None]
    found: dict[Candidate, Found] = field(default_factory=dict)
    faults: dict[Candidate, Attempt] = field(default_factory=dict)
    tried: list[Tried] = field(default_factory=list)
    #: what earlier sessions saw and this one does not attempt again
    seen: set[Candidate] = field(default_factory=set)
    #: those of `seen` that had a time
    timed_before: int = 0
    anchor: Found | None = None
    #: configs that there are to choose from, and whether none was left to attempt
    choices: int = 0
    ended: bool = False
    #: seconds of each solver's attempts by the way they are compiled; how long batches waited for that
    took: dict[tuple[str, Way], deque[float]] = field(default_factory=dict)
    waited: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    #: of the present attempt
    way: Way = Way.ALONE
    compile_seconds: float = 0.0
    check_seconds: float = 0.0

    # ---- what came of it --------------------------------------------------------------------------------------

    @property
    def best(self) -> Found | None:
        return min(self.found.values(), key=lambda f: f.seconds, default=None)

    @property
    def failed(self) -> int:
        return sum(t.status is not Status.OK for t in self.tried)

    @property
    def compared(self) -> int:
        """Candidates that were timed, here or in earlier sessions."""
        return len(self.found) + self.timed_before

    @property
    def is_enough(self) -> bool:
        """Whether it may say that nothing is faster."""
        return not self.watch.stopped and (self.ended or self.compared >= ENOUGH)

    @property
    def extent(self) -> str:
        """How far it came, in words."""
        return f"{self.compared:,} of {self.choices:,} candidates were compared"

    def leaders(self, baseline: Found, again: Collection[Candidate] = ()) -> list[Candidate]:
        """Who races with a baseline: the fastest, those that may be as fast, and the best of ``again`` in any case.

        A candidate that was only probed is far behind.
        """
        ranked = [f for f in sorted(self.found.values(), key=lambda f: f.seconds) if f is not baseline]
        bound = NEAR * min(f.seconds for f in [baseline, *ranked])
        near = [f.candidate for f in ranked if f.seconds <= bound][:MOST_LEADERS]
        if not near:
            # A few turns each do not tell for certain, and that the default is best is an answer for good.
            near = [f.candidate for f in ranked if not f.attempt.probed][:1]
        return near + [f.candidate for f in ranked if f.candidate in again and f.candidate not in near][:1]

    def heat(self) -> None:
        """Measure those that came near once more, together: a few turns each do not tell who belongs in the race."""
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
        """A candidate that was correct failed later on."""
        if self.found.pop(candidate, None) is None:
            return  # it stood in a contest twice
        self.faults[candidate] = attempt
        self.tried.append(Tried(candidate, attempt.status, math.inf, attempt.why, self.watch.elapsed))

    # ---- the order of attempts --------------------------------------------------------------------------------

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
        """Search until a share of the budget is used or nothing is left to attempt. The default was attempted.

        ``gains``: over the default, of what earlier sessions saw here; 0: it cannot be used. Nothing begins that would
        not be done when the share ``end`` is used.
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
        """Around each new best of a solver: configs with one other parameter that is an argument of the same program.

        They need no compiler, so they take a fraction of the time of others. False when the time is over.
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
        """Configs that differ from one in a parameter which does not change the program, and were not attempted."""
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
        """Tell strategies what was measured and seen before; returns the best of it, which is attempted again."""
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
                    # what it gained over the default then, from the default's time now
                    seconds = anchor.seconds / gain if gain > 0 else math.inf
                    status = Status.OK if gain > 0 and self.barred(*candidate) is None else Status.FAILED
                    self._told(lane, Tried(candidate, status, seconds, "seen before", self.watch.elapsed))
                    self.seen.add(candidate)
                    self.timed_before += status is Status.OK
        return again

    def _fits(self, lane: _Lane, m: Measurement) -> bool:
        """Whether earlier measurements are valid for this session's anchor."""
        same = m.key == Key.of(self.problem, self.target, lane.solver, m.config)
        return same and self.anchor is not None and self.anchor.candidate == plain(m.evidence.default)

    def _first(
        self, lanes: Mapping[str, _Lane], seeds: Mapping[str, Sequence[AnyConfig]], again: Sequence[Candidate]
    ) -> Iterator[Candidate]:
        """What is attempted before strategies are asked: each once, and only what its space holds."""
        wanted = [plain((s, lane.solver.default(self.problem, self.target))) for s, lane in lanes.items()]
        wanted += again
        wanted += [plain((s, config)) for s in lanes for config in seeds.get(s, ())]
        seen = {tried.candidate for tried in self.tried} | self.seen
        for candidate in dict.fromkeys(wanted):
            if candidate not in seen and candidate[1] in lanes[candidate[0]].space:
                yield candidate

    def _asked(self, lanes: dict[str, _Lane], count: int) -> list[tuple[_Lane, AnyConfig]]:
        """What strategies ask for next, up to this number; lanes with nothing left leave."""
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
        """Whose turn it is: solvers far behind the best seldom get one."""
        open_ = [lane for lane in lanes.values() if lane.strategy is not None]
        if not open_:
            return None
        lane = min(open_, key=lambda lane: lane.turns)
        best = min(lane.best for lane in lanes.values())
        lane.turns += 1 if lane.best <= PROMISING * best else SELDOM
        return lane

    # ---- one candidate ----------------------------------------------------------------------------------------

    def _batches(
        self, wanted: Sequence[tuple[_Lane, AnyConfig]], share: float, end: float, compiled: bool = False
    ) -> list[float] | None:
        """Attempt candidates, compiled in batches: their seconds; None when the time is over before all are done.

        ``compiled``: their programs are there.
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
            if self.way is Way.TOGETHER:
                self.waited.append(waited)
        return seconds

    def _expected(self, batch: Sequence[tuple[_Lane, AnyConfig]], compiled: bool) -> float:
        """Seconds that a batch will take, going by those before it."""
        way = _way(batch, compiled)
        alike = [s for (_, theirs), took in self.took.items() for s in took if theirs is way]
        every = alike or [s for took in self.took.values() for s in took]
        each = [_mostly(self.took.get((lane.solver.id, way)) or every) for lane, _ in batch]
        return sum(each) + (_mostly(self.waited) if way is Way.TOGETHER else 0.0)

    def _turn(self, lane: _Lane, config: AnyConfig) -> float:
        tried = self.attempt((lane.solver.id, config))
        self._told(lane, tried)
        return tried.seconds

    def _told(self, lane: _Lane, tried: Tried) -> None:
        if tried.seconds < lane.best:
            lane.best, lane.leader = tried.seconds, tried.candidate[1]
        if lane.strategy is not None and tried.candidate[1] in lane.space:
            lane.strategy.tell([Trial(tried.candidate[1], tried.status, tried.seconds, tried.why)])

    @property
    def opens_together(self) -> bool:
        """The default is compiled with those that come next: else what it took alone would be expected of each."""
        return self.measurer.beside or self.measurer.ahead >= MANY

    def open(self, default: Candidate, waited: float) -> Tried:
        """Attempt the default. ``waited``: seconds until it was compiled."""
        tried = self.attempt(default)
        if self.opens_together:
            self.took.clear()  # it paid for what the others find there
            if not self.measurer.beside:
                self.waited.append(waited)
        return tried

    def attempt(self, candidate: Candidate) -> Tried:
        """Attempt a candidate, compare it with the anchor, and keep what came of it."""
        candidate, begin = plain(candidate), self.watch.elapsed
        reason = self.barred(*candidate)
        attempt = Attempt(Status.FAILED, f"barred: {reason}") if reason is not None else self._measure(candidate)
        seconds = math.inf
        if attempt.status is Status.OK:
            attempt, seconds = self._compare(candidate, attempt)
        tried = Tried(candidate, attempt.status, seconds, attempt.why, self.watch.elapsed)
        self.tried.append(tried)
        if attempt.status is Status.OK:
            found = Found(candidate, seconds, attempt)
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
        # Slow, or did another program have the processor just then? Compiling cost far more than a few more probes.
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
        """How many times as long as before the anchor takes now."""
        if self.anchor is None:
            return 1.0
        samples = self.measurer.race([self.anchor.candidate], TURNS).samples[0]
        return min(samples) / self.anchor.seconds if samples and not impossible(samples) else 1.0

    def _compare(self, candidate: Candidate, attempt: Attempt) -> tuple[Attempt, float]:
        """The attempt, and seconds that can be compared with those of the others."""
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
        """A few turns of the anchor and others; more where they are rough."""
        assert self.anchor is not None
        contest = Contest([self.anchor.candidate, *candidates])
        contest.run(self.measurer, rounds)
        times = [contest.samples[i] for i in contest.running]
        disturbed = 0 not in contest.fallen and any(rough(times[0], t) for t in times[1:])
        if disturbed and self._affordable(sum(median(t) for t in times[1:]), MORE):
            contest.run(self.measurer, MORE)
        return contest

    def _affordable(self, seconds: float, rounds: int) -> bool:
        """Whether there is time for rounds of the anchor and of others that take ``seconds`` together."""
        return self.anchor is not None and (self.anchor.seconds + seconds) * rounds <= SHARE * self.watch.budget


def _followers(lanes: Iterable[_Lane]) -> dict[str, list[_Lane]]:
    """Solvers that choose from the same configs as one that compiles less for each: it searches, they follow.

    A family's generic and specialised kernels are alike: what is good in one is good in the other.
    """
    found: dict[str, list[_Lane]] = {}
    leaders: dict[str, _Lane] = {}
    for lane in sorted(lanes, key=lambda lane: lane.solver.tuned_only):
        leader = leaders.setdefault(lane.space.hash, lane)
        if leader is not lane and lane.solver.tuned_only and not leader.solver.tuned_only:
            found.setdefault(leader.solver.id, []).append(lane)
            lane.strategy = None
    return found


def _way(batch: Sequence[object], compiled: bool) -> Way:
    if compiled:
        return Way.BEFORE
    return Way.TOGETHER if len(batch) > 1 else Way.ALONE


def _size(space: Space) -> int:
    """Configs of a space; of a large one the combinations before its constraint."""
    return space.combinations if space.rows is None else len(space.rows)


def _mostly(seconds: Collection[float]) -> float:
    """What most of them do not exceed; nothing where there are none."""
    ranked = sorted(seconds)
    return ranked[math.ceil(MOSTLY * (len(ranked) - 1))] if ranked else 0.0


def plain(candidate: Candidate) -> Candidate:
    """The candidate with a config that can be hashed and compared."""
    return candidate[0], Config(candidate[1])
