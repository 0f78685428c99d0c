"""Train the heuristic: turn records into examples, and grow a section of trees for each kind of problem.

An `Example` is a problem on a device with the known gains of its candidates over the default, from measurements and
surveys. Trees learn the logarithm of a gain divided by the best gain of the problem, so the quality of the default does
not matter. The package scikit-learn grows the trees (extra ``train``). Using them needs no scikit-learn.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from .._version import __version__
from ..devices.base import Target
from ..errors import InputError, SettingsError
from ..knowledge.key import Where
from ..knowledge.record import AnyRecord, Measurement, Survey, now
from ..ops.infer import MISTAKES
from ..search.space import Config
from ..solvers import problem_json
from ..solvers.base import Problem, Solver
from .features import Column, Floats, columns, features, kind
from .file import DIGITS, MOST_COLUMNS, MOST_SECTIONS
from .trees import Heuristic, HeuristicSection, Listed, SectionScope, Tree

#: Fewer problems of a kind than this teach nothing.
LEAST_PROBLEMS = 5
#: Maximum number of candidates of a shortlist; and the share of the best known gain that a candidate needs to enter it.
MOST_LISTED, NEAR_BEST = 48, 0.97
#: Maximum number of training problems whose features a section keeps.
MOST_POINTS = 400
#: Gains more than this many doublings below the best are clipped: such candidates are all useless.
WORST = 1.0
#: Parameters of the trees.
TREES, DEPTH, RATE, LEAST_LEAF, SUBSAMPLE = 150, 4, 0.1, 4, 0.7
#: A section answers up to FACTOR times the QUANTILE of the distances between nearest training problems. The last two
#: are lower bounds for that radius and for a feature's scale.
QUANTILE, FACTOR, LEAST_RADIUS, LEAST_SCALE = 0.95, 1.5, 1.0, 0.5
#: A measured gain whose interval is wider than this factor is not used.
WIDEST = 2.0
#: If a candidate has several gains, an earlier regime in this list counts more, then confirmation, then the date.
_REGIMES = ("network", "layer", "cold", "warm")
_ARCH = re.compile(r"(.*); (\d+) registers of (\d+) bytes; ([^;]*)((?:; no [^;]*)*)", re.DOTALL)


@dataclass(frozen=True, eq=False)
class Example:
    """A problem on a device, with what is known of its candidates."""

    problem: Problem
    target: Target
    default: tuple[str, Config]
    #: seconds of the default
    seconds: float
    #: time of the default over that of the candidate; 0 if the candidate is unusable
    gains: Mapping[Listed, float]

    @cached_property
    def at(self) -> tuple[str, SectionScope]:
        return kind(self.problem), SectionScope.of(Where.of(self.target))

    @cached_property
    def numbers(self) -> dict[str, float]:
        return features(self.problem, self.target)

    @cached_property
    def best(self) -> float:
        """The largest known gain; that of the default is 1."""
        return max(1.0, *self.gains.values())

    def gain(self, solver: str, config: Config) -> float | None:
        """Return the gain of a candidate; None if unknown."""
        return next((g for one, g in self.gains.items() if (one.solver, one.config) == (solver, config)), None)


@dataclass
class _Gathered:
    """The content of the records of one problem on one device."""

    problem: Problem
    target: Target
    #: per default, (rank, gain) of each candidate; in `newest` the newest date, and the default's seconds
    seen: dict[tuple[str, Config], dict[Listed, tuple[tuple[object, ...], float]]] = field(default_factory=dict)
    newest: dict[tuple[str, Config], tuple[str, float]] = field(default_factory=dict)

    def add(self, default: tuple[str, Config], date: str, seconds: float | None) -> None:
        before = self.newest.get(default, ("", 0.0))
        self.newest[default] = max(before[0], date), seconds if seconds is not None else before[1]
        self.seen.setdefault(default, {})

    def tell(self, default: tuple[str, Config], who: Listed, rank: tuple[object, ...], gain: float) -> None:
        mine = self.seen[default]
        if who not in mine or rank > mine[who][0]:
            mine[who] = rank, gain


def examples(records: Iterable[AnyRecord], solvers: Iterable[Solver]) -> tuple[list[Example], Counter[str]]:
    """Collect the examples in records, and count the unused records by reason."""
    versions = {s.id: s.version for s in solvers}
    found: dict[tuple[str, Where], _Gathered | str] = {}
    unused: Counter[str] = Counter()
    for record in records:
        if not isinstance(record, Measurement | Survey):
            continue
        # software versions are ignored: other drivers and compilers behave alike
        at = record.key.problem, replace(record.key.where, software="")
        if at not in found:
            found[at] = _posed(record)
        mine = found[at]
        if isinstance(mine, str):
            unused[mine] += 1
        elif versions.get(record.key.solver) != record.key.version:
            unused["its solver is gone or has another version now"] += 1
        else:
            _tell(mine, record, versions)
    made = []
    for one in found.values():
        if not isinstance(one, str) and one.newest:
            # gains refer to a default; if it has changed, those of the newest default count
            default = max(one.newest, key=lambda d: (one.newest[d][0], str(d)))
            gains = {who: gain for who, (_, gain) in one.seen[default].items()}
            gains[Listed(default[0], versions[default[0]], default[1])] = 1.0
            made.append(Example(one.problem, one.target, default, one.newest[default][1], gains))
    return sorted(made, key=lambda e: (e.problem.key(), str(e.target))), unused


def _posed(record: Measurement | Survey) -> _Gathered | str:
    try:
        problem, target = problem_json.from_json(dict(record.problem)), target_of(record.key.where)
        features(problem, target)
    except InputError as error:
        return error.what
    except (*MISTAKES, AssertionError):  # a file may contain a convolution without weights
        return "its problem makes no sense"
    return _Gathered(problem, target) if problem.key() == record.key.problem else "its problem does not fit its key"


def _tell(mine: _Gathered, record: Measurement | Survey, versions: Mapping[str, str]) -> None:
    if isinstance(record, Survey):
        default = (record.key.solver, record.config)
        mine.add(default, record.date, record.seconds)
        for seen in record.seen:
            if versions.get(seen.solver) == seen.version:
                rank = (-_REGIMES.index(record.regime), False, record.date, record.digest)
                mine.tell(default, Listed(seen.solver, seen.version, seen.config), rank, seen.gain)
        return
    e = record.evidence
    if versions.get(e.default[0]) is not None and tells(record):
        own = (record.key.solver, record.config) == e.default
        mine.add(e.default, record.date, e.seconds if own else None)
        rank = (-_REGIMES.index(e.regime), e.confirmed, record.date, record.digest)
        mine.tell(e.default, Listed(record.key.solver, record.key.version, record.config), rank, e.gain.median)


def tells(m: Measurement) -> bool:
    """Whether a measured gain is more than noise; a few turns on a busy machine may show any gain.

    Gains from a search have no interval; the candidates were compared with each other like a survey's sightings.
    """
    gain = m.evidence.gain
    return m.evidence.confirmed or gain.pairs == 0 or gain.high <= WIDEST * gain.low


def target_of(where: Where) -> Target:
    """Rebuild the target of a measurement from its key, for solvers. Raises `InputError` for an unknown format."""
    found = _ARCH.fullmatch(where.arch)
    if found is None:
        raise InputError("its architecture is not in the form that this version writes")
    arch, registers, nbytes, language, lacks = found.groups()
    return Target(
        where.device, where.processor, arch, where.units, (("runtime", where.runtime),), language, where.options,
        int(nbytes), int(registers), tuple(lacks.split("; no ")[1:]),
    )  # fmt: skip


def learnable(known: Sequence[Example]) -> dict[tuple[str, SectionScope], list[Example]]:
    """Group examples by kind and place, and keep the groups that are large enough."""
    found: dict[tuple[str, SectionScope], list[Example]] = {}
    for example in known:
        if len(example.gains) > 1:  # the default alone teaches nothing
            found.setdefault(example.at, []).append(example)
    order = sorted(found.items(), key=lambda item: str(item[0]))
    return {at: some for at, some in order if len(some) >= LEAST_PROBLEMS}


def train(known: Sequence[Example], about: Mapping[str, object], seed: int = 0) -> Heuristic:
    """Train a heuristic on examples."""
    made = [_section(at, some, seed) for at, some in learnable(known).items()]
    return Heuristic(tuple(made[:MOST_SECTIONS]), now(), __version__, about)


def _section(at: tuple[str, SectionScope], some: Sequence[Example], seed: int) -> HeuristicSection:
    listed = shortlist(some)
    asked = columns([(who.solver, who.config) for e in some for who in e.gains])[:MOST_COLUMNS]
    names = tuple(some[0].numbers)
    points = np.array([[*e.numbers.values()] for e in some], np.float64)
    scale = np.maximum(points.std(axis=0), LEAST_SCALE)
    base, trees = _grow(*_table(some, asked), seed)
    processors = tuple(sorted({e.target.name for e in some}))
    kept = _spread(points / scale, MOST_POINTS)
    return HeuristicSection(
        at[0], at[1], processors, names, tuple(scale.tolist()), tuple(map(tuple, points[kept].tolist())),
        _radius(points / scale), tuple(asked), tuple(listed), base, trees,
    )  # fmt: skip


def _table(some: Sequence[Example], asked: Sequence[Column]) -> tuple[Floats, Floats, Floats]:
    """Return a row of features for each candidate of each problem, with the value to learn and the weight."""
    rows, learn, weights = [], [], []
    for e in some:
        own = [*e.numbers.values()]
        for who, gain in e.gains.items():
            rows.append([*own, *(c.of(who.solver, who.config) for c in asked)])
            learn.append(max(math.log2(gain / e.best), -WORST) if gain > 0 else -WORST)
            weights.append(1.0 / len(e.gains))
    return np.array(rows, np.float64), np.array(learn, np.float64), np.array(weights, np.float64)


def _grow(x: Floats, y: Floats, weights: Floats, seed: int) -> tuple[float, tuple[Tree, ...]]:
    """Fit a constant and the trees that are added to it."""
    try:
        from sklearn.ensemble import GradientBoostingRegressor
    except ImportError:
        raise SettingsError(
            "training needs scikit-learn", where="kb train", hint="pip install 'tunewright[train]'"
        ) from None
    base = float(np.average(y, weights=weights))
    model = GradientBoostingRegressor(
        n_estimators=TREES, max_depth=DEPTH, learning_rate=RATE, min_samples_leaf=LEAST_LEAF, subsample=SUBSAMPLE,
        max_features=0.5, init="zero", random_state=seed,
    )  # fmt: skip
    model.fit(x, y - base, sample_weight=weights / weights.mean())
    trees = []
    for (grown,) in model.estimators_:
        t = grown.tree_
        trees.append(
            Tree(
                tuple(int(f) if left >= 0 else -1 for f, left in zip(t.feature, t.children_left, strict=True)),
                tuple(_short(v) for v in t.threshold),
                tuple(max(int(n), 0) for n in t.children_left),
                tuple(max(int(n), 0) for n in t.children_right),
                tuple(_short(RATE * v) for v in t.value[:, 0, 0]),
            )
        )
    return base, tuple(trees)


def _short(x: float) -> float:
    """Round as the file does, so that the judged heuristic equals the stored one."""
    return float(f"{x:.{DIGITS}g}")


def shortlist(some: Sequence[Example]) -> list[Listed]:
    """Choose candidates that are near the best for some problem; those that help most problems come first."""
    near = {who for e in some for who, gain in e.gains.items() if gain >= NEAR_BEST * e.best and gain > 0}
    order = sorted(near, key=lambda who: (who.solver, str(sorted(who.config.items()))))
    # what each candidate gives each problem, as a share of the best gain; unknown counts as 0
    share = np.array([[max(e.gains.get(who, 0.0), 0.0) / e.best for who in order] for e in some])
    have, chosen = np.zeros(len(some)), list[int]()
    while len(chosen) < min(MOST_LISTED, len(order)):
        worth = np.maximum(share - have[:, None], 0).sum(axis=0)
        worth[chosen] = -1
        chosen.append(int(worth.argmax()))
        have = np.maximum(have, share[:, chosen[-1]])
    return [order[i] for i in chosen]


def _radius(points: Floats) -> float:
    """Return the distance up to which the section answers: about the distance between nearest training problems."""
    steps = np.sqrt(((points[:, None, :] - points[None, :, :]) ** 2).sum(axis=2))
    np.fill_diagonal(steps, np.inf)
    return max(LEAST_RADIUS, FACTOR * float(np.quantile(steps.min(axis=1), QUANTILE)))


def _spread(points: Floats, most: int) -> list[int]:
    """Return the indices of at most ``most`` points that lie far apart from each other."""
    chosen, away = [0], ((points - points[0]) ** 2).sum(axis=1)
    while len(chosen) < most and away.max() > 0:
        chosen.append(int(away.argmax()))
        away = np.minimum(away, ((points - points[chosen[-1]]) ** 2).sum(axis=1))
    return sorted(chosen)
