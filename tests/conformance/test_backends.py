"""What every installed backend promises, held to it: one suite for all of them (docs/reference/conformance.md)."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from builders.backends import discovery
from builders.execution.process import run_job
from enginesmith.core import codec
from enginesmith.core.capabilities import Determinism
from enginesmith.core.hardware import machine
from enginesmith.core.hardware.evaluation import judge
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.requirements import Requirement, Runtime, hardware_of
from enginesmith.core.types import PRECISIONS, BuildRequest, QuantizationScheme, TensorSpec
from tests.calls import call_job
from tests.conformance import page
from tests.conformance.repeats import REPEATED, broken_claims
from tests.conformance.survey import survey
from tests.conformance.torture import GRAPHS
from tests.conformance.trial import backend_of, target_for

ALL = discovery.names()
# These take seconds to build a graph, and are tried where all is asked for.
SLOW = ("aotinductor", "iree", "tvm", "xla")
ALL_OF_IT = os.environ.get("ENGINESMITH_CONFORMANCE") == "all"
INSTALLED = [
    name
    for name in ALL
    if (name not in SLOW or ALL_OF_IT) and backend_of(name).versions() and target_for(backend_of(name))
]
# Of compilers there is one that is quick and everywhere.
TRIED = [name if name == "onnxruntime" else pytest.param(name, marks=pytest.mark.slow) for name in INSTALLED]
HEAVY = ("numpy", "onnx", "onnxruntime", "tensorrt", "tensorrt_rtx", "torch", "tvm", "iree", "jax", "torchax", "ray")


def target(name: str) -> str:
    result = target_for(backend_of(name))
    assert result is not None
    return result.name


def call(function: str, folder: Path, **arguments: object):
    """A function of the suite in a process of its own."""
    folder.mkdir()
    return run_job(call_job("conformance", f"tests.conformance.{function}", arguments), folder)


def probe(name: str, hardware: machine.Target, precision: str) -> BuildRequest:
    tensor = (TensorSpec("x", "float32", (1, 4)),)
    return BuildRequest("0" * 64, precision, hardware, name, tensor, tensor, ())


@pytest.mark.parametrize("name", TRIED)
def test_every_graph_is_answered_correctly_or_refused_with_its_name(name, tmp_path):
    graphs = list(GRAPHS)
    result = survey(name, target(name), "torture", graphs, tmp_path)
    if folder := os.environ.get("ENGINESMITH_CONFORMANCE_FOUND"):
        page.keep(Path(folder), name, result)
    assert list(result) == graphs
    assert [f"{o.name}: {o.kind} at {o.by}: {o.reason}" for o in result.values() if not o.good] == []
    assert [f"{o.name}: {o.reason}" for o in result.values() if _refuses_the_plain(o)] == []
    assert [f"{o.name}: {o.reason}" for o in result.values() if _names_nothing(o)] == []


def _refuses_the_plain(outcome) -> bool:
    return outcome.kind == "refused" and GRAPHS[outcome.name].core


def _names_nothing(outcome) -> bool:
    words = GRAPHS[outcome.name].words
    return outcome.kind == "refused" and not (words and re.search(words, outcome.reason))


@pytest.mark.parametrize("name", TRIED)
def test_sessions_and_openings_keep_every_promise(name, tmp_path):
    assert call("survey:behave", tmp_path / "job", backend=name, target=target(name)) == []


@pytest.mark.parametrize("name", TRIED)
def test_streams_of_stateful_models_answer_like_single_streams(name, tmp_path):
    result = call("streams:behave", tmp_path / "job", backend=name, target=target(name))
    messages = [f"{model}: {text}" for model, texts in result.items() for text in texts]
    # Some compilers have no empty tensors, which a cache begins as.
    assert [text for text in messages if not re.match("cached(, int8)?: refused: ", text)] == []


@pytest.mark.parametrize("name", TRIED)
def test_two_builds_are_as_equal_as_the_backend_claims(name, tmp_path):
    digests, answers = [], []
    for turn in ("first", "second"):
        out_path = tmp_path / f"{turn}.npz"
        arguments = {"backend": name, "target": target(name), "out": str(out_path), "names": REPEATED}
        digests.append(call("repeats:build_all", tmp_path / f"job-{turn}", **arguments))
        with np.load(out_path) as stored_arrays:
            answers.append(dict(stored_arrays))
    assert digests[0], "nothing was built"
    assert list(broken_claims(backend_of(name).capabilities.determinism, digests, answers)) == []


@pytest.mark.parametrize("name", ALL)
def test_a_backend_implements_the_protocol(name):
    cls = discovery.load(name)
    assert cls.name == name and isinstance(cls.revision, int) and cls.revision >= 1
    assert cls.install.strip() and cls.capabilities.determinism in get_args(Determinism)
    assert cls.__dataclass_params__.frozen, "options are values"
    backend = discovery.configure(name, {})
    assert isinstance(backend.scheme, QuantizationScheme)
    assert json.loads(json.dumps(discovery.options_of(backend))) == [
        list(item) for item in discovery.options_of(backend)
    ]
    assert dataclasses.replace(backend) == backend and hash(backend) == hash(dataclasses.replace(backend))
    assert all(isinstance(item, str) and item for pair in backend.versions().items() for item in pair)


@pytest.mark.parametrize("name", ALL)
def test_a_refusal_of_an_unsupported_request_has_a_reason_and_a_remedy(name):
    backend = backend_of(name)
    for hardware in machine.parse_targets("all"):
        for precision in PRECISIONS:
            reason = backend.refuses(probe(name, hardware, precision))
            assert reason is None or re.search(r"\S+.*[;:,] .*\S+", reason), f"{hardware.name} {precision}: {reason!r}"
            assert reason or backend.serves(hardware), f"{hardware.name} is not served and not refused"
        if not backend.serves(hardware):
            assert backend.runs(hardware), "what is not served does not run"


@pytest.mark.parametrize("name", ALL)
def test_requirements_depend_only_on_the_request_and_name_processor_and_runtime(name):
    backend = backend_of(name)
    for hardware in filter(backend.serves, machine.parse_targets("all")):
        request = dataclasses.replace(
            probe(name, hardware, "fp16"), toolchain=discovery.toolchain_of(backend, hardware)
        )
        requires = backend.requires(request)
        assert requires == backend.requires(request) and len(set(requires)) == len(requires)
        processor = hardware_of(requires)
        assert processor is requires[0] and judge(processor, Machine.of(hardware)).state == "met"
        assert not backend.versions() or any(isinstance(item, Runtime) for item in requires)
        document = json.loads(json.dumps(codec.encode(requires)))
        assert codec.decode(document, tuple[Requirement, ...]) == tuple(requires)


@pytest.mark.parametrize("name", ALL)
def test_a_missing_backend_refuses_with_the_installation(name, monkeypatch):
    cls = discovery.load(name)
    served_targets = [hardware for hardware in machine.parse_targets("all") if backend_of(name).serves(hardware)]
    monkeypatch.setattr(cls, "versions", lambda self: {})
    reasons = [backend_of(name).refuses(probe(name, hardware, "fp16")) for hardware in served_targets]
    assert None not in reasons
    assert any("pip install" in reason for reason in reasons), reasons


def test_queries_import_no_compiler():
    code = f"""if True:
        import sys
        from builders.backends import discovery
        from builders.backends.discovery import find_incompatibility
        from enginesmith.core.hardware import machine
        from enginesmith.core.types import PRECISIONS, BuildRequest, TensorSpec
        tensor = (TensorSpec("x", "float32", (1, 4)),)
        for name in discovery.names():
            backend = discovery.configure(name, {{}})
            for target in machine.parse_targets("all"):
                for precision in PRECISIONS:
                    request = BuildRequest("0" * 64, precision, target, name, tensor, tensor, ())
                    backend.serves(target), backend.refuses(request), backend.runs(target)
                    find_incompatibility(backend, request)
                    backend.requires(request)
            backend.scheme, backend.versions(), discovery.options_of(backend)
            if heavy := set({HEAVY!r}) & set(sys.modules):
                sys.exit(f"{{name}} has imported {{heavy}}")
        """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
