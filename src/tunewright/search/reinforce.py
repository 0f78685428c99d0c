"""Reinforcement learning (RL): a policy over the parameters, learnt from rewards and handed on to kindred problems."""

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
#: Random configs before the policy is trusted, where it starts from nothing.
START = 10
#: How far a reward moves the policy, and the share of what it learnt that it forgets with every trial.
RATE, FORGET = 0.7, 0.02
#: A policy from elsewhere is believed only so far.
TRUST = 0.7
#: This number of the best configs are the states that the policy edits; each parameter stays as it is with this chance.
STATES, KEEP = 4, 0.6
#: The same chance where a policy was given: its states are good already.
KEEP_TAUGHT = 0.75
#: After this number of trials without an improvement a given policy has misled the search: restart without it.
DOUBT = 40
#: Attempts at a valid config that was not asked before; each is a little hotter than the last.
ATTEMPTS = 40


class Reinforce(Strategy):
    """A policy gradient (REINFORCE) over one distribution a parameter.

    An episode starts from a good config and decides for every parameter: keep its value, or draw one from the policy.
    The reward is the rank among all trials so far, so that it needs no scale; a failed trial earns the least. What was
    learnt on one problem (`export_policy`) can be given as ``policy`` on another: names and values that the other space
    does not have are left out.
    """

    name = "reinforce"

    def __init__(
        self, space: Space, rng: np.random.Generator, seeds: Iterable[Mapping[str, Scalar]] = (),
        policy: Mapping[str, Any] | None = None,
    ) -> None:
        logits, states = _read(policy, space)
        super().__init__(space, rng, [*seeds, *states])
        self._logits = logits
        self._taught = policy is not None
        self._stalled = 0
        self._dropped: frozenset[Code] = frozenset()  # no states: around them nothing better was found
        self._told: list[float] = []

    def export_policy(self) -> dict[str, Any]:
        """What was learnt, as JSON: the preference for each value of each parameter, and the states to start from."""
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
        reward *= abs(reward)  # the best and the worst teach most
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
    """The logits and states of a policy as far as they mean something in this space."""
    logits = [np.zeros(size) for size in space.sizes]
    if policy is None:
        return logits, []
    try:
        if policy["policy"] != FORMAT:
            raise ValueError(f"its format is {policy['policy']}, this version reads {FORMAT}")
        for (name, values), mine in zip(space.params.items(), logits, strict=True):
            theirs = {value: float(logit) for value, logit in policy["logits"].get(name, ())}
            if theirs:
                # an unknown value is neither liked nor disliked
                mine += [TRUST * theirs.get(value, 0.0) for value in values]
        return logits, [state for state in policy["states"] if isinstance(state, Mapping)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SettingsError(f"cannot be read: {error}", where="policy", hint="export_policy() writes one") from None


STRATEGIES = (Reinforce,)
