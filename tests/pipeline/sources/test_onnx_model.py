import os
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from builders.backends.onnxruntime import OrtSession
from builders.onnx_graphs.bodies import Libraries, list_libraries, list_shards
from builders.onnx_graphs.weights import to_array
from enginesmith.core.errors import ModelError
from enginesmith.core.requirements import Library, LibraryBuild
from enginesmith.core.types import TensorSpec
from pipeline.sources import onnx_model
from pipeline.sources.canonical import canonical
from tests.pipeline.quantization.small_nets import build

WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)


def value(name: str, shape: list, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model_of(nodes, inputs, outputs, constants=(), opset=20, **more) -> onnx.ModelProto:
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in constants]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10, **more)


def linear(opset: int = 20) -> onnx.ModelProto:
    """y = relu(x @ w + b), with x [N, 3]."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"], "matmul", doc_string="from file.py line 3"),
        helper.make_node("Add", ["product", "b"], ["sum"], "add"),
        helper.make_node("Relu", ["sum"], ["y"], "relu"),
    ]
    constants = [("w", WEIGHT), ("b", np.ones(4, np.float32))]
    return model_of(nodes, [value("x", ["N", 3])], [value("y", ["N", 4])], constants, opset)


X = TensorSpec("x", "float32", ("batch", 3))


def saved(folder: Path, model: onnx.ModelProto) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def external(folder: Path) -> Path:
    path = folder / "model.onnx"
    onnx.save_model(linear(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def relocated(folder: Path, location: str) -> Path:
    """A model whose external data claims to be elsewhere."""
    model = onnx.load(external(folder), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    return saved(folder, model)


class TestLoading:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "is empty; export"),
            (b"this is no model", "truncated or not an ONNX file"),
            (os.urandom(64) + b"\xff" * 64, "truncated or not an ONNX file|holds no ONNX graph"),
            (linear().SerializeToString()[:-20], "truncated or not an ONNX file"),
            (onnx.ModelProto(ir_version=10).SerializeToString(), "holds no ONNX graph"),
        ],
        ids=["empty", "text", "noise", "truncated", "no graph"],
    )
    def test_an_invalid_model_file_is_reported(self, tmp_path, content, words):
        (tmp_path / "model.onnx").write_bytes(content)
        with pytest.raises(ModelError, match=words):
            onnx_model.load_onnx(tmp_path / "model.onnx", tmp_path)

    def test_a_missing_file_and_a_folder_are_model_errors(self, tmp_path):
        (tmp_path / "folder.onnx").mkdir()
        for name in ("none.onnx", "folder.onnx"):
            with pytest.raises(ModelError, match=f"{name} does not exist or is not a file"):
                onnx_model.load_onnx(tmp_path / name, tmp_path)

    def test_a_model_outside_the_specs_folder_is_refused_through_a_link_too(self, tmp_path):
        root = tmp_path / "root"
        root.mkdir()
        (root / "model.onnx").symlink_to(saved(tmp_path, linear()))
        with pytest.raises(ModelError, match="leads outside the spec's folder"):
            onnx_model.load_onnx(root / "model.onnx", root)

    def test_every_truncation_is_refused_here_or_by_the_checker(self, tmp_path):
        data = linear().SerializeToString()
        for length in range(0, len(data) - 1, 7):
            (tmp_path / "model.onnx").write_bytes(data[:length])
            with pytest.raises(ModelError):
                canonical(onnx_model.load_onnx(tmp_path / "model.onnx", tmp_path), [X])

    def test_an_opset_newer_than_the_runtime_is_refused_with_the_newest_it_knows(self, tmp_path):
        count = onnx_model.newest_opset()
        onnx_model.load_onnx(saved(tmp_path, linear(count)), tmp_path)
        with pytest.raises(ModelError, match=rf"opset {count + 1}, and onnxruntime here knows {count} at most"):
            onnx_model.load_onnx(saved(tmp_path, linear(count + 1)), tmp_path)

    def test_an_operator_of_an_unknown_domain_is_named(self, tmp_path):
        model = linear()
        model.graph.node[2].domain = "acme"
        model.opset_import.append(helper.make_opsetid("acme", 1))
        with pytest.raises(ModelError, match=r"node 'relu' is operator acme::Relu"):
            onnx_model.load_onnx(saved(tmp_path, model), tmp_path)

    @pytest.mark.parametrize("unknown", [-1, "?", "None", ""])
    def test_axes_of_unknown_size_are_separate_dims(self, tmp_path, unknown):
        node = helper.make_node("Relu", ["x"], ["y"])
        shape = [unknown, 3, unknown, unknown]
        model = model_of([node], [value("x", shape)], [value("y", shape)])
        loaded_model = onnx_model.load_onnx(saved(tmp_path, model), tmp_path)
        assert onnx_model.specs_of(loaded_model)[0][0].shape == ("?", 3, "?", "?")
        (spec,) = (TensorSpec("x", "float32", ("batch", 3, 48, "width")),)
        dims = canonical(loaded_model, [spec]).graph.input[0].type.tensor_type.shape.dim
        assert [dim.dim_param or dim.dim_value for dim in dims] == ["batch", 3, 48, "width"]


class TestExternalData:
    def test_external_data_is_read_into_the_model(self, tmp_path):
        path = external(tmp_path)
        assert onnx_model.external_files(path, tmp_path) == (tmp_path / "weights.bin",)
        model = onnx_model.load_onnx(path, tmp_path)
        (tmp_path / "weights.bin").unlink()
        onnx.checker.check_model(model)
        assert np.array_equal(onnx.numpy_helper.to_array(model.graph.initializer[0]), WEIGHT)
        assert canonical(model, [X]) == canonical(linear(), [X])

    def test_missing_external_data_is_named(self, tmp_path):
        path = external(tmp_path)
        (tmp_path / "weights.bin").unlink()
        with pytest.raises(ModelError, match=r"weights\.bin does not exist"):
            onnx_model.load_onnx(path, tmp_path)

    def test_a_large_models_external_data_stays_in_its_file(self, tmp_path):
        path, wide_number = external(tmp_path), 1 << 28
        model = onnx.load(path, load_external_data=False)
        model.graph.initializer[0].dims[:] = [3, wide_number]
        next(e for e in model.graph.initializer[0].external_data if e.key == "length").value = str(12 * wide_number)
        path.write_bytes(model.SerializeToString())
        os.truncate(tmp_path / "weights.bin", 12 * wide_number + 100)  # 3 GB, sparse: it takes no room on the disk
        for loaded_onnx in (onnx_model.load_onnx, onnx_model.external_files):
            tracemalloc.start()
            loaded_onnx(path, tmp_path)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
            tracemalloc.stop()
        model = onnx_model.load_onnx(path, tmp_path)
        assert model.ByteSize() < 10_000
        assert to_array(model.graph.initializer[0]).shape == (3, wide_number)

    @pytest.mark.parametrize("location", ["../outside.bin", "/etc/hostname", "sub/../../outside.bin", "link.bin"])
    def test_external_data_outside_the_folder_is_refused(self, tmp_path, location):
        folder = tmp_path / "model"
        folder.mkdir()
        (tmp_path / "outside.bin").write_bytes(bytes(1000))
        (folder / "link.bin").symlink_to(tmp_path / "outside.bin")
        with pytest.raises(ModelError, match="leads outside"):
            onnx_model.load_onnx(relocated(folder, location), tmp_path)


class TestCanonical:
    def test_a_second_rewrite_changes_nothing(self):
        model = linear()
        once = canonical(model, [X])
        assert model == linear()
        assert canonical(once, [X]).SerializeToString(deterministic=True) == once.SerializeToString(deterministic=True)

    def test_nor_does_it_rename_axes_that_inference_has_named(self):
        model = canonical(
            onnx.parser.parse_model(
                """<ir_version: 9, opset_import: ["" : 17]> g (float[N, 4] x, int64 n) => (int64[?, ?] shapes) {
                last, shapes = Loop (n, , x) <body = b (int64 i, bool c, float[] e) => (bool d, float[] f, int64[m] s) {
                    d = Identity(c) f = Abs(e) s = Shape(f) }>
                }"""
            )
        )
        assert canonical(model).SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)

    @given(order=st.permutations(range(3)), constants=st.permutations(range(2)))
    def test_the_order_in_the_file_does_not_matter(self, order, constants):
        model = linear()
        nodes, initializers = list(model.graph.node), list(model.graph.initializer)
        del model.graph.node[:], model.graph.initializer[:]
        model.graph.node.extend(nodes[index] for index in order)
        model.graph.initializer.extend(initializers[index] for index in constants)
        assert canonical(model, [X]) == canonical(linear(), [X])

    def test_only_the_function_stays_in_the_file(self):
        model = linear()
        model.doc_string, model.producer_name, model.graph.doc_string = "today", "somebody", "me"
        model.metadata_props.add(key="stack", value="/home/me/train.py")
        model.graph.node[0].metadata_props.add(key="trace", value="line 3")
        model.graph.node.append(helper.make_node("Abs", ["sum"], ["unused"], "dead"))
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(9), "unused constant"))
        assert canonical(model, [X]) == canonical(linear(), [X])

    def test_readers_of_a_constants_identity_read_the_constant(self):
        model = onnx.parser.parse_model(
            """<ir_version: 10, opset_import: ["" : 20]> g (bool c, float[N, 3] x) => (float[N, 3] y, float[3] z)
               <float[3] w = {1, 2, 3}> {
                again = Identity(once) once = Identity(w) z = Identity(w) same = Identity(x)
                a = Add(same, once) b = Mul(a, again)
                y = If (c) <then_branch = t () => (float[N, 3] p) { p = Sub(b, again) },
                            else_branch = e () => (float[N, 3] q) { q = Identity(b) }>
            }"""
        )
        graph = canonical(model).graph
        branches = [attribute.g.node[0] for attribute in graph.node[-1].attribute]
        names = [name for node in (*graph.node, *branches) for name in node.input]
        assert not {"once", "again"} & set(names) and names.count("w") == 4, "in branches, too, and by the output z"
        assert sorted(node.op_type for node in branches) == ["Identity", "Sub"]
        assert [node.op_type for node in graph.node].count("Identity") == 2, "of an input, and one that is an output"

    def test_dims_use_the_specs_names_everywhere(self):
        model = canonical(linear(), [X])
        assert onnx_model.specs_of(model) == ((X,), (TensorSpec("y", "float32", ("batch", 4)),))
        shapes = {
            v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.value_info
        }
        assert shapes == {"product": ["batch", 4], "sum": ["batch", 4]}

    def test_a_dynamic_axis_can_become_static(self):
        assert onnx_model.specs_of(canonical(linear(), [TensorSpec("x", "float32", (2, 3))]))[1][0].shape == (2, 4)

    def test_local_functions_are_inlined(self):
        body = [helper.make_node("Relu", ["a"], ["b"])]
        function = helper.make_function("mine", "Act", ["a"], ["b"], body, [helper.make_opsetid("", 20)])
        model = model_of(
            [helper.make_node("Act", ["x"], ["y"], domain="mine")], [value("x", ["N", 3])], [value("y", None)]
        )
        model.functions.append(function)
        model.opset_import.append(helper.make_opsetid("mine", 1))
        inlined = canonical(model, [X])
        assert [node.op_type for node in inlined.graph.node] == ["Relu"]
        assert [(entry.domain, entry.version) for entry in inlined.opset_import] == [("", 20)]

    def test_an_initializer_that_is_also_an_input_becomes_a_constant(self):
        model = linear()
        model.graph.input.append(value("w", [3, 4]))
        assert [i.name for i in canonical(model).graph.input] == ["x"]

    @pytest.mark.parametrize("name", ["product", "sum", "w", "relu"])
    def test_an_output_may_take_an_inner_name(self, tmp_path, name):
        onnx_model.save_onnx(canonical(linear(), [X], [name]), tmp_path / "m.onnx")
        with OrtSession(tmp_path / "m.onnx", optimized=False) as session:
            outputs = session.run({"x": np.ones((1, 3), np.float32)})
        assert np.array_equal(outputs[name], WEIGHT.sum(0, keepdims=True) + 1)

    def test_outputs_may_swap_names(self):
        model = linear()
        model.graph.output.append(value("sum", ["N", 4]))
        swapped = canonical(model, [X], ["sum", "y"])
        assert [(node.op_type, node.output[0]) for node in swapped.graph.node][1:] == [("Add", "y"), ("Relu", "sum")]

    @pytest.mark.parametrize(
        ("spec", "words"),
        [
            (TensorSpec("z", "float32", ("batch", 3)), r"inputs are \['x'\], the spec's \['z'\]"),
            (TensorSpec("x", "float16", ("batch", 3)), r"input 'x' is float32 in the model and float16"),
            (TensorSpec("x", "float32", ("batch", 4)), r"\[N, 3\] in the model and \[batch, 4\]"),
            (TensorSpec("x", "float32", ("batch", "width")), r"\[N, 3\] in the model and \[batch, width\].*dynamic"),
            (TensorSpec("x", "float32", ("batch",)), r"\[N, 3\] in the model and \[batch\]"),
        ],
    )
    def test_a_spec_that_does_not_fit_is_refused_with_both_sides(self, spec, words):
        with pytest.raises(ModelError, match=words):
            canonical(linear(), [spec])

    @pytest.mark.parametrize(
        ("names", "words"), [(["a", "b"], "1 outputs, the spec names 2"), (["x"], "'x' is an input, or has its name")]
    )
    def test_impossible_output_names_are_refused(self, names, words):
        with pytest.raises(ModelError, match=words):
            canonical(linear(), [X], names)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda graph: setattr(graph.node[2], "op_type", "Frobnicate"), "No Op registered for Frobnicate"),
            (lambda graph: graph.initializer[0].dims.reverse(), "not valid ONNX"),
            (lambda graph: graph.node[0].input.__setitem__(0, "sum"), "cycle"),
        ],
        ids=["unknown operator", "shapes that contradict each other", "cycle"],
    )
    def test_a_graph_that_is_not_valid_is_refused(self, change, words):
        model = linear()
        change(model.graph)
        with pytest.raises(ModelError, match=words):
            canonical(model, [X])


class TestSpecs:
    def test_bfloat16_and_unknown_axes_are_read(self):
        cast_node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.BFLOAT16)
        model = model_of([cast_node], [value("x", [None, 3])], [value("y", [None, 3], TensorProto.BFLOAT16)])
        assert onnx_model.specs_of(model)[1] == (TensorSpec("y", "bfloat16", ("?", 3)),)

    def test_an_output_of_unknown_rank_is_refused(self):
        model = model_of([helper.make_node("Relu", ["x"], ["y"])], [value("x", None)], [value("y", None)])
        with pytest.raises(ModelError, match="input 'x' is of unknown rank"):
            onnx_model.specs_of(model)


class TestAnInputThatIsAnOutput:
    """`OutputFixPass` would leave the name to the output and call the input 'x_orig'."""

    @staticmethod
    def passing_on() -> onnx.ModelProto:
        both_value = value("x", ["N", 3])
        return model_of([helper.make_node("Relu", ["x"], ["y"])], [both_value], [value("y", ["N", 3]), both_value])

    def test_an_input_and_an_output_with_one_name_are_refused(self):
        with pytest.raises(ModelError, match=r"'x' is an input and an output; give the output another name"):
            canonical(self.passing_on())

    def test_with_output_names_the_input_keeps_its_own(self):
        plain_model = canonical(self.passing_on(), [TensorSpec("x", "float32", ("N", 3))], ["a", "b"])
        inputs, outputs = onnx_model.specs_of(plain_model)
        assert [spec.name for spec in inputs] == ["x"] and [spec.name for spec in outputs] == ["a", "b"]
        onnx.checker.check_model(plain_model)


@pytest.mark.parametrize(("inputs", "outputs"), [(TensorProto.STRING, TensorProto.INT64), (1, TensorProto.STRING)])
def test_text_inputs_and_outputs_are_refused(inputs, outputs):
    text_model = model_of([], [value("x", ["N"], inputs)], [value("y", ["N"], outputs)])
    with pytest.raises(ModelError, match="holds strings, which no engine takes or gives"):
        onnx_model.specs_of(text_model)


def test_numbers_in_lists_are_written_as_bytes():
    linear_model = linear()
    odd_array = np.array([0, -0.0, np.nan, 1e-45], "f")
    linear_model.graph.initializer[1].CopyFrom(helper.make_tensor("b", TensorProto.FLOAT, [4], odd_array))
    plain_model = canonical(linear_model)
    result = next(tensor for tensor in plain_model.graph.initializer if tensor.name == "b")
    assert result.HasField("raw_data") and result.raw_data == odd_array.tobytes()


def test_a_normalisation_over_its_default_axes_is_valid(tmp_path):
    """onnx's strict inference knows no shape of it without `axes` since opset 13; onnxruntime runs it."""
    shape = ["N", 2, 4, 4]
    node = helper.make_node("MeanVarianceNormalization", ["x"], ["y"])
    model = model_of([node], [value("x", shape)], [value("y", shape)])
    x = np.random.default_rng(0).standard_normal((3, 2, 4, 4)).astype(np.float32)
    with OrtSession(saved(tmp_path, canonical(model))) as session:
        normal_std = (x - x.mean((0, 2, 3), keepdims=True)) / x.std((0, 2, 3), keepdims=True)
        np.testing.assert_allclose(session.run({"x": x})["y"], normal_std, atol=1e-5)


def test_a_wrong_output_shape_is_replaced_by_the_inferred_one():
    """onnxruntime says so in its log, and runs it."""
    model = linear()
    model.graph.output[0].CopyFrom(value("y", ["N", 5]))
    assert [dim.dim_value for dim in canonical(model).graph.output[0].type.tensor_type.shape.dim] == [0, 4]


def test_a_model_of_other_operator_sets_alone_gets_the_default_one():
    """As classifiers of scikit-learn are: a cast, or what a step asks of its operators, needs one."""
    node = helper.make_node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[1.0], scale=[2.0])
    custom_model = model_of([node], [value("x", ["N", 3])], [value("y", ["N", 3])])
    del custom_model.opset_import[:]
    custom_model.opset_import.add(domain="ai.onnx.ml", version=1)
    plain_model = canonical(custom_model)
    assert {entry.domain: entry.version for entry in plain_model.opset_import}[""] == 20
    assert canonical(plain_model) == plain_model


def elf(machine: int, entry: bytes = b"RegisterCustomOps", rest: bytes = b"") -> bytes:
    return b"\x7fELF\2\1".ljust(18, b"\0") + machine.to_bytes(2, "little") + b"\0" + entry + b"\0" + rest


def test_libraries_are_named_by_digest_with_their_headers(tmp_path: Path) -> None:
    for name, data in {"a/x.so": elf(62), "b/x.so": elf(183), "y.so": elf(62, b"getCreators")}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (dest := tmp_path / "dest").mkdir()
    libraries = onnx_model.read_libraries(tmp_path, [("a/x.so", 0), ("b/x.so", 0), ("y.so", 13)], dest)
    x, y = libraries.libraries
    assert [build.platform for build in x.builds] == ["linux-x86_64", "linux-aarch64"]
    assert (x.name, x.entry, y.entry, y.builds[0].cuda) == ("x.so", "RegisterCustomOps", "getCreators", 13)
    assert sorted(libraries.digests) == sorted(path.name for path in dest.iterdir())
    model = linear()
    onnx_model.name_libraries(model, libraries)
    onnx_model.save_onnx(model, tmp_path / "m.onnx")
    assert list_libraries(tmp_path / "m.onnx") == libraries
    assert list_shards(tmp_path / "m.onnx") == tuple(sorted(libraries.digests))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"x.so": b"text"}, "is not a shared library of Linux for one of x86_64, aarch64"),
        ({"x.so": elf(3)}, "is not a shared library of Linux"),
        ({"x.so": elf(62, b"main")}, "has none of the functions that runtimes call"),
        ({"x.so": elf(62), "a/x.so": elf(62, rest=b"other")}, r"is the second x\.so for linux-x86_64"),
        ({"../x.so": elf(62)}, "leads outside the spec's folder"),
    ],
)
def test_a_file_without_an_operator_library_is_refused(tmp_path: Path, files, words) -> None:
    (root := tmp_path / "spec").mkdir()
    for name, data in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(data)
    with pytest.raises(ModelError, match=words):
        onnx_model.read_libraries(root, [(name, 0) for name in files], root)


def test_a_users_file_names_no_libraries_itself(tmp_path: Path) -> None:
    """They would be opened: code in the process of whoever looks at a model."""
    model = linear()
    onnx_model.name_libraries(
        model, Libraries((Library("x.so", "RegisterCustomOps", (LibraryBuild("linux-x86_64", "a" * 64),)),))
    )
    onnx.save(model, tmp_path / "m.onnx")
    assert list_libraries(tmp_path / "m.onnx").libraries
    assert not onnx_model.load_onnx(tmp_path / "m.onnx", tmp_path).metadata_props
    model.metadata_props[0].value = '{"libraries": [{"name": "../x"}]}'
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="has an invalid list of libraries"):
        list_libraries(tmp_path / "m.onnx")


def test_two_ranges_added_to_a_table_are_valid():
    text = """
        r = Range(zero, three, one) a = Unsqueeze(r, last) b = Range(zero, four, one)
        c = Add(a, b) d = Cast<to=1>(c) y = Mul(d, x)
    """
    numbers = {"zero": np.array(0), "one": np.array(1), "three": np.array(3), "four": np.array(4)}
    model = build("float[n,4] x", "float[3,4] y", text, {**numbers, "last": np.array([-1])})
    with pytest.raises(onnx.shape_inference.InferenceError, match="Add broadcasting"):
        onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    assert {item.name for item in canonical(model).graph.value_info} >= {"c", "d"}
