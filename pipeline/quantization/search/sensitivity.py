"""What quantizing each group alone costs at the model's outputs, and what it saves.

The float model runs once; the tensors where each group's tail begins are kept. A group is then judged by its tail
alone, quantized in this group and nowhere else. A sweep over G groups and n samples costs n inferences and
G tails, half of one on average, on a few samples: far less than one inference per group per calibration sample.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import ModelProto

from enginery.arrays import Array
from enginery.core.errors import DataError
from enginery.core.types import QuantizationScheme, Tensors
from pipeline.quantization.graph import constants, element_types
from pipeline.quantization.insertion_points import find_sites
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.overrides import OverridePrecision
from pipeline.quantization.schemes.qdq import quantize_int8
from pipeline.quantization.search.graph_limits import GraphJudge
from pipeline.quantization.search.quality import Quality
from pipeline.quantization.settings.groups import SmoothingGroup
from pipeline.quantization.settings.runs import (
    SessionRunner,
    downstream,
    set_ranks,
    tail,
    with_outputs,
)
from pipeline.quantization.settings.smooth import SmoothingPlan, apply_plans
from validation.metrics.drift import Drift, is_exact, measure

# Bytes of activations that are kept for the tails to start from. More samples tell little more about single groups,
# which are only ranked; what is chosen is run on all of them.
MOST_KEPT = 64 << 20
_FLOAT: OverridePrecision = "fp32"


@dataclass(frozen=True)
class SweepCost:
    """CPU seconds of a sweep. inference_s: of one pass of the float model over the same samples, which keeps tensors.

    inferences_per_group: the cost of one group, in such passes.
    """

    groups: int
    sweep_s: float
    inference_s: float
    inferences_per_group: float = field(init=False)

    def __post_init__(self) -> None:
        whole = self.inference_s * self.groups
        object.__setattr__(self, "inferences_per_group", self.sweep_s / whole if whole else 0.0)


def sweep(
    model: ModelProto,
    groups: Sequence[SmoothingGroup],
    plans: Mapping[str, SmoothingPlan],
    ranges: Ranges,
    scheme: QuantizationScheme,
    runs: Sequence[Tensors],
    check: Callable[[str, int], None] = lambda *_: None,
) -> tuple[dict[str, Quality], SweepCost]:
    """Quality of each group quantized alone, by its activation. model: prepared; tails share weights that lie outside.

    plans: by activation, if it has one.

    As many of the runs are taken as keep the tails' inputs below `MOST_KEPT` bytes, but at least one.
    check: called before each group; what it raises ends this.
    """
    types = element_types(model)
    starts = (value for group in groups for value in _tail_of(model, group, types).graph.input)
    known = {value.name: value.type.tensor_type.elem_type for value in starts}
    given = {value.name for value in model.graph.input}
    everything = {name: kind for name, kind in known.items() if name not in given}
    everything |= {value.name: value.type.tensor_type.elem_type for value in model.graph.output}
    start = time.process_time()
    inner = SessionRunner(with_outputs(model, everything))
    before = time.process_time()
    kept = _within(({**inputs, **inner.run(inputs)} for inputs in runs), MOST_KEPT)
    inference_s = time.process_time() - before
    del inner
    found = dict[str, Quality]()
    for group in groups:
        check("judging single groups", len(found))
        part = _tail_of(model, group, types)
        if not part.graph.output:  # a dead end: nothing depends on it
            found[group.activation] = Quality(0.0, 1.0)
            continue
        set_ranks(part, kept)
        runner = SessionRunner(_quantize_alone(part, group, plans, ranges, scheme))
        # What lies before the group, an output of the model among it, stays as it is.
        expected = [{name: values[name] for name in runner.outputs} for values in kept]
        found[group.activation] = quality(expected, (runner.run(values) for values in kept))
    return found, SweepCost(len(groups), time.process_time() - start, inference_s)


def _quantize_alone(
    part: ModelProto,
    group: SmoothingGroup,
    plans: Mapping[str, SmoothingPlan],
    ranges: Ranges,
    scheme: QuantizationScheme,
) -> ModelProto:
    plan = [plans[group.activation]] if group.activation in plans else []
    changed, narrowed = apply_plans(part, plan, ranges)
    others = [site.node for site in find_sites(changed)[0] if site.node not in group.nodes]
    return quantize_int8(changed, narrowed, scheme, dict.fromkeys(others, _FLOAT))[0]


@dataclass(frozen=True)
class Answers:
    """The right answers. output: its argmax over the last axis is an answer.  right: class indices of each run, [n]."""

    output: str
    right: Sequence[Array]


def quality(
    expected: Sequence[Tensors],
    actual: Iterable[Tensors],
    answers: Answers | None = None,
    judge: GraphJudge | None = None,
) -> Quality:
    """Quality of `actual` over all runs. Integer outputs are decisions; where there are no others, the share of those
    that change is the noise. An output of another size than expected, as of a graph that selects boxes itself, counts
    as not finite. judge: counts what the graph's own checks miss.

    Raises DataError when there is not one label for each answer.
    """
    total: dict[str, Drift] = {}
    right, as_large = [], True
    for index, (wanted, found) in enumerate(zip(expected, actual, strict=True)):
        for name, values in wanted.items():
            if values.shape == found[name].shape:
                total[name] = total.get(name, Drift()).merge(measure(values, found[name], decisions=True))
            else:
                as_large = False
        if judge:
            judge.add(index, wanted, found)
        if answers:
            right.append(_right(found[answers.output], answers.right[index], answers.output))
    floats = [part for part in total.values() if part.mismatches is None]
    agreement = min((part.argmax_agreement for part in total.values()), default=1.0)
    return Quality(
        max((10 ** (-part.sqnr_db / 10) for part in floats), default=1 - agreement),
        min((part.cosine for part in floats), default=agreement),
        as_large and all(part.nonfinite == 0 for part in floats),
        agreement,
        float(np.mean(np.concatenate(right))) if answers else None,
        judge.missed() if judge else 0,
    )


def decides(output: Array) -> bool:
    """Whether an output holds decisions: integers, or rows of several values, whose greatest is the answer."""
    return is_exact(output) or (output.ndim > 0 and output.shape[-1] > 1)


def _right(output: Array, labels: Array, name: str) -> Array:
    """Which answers are right, bool [n]; none in a row with NaN."""
    if not decides(output):
        raise DataError(
            f"output {name!r} has the shape {output.shape}: the argmax of one value is always 0 and tells no accuracy; "
            "ask for sqnr_db or cosine, or give the model an output with a value for each class"
        )
    answers = output if is_exact(output) else np.argmax(output, axis=-1)
    if answers.size != labels.size:
        raise DataError(f"output {name!r} gives {answers.size} answers for {labels.size} labels; give one each")
    valid = np.ones(answers.shape, bool) if is_exact(output) else ~np.isnan(output).any(axis=-1)
    return np.asarray((answers.reshape(-1) == labels.reshape(-1)) & valid.reshape(-1))


def _within(runs: Iterable[dict[str, Array]], most: int) -> list[dict[str, Array]]:
    kept, held = list[dict[str, Array]](), 0
    for values in runs:
        held += sum(array.nbytes for array in values.values())
        if kept and held > most:
            break
        kept.append(values)
    return kept


def _tail_of(model: ModelProto, group: SmoothingGroup, types: Mapping[str, int]) -> ModelProto:
    """The part of a model that begins at the tensors which do not depend on a group."""
    given = constants(model.graph)
    after = downstream(model, group.nodes)
    return tail(model, {name: kind for name, kind in types.items() if name not in given and name not in after})
