"""When to search, for which problems, among which candidates, and how: one table, read by `decide`.

Four settings are the axes. *When*: TUNING_MODE, as in OpenVINO. *Which problems*: FIND_ENFORCE, and *which candidates*:
FIND_MODE, both as in MIOpen. *How*: AUTO_TUNE_MODE, as in MindSpore. `RULES` has exactly one row for every combination
of the first two and the relevant values of the others; a test counts them.

TUNING_CREATE *requests* tuning. With TUNING_BACKGROUND a load or a new shape searches nothing; a helper process
searches beside the serving model (`model_tuning.background`). TUNING_USE_EXISTING searches only if FIND_ENFORCE 3 or 4
demands it. TUNING_DISABLED and AUTO_TUNE_MODE NO_TUNE never search; if one of them overrules another setting, a warning
says so. In every row the layers of the knowledge base answer, and nothing stored is overwritten: a search adds
measurements. Only FIND_ENFORCE 5 deletes, in the user's knowledge base.

`FINDS` defines FIND_MODE. FAST never searches by itself: without an answer, the immediate solver (the heuristic's, else
the default) is used as it is. A search that FIND_ENFORCE demands stays in that solver's space.

TUNING_FILE is the top layer, with two exceptions: under TUNING_DISABLED, and in a search of known problems. The file
keeps its entries, so they would hide the new measurements. TUNING_CREATE extends the file.

LOCK_FILE comes before everything: problems that it names are not searched. FROZEN = YES overrules every row: nothing is
searched, deleted or written.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from .. import ops, search
from ..errors import SettingsError
from ..knowledge import open_databases
from ..knowledge.key import MatchKind
from ..settings import Settings


class Search(enum.Enum):
    """Which problems are tuned."""

    NEVER = "never"
    MISSING = "missing"  # problems that are not known (see `KnownAnswers`)
    ALWAYS = "always"


class KnownAnswers(enum.Enum):
    """Which answers make a problem known."""

    EXACT = "exact"  # exact answers of a knowledge base
    STORED = "stored"  # provisional answers too
    ANY = "any"  # any answer, including the heuristic's


class Candidates(enum.Enum):
    """The candidates that a search may choose from."""

    ALL = "all"  # every solver, whole spaces
    GENERIC = "generic"  # solvers that compile nothing for a new shape (not `Solver.tuned_only`)
    IMMEDIATE = "immediate"  # the whole space of the solver that would be used without a search


class File(enum.Flag):
    """Use of TUNING_FILE."""

    UNUSED = 0
    READ = 1
    EXTEND = 2


@dataclass(frozen=True)
class PolicyRule:
    """One row. The first four fields are the condition, the others the consequence."""

    mode: str
    enforce: str  # any of these digits
    tunes: str  # "yes": any AUTO_TUNE_MODE but NO_TUNE, "no": NO_TUNE, "any"
    find: str  # "FAST", "others", "any"
    search: Search
    delete: bool
    file: File
    warning: str = ""

    def holds(self, mode: str, enforce: str, tunes: bool, fast: bool) -> bool:
        return (
            self.mode == mode
            and enforce in self.enforce
            and self.tunes in ("any", "yes" if tunes else "no")
            and self.find in ("any", "FAST" if fast else "others")
        )


_DISABLED = "TUNING_DISABLED wins over FIND_ENFORCE {enforce}: nothing is tuned"
_NO_TUNE = "AUTO_TUNE_MODE NO_TUNE wins over {over}: nothing is tuned"
_CLEAN = "FIND_ENFORCE 5 (DB_CLEAN) deletes and wins over TUNING_CREATE: nothing is tuned"
_CLEAN_BESIDE = "FIND_ENFORCE 5 (DB_CLEAN) deletes and wins over TUNING_BACKGROUND: nothing is tuned"
_FAST = "FIND_MODE FAST takes the immediate answer: TUNING_CREATE tunes nothing (FIND_ENFORCE 3 tunes what is missing)"
_FROZEN = "FROZEN wins over {over}: nothing is tuned or deleted"
_LOCKED = "LOCK_FILE answers first: what it names is not tuned again, and would have to be locked again"
_KEEPS = "TUNING_FILE keeps its entries: new results for the same problems go only to the user's knowledge base"

_OFF, _EXISTING, _CREATE, _BESIDE = "TUNING_DISABLED", "TUNING_USE_EXISTING", "TUNING_CREATE", "TUNING_BACKGROUND"
_NEVER, _MISSING, _ALWAYS = Search.NEVER, Search.MISSING, Search.ALWAYS
_NOT, _READ, _EXTEND = File.UNUSED, File.READ, File.EXTEND
_BOTH_WAYS = _READ | _EXTEND

#: The table. 1 NONE, 2 DB_UPDATE, 3 SEARCH, 4 SEARCH_DB_UPDATE, 5 DB_CLEAN.
RULES = (
    #    TUNING_MODE ENFORCE tunes  find      search    delete TUNING_FILE warning
    PolicyRule(_OFF,       "1",   "any", "any",    _NEVER,   False, _NOT),
    PolicyRule(_OFF,       "234", "any", "any",    _NEVER,   False, _NOT,       _DISABLED),
    PolicyRule(_OFF,       "5",   "any", "any",    _NEVER,   True,  _NOT),
    PolicyRule(_EXISTING,  "1",   "any", "any",    _NEVER,   False, _READ),
    PolicyRule(_EXISTING,  "2",   "yes", "any",    _NEVER,   False, _READ),
    PolicyRule(_EXISTING,  "3",   "yes", "any",    _MISSING, False, _READ),
    PolicyRule(_EXISTING,  "4",   "yes", "any",    _ALWAYS,  False, _NOT),
    PolicyRule(_EXISTING,  "234", "no",  "any",    _NEVER,   False, _READ,      _NO_TUNE),
    PolicyRule(_EXISTING,  "5",   "any", "any",    _NEVER,   True,  _READ),
    PolicyRule(_CREATE,    "1",   "yes", "others", _MISSING, False, _BOTH_WAYS),
    PolicyRule(_CREATE,    "1",   "yes", "FAST",   _NEVER,   False, _BOTH_WAYS, _FAST),
    PolicyRule(_CREATE,    "3",   "yes", "any",    _MISSING, False, _BOTH_WAYS),
    PolicyRule(_CREATE,    "24",  "yes", "any",    _ALWAYS,  False, _EXTEND),
    PolicyRule(_CREATE,    "1234", "no", "any",    _NEVER,   False, _READ,      _NO_TUNE),
    PolicyRule(_CREATE,    "5",   "any", "any",    _NEVER,   True,  _READ,      _CLEAN),
    PolicyRule(_BESIDE,    "1234", "yes", "any",   _NEVER,   False, _READ),
    PolicyRule(_BESIDE,    "1234", "no", "any",    _NEVER,   False, _READ,      _NO_TUNE),
    PolicyRule(_BESIDE,    "5",   "any", "any",    _NEVER,   True,  _READ,      _CLEAN_BESIDE),
)  # fmt: skip

#: Settings that prevent compilation from searching, because the caller searches.
QUIET = {"TUNING_MODE": "TUNING_USE_EXISTING", "FIND_ENFORCE": "1"}
#: FIND_MODE -> answers that make a problem known, and candidates of a search.
FINDS = {
    "NORMAL": (KnownAnswers.EXACT, Candidates.ALL),
    "FAST": (KnownAnswers.ANY, Candidates.IMMEDIATE),
    "HYBRID": (KnownAnswers.STORED, Candidates.ALL),
    "DYNAMIC_HYBRID": (KnownAnswers.STORED, Candidates.GENERIC),
}
#: Kinds of stored answers that make a problem known.
_KNOWN = {
    KnownAnswers.EXACT: {MatchKind.EXACT},
    KnownAnswers.STORED: {MatchKind.EXACT, MatchKind.PROVISIONAL},
    KnownAnswers.ANY: {MatchKind.EXACT, MatchKind.PROVISIONAL},
}
_ENFORCE_NAMES = {"1": "NONE", "2": "DB_UPDATE", "3": "SEARCH", "4": "SEARCH_DB_UPDATE", "5": "DB_CLEAN"}
#: Values of AUTO_TUNE_MODE, besides the names of strategies.
MODES = ("AUTO", "NO_TUNE", "RL", "GA", "RL,GA", "GA,RL")

#: Operations that reduce over axes or windows, in any domain; operations named Reduce* belong here too.
_REDUCE = frozenset({
    "ArgMax", "ArgMin", "AveragePool", "BatchNormalization", "CumProd", "CumSum", "GlobalAveragePool", "GlobalLpPool",
    "GlobalMaxPool", "GroupNorm", "GroupNormalization", "Hardmax", "InstanceNormalization", "LRN", "LayerNormalization",
    "LogSoftmax", "LpNormalization", "LpPool", "MaxPool", "MeanVarianceNormalization", "QLinearAveragePool",
    "QLinearGlobalAveragePool", "QLinearSoftmax", "RMSNormalization", "SimplifiedLayerNormalization",
    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Softmax",
})  # fmt: skip
_BROADCAST = frozenset({"Expand", "Tile", "ConstantOfShape"})
#: how operations are searched whose definition says which class they are of (`OpSpec.op_class`)
_TUNED_AS = {
    "conv": "conv", "matmul": "matmul", "norm": "reduce", "softmax": "reduce", "reduce": "reduce",
    "elementwise": "elementwise",
}  # fmt: skip
_CUBE = {"Conv": "conv", "MatMul": "matmul", "Gemm": "matmul"}


def op_class(op: str) -> str:
    """Return the class of an operation for AUTO_TUNE_MODE: elementwise, broadcast, reduce, conv, matmul or other."""
    spec = ops.lookup(op)
    if spec is not None and spec.op_class:
        return _TUNED_AS.get(spec.op_class, "other")
    name = op.rpartition("::")[2]
    for part, kind in _CUBE.items():
        if part in name:
            return kind
    if name in _REDUCE or name.startswith("Reduce"):
        return "reduce"
    if name in _BROADCAST:
        return "broadcast"
    return "elementwise" if spec is not None and spec.elementwise else "other"


@dataclass(frozen=True)
class Policy:
    """The decisions that follow from the settings. The caller logs each warning once."""

    search: Search
    known: KnownAnswers
    candidates: Candidates
    #: remove the problem's entries from the user's knowledge base
    delete: bool
    #: the entries of TUNING_FILE are the first layer
    use_tuning_file: bool
    #: add exact answers that a load uses, new or known, to TUNING_FILE if they are missing there
    extend_tuning_file: bool
    #: one of `MODES` or the name of a strategy
    how: str
    warnings: tuple[str, ...] = ()

    def wanted(self, kind: MatchKind | None, from_heuristic: bool = False) -> bool:
        """Return whether to search for a problem.

        ``kind``: match of the best stored answer, None if there is none. ``from_heuristic``: no answer is stored, and
        the heuristic gives one.
        """
        if self.search is not Search.MISSING:
            return self.search is Search.ALWAYS
        return not (self.known is KnownAnswers.ANY if from_heuristic else kind in _KNOWN[self.known])

    def strategy(self, op: str) -> str | None:
        """Return the strategy that searches for an operation; None for no search."""
        if self.how == "AUTO":
            return "auto"
        # the class of an operation matters only if both modes are allowed
        return search.strategy_for(self.how, op_class(op) if "," in self.how else "") if self.how in MODES else self.how


def decide(settings: Settings) -> Policy:
    """Return the policy for these settings. Raises `SettingsError` for an unknown AUTO_TUNE_MODE."""
    mode, enforce, find = settings.tuning_mode, settings.find_enforce, settings.find_mode
    how = _how(settings.auto_tune_mode)
    rule = next(r for r in RULES if r.holds(mode, enforce, how != "NO_TUNE", find == "FAST"))
    if settings.frozen:
        warning = _FROZEN if mode in (_CREATE, _BESIDE) or enforce != "1" else ""
        rule = replace(rule, search=_NEVER, delete=False, file=_NOT, warning=warning)
    known, candidates = FINDS[find]
    file = rule.file if settings.tuning_file else File.UNUSED
    return Policy(
        rule.search, known, candidates, rule.delete, File.READ in file, File.EXTEND in file, how,
        tuple(_warnings(rule, settings)),
    )  # fmt: skip


def _warnings(rule: PolicyRule, settings: Settings) -> list[str]:
    enforce = settings.find_enforce
    named = f"{enforce} ({_ENFORCE_NAMES[enforce]})"
    asks = enforce in ("2345" if settings.frozen else "234")
    wishes = [rule.mode] * (rule.mode in (_CREATE, _BESIDE)) + [f"FIND_ENFORCE {named}"] * asks
    found = [rule.warning.format(enforce=named, over=" and ".join(wishes))] if rule.warning else []
    if settings.tuning_file and rule.search is Search.ALWAYS:
        found.append(_KEEPS)
    if settings.lock_file and rule.search is Search.ALWAYS:
        found.append(_LOCKED)
    return [*found, *open_databases.warnings(settings)]


def _how(text: str) -> str:
    mode = ",".join(part.strip() for part in text.upper().split(","))
    if mode in MODES:
        return mode
    named = {name.lower(): name for name in search.names()}
    if mode.lower() in named:
        return named[mode.lower()]
    choices = ", ".join([*MODES, *named.values()])
    raise SettingsError(f"AUTO_TUNE_MODE = {text!r} is unknown", where="settings", hint=f"one of: {choices}")
