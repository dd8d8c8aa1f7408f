"""What the steps have in common: the functions of their workers, their limits, the shapes of a spec."""

import os
from dataclasses import asdict
from typing import Literal

from builders.jobs import Limits
from pipeline.closure.code import Root, find_code
from pipeline.spec.model import ModelSpec
from pipeline.values import Json
from pipeline.workshop import versions

# Nearly all of this machine's memory: a runaway step must not take the machine with it.
HOST_MEMORY_MIB = int(0.9 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) >> 20
# The functions that workers run. A step's key holds a digest of all the code that its function can reach
# (`code_key`): the step runs again when that changes. An engine does not, and its key leaves it out.
EXPORT = "pipeline.jobs.model:export_model"
OBSERVE = "pipeline.jobs.ranges:observe_part"
OBSERVE_THERE = "pipeline.jobs.ranges:observe_part_there"
MERGE = "pipeline.jobs.ranges:merge_parts"
CHOOSE = "pipeline.jobs.ranges:choose"
QUANTIZE = "pipeline.jobs.graphs:quantize"
CHECK_GRAPH = "pipeline.jobs.graphs:check_graph"
CHECK_ENGINE = "pipeline.jobs.engines:check_engine"
ATTRIBUTE_GRAPH = "pipeline.jobs.attribution:attribute_graph"
ATTRIBUTE_ENGINE = "pipeline.jobs.attribution:attribute_engine"
MEASURE_LATENCY = "pipeline.jobs.latency:measure_engine"
PROBE_SHAPES = "pipeline.jobs.shapes:probe_shapes"
# What makes the first of the two records of `EXPORT`: another golden set needs no new export.
WRITE_MODEL = ("pipeline.export:write_model", "pipeline.jobs.model:model_value")
# Packages that no code of ours imports: PyTorch's exporter is written in it.
_BEHIND = {"torch": ("onnxscript",)}
_DISTRIBUTIONS = {"google": "protobuf", "onnx_ir": "onnx-ir"}


def code_key(*roots: Root) -> Json:
    """What a step's key holds of code: a digest of what its worker's function can reach, and the versions of the
    packages that this imports.

    roots: the function, and what it finds by name at run time (`closure.code.backend_root`).
    """
    found = find_code(*roots)
    return {"versions": package_versions(*found.packages), "code": found.digest}


def package_versions(*packages: str) -> dict[str, str]:
    """Installed versions by distribution, of packages as `import` names them, and of what stands behind those."""
    behind = [name for package in packages for name in _BEHIND.get(package, ())]
    return versions(*(_DISTRIBUTIONS.get(name, name) for name in (*packages, *behind)))


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


def metric_of(spec: ModelSpec) -> Json | None:
    """The task metric that the spec asks for."""
    return spec.golden.metric.model_dump() if spec.golden and spec.golden.metric else None


def contract_of(spec: ModelSpec) -> Json | None:
    """The contract that the spec asks for, with the shapes that it speaks of; None when it asks for none."""
    contract = spec.validation.contract.model_dump(mode="json", exclude_none=True)
    asks = "bitwise" in contract or contract["structured"] or "distributional" in contract
    return {**contract, "shapes": shapes_of(spec)} if asks else None


def calls_of(spec: ModelSpec) -> Json | None:
    """The calls beside the golden set that the spec asks for, as `pipeline.jobs.calls` takes them."""
    calls, bitwise = spec.validation.calls, spec.validation.contract.bitwise is not None
    return {"seconds": calls.seconds, "bitwise": bitwise, "shapes": shapes_of(spec)} if calls else None


def shapes_of(spec: ModelSpec) -> Json:
    """Inputs, outputs and dims."""
    return {
        "inputs": [asdict(tensor) for tensor in spec.tensors()],
        "outputs": list(spec.outputs) if spec.outputs else None,
        "dims": [asdict(dim) for dim in spec.named_dims()],
    }
