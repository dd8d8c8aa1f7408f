import os
import subprocess
import sys

import pytest

from builders.backends import discovery
from builders.execution.jobs import encode_request
from enginesmith.core.types import BuildRequest, Target
from enginesmith.registry.store.base import open_store
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.engines import BuildEngine, recall_engine
from tests.builders import graphs
from tests.builders.execution.ray.conftest import ROOT
from tests.waiting import gone, text_of

pytest.importorskip("ray")
pytestmark = [pytest.mark.server, pytest.mark.slow]

DRIVER = """
import json, sys
from builders.execution.ray import RayExecutor
from builders.execution.jobs import decode_request
from builders.execution.jobs import Job
from tests.calls import call_job
address, store, request, noted = sys.argv[1:]
with RayExecutor(address) as executor:
    executor.run(Job("unit", decode_request(json.loads(request)), store))
    executor.run(call_job("endless", "tests.builders.jobs:spawn", {"path": noted, "wait": True}))
"""


def test_a_killed_driver_loses_no_finished_engine(fleet, tmp_path):
    import json

    store = open_store(str(tmp_path / "registry"), create=True)
    model = store.put_file(graphs.mlp(tmp_path / "model.onnx"))
    backend = discovery.configure("onnxruntime", {})
    options, toolchain = discovery.options_of(backend), discovery.toolchain_of(backend)
    tensors = (graphs.IMAGE,), (graphs.LOGITS,), ()
    request = BuildRequest(model, "fp32", Target("cpu"), "onnxruntime", *tensors, options, toolchain)
    build = json.dumps(encode_request(BuildEngine(request)))
    noted_path = tmp_path / "pid"
    words = [sys.executable, "-c", DRIVER, fleet.address, store.uri, build, str(noted_path)]
    driver = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(ROOT)})
    grandchild = int(text_of(noted_path))
    driver.kill()
    driver.wait()
    result = recall_engine(request, RunContext(store, None, None))
    assert result and store.has(result.digest)
    assert gone(grandchild)
