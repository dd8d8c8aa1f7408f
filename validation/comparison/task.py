"""The task metric that a spec asks for: how right a model's answers are by their labels, and the least that passes."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TaskMetric:
    """output: whose argmax over the last axis is the predicted class.  floor: the lowest value that passes, 0 to 1;
    None where it is only measured."""

    output: str
    floor: float | None = None
    name: Literal["accuracy"] = "accuracy"
