"""Reinforcement learning (RL): learns a policy over the parameters, which can start the search of a similar problem."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..errors import SettingsError
from .base import Strategy
from .space import Code, Floats, Scalar, Space

FORMAT = 1
#: number of random configs before an untrained policy is used
START = 10
#: How far a reward moves the policy, and the share that the policy forgets with every trial.
RATE, FORGET = 0.7, 0.02
#: factor on the preferences of a given policy
TRUST = 0.7
#: The policy edits this number of the best configs (states). Each parameter keeps its value with this chance.
STATES, KEEP = 4, 0.6
#: The same chance for a given policy, whose states are already good.
KEEP_TAUGHT = 0.75
#: After this number of trials without an improvement, the search drops a given policy and restarts without it.
DOUBT = 40
#: attempts at a valid config that was not asked before; each has a higher temperature
ATTEMPTS = 40


class Reinforce(Strategy):
    """A policy gradient (REINFORCE) over one distribution for each parameter.

    An episode starts from a good config and decides for every parameter: keep its value, or draw one from the policy.
    The reward is the rank among all trials so far, so that it needs no scale; a failed trial earns the least.
    `export_policy` returns the policy of one problem, which can be given as ``policy`` on another. Names and values
    that the other space does not have are left out.
    """

    name = "reinforce"

    def __init__(
        self,
        space: Space,
        rng: np.random.Generator,
        seeds: Iterable[Mapping[str, Scalar]] = (),
        policy: Mapping[str, Any] | None = None,
    ) -> None:
        logits, states = _read(policy, space)
        super().__init__(space, rng, [*seeds, *states])
        self._logits = logits
        self._taught = policy is not None
        self._stalled = 0
        self._dropped: frozenset[Code] = frozenset()  # not used as states: no better config was found around them
        self._told: list[float] = []

    def export_policy(self) -> dict[str, Any]:
        """Return the policy as JSON: the preference for each value of each parameter, and the states to start from."""
        known = zip(self.space.params.items(), self._logits, strict=True)
        return {
            "policy": FORMAT,
            "logits": {
                name: [[value, round(float(logit), 4)] for value, logit in zip(values, logits, strict=True)]
                for (name, values), logits in known
            },
            "states": [dict(config) for config in self.elite()],
        }

    def propose(self) -> Code | None:
        states = [code for code in self.ranked() if code not in self._dropped][:STATES]
        if not self._taught and (len(self.costs) - len(self._dropped) < START or not states):
            return self.safe_start()
        keep = KEEP_TAUGHT if self._taught else KEEP
        drawn: dict[Code, None] = {}
        for attempt in range(ATTEMPTS):
            state = states[min(self.rng.integers(len(states), size=2))] if states else None
            code = self._draw(state, heat=1.0 + attempt / 10, keep=keep - attempt / 100)
            if code not in self.seen and self.space.valid(code):
                drawn[code] = None
                if len(drawn) == self.choices:
                    break
        return self.safest(list(drawn)) if drawn else None

    def learn(self, code: Code, cost: float) -> None:
        self._stalled = 0 if code == self.best else self._stalled + 1
        if self._taught and self._stalled >= DOUBT:
            self._taught = False
            self._dropped = frozenset(self.costs)
            self._logits = [np.zeros_like(logits) for logits in self._logits]
        slower = (len(self._told) - bisect_left(self._told, cost)) / len(self._told) if self._told else 0.5
        insort(self._told, cost)
        reward = -1.0 if cost == math.inf else 2.0 * slower - 1.0
        reward *= abs(reward)  # emphasises the best and the worst trials
        for logits, value in zip(self._logits, code, strict=True):
            gradient = -_softmax(logits)
            gradient[value] += 1.0
            logits *= 1.0 - FORGET
            logits += RATE * reward * gradient

    def _draw(self, state: Code | None, heat: float, keep: float) -> Code:
        luck = self.rng.random((2, len(self._logits)))
        code = []
        for axis, logits in enumerate(self._logits):
            if state is not None and luck[0, axis] < keep:
                code.append(state[axis])
            else:
                total = np.cumsum(_softmax(logits / heat))
                code.append(int(np.searchsorted(total, luck[1, axis] * total[-1], side="right")))
        return tuple(code)


def _softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def _read(policy: Mapping[str, Any] | None, space: Space) -> tuple[list[Floats], list[Mapping[str, Scalar]]]:
    """Return the part of a policy's logits and states that applies to this space."""
    logits = [np.zeros(size) for size in space.sizes]
    if policy is None:
        return logits, []
    try:
        if policy["policy"] != FORMAT:
            raise ValueError(f"its format is {policy['policy']}, this version reads {FORMAT}")
        for (name, values), mine in zip(space.params.items(), logits, strict=True):
            theirs = {value: float(logit) for value, logit in policy["logits"].get(name, ())}
            if theirs:
                # unknown values get a neutral preference
                mine += [TRUST * theirs.get(value, 0.0) for value in values]
        return logits, [state for state in policy["states"] if isinstance(state, Mapping)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SettingsError(f"cannot be read: {error}", where="policy", hint="export_policy() writes one") from None


STRATEGIES = (Reinforce,)
