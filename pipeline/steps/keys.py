"""What the steps have in common: their limits, the code and the libraries that do the work, the shapes of a spec."""

import os
from dataclasses import asdict
from typing import Literal

from builders.jobs import Limits
from builders.types import Precision
from pipeline.jobs.calls import Calls
from pipeline.jobs.engines import ContractTerms
from pipeline.spec.model import ModelSpec, overrides
from pipeline.values import Json, ModelShapes
from validation.task import TaskMetric

# Nearly all of this machine's memory: a runaway step must not take the machine with it.
HOST_MEMORY_MIB = int(0.9 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) >> 20
# The code that does each step. These steps run again when it changes; an engine does not, and its key leaves it out.
EXPORT_CODE = ("pipeline.jobs.blobs", "pipeline.jobs.model", "pipeline.export", "pipeline.sources")
QUANTIZATION_CODE = (
    "pipeline.jobs.blobs",
    "pipeline.jobs.ranges",
    "pipeline.jobs.graphs",
    "pipeline.quantization",
    "pipeline.sources",
    "validation.latency.macs",
)
CHECK_CODE = (
    "builders",
    "validation",
    *("pipeline.jobs.engines", "pipeline.jobs.calls", "pipeline.jobs.limits"),
    *QUANTIZATION_CODE,
)
OBSERVATION_CODE = (*QUANTIZATION_CODE, "validation")
# What rewrites graphs, emulates their arithmetic and measures them.
MEASURING = ("onnx", "onnxruntime", "numpy", "ml_dtypes")


def step_limits(
    spec: ModelSpec, step: Literal["export", "calibration", "quantization", "proof", "attribution"]
) -> Limits:
    """What the process of a step that works on the model may use: the spec's time, most of the machine's memory."""
    remedies = f"raise timeouts.{step}_s in the spec", "run it on a machine with more memory"
    return Limits(getattr(spec.timeouts, f"{step}_s"), HOST_MEMORY_MIB, *remedies)


def engine_limits(spec: ModelSpec, step: Literal["build", "proof", "latency"]) -> Limits:
    """What the process of a step that builds or runs an engine may use: the spec's time, and build.memory_mib."""
    if step == "build":
        key, timeout_s = "build.timeout_s", spec.build.timeout_s
    else:
        key, timeout_s = f"timeouts.{step}_s", getattr(spec.timeouts, f"{step}_s")
    remedies = f"raise {key} in the spec", "raise build.memory_mib in the spec"
    return Limits(timeout_s, spec.build.memory_mib, *remedies)


def limits_of(
    spec: ModelSpec, precision: Precision, stage: Literal["export", "quantization", "engine"]
) -> dict[str, float]:
    """The limits that the spec sets for the checks of a stage, by metric."""
    return dict(overrides(spec, precision, stage))


def metric_of(spec: ModelSpec) -> TaskMetric | None:
    """The task metric that the spec asks for."""
    return TaskMetric(**spec.golden.metric.model_dump()) if spec.golden and spec.golden.metric else None


def contract_of(spec: ModelSpec) -> ContractTerms | None:
    """The contract that the spec asks for, with the shapes that it speaks of; None when it asks for none."""
    contract = spec.validation.contract.model_dump(mode="json", exclude_none=True)
    asks = "bitwise" in contract or contract["structured"] or "distributional" in contract
    return ContractTerms(contract, model_shapes(spec)) if asks else None


def calls_of(spec: ModelSpec) -> Calls | None:
    """The calls beside the golden set that the spec asks for."""
    calls, bitwise = spec.validation.calls, spec.validation.contract.bitwise is not None
    return Calls(calls.seconds, bitwise, model_shapes(spec)) if calls else None


def model_shapes(spec: ModelSpec) -> ModelShapes:
    """Inputs and dims."""
    return ModelShapes(tuple(spec.tensors()), tuple(spec.named_dims()))


def shapes_of(spec: ModelSpec) -> Json:
    """Inputs, outputs and dims."""
    return {
        "inputs": [asdict(tensor) for tensor in spec.tensors()],
        "outputs": list(spec.outputs) if spec.outputs else None,
        "dims": [asdict(dim) for dim in spec.named_dims()],
    }
