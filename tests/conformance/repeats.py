"""Two builds of one request, in two processes and two folders, held to what the backend claims of them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from builders.backends.discovery import check_compatible
from enginesmith.core.capabilities import Determinism
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.hardware.machine import parse_targets
from tests.conformance.items import torture_item
from tests.conformance.torture import GRAPHS
from tests.conformance.trial import answer_reason, backend_of, fresh, read_item, request_for

# A stack of matrices, a convolution and a quantized one: TensorRT's convolutions are known not to repeat.
REPEATED = ("plain", "plain_with_one_shape_alone", "quantized_weight")


def build_all(backend: str, target: str, out: str, workdir: Path, names: Sequence[str] = REPEATED) -> dict[str, str]:
    """Digest of the engine of each graph that is not refused; answers at each graph's first feed go to `out`.npz."""
    tool, (hardware,) = backend_of(backend), parse_targets(target)
    digests, answers = {}, {}
    for name in names:
        try:
            digests[name], answer = _built(tool, hardware, name, workdir)
        except EnginesmithError:
            continue
        answers |= {f"{name}/{output}": array for output, array in answer.items()}
    np.savez(out, **answers)
    return digests


def _built(tool: Any, hardware: Any, name: str, workdir: Path) -> tuple[str, Mapping[str, Any]]:
    item = torture_item(name)
    path, *specs = model = read_item(item, workdir)
    engine = tool.build(request_for(tool, hardware, model, item.dims, item.precision), path, fresh(workdir / "engine"))
    if tool.runs(hardware):
        return engine.digest, {}
    check_compatible(tool, engine)
    with tool.open(engine) as session:
        return engine.digest, session.run(item.runs(*specs)[0].inputs)


def broken_claims(
    claim: Determinism, digests: Sequence[Mapping[str, str]], answers: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Where two builds differ by more than the backend says that they may."""
    if digests[0].keys() != digests[1].keys():
        yield f"one build refuses what another takes: {sorted(digests[0].keys() ^ digests[1].keys())}"
    for name in digests[0].keys() & digests[1].keys():
        if claim == "bytes" and digests[0][name] != digests[1][name]:
            yield f"{name}: claims 'bytes', and two engines are {digests[0][name][:12]} and {digests[1][name][:12]}"
    for name in answers[0].keys() & answers[1].keys():
        one, two = answers[0][name], answers[1][name]
        if claim != "budget" and (one.shape, one.dtype, one.tobytes()) != (two.shape, two.dtype, two.tobytes()):
            yield f"{name}: claims {claim!r}, and two engines answer with other bits"
        if reason := answer_reason({name: two}, {name: one}, GRAPHS[name.partition("/")[0]].precision):
            yield f"two engines differ by more than the budgets: {reason}"
