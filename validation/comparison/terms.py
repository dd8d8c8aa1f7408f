"""The task metric that a spec asks for: how right a model's answers are by their labels, and the least that passes.

What is promised of an output as a distribution, with the default of each number (docs/concepts/validation.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class TaskMetric:
    """output: whose argmax over the last axis is the predicted class.  floor: the lowest value that passes, 0 to 1;
    None where it is only measured."""

    output: str
    floor: float | None = None
    name: Literal["accuracy"] = "accuracy"


Values = Literal["logits", "probabilities"]

# The perplexity on text drawn from the original model grows by e^KL: by 1 %.
KL = 0.01
# No event of any row gains or loses more than 0.2 of probability: JS >= TV^2 / 2, by Pinsker's inequality.
JS = 0.02
# One decision, and one entry of four top-5 lists, in a hundred and in twenty.
FLIPS, TOP_K = 0.01, 0.05
# About what temperature scaling leaves of a network's calibration error (Guo et al. 2017, table 1).
ECE = 0.02
# Of calibrated probabilities, an error of 0.1 (root mean square, over the row) costs 0.01.
BRIER = 0.01
# One false alarm in a thousand engines; it then repeats, because the draws are seeded.
DRAWS, ALPHA = 100, 0.001


@dataclass(frozen=True)
class RowLimits:
    """Limits of one output whose last axis holds a distribution, against the original model's; None is not asked for.

    values: what the output holds.  kl: mean over the rows, in nats.  js: of the worst row, in nats.  flips: share of
    rows with another decision.  top_k: share of the five likeliest that are others.  ece, brier: by how much the
    calibration error and the Brier score may differ (with labels: be worse).
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
    """Two samples of a stochastic model's outputs, the graph's and the engine's, must look alike.

    outputs: names.  vary: the input that is a seed or noise; None: repeated runs differ by themselves.  draws: of each
    side.  alpha: the rate of false alarms, over all outputs together.
    """

    outputs: tuple[str, ...]
    vary: str | None = None
    draws: int = DRAWS
    alpha: float = ALPHA


@dataclass(frozen=True)
class DistributionalLimits:
    """The distributional part of a contract. rows: by output."""

    rows: Mapping[str, RowLimits] = field(default_factory=dict)
    seeds: SampledOutputs | None = None
