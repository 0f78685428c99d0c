"""Damaged and hostile heuristics: a clear error, or one that answers with candidates of the solver's own space."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from functools import cache

import pytest

from faults.tuning_files import TREES
from helpers.heuristic_data import SOLVER, TARGET, conv
from helpers.heuristic_made import heuristic, random_section
from tunewright.errors import InputError
from tunewright.heuristic.file import dump, parse, parse_late
from tunewright.heuristic.trees import Heuristic, HeuristicAdvice, Listed
from tunewright.ir.types import PLAIN
from tunewright.search.space import Config
from tunewright.solvers.base import Solver

SHORT, FULL = 600, 20_000
ASKED = [conv(64, 64, 56), conv(96, 64, 48), conv(64, 80, 28), conv(4096, 64, 56), conv(64, 64, 56, batch=16)]


@cache
def seed_text() -> str:
    configs = [Config(nb=1 + n % 2, ur=1 + n, run=2 ** (n % 7)) for n in range(6)]
    listed = [Listed(SOLVER.id, SOLVER.version, c) for c in configs]
    sections = [random_section(1, conv(64, 64, 56), TARGET, listed, 3, 3)]
    sections.append(random_section(2, conv(64, 64, 56).in_layout(PLAIN, [0]), TARGET, listed, 2, 2))
    return dump(heuristic(*sections))


def mutation(seed: int) -> tuple[str, str]:
    """Name and text of mutation number ``seed``: always the same."""
    rng = random.Random(seed)
    if rng.random() < 0.25:
        data = bytearray(seed_text().encode())
        for _ in range(rng.choice((1, 1, 2, 8))):
            at, length = rng.randrange(len(data)), rng.randrange(1, 60)
            how = rng.randrange(4)
            if how == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif how == 1:
                del data[at:]
                break
            elif how == 2:
                del data[at : at + length]
            else:
                data[at:at] = data[at : at + length]
            if not data:
                break
        return f"{seed}: bytes", data.decode("utf-8", "replace")
    tree = json.loads(seed_text())
    steps = [rng.choice(TREES) for _ in range(rng.choice((1, 1, 2, 3)))]
    for step in steps:
        # most of the time inside of a section, where the checks are
        inner = tree["sections"] if rng.random() < 0.9 and isinstance(tree.get("sections"), list) else tree
        with contextlib.suppress(OverflowError):  # 10**400 and a half is no number
            step(rng, inner if inner else tree)
    return f"{seed}: {' '.join(s.__name__ for s in steps)}", json.dumps(tree)


def asked(found: Heuristic, name: str) -> list[HeuristicAdvice]:
    """What a heuristic says about some problems: whatever was done to it, candidates of the solver's own space."""
    answers = []
    for problem in ASKED:
        space = SOLVER.space(problem, TARGET)

        def why_not(solver: Solver, config: Config, space: object = space) -> str | None:
            assert solver is SOLVER and config in space  # type: ignore[operator]
            return None

        advice = found.advise(problem, TARGET, (SOLVER.id, SOLVER.default(problem, TARGET)), [SOLVER], why_not, 3)
        assert advice.why and (advice.gain > 1 if advice.picks else advice.gain == 1), name
        assert not (advice.abstains and advice.picks), name
        answers.append(advice)
    return answers


def survive(seeds: range) -> None:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        name, text = mutation(seed)
        try:
            found = parse(text)
        except InputError as error:
            assert error.what, name
            outcomes["refused"] += 1
            with contextlib.suppress(InputError):  # a section that is read late may be damaged: then it says nothing
                asked(parse_late(text), name)
            continue
        except Exception as error:  # what this is here to find
            raise AssertionError(name) from error
        assert dump(parse(dump(found))) == dump(found), name
        answers = asked(found, name)
        assert asked(parse_late(dump(found)), name) == answers, name
        outcomes["abstains" if all(advice.abstains for advice in answers) else "answers"] += 1
    # every way that a file can go is among them
    assert all(outcomes[kind] >= len(seeds) // 100 for kind in ("refused", "answers", "abstains")), outcomes


def test_mutations() -> None:
    survive(range(SHORT))


@pytest.mark.soak
def test_many_mutations() -> None:
    survive(range(SHORT, FULL))


def test_what_is_not_changed_answers() -> None:
    found = parse(seed_text())
    default = (SOLVER.id, SOLVER.default(ASKED[0], TARGET))
    assert not found.advise(ASKED[0], TARGET, default, [SOLVER], lambda s, c: None).abstains
