import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from builders.backends import discovery
from builders.backends.onnxruntime import OnnxRuntime
from enginesmith.core.errors import EnginesmithError, InputError, UnknownNameError
from tests.builders import graphs


@pytest.mark.parametrize("name", sorted({*discovery.names()} - {"onnxruntime"}))
def test_a_backend_for_one_file_refuses_weights_beside_it_with_the_reason(name):
    backend = discovery.configure(name, {})
    reason = discovery.refuse_shards(backend, 3 << 30)
    assert reason and "(3.0 GiB)" in reason and f"one ONNX file ends at 2 GB (protobuf), and {name} takes" in reason
    assert discovery.refuse_shards(backend, 0) is None


def test_an_unknown_backend_names_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'tensorrt-rtx'"):
        discovery.load("tensorrtrtx")


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("tensorrt-llm", "TensorRT-LLM"),
        ("tensorrt_llm", "TensorRT-LLM"),
        ("TRTLLM", "TensorRT-LLM"),
        ("mlc", "MLC LLM"),
    ],
)
def test_an_llm_stack_is_refused_with_the_remedy_and_without_a_suggestion(name, title):
    with pytest.raises(UnknownNameError) as error:
        discovery.load(name)
    assert title in str(error.value) and "did you mean" not in str(error.value)
    page = re.search(r"docs/decisions/[\w.-]+\.md", str(error.value))
    assert page and (Path(__file__).parents[3] / page[0]).exists()


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(InputError, match=r"backends\.tensorrt\.optimisation_level.*did you mean 'optimization_level'"):
        discovery.configure("tensorrt", {"optimisation_level": 3})


@pytest.mark.parametrize("value", ["3", 3.0, True, None, [3]])
def test_a_wrong_type_names_value_and_remedy(value):
    with pytest.raises(InputError, match="give an integer, such as"):
        discovery.configure("tensorrt", {"optimization_level": value})


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("aotinductor", {"cpu": "native"}, "cpu: 'native' is not one of 'host'"),
        ("aotinductor", {"threads": -1}, "threads: -1 is negative"),
        ("iree", {"cpu": "znver4"}, "cpu: .* is not one of '"),
        ("iree", {"optimization": "O4"}, "optimization: .* is not one of '"),
        ("onnxruntime", {"graph_optimization": "most"}, "graph_optimization: 'most' is not one of"),
        ("onnxruntime", {"intra_op_threads": -1}, "intra_op_threads: -1 is negative"),
        ("tensorrt", {"hardware_compatibility": "volta"}, "hardware_compatibility: 'volta' is not one of"),
        ("tensorrt", {"layer_information": "all"}, "layer_information: 'all' is not one of"),
        ("tensorrt", {"optimization_level": 6}, "optimization_level: 6 is not in 0..5"),
        ("tensorrt-rtx", {"profiles": "many"}, r"profiles: 'many' is not one of 'per-bucket', 'wide'"),
        ("tensorrt-rtx", {"strip_weights": True}, "strip_weights: no such option"),
        ("tensorrt-rtx", {"weight_budget_mib": 5}, "weight_budget_mib: .*set weight_streaming: true"),
        ("tensorrt-rtx", {"workspace_mib": -1}, "workspace_mib: -1 is negative"),
        ("tvm", {"cpu": "znver4"}, "cpu: 'znver4' is not one of 'x86-64'"),
        ("xla", {"kept_sizes": 0}, "kept_sizes"),
        ("xla", {"matmul_precision": "most"}, "matmul_precision"),
    ],
)
def test_an_invalid_option_is_named_with_its_place(name, options, words):
    with pytest.raises(InputError, match=rf"backends\.{name}\.{words}"):
        discovery.configure(name, options)


def test_options_of_gives_every_field_sorted_with_defaults():
    for name in discovery.names():
        options = discovery.options_of(discovery.configure(name, {}))
        fields = discovery.option_fields(discovery.load(name))
        assert options == tuple(sorted((key, default) for key, (_, default) in fields.items()))


def test_a_node_with_other_versions_than_the_plan_refuses_to_build():
    backend = discovery.configure("onnxruntime", {})
    toolchain = discovery.toolchain_of(backend)
    discovery.check_toolchain(backend, graphs.request("cpu", toolchain=toolchain))
    planned_request = graphs.request("cpu", toolchain=tuple({**dict(toolchain), "onnxruntime": "0.1"}.items()))
    with pytest.raises(EnginesmithError, match=r"differs from the plan: it has onnxruntime .*, not 0\.1;"):
        discovery.check_toolchain(backend, planned_request)


@pytest.mark.parametrize("name", discovery.names())
def test_every_option_has_a_description(name):
    """`enginesmith backends list NAME` shows these lines of the docstrings."""
    cls = discovery.load(name)
    meanings = discovery.option_meanings(cls)
    assert set(meanings) == set(discovery.option_fields(cls))
    assert all(len(text) > 15 and "`" not in text and text.endswith(".") for text in meanings.values()), meanings


def test_a_backend_that_inherits_capabilities_must_say_so(monkeypatch):
    class Inherits(OnnxRuntime):
        pass

    class Declares(OnnxRuntime):
        capabilities = OnnxRuntime.capabilities

    def named(cls):
        entry = SimpleNamespace(load=lambda: cls, value="third.party:Backend")
        monkeypatch.setattr(discovery, "_entries", lambda: {"third": entry})
        return discovery.load("third")

    assert named(Declares) is Declares
    with pytest.raises(EnginesmithError, match=r"inherits the capabilities of OnnxRuntime.*capabilities = OnnxRuntime"):
        named(Inherits)
