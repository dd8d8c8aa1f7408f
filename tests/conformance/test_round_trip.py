"""The examples through every installed backend, the way a user's models go: exported, quantized, built, proven.

One run for each example builds it with all backends, so that exporting is paid for once.
"""

import shutil
from pathlib import Path

import pytest
import yaml

import enginesmith
from enginesmith.core.hardware import machine
from enginesmith.core.types import BuildRequest, TensorSpec
from tests.conformance.test_backends import ALL_OF_IT, INSTALLED
from tests.conformance.trial import backend_of, target_for

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.skipif(not ALL_OF_IT, reason="make conformance runs it; what is quick is in tests/pipeline, too")
@pytest.mark.parametrize("example", ["digits", "encoder"])
def test_an_example_is_proven_if_it_runs_here_and_else_built(example, tmp_path):
    outcome = enginesmith.build(spec_for_all(example, tmp_path), registry=str(tmp_path / "registry"))
    result = {(engine.entry.backend, engine.entry.target): engine for engine in outcome.engines}
    for name in INSTALLED:
        backend, target = backend_of(name), target_for(backend_of(name))
        engine = result[name, target.name].entry
        if example == "encoder" and takes_one_size(name, target) and engine.status == "refused":
            continue
        expected = "unproven" if backend.runs(target) else "proven"
        assert engine.status == expected, f"{name}: {engine.status}: {engine.reason}"
    assert outcome.version is not None


def spec_for_all(example: str, folder: Path) -> Path:
    """The example in one precision, with every installed backend and the targets that these are tried on."""
    shutil.copytree(EXAMPLES / example, folder / example)
    path = folder / example / f"{example}.yaml"
    spec = yaml.safe_load(path.read_text())
    chosen = {target_for(backend_of(name)).name for name in INSTALLED}
    spec |= {"backends": {name: {} for name in INSTALLED}, "targets": sorted(chosen), "precisions": ["fp32"]}
    spec |= {"validation": {"latency": "off", "attribution": "off"}, "calibration": None}
    path.write_text(yaml.safe_dump({key: value for key, value in spec.items() if value is not None}))
    return path


def takes_one_size(name: str, target: machine.Target) -> bool:
    """Whether a backend refuses what has dynamic dims."""
    dynamic_specs = (TensorSpec("x", "float32", ("n", "t")),)
    backend = backend_of(name)
    return backend.refuses(BuildRequest("0" * 64, "fp32", target, name, dynamic_specs, dynamic_specs, ())) is not None
