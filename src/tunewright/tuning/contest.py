"""Interleaved comparison of candidates with the default: the race of the leaders, and the confirmation of one winner.

In both the default runs twice. The second copy is the control: its difference from the first is noise, and a gain
counts only if it is larger than that noise.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..knowledge.record import Ratio
from ..measure.base import Attempt, Candidate, Measurer
from ..measure.statistics import Spending, leader, looks, losers, ratio, unknown
from ..search.base import Status
from .progress import Watch

#: A smaller gain is not worth a change: alignment of code and data alone makes up to one per cent.
LEAST_GAIN = 1.01
#: Risk, in a confirmation, of a false gain or of a wrong interval.
ALPHA = 0.01
#: Risk that the race drops a candidate that is not slower. Such an error may cost speed, but causes no wrong change.
RACE_ALPHA = 0.02
#: Entrants that surely do not beat the leader by more than this share are dropped: they need not be told apart from it.
MARGIN = 0.005
#: Risk at which a candidate without a worthwhile gain is given up: 256 more rounds would hardly change the result.
FUTILE = 0.1
#: While the default may differ from itself by this factor, no candidate is given up.
CALM = 1.2
#: Maximum number of rounds. A gain of 3 % under 5 % of jitter shows within about 200 rounds; the rest is for a busy
#: machine.
RACE_ROUNDS, CONFIRM_ROUNDS = 128, 512
#: Share of the budget that one call of the measurer may use.
STEP = 0.05


@dataclass
class Contest:
    """Samples of entrants over common rounds. In races the first two rows are the baseline and its control."""

    entrants: list[Candidate]
    samples: list[list[float]] = field(init=False)
    #: rows that are still measured
    running: list[int] = field(init=False)
    fallen: dict[int, Attempt] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.samples = [[] for _ in self.entrants]
        self.running = list(range(len(self.entrants)))

    @property
    def rounds(self) -> int:
        return len(self.samples[0])

    @property
    def leaders(self) -> list[int]:
        """Rows of the candidates that still run against the baseline."""
        return [i for i in self.running if i > 1]

    @property
    def upset(self) -> bool:
        """Whether the baseline or its control failed, so that nothing can be compared any more."""
        return 0 in self.fallen or 1 in self.fallen

    def gain(self, row: int, alpha: float) -> Ratio:
        """Return the time of the baseline divided by that of a candidate."""
        return ratio(self.samples[0], self.samples[row], alpha)

    def drop(self, rows: set[int]) -> None:
        self.running = [i for i in self.running if i not in rows]

    def run(self, measurer: Measurer, rounds: int) -> None:
        """Measure more rounds of all rows that still run."""
        race = measurer.race([self.entrants[i] for i in self.running], rounds)
        for row, times in zip(self.running, race.samples, strict=True):
            self.samples[row] += times
        fallen = {self.running[i]: attempt for i, attempt in race.fallen.items()}
        for row in self.running:
            wrong = impossible(self.samples[row])
            if wrong and row not in fallen:
                fallen[row] = Attempt(Status.WRONG, wrong)
            if row in fallen:  # times of a failed candidate are discarded
                self.samples[row] = []
        self.fallen |= fallen
        self.drop(set(fallen))


def impossible(samples: Sequence[float]) -> str:
    """Describe the first time that cannot be true; empty if all are possible."""
    odd = next((s for s in samples if not (math.isfinite(s) and s > 0)), None)
    return "" if odd is None else f"a time of {odd} seconds is impossible"


def play(
    contest: Contest, measurer: Measurer, watch: Watch, share: float, limit: int, alpha: float
) -> Iterator[tuple[float, bool]]:
    """Run a contest up to a share of the budget.

    Yields, at each look at the samples, the risk that this look may spend and whether it is the last.
    """
    spending = Spending(alpha)
    start = watch.elapsed
    for look in looks(limit):
        while contest.rounds < look and not contest.upset and (contest.rounds == 0 or watch.left(share) > 0):
            each = _pace(contest, watch.elapsed - start)
            # small steps: if others load the machine during one, the budget must not suffer much
            affordable = int(STEP * watch.budget / each) if each > 0 else limit
            contest.run(measurer, min(max(1, affordable), look - contest.rounds))
        each, left = _pace(contest, watch.elapsed - start), watch.left(share)
        plan = min(limit, contest.rounds + int(left / each)) if each > 0 and left < math.inf else limit
        last = look == limit or contest.upset or plan <= contest.rounds or left <= 0
        yield spending.at(contest.rounds, plan, last), last
        if last:
            return


def _pace(contest: Contest, seconds: float) -> float:
    """Return the seconds per round so far; infinite before the first round."""
    return seconds / contest.rounds if contest.rounds else math.inf


def race(contest: Contest, measurer: Measurer, watch: Watch, share: float) -> int | None:
    """Race the leaders until one is left or nothing more can be learnt. Return the row to confirm, or None.

    Candidates that are slower than the fastest drop out, as do those that will not gain enough over the baseline. Among
    candidates that cannot be told apart the baseline is preferred, then the one with the shortest time.
    """
    for alpha, last in play(contest, measurer, watch, share, RACE_ROUNDS, RACE_ALPHA):
        if contest.upset:
            return None
        contest.drop({i for i in contest.leaders if contest.gain(i, FUTILE).high < LEAST_GAIN})
        rows = contest.leaders
        if rows:
            contest.drop(losers(contest.samples, rows, alpha / len(rows), MARGIN))
        if last or len(contest.leaders) <= 1:
            break
    rows = contest.leaders
    if not rows:
        return None
    first = leader(contest.samples, rows)
    return first if not last or contest.gain(first, ALPHA).median >= LEAST_GAIN else None


class ContestVerdict(enum.Enum):
    """Result of a confirmation."""

    GAIN = "faster than the default"
    NONE = "no significant gain"
    NOISY = "too noisy: the default differs from itself by more than the gain"
    SHORT = "the time was too short for enough rounds"
    FALLEN = "it failed while it was timed"


@dataclass(frozen=True)
class Confirmation:
    """One candidate against the baseline on fresh samples: verdict, gain, and the control's ratio."""

    verdict: ContestVerdict
    gain: Ratio
    control: Ratio


def confirm(contest: Contest, measurer: Measurer, watch: Watch, share: float = 1.0) -> Confirmation:
    """Run baseline, control and one candidate until the gain is certain or hopeless, or rounds or time are used up.

    A gain counts when the lower end of its interval is worth a change and its median lies beyond the control's
    interval. A busy machine widens both intervals; nothing is decided then, and more rounds follow.
    """
    nothing = Confirmation(ContestVerdict.FALLEN, ratio((), (), ALPHA), ratio((), (), ALPHA))
    found = nothing
    for alpha, last in play(contest, measurer, watch, share, CONFIRM_ROUNDS, ALPHA):
        if contest.fallen:
            return nothing
        gain, control = contest.gain(2, alpha), contest.gain(1, alpha)
        noise = max(control.high, 1 / control.low)
        found = Confirmation(ContestVerdict.NONE, gain, control)
        if gain.low >= LEAST_GAIN and gain.median > noise:
            return Confirmation(ContestVerdict.GAIN, gain, control)
        # otherwise load by other processes may make the candidate look hopeless
        calm = contest.gain(1, ALPHA).high < CALM
        if (calm or last) and contest.gain(2, FUTILE).high < LEAST_GAIN:
            return found
        if last and unknown(gain):
            return Confirmation(ContestVerdict.SHORT, gain, control)
        if last and noise >= gain.median >= LEAST_GAIN:
            return Confirmation(ContestVerdict.NOISY, gain, control)
    return found
