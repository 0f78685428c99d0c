"""A Gaussian process over a pool of candidates, in plain numpy and fast enough to update after every trial.

The covariance is exp(-sum of distance / length over the coordinates), the limit of a forest of random axis-parallel
cuts. It is rough, with corners. So are the times of kernels, where one step of a tile size may cost a factor of two.
The process learns one length for each coordinate, so a parameter without influence drops out of the distance.
"""

from __future__ import annotations

import math
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from .space import Floats

Singles: TypeAlias = npt.NDArray[np.float32]
Array = TypeVar("Array", Floats, Singles)

#: Learning the lengths takes cubic time; this number of points is enough for it.
LEARN_FROM = 96
#: Gradient steps for each learning; it starts where the last one ended.
STEPS = 10
#: Prior of the lengths and the noise: centre and spread of their logarithms.
LENGTH_PRIOR = (0.5, 1.0)
NOISE_PRIOR = (math.log(1e-2), 1.5)


class GaussianProcess:
    """Predicts standardised values: `mean` and `deviation` of every candidate, given the points told so far."""

    def __init__(self, groups: npt.NDArray[np.int64]) -> None:
        self._groups = groups  # coordinates of one group share a length
        self._log_lengths = np.full(int(groups.max(initial=-1)) + 1, LENGTH_PRIOR[0])
        self._log_noise = NOISE_PRIOR[0]

    def learn(self, points: Floats, values: Floats) -> None:
        """Improve the lengths and the noise by steps along the signs of the posterior's gradient (Rprop)."""
        points, values = points[:LEARN_FROM], values[:LEARN_FROM]
        gaps = np.zeros((len(self._log_lengths), len(values), len(values)))
        for group, column in zip(self._groups, points.T, strict=True):
            gaps[group] += np.abs(column[:, None] - column[None, :])
        at = best = np.append(self._log_lengths, self._log_noise)
        height, slope = self._posterior(at, gaps, values)
        step = np.full(len(at), 0.3)
        for _ in range(STEPS):
            at = np.clip(at + np.sign(slope) * step, -4.0, 5.0)
            at[-1] = np.clip(at[-1], -12.0, 0.0)
            here, after = self._posterior(at, gaps, values)
            step *= np.where(after * slope > 0, 1.3, 0.5)
            slope = after
            if here > height:
                height, best = here, at
        self._log_lengths, self._log_noise = best[:-1], float(best[-1])

    def _posterior(self, at: Floats, gaps: Floats, values: Floats) -> tuple[float, Floats]:
        """Return the log posterior density of lengths and noise, for the best signal variance, and its gradient."""
        n = len(values)
        rates, noise = np.exp(-at[:-1]), math.exp(at[-1])
        kernel = np.exp(-np.einsum("i,ijk->jk", rates, gaps))
        full = kernel + noise * np.eye(n)
        inverse = np.linalg.inv(full)
        weights = inverse @ values
        signal = max(float(values @ weights) / n, 1e-12)
        height = -0.5 * (n * math.log(signal) + float(np.linalg.slogdet(full)[1]))
        pull = np.outer(weights, weights) / signal - inverse
        slope = np.append(0.5 * rates * np.einsum("ijk,jk->i", gaps, pull * kernel), 0.5 * noise * np.trace(pull))
        centre = np.append(np.full(len(rates), LENGTH_PRIOR[0]), NOISE_PRIOR[0])
        spread = np.append(np.full(len(rates), LENGTH_PRIOR[1]), NOISE_PRIOR[1])
        away = (at - centre) / spread
        return height - 0.5 * float(away @ away), slope - away / spread

    def condition(self, points: Floats, values: Floats, pool: Floats) -> None:
        """Replace the told points and values by these, and predict for this pool."""
        n = len(values)
        rates = np.exp(-self._log_lengths)[self._groups]
        self._rates, self._noise = rates, math.exp(self._log_noise)
        # Scaling once turns a distance into a plain sum of gaps. Transposing makes each coordinate contiguous in
        # memory.
        self._points, self._pool = points * rates, np.ascontiguousarray((pool * rates).T, dtype=np.float32)
        # inverse of the Cholesky factor, which grows by one row for each trial
        self._inverse = _inverse_factor(_kernel(self._points.T, self._points.T) + self._noise * np.eye(n))
        self._whitened = self._inverse @ values
        # covariances of points and pool, in the basis in which the points are independent
        self._rows = _product(self._inverse.astype(np.float32), _kernel(self._points.T.astype(np.float32), self._pool))
        self.mean = np.einsum("i,ij->j", self._whitened.astype(np.float32), self._rows)
        self._variance = 1.0 - np.einsum("ij,ij->j", self._rows, self._rows)
        self._signal = max(float(self._whitened @ self._whitened) / n, 1e-12)
        self._hoped: Singles | None = None

    def focus(self, chosen: npt.NDArray[np.int64]) -> None:
        """Predict only for these candidates of the pool until the next `condition`, which makes later steps cheaper."""
        self._pool, self._rows = np.take(self._pool, chosen, axis=1), np.take(self._rows, chosen, axis=1)
        self.mean, self._variance, self._hoped = self.mean[chosen], self._variance[chosen], None

    def add(self, point: Floats, value: float) -> None:
        """Add one more point: extends the result of `condition` by one row."""
        n = len(self._whitened)
        cross, row, scale = self._project(point)
        whitened = (value - float(cross @ self._whitened)) / scale
        if n == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[n] = row
        self._points = np.vstack([self._points, point * self._rates])
        self._inverse = _bordered(self._inverse, -(cross @ self._inverse) / scale, 1.0 / scale)
        self._whitened = np.append(self._whitened, whitened)
        self.mean += np.float32(whitened) * row
        self._variance -= row * row
        self._hoped = None

    def expect(self, point: Floats) -> None:
        """Count a point as told whose value is not known yet: the mean stays, the variance around it shrinks.

        This lasts until the next point is told.
        """
        row = self._project(point)[1]
        self._hoped = (self._variance if self._hoped is None else self._hoped) - row * row

    def deviation(self) -> Singles:
        """Return the standard deviation of every candidate's prediction."""
        variance = self._variance if self._hoped is None else self._hoped
        return np.asarray(np.sqrt(np.maximum(variance, np.float32(1e-9)) * np.float32(self._signal)))

    def _project(self, point: Floats) -> tuple[Floats, Singles, float]:
        """Project a new point onto the basis of the old ones. Returns coordinates, row over the pool, and residual."""
        scaled = (point * self._rates)[:, None]
        cross = self._inverse @ _kernel(self._points.T, scaled)[:, 0]
        scale = math.sqrt(max(1.0 + self._noise - float(cross @ cross), 1e-9))
        row = _kernel(scaled.astype(np.float32), self._pool)[0]
        row -= np.einsum("i,ij->j", cross.astype(np.float32), self._rows[: len(cross)])
        row /= np.float32(scale)
        return cross, row, scale


def _kernel(a: Array, b: Array) -> Array:
    """Return the covariances between the columns of a and those of b."""
    kernel = np.zeros((a.shape[1], b.shape[1]), dtype=a.dtype)
    height = max(1, (1 << 15) // max(1, b.shape[1]))  # few enough rows at a time to stay in the cache
    room = np.empty((height, b.shape[1]), dtype=a.dtype)
    for top in range(0, len(kernel), height):
        rows = kernel[top : top + height]
        gaps = room[: len(rows)]
        for one, other in zip(a[:, top : top + height], b, strict=True):
            np.abs(np.subtract(one[:, None], other[None, :], out=gaps), out=gaps)
            rows -= gaps
        np.exp(rows, out=rows)
    return kernel


def _product(a: Array, b: Array) -> Array:
    """Multiply in blocks so small that the linear algebra library does not start its threads.

    The threads gain little at these sizes. After each call they busy-wait for a tenth of a second for the next one,
    which keeps the cores occupied. Sums elsewhere in this module use einsum for the same reason.
    """
    out = np.empty((len(a), b.shape[1]), dtype=a.dtype)
    width = max(1, (1 << 18) // a.size)
    for left in range(0, b.shape[1], width):
        out[:, left : left + width] = a @ b[:, left : left + width]
    return out


def _inverse_factor(square: Floats) -> Floats:
    """Return the inverse of the Cholesky factor, computed in blocks too small for the library's threads."""
    n = len(square)
    if n <= 64:
        return np.asarray(np.linalg.inv(np.linalg.cholesky(square)))
    half, result = n // 2, np.zeros((n, n))
    result[:half, :half] = top = _inverse_factor(square[:half, :half])
    below = _product(square[half:, :half], top.T)
    result[half:, half:] = corner = _inverse_factor(square[half:, half:] - _product(below, below.T))
    result[half:, :half] = -_product(corner, _product(below, top))
    return result


def _bordered(square: Floats, row: Floats, corner: float) -> Floats:
    n = len(square)
    grown = np.zeros((n + 1, n + 1))
    grown[:n, :n], grown[n, :n], grown[n, n] = square, row, corner
    return grown
