"""Which engine of this machine measures what int8 saves."""

import os

from builders.backends import discovery
from builders.backends.shape_profiles import profiles
from enginery.core.hardware.cpu_kinds import this_kind, why_no_proof
from enginery.core.types import Backend, BuildRequest, Target
from pipeline.compile.jobs.ranges import LatencyProbe
from pipeline.spec.model import ModelSpec
from pipeline.values import Exported, Searched


def find_latency_probe(kind: Searched, spec: ModelSpec, exported: Exported) -> LatencyProbe | None:
    """What to build and where, for one kind of int8; None when the spec does not ask for measuring.

    On another kind of CPU, or with another number of cores, the times are measured anew.
    """
    if spec.quantization.latency == "ignore":
        return None
    tools = [discovery.configure(name, options) for name, options in spec.backends.items()]
    pairs = [(tool, target) for tool in tools for target in spec.target_list() if tool.serves(target)]
    reasons = []
    for tool, target in pairs:
        scheme = tool.scheme()
        if Searched(scheme.activation, scheme.weight_levels) != kind:
            continue
        request = _request(tool, target, spec, exported)
        reason = tool.refuses(request) or tool.runs(target) or why_no_proof(request)
        if reason is None:
            return LatencyProbe(request, this_kind().name, os.cpu_count() or 1)
        reasons.append(reason)
    return LatencyProbe(cannot=reasons[0] if reasons else f"no target of this spec takes {kind.name}")


def _request(tool: Backend, target: Target, spec: ModelSpec, exported: Exported) -> BuildRequest:
    model = exported.model
    shapes = tuple(profiles(model.inputs, spec.named_dims())) if not target.is_cpu else ()
    options, toolchain = discovery.options_of(tool), discovery.toolchain_of(tool, target)
    return BuildRequest(
        model.digest, "int8", target, tool.name, model.inputs, model.outputs, shapes, options, toolchain
    )
