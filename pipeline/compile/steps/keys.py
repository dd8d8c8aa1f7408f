"""What the steps have in common: their limits, what their keys hold of code, the shapes of a spec."""

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from builders.execution.jobs import ProcessLimits
from enginesmith.core.codec import encode
from enginesmith.core.types import Precision
from pipeline.compile.closure.code import Root, find_code
from pipeline.compile.run_context import versions
from pipeline.values import Json, ModelShapes
from validation.metrics.tasks.terms import TaskMetric

if TYPE_CHECKING:
    from pipeline.spec.model import ModelSpec

# Nearly all of this machine's memory: a runaway step must not take the machine with it.
HOST_MEMORY_MIB = int(0.9 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) >> 20
# What makes the first of the two records of an export: another golden set needs no new export.
WRITE_MODEL = ("pipeline.sources.export:write_model", "pipeline.compile.steps.export_model:store_model")
# Packages that no code of ours imports: PyTorch's exporter is written in it.
_BEHIND = {"torch": ("onnxscript",)}
_DISTRIBUTIONS = {"google": "protobuf", "onnx_ir": "onnx-ir"}


def code_key(*roots: Root) -> Json:
    """What a step's key holds of code: a digest of what its request can reach, and the versions of the packages that
    this imports. The step runs again when either changes; an engine does not, and its build key leaves them out.

    roots: the request's class, and what it finds by name at run time (`closure.code.backend_root`).
    """
    found = find_code(*roots)
    return {"versions": package_versions(*found.packages), "code": found.digest}


def package_versions(*packages: str) -> dict[str, str]:
    """Installed versions by distribution, of packages as `import` names them, and of what stands behind those."""
    behind = [name for package in packages for name in _BEHIND.get(package, ())]
    return versions(*(_DISTRIBUTIONS.get(name, name) for name in (*packages, *behind)))


def step_limits(
    spec: "ModelSpec", step: Literal["export", "calibration", "quantization", "proof", "attribution"]
) -> ProcessLimits:
    """What the process of a step that works on the model may use: the spec's time, most of the machine's memory."""
    remedies = f"raise timeouts.{step}_s in the spec", "run it on a machine with more memory"
    return ProcessLimits(getattr(spec.timeouts, f"{step}_s"), HOST_MEMORY_MIB, *remedies)


def engine_limits(spec: "ModelSpec", step: Literal["build", "proof", "latency"]) -> ProcessLimits:
    """What the process of a step that builds or runs an engine may use: the spec's time, and build.memory_mib."""
    if step == "build":
        key, timeout_s = "build.timeout_s", spec.build.timeout_s
    else:
        key, timeout_s = f"timeouts.{step}_s", getattr(spec.timeouts, f"{step}_s")
    remedies = f"raise {key} in the spec", "raise build.memory_mib in the spec"
    return ProcessLimits(timeout_s, spec.build.memory_mib, *remedies)


def limits_of(
    spec: "ModelSpec", precision: Precision, stage: Literal["export", "quantization", "engine"]
) -> dict[str, float]:
    """The limits that the spec sets for the checks of a stage, by metric."""
    from pipeline.spec.model import overrides  # with pydantic, which no worker needs

    return dict(overrides(spec, precision, stage))


def metrics_of(spec: "ModelSpec", precision: Precision | None = None) -> tuple[TaskMetric, ...]:
    """The task metrics that the spec asks for. precision: of what they judge; of an export None, where none decides."""
    golden = spec.golden
    return tuple(item.to_terms(precision, golden.labels is not None) for item in golden.metrics) if golden else ()


def model_shapes(spec: "ModelSpec") -> ModelShapes:
    """Inputs and dims of the model."""
    return ModelShapes(tuple(spec.tensors()), tuple(spec.named_dims()))


def shapes_of(spec: "ModelSpec") -> Json:
    """Inputs, names of outputs, and dims of the model, as JSON."""
    return {
        "inputs": [asdict(tensor) for tensor in spec.tensors()],
        "outputs": list(spec.outputs) if spec.outputs else None,
        "dims": [encode(dim) for dim in spec.named_dims()],
    }
