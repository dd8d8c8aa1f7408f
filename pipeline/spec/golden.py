"""The section `golden` of a spec: real inputs, right answers, task metrics."""

from typing import Self

from pydantic import Field, model_validator

from pipeline.spec.metrics import Metric, Metrics
from pipeline.spec.sequences import SequenceArrays
from pipeline.spec.value_types import File, GraphName, Loc, Mistakes, SpecPart


class MeasuredData(SpecPart):
    """What real inputs are for: right answers, and the task metrics that are measured over them."""

    labels: GraphName | None = Field(None, description="name of the array of right answers in the data file")
    metric: Metrics | None = Field(None, description="a task metric or a list of them (docs/guides/task-metrics.md)")

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The task metrics, in order."""
        return self.metric if isinstance(self.metric, tuple) else (self.metric,) if self.metric else ()

    def named_metrics(self) -> list[tuple[Loc, Metric]]:
        """The task metrics, each with its path below `golden`."""
        several = isinstance(self.metric, tuple)
        return [(("metric", index) if several else ("metric",), item) for index, item in enumerate(self.metrics)]

    def outputs(self) -> list[tuple[Loc, str]]:
        """(path of the key below `golden`, output) for each output that a task metric names."""
        return [((*loc, key), name) for loc, item in self.named_metrics() for key, name in item.outputs().items()]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        found: list[tuple[Loc, str]] = []
        seen: set[tuple[str, str]] = set()
        for loc, item in self.named_metrics():
            if not self.labels and (item.against == "labels" or item.name == "accuracy"):
                text = f"metric {item.name} needs labels; name the array that holds them"
                found.append((loc, f"{text}, or take top_k" if item.name == "accuracy" else text))
            if (item.name, item.output) in seen:
                found.append((loc, f"there is a metric {item.name} of {item.output!r} before it; leave one out"))
            seen.add((item.name, item.output))
        if found:
            raise Mistakes(found)
        return self


class Golden(MeasuredData, SequenceArrays):
    """Real inputs with which every engine is proven. Expected outputs come from the source model itself."""

    data: File = Field(description="an .npz, .npy or .safetensors, or a folder of .npy files")
    frozen: str | None = Field(
        None,
        pattern="^[0-9a-f]{64}$",
        description="digest of the golden set: a build that would make another one fails; `enginesmith debug golden "
        "accept`",
    )
