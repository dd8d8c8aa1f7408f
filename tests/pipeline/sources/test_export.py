import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from builders.backends.request_checks import profiles
from builders.reference import ReferenceSession
from enginesmith.client.layouts.triton_config import largest_batch
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import DataError, digest_of_file
from enginesmith.core.types import BuildRequest, Dim, Target, TensorSpec
from pipeline.sources.onnx_model import save_onnx, specs_of
from pipeline.sources.request import ExportRequest
from tests.pipeline.quantization.small_nets import build
from tests.pipeline.sources.exports import BATCH, LINEAR, X, failed, fails, net, run, torch_request, user_code_here
from validation.data.samples import Samples
from validation.golden.golden_set import GoldenSet

__all__ = ["user_code_here"]  # a fixture


class TestCapture:
    def test_inputs_are_matched_by_name_not_by_order(self, tmp_path):
        y = TensorSpec("y", "float32", ("batch", 3))
        exported_result = run(torch_request(tmp_path, net("return x - 2 * y", ", y"), inputs=(y, X)))
        assert [spec.name for spec in specs_of(onnx.load(exported_result.onnx))[0]] == ["y", "x"]
        assert failed(exported_result) == []
        case = GoldenSet.load(exported_result.golden).cases[0]
        assert np.allclose(case.expected["output"], case.inputs["x"] - 2 * case.inputs["y"])

    def test_inputs_that_forward_does_not_take_are_named(self, tmp_path):
        y = TensorSpec("y", "float32", ("batch", 3))
        fails(torch_request(tmp_path, net("return x"), inputs=(X, y)), r"forward\(x\): y does not match")
        fails(torch_request(tmp_path, net("return x + z", ", z")), r"forward\(x, z\): z does not match")

    def test_a_dim_that_the_code_fixes_is_reported_with_torchs_message(self, tmp_path):
        fails(torch_request(tmp_path, net("return x + torch.ones(4, 3)")), r"batch as dynamic.*constant \(4\)")

    @pytest.mark.slow
    def test_a_dim_of_multiples_is_exported_if_torch_requires_it(self, tmp_path):
        body = "y = x.reshape(-1, 4, 3); return (y * 2).reshape(-1, 3) + x, y[:, 0], y[:, :2].reshape(-1, 3)"
        request = torch_request(tmp_path, net(body))
        fails(request, r"Constraints violated \(batch\)|divisible|4\*_batch")
        exported_result = run(ExportRequest(**{**vars(request), "dims": (Dim("batch", 4, 8, 16, multiple=4),)}))
        assert failed(exported_result) == []
        graph = onnx.load(exported_result.onnx)
        shapes = [spec.shape for specs in specs_of(graph) for spec in specs]
        assert shapes == [("batch", 3), ("batch", 3), ("(batch//4)", 3), ("2*(batch//4)", 3)]

    def test_a_branch_on_values_is_reported_with_its_line(self, tmp_path):
        fails(
            torch_request(tmp_path, net("return x if x.sum() > 0 else -x")),
            r"model\.py:5: the model cannot be captured",
        )

    def test_an_operator_without_onnx_form_is_named(self, tmp_path):
        request = torch_request(tmp_path, net("return torch.linalg.eigvals(x).real"))
        square = ExportRequest(**{**vars(request), "inputs": (TensorSpec("x", "float32", (3, 3)),), "dims": ()})
        fails(square, "no ONNX form.*linalg_eig")

    def test_a_model_that_fails_at_a_bucket_edge_is_reported_with_the_shape(self, tmp_path):
        body = "return torch.nn.functional.embedding((x * 0 + x.shape[0]).long(), torch.ones(8, 2))"
        fails(torch_request(tmp_path, net(body)), r"failed on x \[8, 3\]: IndexError")

    def test_opset_is_the_requested_one(self, tmp_path):
        model = onnx.load(run(torch_request(tmp_path, LINEAR, opset=21)).onnx)
        assert [entry.version for entry in model.opset_import] == [21]


class TestOutputs:
    @pytest.mark.parametrize(
        ("body", "names"),
        [
            ("return x * 2", ["output"]),
            ("return x * 2, x + 1", ["output_0", "output_1"]),
            ("return {'scaled': x * 2, 'moved': x + 1}", ["scaled", "moved"]),
            ("return x * 2, None, [x + 1]", ["output_0", "output_1"]),
            ("return x", ["output"]),
            ("y = x * 2; return y, y", ["output_0", "output_1"]),
        ],
    )
    def test_outputs_have_the_models_own_names(self, tmp_path, body, names):
        exported_result = run(torch_request(tmp_path, net(body)))
        assert [spec.name for spec in specs_of(onnx.load(exported_result.onnx))[1]] == names
        assert set(GoldenSet.load(exported_result.golden).cases[0].expected) == set(names)
        assert failed(exported_result) == []

    def test_the_spec_may_use_names_of_inner_values(self, tmp_path):
        request = torch_request(tmp_path, net("y = x.relu(); return y + 1, y * 3"), outputs=("relu", "add"))
        exported_result = run(request)
        assert failed(exported_result) == []
        case = GoldenSet.load(exported_result.golden).cases[0]
        assert np.array_equal(case.expected["add"], np.maximum(case.inputs["x"], 0) * 3)

    def test_the_number_of_names_equals_that_of_tensors(self, tmp_path):
        fails(torch_request(tmp_path, net("return x, x * 2"), outputs=("a",)), "returns 2 tensors, the spec names 1")


class TestGolden:
    def test_real_samples_and_labels_are_frozen_with_every_edge(self, tmp_path):
        images = np.random.default_rng(1).standard_normal((10, 3)).astype(np.float32)
        np.savez(tmp_path / "golden.npz", x=images, label=np.arange(10))
        samples = Samples.open(tmp_path / "golden.npz", (X,), (BATCH,), extra=["label"])
        exported_result = run(torch_request(tmp_path, LINEAR), samples, samples.column("label"))
        golden = GoldenSet.load(exported_result.golden)
        assert [len(case.inputs["x"]) for case in golden.of_kind("golden")] == [4, 4, 2]
        assert {len(case.inputs["x"]) for case in golden.of_kind("edge")} == {1, 4, 8}
        assert np.array_equal(golden.labels, np.arange(10))
        assert golden.digest == exported_result.golden_digest
        assert not any("random" in note for note in exported_result.notes)

    def test_inputs_that_the_model_does_not_take_are_named_with_the_remedy(self, tmp_path):
        request = torch_request(tmp_path, net("return torch.zeros(1, 4)[x.to(torch.int64) + 7]"), inputs=(X,))
        fails(
            request,
            "out of bounds.*; the inputs were random, with the sizes in dims: correct the dims, or add golden.data",
        )

    def test_without_samples_random_ones_are_used_with_a_note(self, tmp_path):
        exported_result = run(torch_request(tmp_path, LINEAR))
        assert "no golden data: 8 groups of random inputs" in exported_result.notes[-1]
        assert run(torch_request(tmp_path, LINEAR)).golden_digest == exported_result.golden_digest

    def test_random_indices_cover_a_whole_table(self, tmp_path):
        ids = TensorSpec("x", "int64", ("batch", 30))
        table = LINEAR.replace("Sequential", "Embedding").replace("torch.nn.Linear(3, width), torch.nn.ReLU()", "45, 2")
        case = GoldenSet.load(run(torch_request(tmp_path, table, inputs=(ids,))).golden).cases[0]
        assert case.inputs["x"].min() == 0 and case.inputs["x"].max() == 44

    def test_random_masks_keep_a_part_of_each_row_and_a_models_own_nan_is_reported(self, tmp_path):
        mask, dims = TensorSpec("mask", "bool", ("batch", "n")), (BATCH, Dim("n", 1, 4, 8))
        body = net("return x / mask.sum(1, keepdim=True), x.log()", ", mask")
        checks = run(torch_request(tmp_path, body, inputs=(X, mask), dims=dims, outputs=("y", "z"))).checks
        flaws = [(check.output, "the model itself answers NaN" in check.note) for check in checks if not check.passed]
        assert set(flaws) == {("z", True)}

    def test_a_known_model_is_reused_for_a_new_golden_set(self, tmp_path):
        known_model = run(torch_request(tmp_path, LINEAR)).onnx.rename(tmp_path / "known.onnx")
        digest = digest_of_file(known_model)
        second_result = run(torch_request(tmp_path, LINEAR.replace("ReLU", "Tanh")), known_model=known_model)
        assert digest_of_file(second_result.onnx) == digest
        assert "sqnr_db" in failed(second_result)

    def test_drift_beyond_the_budget_is_a_failed_check_not_an_error(self, tmp_path):
        exported_result = run(torch_request(tmp_path, net("return x * 0.1 + x.exp()")), limits={"sqnr_db": 1000})
        assert set(failed(exported_result)) == {"sqnr_db"}

    def test_bad_samples_stay_data_errors(self, tmp_path):
        np.savez(tmp_path / "golden.npz", x=np.full((4, 3), np.nan, np.float32))
        samples = Samples.open(tmp_path / "golden.npz", (X,), (BATCH,))
        with pytest.raises(DataError, match=r"golden\.npz"):
            run(torch_request(tmp_path, LINEAR), samples)


class TestPt2:
    def save(self, root: Path, batch: bool = True) -> None:
        import torch

        module = torch.nn.Linear(3, 2).eval()
        shapes = {"input": {0: torch.export.Dim("n", min=1, max=8)}} if batch else None
        torch.export.save(torch.export.export(module, (torch.zeros(4, 3),), dynamic_shapes=shapes), root / "m.pt2")

    def request(self, root: Path, name: str = "input", dims: tuple = (BATCH,)) -> ExportRequest:
        return ExportRequest("pt2", root, "m.pt2", (TensorSpec(name, "float32", ("batch", 3)),), dims)

    def test_a_saved_program_is_exported_and_proven_like_a_module(self, tmp_path):
        self.save(tmp_path)
        exported_result = run(self.request(tmp_path))
        assert failed(exported_result) == []
        assert specs_of(onnx.load(exported_result.onnx))[1] == (TensorSpec("output", "float32", ("batch", 2)),)

    def test_inputs_with_other_names_are_matched_by_position_with_a_note(self, tmp_path):
        self.save(tmp_path)
        exported_result = run(self.request(tmp_path, "pixels"))
        assert exported_result.notes[0] == "inputs matched by position: input are called pixels"
        assert failed(exported_result) == []

    def test_an_axis_that_the_program_fixes_is_refused(self, tmp_path):
        self.save(tmp_path, batch=False)
        fails(self.request(tmp_path), r"\[4, 3\] in the model and \[batch, 3\] in the spec")

    def test_a_size_that_the_program_does_not_allow_is_refused(self, tmp_path):
        self.save(tmp_path)
        fails(self.request(tmp_path, dims=(Dim("batch", 1, 4, 9),)), r"failed on input \[9, 3\]")

    def test_another_number_of_inputs_is_refused(self, tmp_path):
        self.save(tmp_path)
        fails(
            ExportRequest("pt2", tmp_path, "m.pt2", (X, TensorSpec("y", "float32", (1,))), (BATCH,)), "takes 1 inputs"
        )

    @pytest.mark.parametrize("content", [b"", b"garbage", None])
    def test_a_file_that_is_no_archive_is_refused(self, tmp_path, content):
        if content is not None:
            (tmp_path / "m.pt2").write_bytes(content)
        fails(self.request(tmp_path), "missing, truncated or not a .pt2 archive")


class TestOnnx:
    def save(self, root: Path) -> None:
        model = build("float[N,3] x", "float[N,3] y, float[N,3] z", "y = Relu(x) z = Neg(x)", {})
        model.ir_version = 9
        save_onnx(model, root / "source.onnx")

    def request(self, root: Path, outputs: tuple[str, ...] | None = None) -> ExportRequest:
        return ExportRequest("onnx", root, "source.onnx", (X,), (BATCH,), outputs)

    def test_an_onnx_file_becomes_canonical_and_is_compared_with_the_original(self, tmp_path):
        self.save(tmp_path)
        result = run(self.request(tmp_path))
        assert specs_of(onnx.load(result.onnx))[1] == tuple(TensorSpec(n, "float32", ("batch", 3)) for n in "yz")
        assert result.checks
        assert failed(result) == []
        assert [path.name for path in (tmp_path / "work").glob("*.onnx")] == ["model.onnx"]

    @pytest.mark.parametrize(
        ("multiple", "y_shape"), [(1, ("batch", 1, "v")), (2, ("batch", 1, "width"))], ids=["rounded", "equal"]
    )
    def test_axes_without_a_size_get_the_dims_they_always_equal(self, tmp_path, multiple, y_shape):
        halved_and_doubled = 'p = AveragePool<kernel_shape=[2], strides=[2]>(x) y = Resize<mode="nearest">(p, , s)'
        by_values = "m = ReduceMax<keepdims=0>(x, a) n = NonZero(m)"  # random values are all there
        by_values += " c = Equal(x, x) i = Cast<to=7>(c) r = ReduceSum<keepdims=0>(i, b) e = ReduceMax(r, f) "
        by_values += "t = Slice(x, f, e, g)"  # cut to the longest row of values
        weights = {"s": np.array([1, 1, 2.0]), "a": np.array([0, 1]), "b": np.array([1, 2])}
        weights |= {"f": np.array([0]), "g": np.array([2])}
        text, outputs = f"{halved_and_doubled} {by_values}", "float[u,1,v] y, int64[1,v] n, float[u,1,v] t"
        inputs = "float[B,1,W] x"
        save_onnx(build(inputs, outputs, text, weights), tmp_path / "source.onnx")
        x, dims = TensorSpec("x", "float32", ("batch", 1, "width")), (BATCH, Dim("width", 4, 8, 16, multiple=multiple))
        export_result = run(replace(self.request(tmp_path), inputs=(x,), dims=dims))
        y, n, t = specs_of(onnx.load(export_result.onnx))[1]
        assert [y.shape, n.shape] == [y_shape, (1, "v")] and t.shape[2] == "v"
        request = BuildRequest("", "fp32", Target("cpu"), "onnxruntime", (x,), (y,), tuple(profiles((x,), dims)))
        assert largest_batch(request) == BATCH.max  # Triton's max_batch_size

    @pytest.mark.parametrize(
        ("first", "dims", "shape"), [(2, (), (2, 3, 12)), ("batch", (BATCH,), ("batch", 3, 12))], ids=["fixed", "batch"]
    )
    def test_axes_that_always_have_one_size_get_it(self, tmp_path, first, dims, shape):
        weights = {"k": np.array([1.0, 1.0, 3.0])}
        text = "h = Cast<to=7>(k) y = Tile(x, h)"
        save_onnx(build(f"float[{first},3,4] x", "float[u,v,w] y", text, weights), tmp_path / "source.onnx")
        result = run(replace(self.request(tmp_path), inputs=(TensorSpec("x", "float32", (first, 3, 4)),), dims=dims))
        assert specs_of(onnx.load(result.onnx))[1][0].shape == shape

    @pytest.mark.parametrize("text", ["y, z = Split(x, c)", "y = com.microsoft.CropAndResize(x, r, i, c)"])
    def test_axes_without_dims_whose_size_is_a_value_stay_open(self, tmp_path, text):
        weights = {"k": np.array([4]), "r": np.array([[0, 0, 1, 1.0]]), "i": np.zeros(1, np.int32)}
        text = (
            f"s = Mul(n, n) t = Sub(k, s) h = Concat<axis=0>(s, t) c = Cast<to={6 if 'Crop' in text else 7}>(h) {text}"
        )
        model = build("float[4,1,3,3] x, int64[1] n", "float[u,v,w,q] y", text, weights)
        model.opset_import.add(domain="com.microsoft", version=1)
        save_onnx(model, tmp_path / "source.onnx")
        inputs = TensorSpec("x", "float32", (4, 1, 3, 3)), TensorSpec("n", "int64", (1,))
        exported_result = run(replace(self.request(tmp_path), inputs=inputs, dims=()))
        assert isinstance(specs_of(onnx.load(exported_result.onnx))[1][0].shape[2 if "Crop" in text else 0], str)

    def test_an_unchanged_file_is_run_in_place(self, tmp_path, monkeypatch):
        self.save(tmp_path)
        opened_paths = list[Path]()

        def reference(path: Path, **options: str) -> ReferenceSession:
            opened_paths.append(path)
            return ReferenceSession(path, **options)

        monkeypatch.setattr("pipeline.sources.export.ReferenceSession", reference)
        run(self.request(tmp_path))
        model = onnx.load(tmp_path / "source.onnx")
        model.ir_version = 10  # is lowered for what cannot read it; this is what can
        onnx.save(model, tmp_path / "source.onnx")
        run(self.request(tmp_path))
        run(self.request(tmp_path, ("z", "y")))
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "?"
        onnx.save(model, tmp_path / "source.onnx")
        run(self.request(tmp_path))
        source_path, saved = tmp_path / "source.onnx", tmp_path / "work" / "source.onnx"
        assert [path for path in opened_paths if path.name == "source.onnx"] == [source_path, source_path, saved, saved]
        assert not saved.exists()

    def test_external_weights_in_a_folder_are_embedded(self, tmp_path):
        model = build("float[N,3] x", "float[N,3] y", "y = MatMul(x, w)", {"w": np.eye(3)})
        (tmp_path / "weights").mkdir()
        onnx.save(model, tmp_path / "source.onnx", save_as_external_data=True, location="weights/w", size_threshold=0)
        assert failed(run(self.request(tmp_path))) == []

    def test_the_spec_chooses_and_orders_outputs(self, tmp_path):
        self.save(tmp_path)
        model = onnx.load(run(self.request(tmp_path, ("z",))).onnx)
        assert [node.op_type for node in model.graph.node] == ["Neg"]
        model = onnx.load(run(self.request(tmp_path, ("z", "y"))).onnx)
        assert [output.name for output in model.graph.output] == ["z", "y"]

    def test_a_missing_output_is_named_with_the_existing_ones(self, tmp_path):
        self.save(tmp_path)
        fails(self.request(tmp_path, ("logits",)), "output 'logits' is not in the model; its outputs are y, z")


def test_a_request_survives_json(tmp_path):
    request = torch_request(
        tmp_path, LINEAR, dims=(Dim("batch", 1, 8, 8, (4, 8)),), outputs=("a",), arguments={"width": 2}
    )
    assert decode(json.loads(json.dumps(encode(request))), ExportRequest) == request


@pytest.mark.slow
def test_processes_with_other_hash_seeds_export_the_same_bytes(tmp_path):
    body = "a = x.relu(); b = x.exp(); return {'s': a @ torch.arange(12.).reshape(3, 4), 't': (a * b).flatten()}"
    request = torch_request(tmp_path, net(body))
    code = (
        "import json, sys; from pathlib import Path; from enginesmith.core.codec import decode; "
        "from enginesmith.core.errors import digest_of_file; "
        "from pipeline.sources.export import export; from pipeline.sources.request import ExportRequest; "
        "done = export(decode(json.loads(sys.argv[1]), ExportRequest), None, None, Path(sys.argv[2])); "
        "print(digest_of_file(done.onnx), done.golden_digest)"
    )
    (tmp_path / "other").mkdir()
    command = [sys.executable, "-c", code, json.dumps(encode(request)), str(tmp_path / "other")]
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # here, and there
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    printed_stdout = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    result = run(request)
    assert printed_stdout.split() == [digest_of_file(result.onnx), result.golden_digest]
