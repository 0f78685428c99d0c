"""Tuning sessions whose options are keywords: tests give one or two of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tunewright.tuning import session
from tunewright.tuning.session import EarlierResults, MeasuringPlan, Outcome, SearchPlan, SessionHooks, SessionSubject


def _only(kind: type[Any], options: dict[str, Any]) -> Any:
    """An object of the fields that are among the options, which are taken out."""
    return kind(**{each.name: options.pop(each.name) for each in fields(kind) if each.name in options})


def tune(problem: Any, target: Any, default: Any, solvers: Any, measurer: Any, **options: Any) -> Outcome:
    plan, earlier, hooks = (_only(kind, options) for kind in (SearchPlan, EarlierResults, SessionHooks))
    assert not options, options
    return session.tune(SessionSubject(problem, target, default, solvers), measurer, plan, earlier, hooks)


def duel(problem: Any, target: Any, default: Any, candidate: Any, solvers: Any, measurer: Any, **options: Any) -> Any:
    plan, hooks = (_only(kind, options) for kind in (MeasuringPlan, SessionHooks))
    assert not options, options
    return session.duel(SessionSubject(problem, target, default, solvers), candidate, measurer, plan, hooks)
