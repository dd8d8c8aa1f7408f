from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from enginesmith.client.layouts.protobuf_text import write_message
from enginesmith.core.errors import InputError
from pipeline.drafts.facts import FoundModel
from pipeline.drafts.onnx_model import ProtoMessage, look_at_triton, parse
from pipeline.drafts.text import write_spec
from pipeline.spec.ensembles.model import load_ensemble
from pipeline.spec.model import load_spec
from tests.pipeline.drafts.graphs import halving
from tests.pipeline.projects import exit_code
from tests.pipeline.quantization.small_nets import build

CONFIG = """
name: "detector"   # as the server calls it
platform: "onnxruntime_onnx"
max_batch_size: 16
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] } ]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }
"""


def repository(folder: Path, text: str = CONFIG) -> Path:
    (folder / "2").mkdir(parents=True)
    halving(folder / "2" / "model.onnx")
    (folder / "config.pbtxt").write_text(text)
    return folder / "config.pbtxt"


def test_name_and_batch_sizes_equal_the_configuration(tmp_path: Path) -> None:
    triton = look_at_triton(repository(tmp_path / "m"), tmp_path / "m")
    assert (triton.name, triton.source) == ("detector", {"onnx": "2/model.onnx"})
    batch = triton.dims["batch"]
    assert (batch.min, batch.opt, batch.max, batch.why) == (1, 8, 16, "max_batch_size is 16")


def sized(folder: Path, config: str, shape: str = "n,3,h,w") -> FoundModel:
    """A look at a configuration beside a model of which no axis but the channels is fixed."""
    (folder / "1").mkdir(parents=True)
    onnx.save(build(f"float[{shape}] x", f"float[{shape}] y", "y = Relu(x)", {}), folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(config)
    return look_at_triton(folder / "config.pbtxt", folder)


def test_configuration_that_contradicts_the_model_is_reported(tmp_path: Path) -> None:
    result = sized(tmp_path, "max_batch_size: 4 input {name: 'z' dims: [3, 5, 5]} input {name: 'x' dims: [192]}")
    assert "config.pbtxt: input 'z', which the model does not have; it has x" in result.notes
    assert "config.pbtxt: input 'x' has 1 size, but the model takes 3: ignored" in result.notes
    right_notes = sized(tmp_path / "right", "max_batch_size: 4 input {name: 'x' dims: [3, -1, 192]}").notes
    assert not any("input" in note for note in right_notes)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (
            "max_batch_size: 4 input [{name: 'x' dims: [3, 160, 192]}]",
            {"batch": (1, 4), "height": (160, 160), "width": (192, 192)},
        ),
        ("max_batch_size: 0x10 input {name: 'x' dims: [3, 0240, 192]}", {"batch": (1, 16), "height": (160, 160)}),
        ("max_batch_size: 0 input {name: 'x' dims: [2, 3, -1, 192]}", {"batch": (2, 2), "width": (192, 192)}),
        (
            "input {name: 'x' dims: [3, 192] reshape {shape: [1, 3, 192, 64]}}",
            {"batch": (1, 1), "height": (192, 192), "width": (64, 64)},
        ),
        ("max_batch_size: 4 input {name: 'z' dims: [3, 5, 5]} input {name: 'x' dims: [192]}", {"batch": (1, 4)}),
        ("input {name: 'x' dims: [[3]", "a list may not contain a list"),
        *((f"max_batch_size: {digits}{4300 * '0'}", "000... is a number of") for digits in ("0x1", "1", "0")),
        ("max_batch_size: '²' input {name: 'x' dims: ['³', 3, -1, 192]}", {"width": (192, 192)}),
    ],
)  # fmt: skip
def test_served_sizes_equal_the_specs(tmp_path, config, sizes):
    if isinstance(sizes, str):
        with pytest.raises(InputError, match=sizes):
            sized(tmp_path, config, "batch,3,height,width")
        return
    result = sized(tmp_path, config, "batch,3,height,width")
    assert {name: (result.dims[name].min, result.dims[name].max) for name in sizes} == sizes
    untouched_names = result.dims.keys() - sizes.keys()
    assert all(result.dims[name].max >= 8 for name in untouched_names)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ("instance_group [{kind: KIND_GPU count: 2 gpus: [0]}]", "targets: [gpu] "),
        ("instance_group [{kind: KIND_GPU}, {kind: KIND_CPU}]", "targets: [cpu, gpu] "),
        ("instance_group [{kind: KIND_CPU}]", "targets: [cpu] "),
        ("instance_group [{count: 1}]", "targets: [cpu] "),
        ("", "targets: [cpu] "),
    ],
)
def test_the_serving_device_becomes_the_target_of_the_spec(tmp_path: Path, config: str, line: str) -> None:
    text = write_spec(sized(tmp_path, config))
    assert line in text and yaml.safe_load(text)["targets"]


# As NVIDIA's examples write them: an image classifier with labels, instances and dynamic batching.
BY_HAND = """
name: "densenet_onnx"
platform: "onnxruntime_onnx"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 224, 224 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] label_filename: "names.txt" } ]
instance_group [ { kind: KIND_GPU count: 2 gpus: [ 0 ] } ]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 preserve_ordering: true }
version_policy: { specific: { versions: [ 1 ] } }
response_cache { enable: true }
"""


def test_a_manual_configuration_is_kept_and_its_rest_reported(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("a\nb\n")
    result = sized(tmp_path, BY_HAND)
    (tmp_path / "densenet.yaml").write_text(write_spec(result))
    spec = load_spec(tmp_path / "densenet.yaml")
    assert (spec.serve, spec.version, spec.targets) == ("triton", "1", ("gpu",))
    expected = {"batch": (1, 8), "h": (224, 224), "w": (224, 224)}
    assert {name: (dim.min, dim.max) for name, dim in spec.dims.items()} == expected
    assert spec.triton.model_dump() == {
        "instances": 2,
        "preferred_batch_sizes": (4, 8),
        "max_queue_delay_us": 100,
        "labels": {"y": "names.txt"},
    }
    dropped_names = {note.split(": ")[1] for note in result.notes if "because specs have no such key" in note}
    assert dropped_names == {"response_cache", "dynamic_batching.preserve_ordering", "instance_group.gpus"}


@pytest.mark.parametrize(
    ("policy", "count"),
    [
        ("specific { versions: [1, 3] }", 2),
        ("latest { num_versions: 2 }", 2),
        ("latest {}", 1),
        ("specific { versions: [1, 1] }", 1),
    ],
)
def test_of_several_versions_that_are_served_one_is_taken_and_the_others_are_reported(
    tmp_path: Path, policy: str, count: int
) -> None:
    text = "config.pbtxt: version_policy: serves 2 versions, but a spec builds one: 1/model.onnx is used"
    assert (text in sized(tmp_path, f"version_policy {{ {policy} }}").notes) == (count > 1)


def test_a_missing_label_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"output 'y' has the label file 'names.txt', not a file in"):
        sized(tmp_path, BY_HAND)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('platform: "tensorrt_plan"', "platform 'tensorrt_plan'"),
        ('default_model_filename: "other.onnx"', "no other.onnx beside it"),
        ("input [ { name: 'x' ", "the list has no end|ends before"),
        ("a: }", "a value is missing"),
        ("\x00", "line 1: invalid token"),
        ("a: 1\noutput {label_filename: '\\000'}", "line 2: .* has a NUL"),
        ("a " + "{ a " * 50, "deep"),
        ("platform: 'ensemble'", "run `enginesmith init "),
    ],
)
def test_mistakes_are_reported(tmp_path: Path, text: str, words: str) -> None:
    config = repository(tmp_path / "m", text)
    with pytest.raises(InputError, match=words):
        look_at_triton(config, tmp_path / "m")


@given(st.text(alphabet="ab{}[]<>:,;\"' #\n\\1", max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        parse(text)
    except ValueError:
        return


@given(st.text(st.characters(codec="utf-8", min_codepoint=1), max_size=8))
def test_a_name_that_was_written_is_read(name: str) -> None:
    assert parse(write_message({"name": name})).text("name") == name


def test_escapes_are_resolved() -> None:
    assert parse(r"name: '\x41\101\n\?'").text("name") == "AA\n?"


WORDS = st.text(alphabet="abc_", min_size=1, max_size=4)
MESSAGES = st.recursive(
    st.dictionaries(WORDS, st.lists(WORDS, min_size=1, max_size=3), max_size=3),
    lambda inner: st.dictionaries(WORDS, st.lists(inner, min_size=1, max_size=2), max_size=2),
    max_leaves=8,
)


def as_text(message: object) -> str:
    if isinstance(message, str):
        return f'"{message}"'
    assert isinstance(message, dict)
    return "{" + " ".join(f"{name}: [{', '.join(map(as_text, items))}]" for name, items in message.items()) + "}"


def as_plain(message: ProtoMessage) -> object:
    return {
        name: [item if isinstance(item, str) else as_plain(item) for item in items]
        for name, items in message.fields.items()
    }


@given(MESSAGES)
def test_written_text_can_be_parsed(message: dict[str, object]) -> None:
    assert as_plain(parse(as_text(message)[1:-1])) == message


ENSEMBLE = """platform: "ensemble" max_batch_size: 8
input { name: "IMAGE" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] }
output { name: "SCORES" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] }
ensemble_scheduling { step [
  { model_name: "head" model_version: -1 input_map { key: "x" value: "features" }
    output_map { key: "y" value: "SCORES" } },
  { model_name: "backbone" model_version: -1 input_map { key: "x" value: "IMAGE" }
    output_map { key: "y" value: "features" } }
] }
"""


def write_ensemble(folder: Path, text: str) -> Path:
    """A repository with an ensemble of a backbone and a head; its configuration."""
    for name in ("backbone", "head"):
        repository(folder / name, 'platform: "onnxruntime_onnx" max_batch_size: 8')
    (folder / "net").mkdir()
    (folder / "net" / "config.pbtxt").write_text(text)
    return folder / "net" / "config.pbtxt"


def test_the_steps_of_an_ensemble_become_its_graphs_in_the_order_of_the_data(tmp_path, capsys):
    config = write_ensemble(tmp_path, ENSEMBLE)
    assert exit_code("init", config) == 0
    assert "head.x: backbone.y: as in config.pbtxt" in capsys.readouterr().err
    np.savez(tmp_path / "golden.npz", IMAGE=np.zeros((8, 3, 8, 8), np.float32))
    loaded_ensemble = load_ensemble(tmp_path / "net.yaml")
    assert {name: graph.source.onnx for name, graph in loaded_ensemble.graphs.items()} == {
        name: f"{name}/2/model.onnx" for name in ("backbone", "head")
    }
    assert loaded_ensemble.spec.connections == {"backbone.x": "IMAGE", "head.x": "backbone.y"}
    assert loaded_ensemble.spec.outputs == ("head.y",) and loaded_ensemble.graphs["head"].dims["batch"].max == 8


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"IMAGE" }', '"SCORES" }', "each of the steps head, backbone takes what another gives"),
        ('value: "SCORES"', 'value: "other"', "no step gives the output 'SCORES'"),
        ('model_name: "head"', 'model_name: "net"', "net/config.pbtxt is of the platform 'ensemble'"),
        ('model_name: "head"', 'model_name: "gone"', "gone/config.pbtxt does not exist"),
    ],
)
def test_an_ensemble_that_is_none_is_refused(tmp_path, capsys, old, new, words):
    config = write_ensemble(tmp_path, ENSEMBLE.replace(old, new))
    assert exit_code("init", config) == 2 and words in capsys.readouterr().err
