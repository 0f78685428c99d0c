"""Packing what was tuned into the package's data, and checking what is there.

Three files: ``system.jsonl``, the answers with their evidence; ``heuristic.json``; ``about.json``, which says where it
all comes from: machines, networks, the grid, and what was withheld. They depend on nothing but what is packed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from ship_sources import WITHHELD
from tunewright import __version__
from tunewright.devices.base import Device, Target
from tunewright.errors import InputError, UnsupportedError
from tunewright.heuristic import file as heuristic_file
from tunewright.heuristic.find import HEURISTIC
from tunewright.heuristic.train import target_of
from tunewright.heuristic.trees import SectionScope
from tunewright.knowledge.database import MemoryDatabase
from tunewright.knowledge.key import WHERE_FIELDS, Key, MatchKind, Where
from tunewright.knowledge.open_databases import open_path
from tunewright.knowledge.record import AnyRecord, Fault, Measurement
from tunewright.knowledge.system import FILE, SystemDatabase, write_lines
from tunewright.settings import Settings
from tunewright.solvers import problem_json
from tunewright.solvers.base import Problem, Solver, solvers
from tunewright.tuning.lookup import KnowledgeLayer, Lookup, StoredAnswer
from tunewright.tuning.tuner import Tuner

SCHEMA = "tunewright.shipped/1"
DATA = Path(__file__).resolve().parent.parent / "src" / "tunewright" / "data"
ABOUT = "about.json"
#: what is told about where nothing is
NOBODY: dict[str, Any] = {"machines": [], "networks": {}, "withheld": {}}
#: a folder that does not exist is a knowledge base with nothing in it
NOTHING = "/nonexistent"
#: A kernel that is compiled for one shape alone must be so many times as fast as one that is not: a load compiles it.
WORTH = 1.02
#: samples that are kept of a measurement, and their digits: the quartiles and intervals are of all of them
SAMPLES, DIGITS = 16, 4
#: bytes of `system.jsonl`
MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class Elsewhere:
    """A device that need not be here: what choosing a default asks of one."""

    target: Target
    name: str
    family: str

    @staticmethod
    def of(target: Target) -> Elsewhere:
        return Elsewhere(target, target.device.upper(), "cuda" if target.language == "cuda" else "native")


@dataclass
class Checked:
    """What a check found."""

    facts: list[str] = field(default_factory=list)
    #: records that this version of Tunewright cannot use as they are: they do no harm, and no good
    stale: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def digest(problem: str) -> str:
    """A problem's key in short."""
    return hashlib.sha256(problem.encode()).hexdigest()[:16]


def layers_of(results: Iterable[Mapping[str, Any]]) -> dict[str, set[str]]:
    """Keys of the problems that result files have, by network."""
    found: dict[str, set[str]] = {}
    for result in results:
        found.setdefault(result["model"], set()).update(layer["problem"] for layer in result["layers"])
    return found


def strangers(kb: Path, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Problems of a knowledge base that no network and no grid of its result files has."""
    known = set().union(*layers_of(results).values())
    return sorted({r.key.problem for r in open_path(kb)} - known)


# ---- pack ------------------------------------------------------------------------------------------------------------


def pack(
    kbs: Mapping[Path, tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]], out: Path, keep: bool = False
) -> list[str]:
    """Write the files, out of knowledge bases with their states and results; what is told about it. ``keep``: what
    they have of other machines stays."""
    packed: list[AnyRecord] = []
    machines: list[dict[str, Any]] = []
    networks: dict[str, set[str]] = {}
    withheld: dict[str, set[str]] = {name: set() for name in WITHHELD}
    told = []
    for kb, (state, results) in kbs.items():
        mine = layers_of(results)
        known = set().union(*mine.values())
        records = list(open_path(kb.absolute()))
        taken = answers([r for r in records if r.key.problem in known])
        left_out = len({r.key.problem for r in records} - known)
        if left_out:
            told.append(f"{kb}: {left_out} problems of no network that ships are left out")
        packed += taken
        machines += machines_of(taken)
        for name, keys in mine.items():
            networks.setdefault(name, set()).update(keys)
        for name, keys in state["withheld"].items():
            withheld[name].update(keys)
    here = {r.key.where for r in packed}
    old = read_about(out, Checked()) if keep else NOBODY
    packed += [r for r in SystemDatabase(out) if r.key.where not in here] if keep else []
    machines += [m for m in old["machines"] if Where(**m["where"]) not in here]
    shipped = {r.key.problem for r in packed if isinstance(r, Measurement)}
    about = {
        "schema": SCHEMA,
        "tool": __version__,
        "machines": sorted(machines, key=lambda m: json.dumps(m, sort_keys=True)),
        "networks": digests(networks, old["networks"]),
        "withheld": digests(withheld, old["withheld"]),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_lines(out / FILE, packed)
    (out / ABOUT).write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    told += pack_heuristic(next(iter(kbs)) / HEURISTIC, out / HEURISTIC, keep)
    return [*told, f"{len(packed)} records of {len(shipped)} problems in {out}"]


def digests(found: Mapping[str, Iterable[str]], old: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Keys of problems in short, by network, with those that were there before."""
    names = sorted({*found, *old})
    return {name: sorted({*map(digest, found.get(name, ())), *old.get(name, ())}) for name in names}


def pack_heuristic(file: Path, out: Path, keep: bool) -> list[str]:
    """The heuristic of a knowledge base, beside the sections that are there of other places; what is told about it."""
    keep = keep and out.exists()
    if not file.exists():
        if not keep:
            out.unlink(missing_ok=True)
        return [f"{file} is not there: {'that of before stays' if keep else 'no heuristic is packed'}"]
    made = heuristic_file.parse(file.read_text(encoding="utf-8"))
    if keep:
        old = heuristic_file.parse(out.read_text(encoding="utf-8"))
        places = {section.place for section in made.sections}
        # one processor may be trained for several instruction sets, each with figures of its own
        named = {name for section in made.sections for name in section.processors}
        sets = {section.place.arch.partition(";")[0] for section in made.sections}
        where = ", ".join([*sorted(named), *sorted(sets)])
        sections = (*(section for section in old.sections if section.place not in places), *made.sections)
        about = {**old.about, "beside": {**old.about.get("beside", {}), where: dict(made.about)}}
        made = replace(made, sections=sections, about=about)
    out.write_text(heuristic_file.dump(made), encoding="utf-8")
    return []


def answers(records: Sequence[AnyRecord]) -> list[AnyRecord]:
    """Of each problem and place the measurements that would answer there exactly, the best ones; and every fault."""
    tuner = Tuner(Settings.make({"USER_DB_PATH": NOTHING, "SYSTEM_DB_PATH": NOTHING, "HEURISTIC_PATH": ""}))
    faults = [r for r in records if isinstance(r, Fault)]
    lookup = Lookup([KnowledgeLayer("packed", MemoryDatabase(records))])
    found: list[AnyRecord] = [*faults]
    posed: dict[tuple[str, Where], Measurement] = {}
    for record in records:
        if isinstance(record, Measurement):
            posed.setdefault((record.key.problem, record.key.where), record)
    for (_, where), record in posed.items():
        problem, target = problem_json.from_json(dict(record.problem)), exact_target(where)
        default = default_of(tuner, problem, target)
        answer = lookup.ask(problem, target, tuner.candidates, partial(_why_not, problem, target), default)
        exact = worth([one for one in answer.found if one.match.kind is MatchKind.EXACT])
        accurate = [one for one in exact if one.solver.inexact(problem, one.config) is None]
        # the second one serves where EXECUTION_MODE_HINT = ACCURACY excludes the first
        found += [thinned(m) for m in dict.fromkeys(one.measurement for one in (*exact[:1], *accurate[:1]))]
    return found


def _why_not(problem: Problem, target: Target, solver: Solver) -> str | None:
    return solver.why_not(problem, target)


def worth(found: Sequence[StoredAnswer]) -> list[StoredAnswer]:
    """Answers without kernels for one shape that are not worth their compilation."""
    plain = max((f.measurement.evidence.gain.median for f in found if not f.solver.tuned_only), default=0.0)
    return [f for f in found if not f.solver.tuned_only or f.measurement.evidence.gain.median >= WORTH * plain]


def default_of(tuner: Tuner, problem: Problem, target: Target) -> tuple[str, Any] | None:
    try:
        choice = tuner.default(problem, cast(Device, Elsewhere.of(target)))
    except UnsupportedError:
        return None
    return None if choice.solver.host else (choice.solver.id, choice.config)


def exact_target(where: Where) -> Target:
    """The target that a record was measured on, with its software."""
    names = [part.partition(" ")[::2] for part in where.software.split("; ") if part]
    return replace(target_of(where), software=(("runtime", where.runtime), *names))


def thinned(m: Measurement) -> Measurement:
    """The same with fewer samples, of fewer digits."""
    e = m.evidence
    step = max(1, -(-len(e.samples) // SAMPLES))
    samples = tuple(float(f"{s:.{DIGITS}g}") for s in e.samples[::step])
    return replace(m, evidence=replace(e, samples=samples))


def machines_of(records: Sequence[AnyRecord]) -> list[dict[str, Any]]:
    """Where records come from."""
    found = []
    for where in sorted({r.key.where for r in records}, key=str):
        mine = [r for r in records if r.key.where == where]
        measured = [r for r in mine if isinstance(r, Measurement)]
        environments = sorted({e for m in measured for k, e in m.evidence.environment.items() if k == "platform"})
        found.append({
            "where": {name: getattr(where, name) for name in WHERE_FIELDS}, "platforms": environments,
            "from": min(r.date for r in mine), "to": max(r.date for r in mine), "records": len(mine),
            "problems": len({m.key.problem for m in measured}),
        })  # fmt: skip
    return found


# ---- check -----------------------------------------------------------------------------------------------------------


def check(data: Path) -> Checked:
    """Whether what ships is whole, can be used, says where it comes from, and has nothing that is withheld."""
    found = Checked()
    database, about = SystemDatabase(data), read_about(data, found)
    found.wrong += database.damage()
    size = (data / FILE).stat().st_size if (data / FILE).exists() else 0
    if size > MOST_BYTES:
        found.wrong.append(f"{FILE} has {size:,} bytes, and {MOST_BYTES:,} are the most")
    records = list(database)
    places = {Where(**machine["where"]) for machine in about["machines"]}
    known = set[str]().union(*about["networks"].values())
    for record in records:
        name = f"record {record.digest[:10]}"
        if record.key.where not in places:
            found.wrong.append(f"{name}: its machine is not named in {ABOUT}")
        if digest(record.key.problem) not in known:
            found.wrong.append(f"{name}: its problem is of no network that ships: {record.key.problem}")
        if isinstance(record, Measurement):
            if not record.evidence.confirmed or record.evidence.gain.low < 1:
                found.wrong.append(f"{name}: it can never answer")
            try:
                why = why_stale(record)
            except InputError as error:
                found.wrong.append(f"{name}: {error}")
            else:
                found.stale += [f"{name}: {why}"] if why else []
        elif not isinstance(record, Fault):
            found.wrong.append(f"{name}: nobody reads a {record.kind} from here")
    shipped = {digest(r.key.problem) for r in records if isinstance(r, Measurement)}
    for name in WITHHELD:
        mine = set(about["withheld"].get(name, ()))
        if not mine:
            found.wrong.append(f"{name}: it is withheld, and nobody noted its problems")
        if mine & shipped - known:
            found.wrong.append(f"{name}: it is withheld, and {len(mine & shipped - known)} of its problems ship")
        shared = len(mine & shipped)
        found.facts.append(f"withheld: {name}: {shared} of its {len(mine)} problems are known from other networks")
    found.facts += [f"{m['records']} records of {place_text(m['where'])}" for m in about["machines"]]
    counts = f"{len(records)} records of {len(shipped)} problems"
    found.facts.append(f"{counts}, {size / 1e6:.2f} MB, {len(found.stale)} stale")
    check_heuristic(data, places, found)
    return found


def check_heuristic(data: Path, places: Iterable[Where], found: Checked) -> None:
    path = data / HEURISTIC
    if not path.exists():
        found.wrong.append(f"there is no {HEURISTIC}")
        return
    try:
        heuristic = heuristic_file.parse(path.read_text(encoding="utf-8"))
    except InputError as error:
        found.wrong.append(f"{HEURISTIC}: {error}")
        return
    trained, versions = {SectionScope.of(where) for where in places}, {s.id: s.version for s in solvers()}
    for section in heuristic.sections:
        if section.place not in trained:
            found.wrong.append(f"{HEURISTIC}: a section is of a machine that {ABOUT} does not name: {section.place}")
        gone = {one.solver for one in section.shortlist if versions.get(one.solver) != one.version}
        found.stale += [f"{HEURISTIC}: {section.kind}: {solver} has another version now" for solver in sorted(gone)]
    speed = heuristic.about.get("speed")
    share = f", {speed:.1%} of the tuned speed on networks left out" if isinstance(speed, float) else ""
    found.facts.append(f"the heuristic knows {len(heuristic.sections)} kinds of problems{share}")


def why_stale(m: Measurement) -> str:
    """Why a record does not answer exactly on its own machine; empty where it does."""
    solver = {s.id: s for s in solvers()}.get(m.key.solver)
    if solver is None:
        return f"the solver {m.key.solver} is gone"
    if solver.version != m.key.version:
        return f"{solver.id} has the version {solver.version} now, and it was measured with {m.key.version}"
    problem, target = problem_json.from_json(dict(m.problem)), exact_target(m.key.where)
    if problem.key() != m.key.problem:
        raise InputError("its problem does not fit its key")
    why = solver.why_not(problem, target)
    if why is not None:
        return f"{solver.id} refuses it: {why}"
    if m.config not in solver.space(problem, target):
        return f"its config is not in the space of {solver.id}"
    return "" if Key.of(problem, target, solver, m.config) == m.key else f"the text or space of {solver.id} changed"


def read_about(data: Path, found: Checked) -> dict[str, Any]:
    """What says where it comes from."""
    try:
        about: dict[str, Any] = json.loads((data / ABOUT).read_text(encoding="utf-8"))
        if about["schema"] == SCHEMA:
            return about
        found.wrong.append(f"{ABOUT} has another schema: {about['schema']}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        found.wrong.append(f"{ABOUT} cannot be read: {error}")
    return NOBODY


def place_text(where: Mapping[str, Any]) -> str:
    return f"{where['processor']} ({where['units']} units, {where['arch']}), {where['runtime']}, {where['software']}"
