import math
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from enginesmith.core.codec import encode
from enginesmith.core.errors import SpecError
from pipeline.spec.document import _quickly_composed
from pipeline.spec.model import ModelSpec, load_spec
from tests.pipeline.projects import SPEC, Project


def mistakes(project: Project, **parts: Any) -> list[str]:
    project.change_spec(**parts)
    with pytest.raises(SpecError) as error:
        load_spec(project.spec)
    return list(error.value.lines)


def test_a_good_spec_is_read_with_its_groups_expanded(project: Project) -> None:
    project.change_spec(targets=["ampere", "l4", "cpu", "sm_80"], precisions=["int8", "fp32"])
    spec = load_spec(project.spec)
    assert [target.name for target in spec.target_list()] == ["sm_80", "sm_86", "l4", "cpu"]
    assert spec.precision_list() == ("fp32", "int8") and spec.named_dims()[0].buckets() == ((1, 4, 8),)


def test_buckets_become_ranges_tuned_for_their_upper_edge(project: Project) -> None:
    project.change_spec(dims={"batch": {"min": 1, "buckets": [2, 8]}})
    (dim,) = load_spec(project.spec).named_dims()
    assert dim.buckets() == ((1, 2, 2), (3, 8, 8)) and dim.test_sizes() == (1, 2, 3, 8)


def test_a_dim_of_multiples_starts_at_the_first_one(project: Project) -> None:
    project.change_spec(dims={"batch": {"buckets": [8, 16], "multiple": 4}})
    (dim,) = load_spec(project.spec).named_dims()
    assert dim.buckets() == ((4, 8, 8), (12, 16, 16)) and list(dim.sizes) == [4, 8, 12, 16]
    project.change_spec(dims={"batch": {"min": 4, "opt": 8, "max": 16, "multiple": 4}})
    (dim,) = load_spec(project.spec).named_dims()
    assert (dim.min, dim.opt, dim.max, dim.multiple) == (4, 8, 16, 4) and dim.words == "4..16 in steps of 4"


def test_a_spec_without_multiples_keeps_its_old_json(project: Project) -> None:
    project.change_spec(dims={"batch": {"min": 1, "opt": 4, "max": 8, "multiple": 1}})
    spec = load_spec(project.spec)
    assert spec.model_dump(mode="json")["dims"] == {"batch": {"min": 1, "opt": 4, "max": 8, "buckets": None}}
    assert encode(spec.named_dims()[0]).keys() == {"name", "min", "opt", "max", "edges", "multiple"}
    project.change_spec(dims={"batch": {"max": 8, "multiple": 4}})
    assert load_spec(project.spec).model_dump(mode="json")["dims"]["batch"]["multiple"] == 4


def test_one_pad_covers_all_dims_of_an_input_and_a_spec_without_keeps_its_json(project: Project) -> None:
    before = load_spec(project.spec).model_dump(mode="json")["inputs"]["x"]
    assert "pad" not in before
    project.change_spec(inputs={"x": {**before, "pad": "repeat"}})
    assert load_spec(project.spec).model_dump(mode="json")["inputs"]["x"] == {**before, "pad": {"batch": "repeat"}}


@pytest.mark.parametrize(
    ("pad", "message"),
    [
        ({"n": 0}, "inputs.x.pad has dim 'n', which is not an axis of 'x'; name one of"),
        ({"batch": "wrap"}, "must be"),
        ({"batch": 1e39}, "inputs.x.pad is 1e+39, which float32 does not hold"),
    ],
)
def test_impossible_pads_are_refused(project: Project, pad: Any, message: str) -> None:
    lines = mistakes(project, inputs={"x": {"dtype": "float32", "shape": ["batch", 8], "pad": pad}})
    assert any(message in line for line in lines), lines


def test_a_dim_is_padded_by_every_input_that_has_it(project: Project) -> None:
    x = {"dtype": "float32", "shape": ["batch", 8]}
    lines = mistakes(project, inputs={"x": {**x, "pad": 0}, "mask": {"shape": ["batch", 4]}})
    assert any(
        "dim 'batch', which input 'mask' has too and does not pad; add inputs.mask.pad" in line for line in lines
    )
    inputs = {"x": {**x, "pad": 0}, "h": {"shape": ["batch", 4], "pad": 0}}
    lines = mistakes(project, inputs=inputs, state={"h": {"output": "hn", "initial": 0}})
    assert any("a model with state is not padded; remove pad" in line for line in lines)
    fields = {"x": {**x, "pad": 0}, "mask": {"shape": [1, "batch + 1"]}}
    assert any(
        "part of a sum of dims, and those are not padded" in line for line in mistakes(project, state={}, inputs=fields)
    )


def test_names_that_yaml_reads_as_whole_numbers_are_names(project: Project) -> None:
    project.change_spec(
        inputs={387: {"shape": ["batch", 8]}, "a/b:0": {"shape": ["batch", 8]}},
        outputs=[388, "StatefulPartitionedCall:0"],
        golden={**SPEC["golden"], "metric": {"output": 388, "floor": 0.5}},
        validation={"contract": {"structured": {388: {"finite": True}}}},
    )
    spec = load_spec(project.spec)
    assert list(spec.inputs) == ["387", "a/b:0"] and spec.outputs == ("388", "StatefulPartitionedCall:0")
    assert list(spec.validation.contract.structured) == ["388"]
    assert spec.golden and spec.golden.metric and spec.golden.metric.output == "388"
    assert "must be text" in mistakes(project, inputs={True: {"shape": [1]}})[0]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"modle": "x"}, "modle: unknown key; did you mean 'model'?"),
        ({"[x]": "x"}, "[x]: unknown key; known: "),
        ({"source": {"onnx": "tiny.onnx", "int": "w"}}, "source.int: unknown key; "),
        ({"source": {"onnx": "tiny.onnx", "weigths": "w"}}, "source.weigths: unknown key; did you mean 'weights'?"),
        ({"source": {"torch": "m.py:build", "weights": "w.ckpt"}}, "weights: 'w.ckpt': must end in one of .safet"),
        ({"source": {"torch": "my-package.x:build"}}, "must look like 'model.py:build' or 'package.models:build'"),
        ({"source": {"torch": "mine.none:build"}}, "source.torch: 'mine/none.py' does not exist in"),
        ({"model": "Bad Name"}, "model: model name 'Bad Name': use"),
        ({"model": None}, "model: is missing; add it"),
        ({"precisions": ["fp31"]}, "precisions.0: 'fp31' is not known; did you mean 'fp32'?"),
        ({"precisions": ["fp31"], "backends": None}, "precisions.0: 'fp31' is not known; did you mean 'fp32'?"),
        ({"source": {"onnx": 3}, "backends": None}, "source.onnx: 3: must be text"),
        ({"precisions": "fp32"}, "precisions: 'fp32': must be a list"),
        ({"targets": ["sm_98"]}, "targets.0: target 'sm_98' is not supported; known: sm_75,"),
        ({"backends": {"tensort": {}}}, "backends: backend 'tensort' is not known; did you mean 'tensorrt'?"),
        ({"backends": {"onnxruntime": {"threads": 1}}}, "backends: onnxruntime.threads: no such option"),
        ({"outputs": ["y", "z", "y"]}, "outputs: ['y', 'z', 'y']: 'y' is named twice; keep one"),
        ({"dims": {}}, "inputs name dim 'batch', which dims does not define; add dims.batch.max"),
        ({"dims": {"batch": {"min": 1}}}, "dims.batch: has no max; compilers need one; add max, or buckets"),
        ({"dims": {"batch": {"min": 9, "max": 8}}}, "dims.batch: needs min <= opt <= max, found 9, 8, 8"),
        ({"dims": {"batch": {"max": 9, "multiple": 4}}}, "accepts only multiples of 4; change max 9"),
        ({"dims": {"batch": {"min": 1, "buckets": [4, 6], "multiple": 4}}}, "multiples of 4; change min 1, buckets 6"),
        ({"dims": {"batch": {"max": 8, "multiple": 0}}}, "dims.batch.multiple: 0: "),
        ({"dims": {"batch": {"buckets": [4, 2]}}}, "dims.batch: buckets must rise from min=1, found [4, 2]"),
        ({"dims": {"batch": {"max": 8}, "seq": {"max": 2}}}, "dims.seq is used by no input; remove it"),
        ({"source": {"onnx": "../tiny.onnx"}}, "source.onnx: '../tiny.onnx': must be a relative path inside"),
        ({"source": {"onnx": "/etc/passwd"}}, "source.onnx: '/etc/passwd': must be a relative path inside"),
        ({"source": {"onnx": "gone.onnx"}}, "source.onnx: 'gone.onnx' does not exist in"),
        ({"source": {"torch": "model.py"}}, "source.torch: 'model.py': must look like 'model.py:build'"),
        ({"source": {"torch": "m.py:b", "onnx": "tiny.onnx"}}, "source: needs exactly one of torch, pt2, onnx; found"),
        ({"inputs": {"x": {"dtype": "float33", "shape": [1]}}}, "inputs.x.dtype: 'float33' is not known; did you mean"),
        ({"inputs": {"x": {"shape": [0, 8]}}}, "inputs.x.shape.0: 0: "),
        ({"validation": {"canary": {"latency": {"p100": 0.1}}}}, "p100 is not a quantile; use p50, p90, p99, p99.9"),
        ({"validation": {"canary": {"latency": {"p99": 0}}}}, "latency.p99 is 0.0; it must be a number, above 0"),
        ({"validation": {"canary": {"quality": {"scor": 0.1}}}}, "quality.scor: unknown key; did you mean 'score'?"),
        ({"validation": {"limits": {"int8": {"engine": {"argmax_agreement": 2}}}}}, "argmax_agreement: 2: must be 1"),
        ({"validation": {"limits": {"int8": {"engine": {"cosin": 0.9}}}}}, "cosin: unknown key; did you mean 'cosine'"),
        ({"calibration": {"data": "calibration.npz", "percentile": 99.9}}, "minmax accepts no percentile; remove"),
        ({"calibration": {"data": "a.npz:samples"}}, "calibration.data: 'a.npz:samples': must be a file, a folder, or"),
        ({"calibration": {"data": "gone.py:samples"}}, "calibration.data: 'gone.py' does not exist in"),
        ({"source": {"onnx": "folder"}}, "source.onnx: 'folder' is a folder; name the file in it"),
        ({"calibration": {"data": "folder.py:samples"}}, "calibration.data: 'folder.py' is a folder; name the file"),
        ({"calibration": {"data": "spec.py:f", "labels": "y"}}, "a generator gives no labels; remove labels"),
        ({"quantization": {"floor": {"accuracy": 0.9}}}, "floor.accuracy needs the right answers; name their array in"),
        ({"quantization": {"floor": {}}}, "floor: needs one of sqnr_db, cosine, argmax_agreement, accuracy"),
        ({"quantization": {"floor": {"sqnr_db": -1}}}, "quantization.floor.sqnr_db: -1: must be"),
        ({"quantization": {"floor": {"cosine": 1.5}}}, "quantization.floor.cosine: 1.5: must be"),
        ({"quantization": {"floor": {"sqnr_db": 20}}, "calibration": None}, "add calibration.data"),
        ({"quantization": {"search": "never", "floor": {"sqnr_db": 20}}}, "search: never contradicts floor"),
        ({"validation": {"latency": {"second": 1}}}, "validation.latency.second: unknown key; did you mean 'seconds'?"),
        ({"calibration": {"data": "spec.py:f", "parts": 2}}, "a generator cannot be divided into parts; remove parts"),
        ({"calibration": {"data": "../data"}}, "calibration.data: '../data': must be a relative path inside"),
        ({"backends": ["xla", "iree"]}, "backends: ['xla', 'iree']: give each its options: {xla: {}, iree: {}}"),
        ({"backends": {"xla": None}}, "backends: xla has null; give its options, or {} for none"),
        ({"backends": {"onnxruntime": {"intra_op_threads": 2.5}}}, "2.5 is of type float; give an integer, such as 0"),
        ({"build": {"timeout_s": -1}}, "build.timeout_s: -1: must be above 0"),
        ({"build": {"required": ["cpu int9"]}}, "build.required has 'cpu int9', which covers no unit of this spec"),
        ({"quantization": {"overrides": [{"match": "MatMul", "precision": "int4"}]}}, "overrides.0.precision"),
        ({"precisions": ["fp8"], "calibration": None, "source": {"torch": "m.py:build"}}, "precisions has fp8"),
        ({"build": {"required": ["sm_98 int8"]}}, "build.required.0: 'sm_98 int8': target 'sm_98' is not supported"),
        ({"publication": {"channel": "no/slash"}}, "publication.channel: channel name 'no/slash'"),
        ({"version": 1.5}, "version: 1.5: must be text"),
        ({"inputs": ["x"]}, "inputs: ['x']: must be a mapping of keys to values"),
        ({"inputs": {}}, "inputs: {}: has 0 items; it needs 1 or more"),
        ({"source": "tiny.onnx"}, "source: 'tiny.onnx': must be a mapping of keys to values"),
        ({"source": {"torch": "m.py:b", "arguments": {"a": [1]}}}, "arguments.a: [1]: must be text, a number, or"),
        ({"build": {"timeout_s": "long"}}, "build.timeout_s: 'long': must be a number"),
        ({"build": {"memory_mib": 1.5}}, "build.memory_mib: 1.5: must be a whole number"),
        ({"dims": {"batch": {"max": None, "min": True}}}, "dims.batch.min: true: must be a whole number"),
        ({"golden": {"data": "golden.npz", "frozen": "12"}}, "golden.frozen: '12': must look like "),
        ({"validation": {"contract": {"bitwise": {"size": [1]}}}}, "bitwise.size: [1]: must be true or false"),
        ({"validation": {"contract": {"structured": {"logits": {"range": [1, 2, 3]}}}}}, "has 3 items; it takes 2"),
    ],
)
def test_each_mistake_is_a_line_with_key_value_and_remedy(project: Project, parts: Any, message: str) -> None:
    for name in ("folder", "folder.py"):
        (project.folder / name).mkdir()
    lines = mistakes(project, **parts)
    assert any(message in line for line in lines), lines
    assert all(line.startswith(f"{project.spec}:") for line in lines)
    assert not any("default factory" in line for line in lines), "a default that follows from another mistake"


@pytest.mark.parametrize(
    ("parts", "on"),
    [
        ({"dims": {"batch": {"max": 8}, "seq": {"max": 2}}}, "seq:"),
        ({"inputs": {"x": {"shape": ["batch", "width"]}}}, "- width"),
        ({"build": {"required": ["cpu fp32", "cpu fp16"]}}, "- cpu fp16"),
        ({"precisions": ["fp32", "fp8"], "calibration": None, "source": {"torch": "m.py:b"}}, "- fp8"),
        ({"quantization": {"io": "fp32", "floor": {"sqnr_db": 20}}, "calibration": None}, "floor:"),
        ({"quantization": {"floor": {"sqnr_db": 20, "accuracy": 0.9}}}, "accuracy: 0.9"),
        ({"golden": {"data": "golden.npz", "labels": "l", "metric": {"output": "z", "floor": 0.9}}}, "output: z"),
        ({"golden": {"data": "golden.npz", "metric": {"output": "logits", "floor": 0.9}}}, "metric:"),
        ({"calibration": {"data": "calibration.npz", "percentile": 99.9}}, "percentile: 99.9"),
        ({"validation": {"contract": {"structured": {"logits": {"finite": True}, "z": {"finite": True}}}}}, "z:"),
        ({"validation": {"contract": {"distributional": {"rows": {"z": {}}}}}}, "z: {}"),
        ({"validation": {"contract": {"distributional": {"seeds": {"outputs": ["logits"], "vary": "z"}}}}}, "vary: z"),
    ],
)
def test_a_mistake_between_keys_points_at_the_right_line(project: Project, parts: Any, on: str) -> None:
    (line,) = mistakes(project, **parts)
    number = int(line.removeprefix(f"{project.spec}:").split(":")[0])
    assert project.spec.read_text().splitlines()[number - 1].strip().startswith(on), line


PYDANTICS = ("input should", "valid ", "tuple", "dictionary", "instance of", "parse string", "None", "True", "False")


@pytest.mark.parametrize(
    "value",
    [None, True, 1, 1.5, "text", [], ["x"], [[1]], {}, {"a": None}, {"a": [True]}, math.inf, math.nan, "\0\x85"],
)
def test_errors_contain_no_message_of_pydantic_or_python(project: Project, value: Any) -> None:
    keys = [[key] for key in ModelSpec.model_fields]
    keys += [[key, inner] for key, field in ModelSpec.model_fields.items() for inner in _below(field.annotation)]
    keys += [["inputs", "x"], ["inputs", "x", "shape"], ["inputs", "x", "dtype"], ["dims", "batch", "buckets"]]
    keys += [["validation", "contract", "structured"], ["validation", "limits", "fp32"], ["targets", "0"]]
    for path in keys:
        parts: Any = value
        for key in reversed(path):
            parts = {key: parts}
        project.spec.write_text(yaml.safe_dump({**SPEC, **parts}))
        try:
            load_spec(project.spec)
        except SpecError as error:
            for line in error.lines:
                assert not [word for word in PYDANTICS if word in line.replace(str(project.spec), "")], line


def _below(annotation: Any) -> list[str]:
    members = [annotation, *typing.get_args(annotation)]
    return [key for member in members for key in getattr(member, "model_fields", ())]


def test_several_mistakes_are_reported_together_with_their_lines(project: Project) -> None:
    lines = mistakes(project, modle="x", precisions=["fp31"], inputs={"x": {"shape": ["batch", 8], "dtyp": "float32"}})
    assert len(lines) == 3
    text = project.spec.read_text().splitlines()
    for line in lines:
        number = int(line.removeprefix(f"{project.spec}:").split(":")[0])
        assert any(word in text[number - 1] for word in ("modle", "fp31", "dtyp"))


ALIASES = "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(8))
HALVES = {"key": b'inputs: {"\\ud800": 1}', "item": b'outputs: ["a\\ud800"]', "uri": b'serve: "\\ud800"'}


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("empty", b"", "holds nothing"),
        ("list", b"- a\n- b\n", "holds a list"),
        ("words", b"just words\n", "holds a single value"),
        ("cut", b"model: [1, 2\n", "is not YAML"),
        ("objects", b"model: !!python/object/apply:os.system [true]\n", "is not plain YAML"),
        ("twice", b"model: a\nmodel: b\n", ":2: key 'model' is given twice"),
        ("many", b"a: &a [x, x, x, x, x, x, x, x, x, x]\n" + ALIASES.encode(), "aliases expand"),
        ("circle", b"a: &a [*a]\n", "aliases expand"),
        ("zero", b"model: \x00\n", "is a binary file, and a spec is YAML text; `enginesmith init`"),
        ("binary", b"\xff\xfe\x00\x01", "is a binary file, and a spec is YAML text; `enginesmith init` writes"),
        ("latin", "model: a\n# gr\u00fcn\n".encode("latin-1"), ":2: byte 0xfc is not UTF-8; save the file as UTF-8"),
        *((place, text, r":1: '\\ud800' is half of a character; write") for place, text in HALVES.items()),
        ("huge", b"#" * (2 << 20), "is larger than 1048576 bytes, so it is not a spec; `enginesmith init` writes"),
        ("a.onnx", b"\x08\x08", "is a file of a model, and not a spec; write a spec with `enginesmith init`, and name"),
        ("b.onnx", b"#" * (2 << 20), "is a file of a model, and not a spec; .* as source.onnx"),
        ("a.pt", b"\x80\x02", "is a file of a model, and not a spec; .* as source.weights"),
        ("a.safetensors", b"{}", "is a file of a model, and not a spec; .* as source.weights"),
    ],
)
def test_impossible_spec_files_are_refused(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SpecError, match=message) as error:
        load_spec(tmp_path / name)
    assert len(error.value.lines) == 1 and "codec" not in str(error.value)


def test_a_missing_spec_file_is_reported(tmp_path: Path) -> None:
    for name, expected in {"gone": "no such file", "gone.onnx": "no such file", ".": "is a folder"}.items():
        with pytest.raises(SpecError, match=expected):
            load_spec(tmp_path / name)


def test_a_link_that_leads_out_of_the_folder_is_refused(project: Project, tmp_path: Path) -> None:
    (project.folder / "tiny.onnx").rename(tmp_path / "elsewhere.onnx")
    (project.folder / "tiny.onnx").symlink_to(tmp_path / "elsewhere.onnx")
    assert "leads outside the spec's folder" in mistakes(project)[0]


def test_the_schema_accepts_good_specs_and_knows_every_key() -> None:
    schema = ModelSpec.model_json_schema()
    assert set(schema["properties"]) == set(ModelSpec.model_fields) and schema["additionalProperties"] is False


@pytest.mark.parametrize(
    "spec", sorted((Path(__file__).parents[2] / "examples").glob("*/*.yaml")), ids=lambda p: p.name
)
def test_both_parsers_read_ordinary_specs_equally(spec):
    def flat(node: yaml.Node) -> object:
        if isinstance(node, yaml.MappingNode):
            return [(flat(key), flat(value)) for key, value in node.value]
        if isinstance(node, yaml.SequenceNode):
            return [flat(item) for item in node.value]
        return node.tag, node.value, node.start_mark.line

    quick_node = _quickly_composed(spec.read_text())
    assert quick_node is not None and flat(quick_node) == flat(yaml.compose(spec.read_text(), Loader=yaml.SafeLoader))


@pytest.mark.parametrize("text", ["[" * 100_000, "- " * 100_000, "{a: " * 1000, "a: [\n", "a: b: c"])
def test_deep_or_wrong_specs_use_the_careful_parser(text):
    assert _quickly_composed(text) is None


def test_a_dotted_entry_point_is_a_module_or_a_package(project: Project) -> None:
    folder = project.spec.parent
    (folder / "mine" / "nets").mkdir(parents=True)
    (folder / "mine" / "flat.py").touch()
    (folder / "mine" / "nets" / "__init__.py").touch()
    for name, file in {"mine.flat": "mine/flat.py", "mine.nets": "mine/nets/__init__.py"}.items():
        project.change_spec(source={"torch": f"{name}:build"})
        spec = load_spec(project.spec)
        assert (spec.source_file, spec.source.module, spec.source.function) == (file, name, "build")
