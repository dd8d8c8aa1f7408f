"""What a spec may ask of a model's outputs beside drift and task metrics: limits on distributions.

The defaults are explained in docs/concepts/validation.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Values = Literal["logits", "probabilities"]

# The default limits. KL: the perplexity on text drawn from the original model grows by e^KL, 1 %.
KL = 0.01
# No event of any row gains or loses more than 0.2 of probability: JS >= TV^2 / 2, by Pinsker's inequality.
JS = 0.02
# One decision of a hundred; one entry of four top-5 lists.
FLIPS, TOP_K = 0.01, 0.05
# About what temperature scaling leaves of a network's calibration error (Guo et al. 2017, table 1).
ECE = 0.02
# What an error of 0.1 (root mean square over the row) costs calibrated probabilities.
BRIER = 0.01
# One false alarm in a thousand engines, which repeats for the same engine because the draws are seeded.
DRAWS, ALPHA = 100, 0.001


@dataclass(frozen=True)
class RowLimits:
    """Limits of one output whose last axis holds a distribution, against the original model's; None: not checked.

    values: what the output holds.  kl: mean over the rows, in nats.  js: of the worst row, in nats.  flips: share of
    rows with another argmax.  top_k: share of the five likeliest that are others.  ece, brier: by how much the
    calibration error and the Brier score may differ, or get worse where there are labels.
    """

    values: Values = "logits"
    kl: float | None = None
    js: float | None = None
    flips: float | None = None
    top_k: float | None = None
    ece: float | None = None
    brier: float | None = None


@dataclass(frozen=True)
class SampledOutputs:
    """A two-sample test of a stochastic model: the graph's and the engine's outputs have one distribution.

    outputs: their names.  vary: the input that is a seed or noise; None where repeated runs differ by themselves.
    draws: runs of each side.  alpha: the rate of false alarms over all outputs together.
    """

    outputs: tuple[str, ...]
    vary: str | None = None
    draws: int = DRAWS
    alpha: float = ALPHA


@dataclass(frozen=True)
class DistributionalLimits:
    """The distributional part of a contract. rows: limits by output.  seeds: the two-sample test, if any."""

    rows: Mapping[str, RowLimits] = field(default_factory=dict)
    seeds: SampledOutputs | None = None
