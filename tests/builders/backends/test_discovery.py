import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from builders.backends import discovery
from builders.backends.onnxruntime import OnnxRuntime
from enginesmith.core.errors import EnginesmithError, InputError, UnknownNameError
from tests.builders import graphs


@pytest.mark.parametrize("name", sorted({*discovery.names()} - {"onnxruntime"}))
def test_a_backend_that_takes_one_file_refuses_weights_beside_it_and_says_why(name):
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
def test_an_llm_stack_is_refused_with_the_remedy_and_not_taken_for_a_typing_mistake(name, title):
    with pytest.raises(UnknownNameError) as caught:
        discovery.load(name)
    assert title in str(caught.value) and "did you mean" not in str(caught.value)
    page = re.search(r"docs/decisions/[\w.-]+\.md", str(caught.value))
    assert page and (Path(__file__).parents[3] / page[0]).exists()


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(InputError, match=r"backends\.tensorrt\.optimisation_level.*did you mean 'optimization_level'"):
        discovery.configure("tensorrt", {"optimisation_level": 3})


@pytest.mark.parametrize("value", ["3", 3.0, True, None, [3]])
def test_a_wrong_type_names_value_and_remedy(value):
    with pytest.raises(InputError, match="give an integer, such as"):
        discovery.configure("tensorrt", {"optimization_level": value})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tensorrt", {"optimization_level": 6}),
        ("tensorrt-rtx", {"workspace_mib": -1}),
        ("onnxruntime", {"graph_optimization": "most"}),
        ("onnxruntime", {"intra_op_threads": -1}),
    ],
)
def test_a_value_out_of_range_is_an_input_error(name, options):
    with pytest.raises(InputError, match=next(iter(options))):
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
    planned = graphs.request("cpu", toolchain=tuple({**dict(toolchain), "onnxruntime": "0.1"}.items()))
    with pytest.raises(EnginesmithError, match=r"onnxruntime .*, not 0\.1, which the plan was made for"):
        discovery.check_toolchain(backend, planned)


@pytest.mark.parametrize("name", discovery.names())
def test_every_option_says_what_it_means(name):
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
