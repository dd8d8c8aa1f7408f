"""The run time of an engine as a function of the sizes of its dims, interpolated between measured sizes.

Between measured sizes the logarithm of the median is interpolated by universal kriging over the logarithms of the
sizes: a linear trend (t is about a * size^b) and a Gaussian process on the residuals. Its scale and length have the
greatest likelihood on a grid (Cressie, Statistics for Spatial Data, 1993, 3.4; Rasmussen & Williams,
Gaussian Processes for Machine Learning, 2006, 2.7 and 5.4). Each value has a standard deviation. There are no
predictions outside the measured sizes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.reports.latency import BucketLatency

# Standard deviation of a measured median's logarithm if only one process measured it.
_ONE_PROCESS = 0.02
# The grid of scales (of the logarithm of seconds) and lengths (of the logarithm of sizes) of the Gaussian process.
_SCALES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
_LENGTHS = (0.35, 0.7, 1.4, 2.8)


@dataclass(frozen=True, eq=False)
class ServiceTimes:
    """The measured run times of an engine. sizes: int64 [points, dims], at least one point.

    curves: run times in seconds as quantiles at equal steps from 0 to 1, float64 [points, steps].
    log_sd: standard deviation of the logarithm of each point's median, float64 [points].
    """

    dims: tuple[str, ...]
    sizes: Array
    curves: Array
    log_sd: Array

    @classmethod
    def of_buckets(cls, buckets: Sequence[BucketLatency], dims: Sequence[str]) -> "ServiceTimes":
        """The run times of a latency report's buckets. Raises DataError if there are none."""
        if not buckets:
            raise DataError("no bucket was timed; `enginesmith profile` times them")
        sizes = np.array([[bucket.sizes[dim] for dim in dims] for bucket in buckets], np.int64)
        curves = np.array([bucket.curve for bucket in buckets], np.float64)
        return cls(tuple(dims), sizes, curves, np.array([_log_sd(bucket.process_medians_s) for bucket in buckets]))

    def predict(self, sizes: Array) -> tuple[Array, Array]:
        """The median seconds of a run, and the standard deviation of its logarithm, float64 [rows] each.

        sizes: int64 [rows, dims]. Raises DataError for a size beyond those measured.
        """
        low, high = self.sizes.min(0), self.sizes.max(0)
        outside_mask = (sizes < low) | (sizes > high)
        if outside_mask.any():
            row, dim = (int(index) for index in np.argwhere(outside_mask)[0])
            raise DataError(
                f"{self.dims[dim]}={sizes[row, dim]} is beyond what was timed ({low[dim]} to {high[dim]}); time it:"
                f" enginesmith profile REF --bucket {self.dims[dim]}={sizes[row, dim]}"
            )
        return self._kriging.predict(sizes)

    def curves_at(self, sizes: Array) -> Array:
        """Quantiles of the run times at these sizes, float64 [rows, steps]: the predicted median, with the shape of the
        distribution at the nearest measured size. Raises as `predict`."""
        medians, _ = self.predict(sizes)
        distances = np.abs(np.log(sizes)[:, None] - np.log(self.sizes)[None]).sum(-1)
        curve_shapes = self.curves / self._medians[:, None]
        return np.asarray(medians[:, None] * curve_shapes[distances.argmin(1)])

    @cached_property
    def _medians(self) -> Array:
        return np.asarray(self.curves[:, self.curves.shape[1] // 2])

    @cached_property
    def _kriging(self) -> "_Kriging":
        return _Kriging.fit(np.log(self.sizes), np.log(self._medians), self.log_sd)


def _log_sd(process_medians_s: Sequence[float]) -> float:
    """Standard deviation of the logarithm of a median, given each process's median in seconds."""
    if len(process_medians_s) < 2:
        return _ONE_PROCESS
    log_std = float(np.std(np.log(process_medians_s), ddof=1))
    return max(log_std / math.sqrt(len(process_medians_s)), 1e-3)


@dataclass(frozen=True, eq=False)
class _Kriging:
    """A linear trend and a Gaussian process. at: [points, dims].  weights: of the residuals, [points]."""

    at: Array
    scale: float
    length: float
    trend: Array
    weights: Array
    inverse: Array
    design: Array
    information: Array

    @classmethod
    def fit(cls, at: Array, values: Array, noise: Array) -> "_Kriging":
        candidates = [cls._at(at, values, noise, scale, length) for scale, length in product(_SCALES, _LENGTHS)]
        return max(candidates, key=lambda candidate: candidate[0])[1]

    @classmethod
    def _at(cls, at: Array, values: Array, noise: Array, scale: float, length: float) -> tuple[float, "_Kriging"]:
        """The logarithm of the likelihood, up to a constant, and the fit."""
        covariance = _kernel(at, at, scale, length) + np.diag(noise**2)
        inverse = np.linalg.inv(covariance)
        design = _design(at, len(at) > at.shape[1])
        information = np.linalg.pinv(design.T @ inverse @ design)
        trend = information @ design.T @ inverse @ values
        residuals = values - design @ trend
        likelihood = -0.5 * float(residuals @ inverse @ residuals + np.linalg.slogdet(covariance)[1])
        return likelihood, cls(at, scale, length, trend, inverse @ residuals, inverse, design, information)

    def predict(self, sizes: Array) -> tuple[Array, Array]:
        points = np.log(sizes)
        covariances = _kernel(points, self.at, self.scale, self.length)
        design = _design(points, self.design.shape[1] > 1)
        values = design @ self.trend + covariances @ self.weights
        residual_design = design - covariances @ self.inverse @ self.design
        variance = self.scale**2 - np.einsum("ij,jk,ik->i", covariances, self.inverse, covariances)
        variance = variance + np.einsum("ij,jk,ik->i", residual_design, self.information, residual_design)
        return np.exp(values), np.sqrt(np.maximum(variance, 0.0))


def _design(at: Array, has_slope: bool) -> Array:
    """The terms of the trend, [rows, terms]: 1 and, if there are enough points, the logarithms of the sizes."""
    ones = np.ones((len(at), 1))
    return np.hstack([ones, at]) if has_slope else ones


def _kernel(points: Array, other_points: Array, scale: float, length: float) -> Array:
    """Matern's covariance with smoothness 3/2 (Rasmussen & Williams 2006, equation 4.17): [rows, columns]."""
    distances = np.sqrt(3.0) * np.linalg.norm(points[:, None] - other_points[None], axis=-1) / length
    return np.asarray(scale**2 * (1.0 + distances) * np.exp(-distances))
