"""The error at the model's outputs if only one group is quantized.

The float model runs once on a few samples; the tensors where each group's tail begins are kept. A group is then judged
by its tail alone, quantized in this group and nowhere else. A tail ends at the end of the section after the group's own
(`sections`). The error there, times the gain of the rest of the model for such errors, is the error at the outputs. So
a sweep over G groups costs G tails of one or two sections: its cost grows as the model does.
"""

import math
import operator
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast

import numpy as np
from onnx import ModelProto, TensorProto

from builders.onnx_graphs.bodies import list_reads
from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.types import Precision, QuantizationScheme, Tensors
from pipeline.quantization.graph import constants, element_types
from pipeline.quantization.insertion_points import find_sites
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.overrides import OverridePrecision
from pipeline.quantization.schemes.write import write_searched
from pipeline.quantization.search.graph_limits import GraphJudge
from pipeline.quantization.search.quality import Quality
from pipeline.quantization.search.sections import divide_sections
from pipeline.quantization.settings.groups import SmoothingGroup
from pipeline.quantization.settings.runs import JoinedTensors, SessionRunner, downstream, set_ranks, tail
from pipeline.quantization.settings.smooth import SmoothingPlan, apply_plans
from validation.metrics.drift import Drift, is_exact, measure

# The most bytes of activations that are kept as inputs of tails. More samples hardly change the ranking of groups; the
# chosen graph runs on all samples.
MOST_KEPT = 96 << 20
_FLOAT: OverridePrecision = "fp32"


@dataclass(frozen=True)
class SweepCost:
    """CPU seconds of a sweep. inference_s: of one pass of the float model over the same samples, which keeps tensors.

    inferences_per_group: the cost of one group, in such passes.
    groups: their number, in all formats together.  sweep_s: of the whole sweep.
    """

    groups: int
    sweep_s: float
    inference_s: float
    inferences_per_group: float = field(init=False)

    def __post_init__(self) -> None:
        total_s = self.inference_s * self.groups
        object.__setattr__(self, "inferences_per_group", self.sweep_s / total_s if total_s else 0.0)


def sweep(
    model: ModelProto,
    groups: Sequence[SmoothingGroup],
    plans: Mapping[str, SmoothingPlan],
    ranges: Ranges,
    scheme: QuantizationScheme,
    runs: Sequence[Tensors],
    check: Callable[[str, int], None] = lambda *_: None,
    precision: Precision = "int8",
    group_format: Precision = "int8",
) -> tuple[dict[str, float], SweepCost]:
    """The error of the outputs if only one group is quantized, by the group's activation: its energy divided by that of
    the outputs, infinite if these are not finite; and the cost. model: prepared; tails share its external weights.

    plans: by activation, if any.  precision: of the written graph.  group_format: of the group in it.

    As many runs are used as keep the tails' inputs below `MOST_KEPT` bytes, or a part of the first one.
    check: called before each group; its exception ends the sweep.
    """
    start_s = time.process_time()
    stages = list(_find_stages(model, groups))
    stage_values, inference_s = _run_float(model, stages, runs)
    drifts, gains = list[dict[str, float]](), list[float]()
    for stage in stages:
        drifts.append({})
        shifted_values = [values[stage.end].copy() for values in stage_values] if stage.end else []
        for group, tail_model in stage.tails:
            check("judging single groups", sum(map(len, drifts)))
            drifts[-1][group.activation] = noise = 0.0
            if tail_model.graph.output:  # else a dead end: nothing depends on it
                plan = [plans[group.activation]] if group.activation in plans else []
                changed_part, narrow_ranges = apply_plans(tail_model, plan, ranges)
                other_nodes = [site.node for site in find_sites(changed_part)[0] if site.node not in group.nodes]
                float_overrides = dict.fromkeys(other_nodes, _FLOAT)
                if group_format != precision:
                    float_overrides |= dict.fromkeys(group.nodes, cast("OverridePrecision", group_format))
                quantized_part = write_searched(changed_part, precision, scheme, narrow_ranges, float_overrides)
                noise, answers = _compare(quantized_part, stage_values)
                drifts[-1][group.activation] = noise
            if stage.end and 0 < noise < math.inf:
                for values, float_values, actual_values in zip(shifted_values, stage_values, answers, strict=True):
                    values += actual_values[stage.end] - float_values[stage.end]
        gains.append(_gain(stage, stage_values, shifted_values))
    output_gains = list(accumulate(reversed(gains), operator.mul))[::-1]
    output_noise = {
        name: noise * gain if noise else 0.0
        for noises, gain in zip(drifts, output_gains, strict=True)
        for name, noise in noises.items()
    }
    return output_noise, SweepCost(len(groups), time.process_time() - start_s, inference_s)


@dataclass(frozen=True)
class _Stage:
    """The groups of a section, each with its tail. end: the waist at which the tails end; None for the outputs.

    link: the model from `end` to the next stage's end; None if the tails end at the outputs.
    """

    tails: tuple[tuple[SmoothingGroup, ModelProto], ...]
    end: str | None
    link: ModelProto | None


def _find_stages(model: ModelProto, groups: Sequence[SmoothingGroup]) -> Iterator[_Stage]:
    types, initializers = element_types(model), constants(model.graph)
    producer_names = {name: node.name for node in model.graph.node for name in node.output}
    sections = divide_sections(model, groups, types)
    end_names = [*(section.end for section in sections[1:]), None, None]

    def behind(part: ModelProto, nodes: Collection[str], end: str | None, also: Collection[str] = ()) -> ModelProto:
        """The part that depends on these nodes, up to `end` or the outputs."""
        dependents = downstream(part, nodes) - {*also}
        names = {name for node in part.graph.node for name in (*list_reads(node), *node.output)}
        boundary_types = {
            name: types[name] for name in names if name in types and name not in initializers and name not in dependents
        }
        return tail(part, boundary_types, {end: TensorProto.FLOAT} if end else None)

    for section, end, next_end in zip(sections, end_names, end_names[1:], strict=False):
        section_model = behind(model, {node for group in section.groups for node in group.nodes}, end)
        tails = tuple((group, behind(section_model, group.nodes, None)) for group in section.groups)
        yield _Stage(tails, end, behind(model, {producer_names[end]}, next_end, {end}) if end else None)


def _run_float(
    model: ModelProto, stages: Sequence[_Stage], runs: Sequence[Tensors]
) -> tuple[list[dict[str, Array]], float]:
    """The tensors that tails and links read and should write, in the first runs; and CPU seconds of the float model.
    In place: tails and links get the ranks of their inputs."""
    protos = [proto for stage in stages for proto in (*(proto for _, proto in stage.tails), stage.link) if proto]
    values = [value for proto in protos for value in (*proto.graph.input, *proto.graph.output)] + [*model.graph.output]
    input_names = {value.name for value in model.graph.input}
    end_types = {value.name: value.type.tensor_type.elem_type for value in values if value.name not in input_names}
    tail_runner = SessionRunner(tail(model, {}, end_types))
    start_s = time.process_time()
    stage_values = _within(({**inputs, **tail_runner.run(inputs)} for inputs in _fitting(runs, tail_runner)), MOST_KEPT)
    spent_s = time.process_time() - start_s
    for proto in protos:
        set_ranks(proto, stage_values)
    return stage_values, spent_s


def _fitting(runs: Sequence[Tensors], tail_runner: SessionRunner) -> Sequence[Tensors]:
    """The runs; if the first one joins samples that together exceed `MOST_KEPT`, only its part that fits."""
    if not runs or not isinstance(runs[0], JoinedTensors):
        return runs
    sample = runs[0].first(1)
    count = MOST_KEPT // max(1, sum(array.nbytes for array in (*sample.values(), *tail_runner.run(sample).values())))
    return runs if count >= runs[0].parts else [runs[0].first(max(1, count))]


def _compare(
    part: ModelProto, inputs: Sequence[Tensors], kept_runs: Sequence[Tensors] = ()
) -> tuple[float, list[dict[str, Array]]]:
    """The noise of a part's outputs, compared with `kept_runs` or, without it, `inputs`; and the outputs by run."""
    runner = SessionRunner(part)
    answers = [runner.run(values) for values in inputs]
    expected_values = [{name: values[name] for name in runner.outputs} for values in kept_runs or inputs]
    result = quality(expected_values, answers)
    return result.noise if result.finite else math.inf, answers


def _gain(stage: _Stage, kept_runs: Sequence[Tensors], shifted_values: Sequence[Array]) -> float:
    """The factor of the link on relative errors. shifted_values: the stage's end with the errors of all its groups."""
    if stage.link is None or stage.end is None:
        return 1.0
    base_quality = quality(
        [{stage.end: values[stage.end]} for values in kept_runs], ({stage.end: values} for values in shifted_values)
    )
    runs = [{**values, stage.end: end_value} for values, end_value in zip(kept_runs, shifted_values, strict=True)]
    return _compare(stage.link, runs, kept_runs)[0] / base_quality.noise if base_quality.noise else 1.0


@dataclass(frozen=True)
class Answers:
    """The right answers. output: its argmax over the last axis is an answer.  right: class indices of each run, [n]."""

    output: str
    right: Sequence[Array]


def quality(
    expected_outputs: Sequence[Tensors],
    actual: Iterable[Tensors],
    answers: Answers | None = None,
    judge: GraphJudge | None = None,
) -> Quality:
    """Quality of `actual` over all runs. Integer outputs are decisions; if there are no others, the share of changed
    decisions is the noise. An output of another size than expected, as of a graph that selects boxes itself, counts as
    not finite. judge: counts the failed checks of the graph, also at edges, which are used only for this; the first
    part of the runs that fails ends the comparison.

    answers: the right ones; None without labels.
    Raises DataError when there is not one label for each answer.
    """
    drifts: dict[str, Drift] = {}
    right_masks, is_as_large = [], True
    for index, (expected_values, actual_values) in enumerate(zip(expected_outputs, actual, strict=True)):
        is_edge = judge is not None and judge.is_edge(index)
        for name, values in expected_values.items() if not is_edge else ():
            if values.shape == actual_values[name].shape:
                drifts[name] = drifts.get(name, Drift()).merge(measure(values, actual_values[name], decisions=True))
            else:
                is_as_large = False
        if answers and not is_edge:
            right_masks.append(_right(actual_values[answers.output], answers.right[index], answers.output))
        if judge and judge.add(index, expected_values, actual_values):
            break  # the other runs change nothing
    float_outputs = [drift for drift in drifts.values() if drift.mismatches is None]
    agreement = min((drift.argmax_agreement for drift in drifts.values()), default=1.0)
    return Quality(
        max((10 ** (-drift.sqnr_db / 10) for drift in float_outputs), default=1 - agreement),
        min((drift.cosine for drift in float_outputs), default=agreement),
        is_as_large and all(drift.nonfinite == 0 for drift in float_outputs),
        agreement,
        float(np.mean(np.concatenate(right_masks))) if answers else None,
        judge.missed() if judge else 0,
    )


def decides(output: Array) -> bool:
    """Whether an output has decisions: integers, or rows of several values whose greatest one is the answer."""
    return is_exact(output) or (output.ndim > 0 and output.shape[-1] > 1)


def _right(output: Array, labels: Array, name: str) -> Array:
    """Whether each answer is right, bool [n]; False for a row with NaN."""
    if not decides(output):
        raise DataError(
            f"output {name!r} has the shape {output.shape}: the argmax of one value is always 0 and shows no accuracy; "
            "ask for sqnr_db or cosine, or give the model an output with a value for each class"
        )
    answers = output if is_exact(output) else np.argmax(output, axis=-1)
    if answers.size != labels.size:
        raise DataError(
            f"output {name!r} gives {answers.size} answers for {labels.size} labels; give one label for each answer"
        )
    valid_mask = np.ones(answers.shape, bool) if is_exact(output) else ~np.isnan(output).any(axis=-1)
    return np.asarray((answers.reshape(-1) == labels.reshape(-1)) & valid_mask.reshape(-1))


def _within(runs: Iterable[dict[str, Array]], max_bytes: int) -> list[dict[str, Array]]:
    run_values, total_bytes = list[dict[str, Array]](), 0
    for values in runs:
        total_bytes += sum(array.nbytes for array in values.values())
        if run_values and total_bytes > max_bytes:
            break
        run_values.append(values)
    return run_values
