"""The space that a strategy searches: named parameters, their values, and the constraint on valid configs.

A config has two forms. Callers see a `Config`, a mapping of names to values. Strategies use a *code*, a tuple with the
position of each value in its list, because arrays, sets and distances work on codes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import SettingsError

Scalar: TypeAlias = str | int | float | bool | None
Code: TypeAlias = tuple[int, ...]
Codes: TypeAlias = npt.NDArray[np.int16]
Floats: TypeAlias = npt.NDArray[np.float64]
Constraint: TypeAlias = Callable[[Mapping[str, Scalar]], object]

#: Spaces of up to this many combinations are enumerated on first need; a plain constraint takes about a third of a
#: second.
ENUMERATE = 1 << 18
#: After this many misses in a row, sampling scans instead of guessing. A miss costs a microsecond plus the constraint.
MISSES = 200_000


class Config(Mapping[str, Scalar]):
    """An immutable, hashable mapping from parameter names to JSON scalars. Equals any mapping with the same items."""

    __slots__ = ("_hash", "_values")

    def __init__(self, values: Mapping[str, Scalar] | Iterable[tuple[str, Scalar]] = (), /, **more: Scalar) -> None:
        self._values: dict[str, Scalar] = dict(values, **more)
        self._hash: int | None = None

    def __getitem__(self, name: str) -> Scalar:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._values.items()))
        return self._hash

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Config, (self._values,)


class Space:
    """Parameters with their values, and ``allow(config) -> bool``, which accepts valid configs (by default all).

    >>> space = Space({"tile": [1, 2, 4], "unroll": [1, 2]}, lambda c: c["tile"] * c["unroll"] <= 4)
    >>> len(list(space)), {"tile": 4, "unroll": 2} in space
    (5, False)

    A constraint is code, so it has no content to hash. ``version`` identifies it: change the text when the rule
    changes. Without a version, `hash` covers the set of valid configs if the space is small enough to enumerate.
    Otherwise it covers the verdict on 4,096 fixed combinations, which distinguishes most rules but not all.
    """

    def __init__(
        self, params: Mapping[str, Sequence[Scalar]], allow: Constraint | None = None, *, version: str = ""
    ) -> None:
        self.params: dict[str, tuple[Scalar, ...]] = {name: tuple(values) for name, values in params.items()}
        self.allow, self.version = allow, version
        for name, values in self.params.items():
            odd = [v for v in values if not isinstance(v, Scalar) or (isinstance(v, float) and not math.isfinite(v))]
            if not values or odd or len(set(values)) != len(values):
                raise SettingsError(
                    "needs at least one value, and its values must be distinct, finite JSON scalars",
                    where=f"parameter {name}",
                    hint=f"it has {list(values)!r}",
                )
        self.names = tuple(self.params)
        self.sizes = tuple(len(values) for values in self.params.values())
        #: number of combinations before the constraint
        self.combinations = math.prod(self.sizes)
        self._columns = tuple(self.params.values())
        self._positions = [{v: i for i, v in enumerate(values)} for values in self._columns]

    @classmethod
    def of(cls, params: Mapping[str, Sequence[Scalar]], configs: Iterable[Mapping[str, Scalar]]) -> Space:
        """Make a space whose valid configs are exactly those given, for example those of a recorded table."""
        space = cls(params)
        codes = sorted({space.code(config) for config in configs})
        space.rows = np.array(codes, dtype=np.int16).reshape(len(codes), len(space.sizes))
        space.allow = lambda config: space._rank(space.code(config)) in space._known
        return space

    # ---- the public view: configs -------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"Space({len(self.names)} parameters, {self.combinations} combinations)"

    def __iter__(self) -> Iterator[Config]:
        if self.rows is None:
            return (self.config(code) for code in product(*map(range, self.sizes)) if self.valid(code))
        return (self.config(tuple(code)) for code in self.rows.tolist())

    def __contains__(self, config: object) -> bool:
        code = self.find(config)
        return code is not None and self.valid(code)

    def sample(self, rng: np.random.Generator) -> Config | None:
        """Draw a valid config, uniformly (but see `sample_code`). None if no config is valid."""
        code = self.sample_code(rng)
        return None if code is None else self.config(code)

    def neighbours(self, config: Mapping[str, Scalar], *, step: int | None = None) -> list[Config]:
        """Return the valid configs that differ in one parameter, by at most ``step`` positions in its list if given."""
        return [self.config(code) for code in self.neighbour_codes(self.code(config), step)]

    def encode(self, config: Mapping[str, Scalar]) -> Floats:
        """Return the config as a point in the unit cube. No two configs share a point (see `features`)."""
        return np.asarray(self.features(np.array([self.code(config)], dtype=np.int16))[0])

    def index(self, config: Mapping[str, Scalar]) -> int:
        """Return the number of a combination, valid or not, among all. The last parameter varies fastest."""
        return self._rank(self.code(config))

    def at(self, index: int) -> Config:
        """Return the combination with this number, valid or not."""
        if not 0 <= index < self.combinations:
            raise SettingsError(f"is not below {self.combinations}", where=f"index {index}")
        return self.config(self._code_at(index))

    @cached_property
    def hash(self) -> str:
        """Digest of the space's content: the same on every machine and in every process."""
        parts = [json.dumps([self.params, self.version], sort_keys=True)]
        if self.allow is not None and not self.version:
            if self.rows is not None:
                parts.append(json.dumps(self._ranks(self.rows).tolist()))
            else:
                # A stride of combinations / golden ratio spreads the probes evenly and is the same on every machine.
                stride = int(self.combinations * 0.6180339887498949) | 1
                probes = (i * stride % self.combinations for i in range(4096))
                parts.append("".join("01"[self.valid(self._code_at(rank))] for rank in probes))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    # ---- the inner view: codes ----------------------------------------------------------------------------------

    def config(self, code: Sequence[int]) -> Config:
        """Return the config of a code."""
        return Config(zip(self.names, (values[i] for values, i in zip(self._columns, code, strict=True)), strict=True))

    def find(self, config: object) -> Code | None:
        """Return the code of a config, valid or not. None if a name or value is not of this space."""
        if not isinstance(config, Mapping) or len(config) != len(self.names):
            return None
        try:
            return tuple(at[config[name]] for at, name in zip(self._positions, self.names, strict=True))
        except (KeyError, TypeError):  # TypeError: the value is not hashable
            return None

    def code(self, config: Mapping[str, Scalar]) -> Code:
        """Return the code of a config. Raises SettingsError if a name or value is not of this space."""
        code = self.find(config)
        if code is None:
            raise SettingsError("is not a combination of this space", where=f"config {dict(config)!r}")
        return code

    def valid(self, code: Sequence[int]) -> bool:
        """Whether the constraint holds for a code."""
        if self.allow is None:
            return True
        if "rows" in self.__dict__ and self.rows is not None:
            return self._rank(code) in self._known
        values = (column[i] for column, i in zip(self._columns, code, strict=True))
        return bool(self.allow(dict(zip(self.names, values, strict=True))))

    @cached_property
    def rows(self) -> Codes | None:
        """Every valid code in order, one per row, or None if the space is too large to enumerate."""
        if self.combinations > ENUMERATE:
            return None
        if self.allow is None:
            return np.indices(self.sizes, dtype=np.int16).reshape(len(self.sizes), self.combinations).T.copy()
        names, allow = self.names, self.allow
        indices = product(*map(range, self.sizes))
        found = [
            code
            for code, values in zip(indices, product(*self._columns), strict=True)
            if allow(dict(zip(names, values, strict=True)))
        ]
        return np.array(found, dtype=np.int16).reshape(len(found), len(self.sizes))

    def sample_code(self, rng: np.random.Generator) -> Code | None:
        """Draw a valid code, uniformly unless valid codes are very rare. None if no code is valid."""
        if self.rows is not None:
            return tuple(self.rows[rng.integers(len(self.rows))].tolist()) if len(self.rows) else None
        misses = 0
        while misses < MISSES:
            for code in rng.integers(self.sizes, size=(256, len(self.sizes))).tolist():
                if self.valid(code):
                    return tuple(code)
            misses += 256
        # Too sparse to guess: take the next valid code from a random start. This is not uniform, but it ends.
        start = int(rng.integers(min(self.combinations, 2**63 - 1)))
        ranks = ((start + i) % self.combinations for i in range(self.combinations))
        return next((code for code in map(self._code_at, ranks) if self.valid(code)), None)

    def neighbour_codes(self, code: Code, step: int | None = None) -> list[Code]:
        """Return the codes of `neighbours`: parameter by parameter, nearest values first."""
        found = []
        for axis, (here, size) in enumerate(zip(code, self.sizes, strict=True)):
            for at in sorted((i for i in range(size) if i != here), key=lambda i, here=here: (abs(i - here), i)):  # type: ignore[misc]
                if step is not None and abs(at - here) > step:
                    break
                near = (*code[:axis], at, *code[axis + 1 :])
                if self.valid(near):
                    found.append(near)
        return found

    def features(self, codes: Codes) -> Floats:
        """Return codes as points in the unit cube.

        A parameter whose values have an order becomes its rank, because authors choose lists with meaningful steps (1,
        2, 4, 8 or 16, 32, 48). Whole numbers get two more coordinates: how often two divides them, and whether they are
        a power of two. Alignment often decides how fast a kernel is: a block of 128 behaves like one of 64 and not like
        one of 112. A parameter without an order becomes one coordinate per value.
        """
        columns = [table[codes[:, axis]] for axis, table in enumerate(self._tables)]
        return np.concatenate([np.zeros((len(codes), 0)), *columns], axis=1)

    @cached_property
    def _tables(self) -> list[Floats]:
        return [np.array(_coordinates(values)).reshape(-1, len(values)).T for values in self._columns]

    @cached_property
    def kin(self) -> list[list[list[list[int]]]]:
        """By parameter, value and coordinate: the values nearest to that value in that coordinate.

        Example: the neighbours of a block of 256 among 16, 32, 48, ... are 240 by rank and 128 by how often two divides
        it. All other powers of two are its neighbours by the third coordinate.
        """
        kin = []
        for table in self._tables:
            gaps = np.abs(table[:, None, :] - table[None, :, :])
            gaps[np.arange(len(table)), np.arange(len(table))] = np.inf
            nearest = gaps.min(axis=1, keepdims=True) if gaps.size else gaps
            close = np.isclose(gaps, nearest) & np.isfinite(gaps)
            senses = range(table.shape[1])
            kin.append([[np.flatnonzero(by_value[:, c]).tolist() for c in senses] for by_value in close])
        return kin

    @cached_property
    def coordinate_groups(self) -> npt.NDArray[np.int64]:
        """The group of each coordinate of `features`. Coordinates of one unordered parameter share a group."""
        groups: list[int] = []
        for table, values in zip(self._tables, self._columns, strict=True):
            start = groups[-1] + 1 if groups else 0
            width = table.shape[1]
            groups += range(start, start + width) if _ordered(values) else [start] * width
        return np.array(groups, dtype=np.int64)

    # ---- ranks: a code as one number ------------------------------------------------------------------------------

    @cached_property
    def _weights(self) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes)))

    @cached_property
    def _known(self) -> frozenset[int]:
        return frozenset() if self.rows is None else frozenset(self._ranks(self.rows).tolist())

    def _rank(self, code: Sequence[int]) -> int:
        return sum(i * weight for i, weight in zip(code, self._weights, strict=True))

    def _ranks(self, codes: Codes) -> npt.NDArray[np.int64]:
        return codes.astype(np.int64) @ np.array(self._weights, dtype=np.int64)

    def _code_at(self, rank: int) -> Code:
        return tuple(rank // weight % size for weight, size in zip(self._weights, self.sizes, strict=True))


def _ordered(values: Sequence[Scalar]) -> bool:
    return len(values) <= 2 or all(isinstance(value, int | float) for value in values)


def _coordinates(values: Sequence[Scalar]) -> list[Floats]:
    """Return a parameter's coordinates, each an array over its values in 0..1. A single value has none."""
    if len(values) == 1:
        return []
    if not _ordered(values):
        return list(np.eye(len(values)))
    ranks = {value: i for i, value in enumerate(values if len(values) <= 2 else sorted(values))}  # type: ignore[type-var]
    columns = [np.array([float(ranks[value]) for value in values])]
    if len(values) > 2 and all(isinstance(value, int) and value > 0 for value in values):
        whole = np.array(values, dtype=np.int64)
        twos = np.log2(whole & -whole)  # how often 2 divides the value
        columns += [twos, (whole == 2.0**twos).astype(np.float64)]
    spans = [column - column.min() for column in columns]
    scaled = [span / (span.max() or 1.0) for span in spans]
    # for a list of powers of two the rank says everything
    return [c for i, c in enumerate(scaled) if i == 0 or (c.any() and not np.allclose(c, scaled[0]))]
