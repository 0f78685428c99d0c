"""Every rule on a small graph, as text before and after (regenerate with ACCEPT=1), and the same results from both."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from golden import cases, cases_fusion, cases_openvino, graphs
from tunewright.ir.graph import Graph
from tunewright.ir.verify import verify
from tunewright.passes.base import Context, Pass, RepeatedPasses, run_passes
from tunewright.passes.fusion.fuse import FUSIONS, Fuse
from tunewright.passes.pattern import Op, RewritePass, Rule, always
from tunewright.passes.standard import DEVICE, NEUTRAL, SPECIALISE
from tunewright.settings import Settings

CASES = [
    *cases.IDENTITIES,
    *cases.CLEAN_UP,
    *cases.LINEAR,
    *cases_fusion.RECOGNISE,
    *cases_fusion.FUSE,
    *cases_openvino.OPENVINO,
]
FOLDER = Path(__file__).parent / "passes"


def every_pass() -> Iterator[Pass]:
    for one in [*NEUTRAL, *DEVICE, *SPECIALISE]:
        yield from one.passes if isinstance(one, RepeatedPasses) else [one]


RULES = {rule.name: rule for one in every_pass() if isinstance(one, RewritePass) for rule in one.rules}


def alone(name: str) -> Pass:
    """The pass that runs one rule only."""
    if name in RULES:
        return RewritePass(name, [RULES[name]])
    fusion = [f for f in FUSIONS if f.name == name]
    return Fuse(tuple(fusion)) if fusion else next(p for p in every_pass() if p.name == name)


def can_refuse(rule: Rule) -> bool:
    inner = isinstance(rule.pattern, Op) and any(isinstance(a, Op) and not a.shared for a in rule.pattern.args)
    return rule.check is not always or inner


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.rule}.{c.name}")
def test_rule(case: cases.Case) -> None:
    before, after = graphs.graph(case.text, case.opset), graphs.graph(case.text, case.opset)
    settings = Settings.make(case.config, Settings())
    context = Context(settings)
    if case.first:
        for g in (before, after):
            run_passes(g, [alone(case.first)], Context(settings))
    changed = run_passes(after, [alone(case.rule)], context)
    verify(after, case.rule)
    refusals = [e for e in context.log.entries if e.reason]
    assert bool(refusals) if case.refuses else changed
    arrays = graphs.inputs(before, sizes={"N": 1, "D": 5, "H": 4, "A": 2, "B": 2, "M": 3})
    graphs.assert_close(graphs.run(after, arrays), graphs.run(before, arrays))
    compare(case, before, after, context)


def compare(case: cases.Case, before: Graph, after: Graph, context: Context) -> None:
    log = [f"{e.rule} at {e.node!r}: {e.reason or 'applied'}" for e in context.log.entries]
    result = "unchanged" if str(after) == str(before) else str(after)
    text = "\n\n".join([f"before\n{before}", f"after\n{result}", "\n".join(["log", *log])]) + "\n"
    path = FOLDER / f"{case.rule}.{case.name}.txt"
    if os.environ.get("ACCEPT") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"{path} is missing; ACCEPT=1 makes it"
    assert text == path.read_text(encoding="utf-8"), f"differs from {path}; ACCEPT=1 accepts it"


def test_every_rule_has_cases() -> None:
    rules = {*RULES, *(f.name for f in FUSIONS)}
    assert rules - {c.rule for c in CASES if not c.refuses} == set(), "rules without a case that applies"
    needed = {r for r in rules if r not in RULES or can_refuse(RULES[r])}
    assert needed - {c.rule for c in CASES if c.refuses} == set(), "rules without a case that refuses"


def test_no_golden_file_is_left_over() -> None:
    assert {p.stem for p in FOLDER.glob("*.txt")} == {f"{c.rule}.{c.name}" for c in CASES}


def test_names_are_unique_and_readable() -> None:
    names = [*RULES, *(f.name for f in FUSIONS), *{p.name for p in every_pass()} - set(RULES)]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in names)
