import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import save_file

from enginesmith.core.errors import digest_of_file
from enginesmith.core.types import TensorSpec
from pipeline.sources.onnx_model import specs_of
from pipeline.sources.request import ExportRequest
from pipeline.sources.user_process import start_user_process
from tests.pipeline.sources.exports import BATCH, LINEAR, X, failed, fails, net, run, torch_request, user_code_here
from validation.golden.golden_set import GoldenSet

__all__ = ["user_code_here"]  # a fixture


class TestEntryPoint:
    @pytest.mark.parametrize(
        ("code", "words"),
        [
            (
                "def build():\n    raise ValueError('no config')",
                r"model\.py:2: build\(\) failed: ValueError: no config",
            ),
            ("def build():\n    import sys; sys.exit('bye')", r"model\.py:2: build\(\) failed: SystemExit: bye"),
            ("import none_such\ndef build(): ...", r"model\.py:1: build\(\) failed: ModuleNotFoundError: No module"),
            ("def biuld(): ...", r"has no function 'build'; did you mean 'biuld'"),
            ("x = 1", "has no function 'build'; its functions: none"),
            ("def build(): return {}", r"build returned dict; return a torch\.nn\.Module"),
            ("def build(:", r"model\.py:1: not Python"),
            ("from other import build", r"other\.py:3: build\(\) failed: ZeroDivisionError"),
        ],
    )
    def test_errors_are_reported_with_file_and_line(self, tmp_path, code, words):
        (tmp_path / "other.py").write_text("def build():\n    x = 0\n    return 1 / x\n")
        fails(torch_request(tmp_path, code), words)

    def test_a_missing_file_is_a_model_error(self, tmp_path):
        fails(ExportRequest("torch", tmp_path, "none.py", (X,), (BATCH,), function="build"), "does not exist")

    def test_wrong_arguments_are_reported(self, tmp_path):
        fails(torch_request(tmp_path, LINEAR, arguments={"widht": 2}), "unexpected keyword argument 'widht'")

    def test_arguments_reach_the_function(self, tmp_path):
        export_result = run(torch_request(tmp_path, LINEAR, arguments={"width": 7}))
        assert specs_of(onnx.load(export_result.onnx))[1][0].shape == ("batch", 7)

    def test_the_fields_of_a_dataclass_are_the_outputs(self, tmp_path):
        fields = "from dataclasses import dataclass\n@dataclass\nclass Output:\n    y: object\n    z: object = None\n"
        export_result = run(torch_request(tmp_path, fields + net("return Output(x * 2)")))
        assert [value.name for value in onnx.load(export_result.onnx).graph.output] == ["y"] and not failed(
            export_result
        )

    def test_inputs_may_be_keywords_only_in_the_specs_order(self, tmp_path):
        code = net("return a * 2 + x.sum(1, keepdim=True)", more="").replace("self, x", "self, *, x, a")
        export_result = run(torch_request(tmp_path, code, inputs=(TensorSpec("a", "float32", ("batch", 2)), X)))
        assert [value.name for value in onnx.load(export_result.onnx).graph.input] == ["a", "x"] and not failed(
            export_result
        )

    def package(self, folder: Path, code: str) -> None:
        folder.mkdir()
        (folder / "__init__.py").write_text("from . import json\n")
        (folder / "json.py").write_text("SCALE = 3.0\n")
        (folder / "models.py").write_text("import json\nfrom .json import SCALE\n" + code)

    def test_a_dotted_module_is_imported_by_its_name(self, tmp_path):
        self.package(tmp_path / "parts", net("return x * SCALE"))
        names = {"function": "build", "module": "parts.models"}
        request = ExportRequest("torch", tmp_path, "parts/models.py", (X,), (BATCH,), **names)
        case = GoldenSet.load(run(request).golden).cases[0]
        assert np.array_equal(case.expected["output"], case.inputs["x"] * 3)

    @pytest.mark.slow
    def test_a_dotted_module_may_have_a_name_of_enginesmith(self, tmp_path):
        self.package(tmp_path / "pipeline", "def build(): raise ValueError(__name__, SCALE, json.loads('4'))")
        names = {"function": "build", "module": "pipeline.models"}
        with pytest.MonkeyPatch.context() as patch:  # this process holds Enginesmith's `pipeline`
            patch.setattr("pipeline.sources.export.start_user_process", start_user_process)
            request = ExportRequest("torch", tmp_path, "pipeline/models.py", (X,), (BATCH,), **names)
            fails(request, r"ValueError: \('pipeline\.models', 3\.0, 4\)")

    def test_a_local_module_that_python_would_not_import_is_refused(self, tmp_path):
        (tmp_path / "json.py").write_text("SCALE = 2")
        request = torch_request(tmp_path, "import json\n" + LINEAR)
        fails(request, r"json\.py has the name of 'json', a module that is loaded")

    def test_local_modules_are_imported_fresh_and_unloaded(self, tmp_path):
        path, modules = list(sys.path), set(sys.modules)
        for scale in (2, 3):
            root = tmp_path / str(scale)
            root.mkdir()
            (root / "scales.py").write_text(f"SCALE = {scale}")
            late_net = net("from scales import SCALE; return x * SCALE")
            golden = GoldenSet.load(run(torch_request(root, late_net)).golden)
            assert np.array_equal(golden.cases[0].expected["output"], golden.cases[0].inputs["x"] * scale)
            assert not list(root.rglob("__pycache__"))
        assert sys.path == path and not {"model", "scales"} & (set(sys.modules) - modules)


class TestWeights:
    def save(self, root: Path, **tensors) -> None:
        save_file({name.replace("_", "."): array for name, array in tensors.items()}, root / "w.safetensors")

    def test_loaded_weights_replace_the_modules_own(self, tmp_path):
        self.save(tmp_path, **{"0_weight": np.ones((4, 3), np.float32), "0_bias": np.full(4, 2, np.float32)})
        case = GoldenSet.load(run(torch_request(tmp_path, LINEAR, weights="w.safetensors")).golden).cases[0]
        expected = np.maximum(case.inputs["x"].sum(1, keepdims=True) + 2, 0) * np.ones(4)
        assert np.allclose(case.expected["output"], expected, atol=1e-5)

    @pytest.mark.parametrize(
        ("tensors", "words"),
        [
            ({"0_weight": np.ones((4, 3), np.float32)}, r"0\.bias \[4\] is missing"),
            (
                {"0_weight": np.ones((4, 2), np.float32), "0_bias": np.ones(4, np.float32)},
                r"\[4, 2\] and must be \[4, 3\]",
            ),
            ({"0_weight": np.ones((4, 3)), "0_bias": np.ones(4), "1_x": np.ones(1)}, r"1\.x is not in the module"),
        ],
    )
    def test_every_name_and_shape_must_match(self, tmp_path, tensors, words):
        self.save(tmp_path, **tensors)
        fails(torch_request(tmp_path, LINEAR, weights="w.safetensors"), words)

    def test_an_invalid_safetensors_file_is_a_model_error(self, tmp_path):
        (tmp_path / "w.safetensors").write_bytes(b"garbage")
        fails(torch_request(tmp_path, LINEAR, weights="w.safetensors"), "cannot be read as safetensors")

    def test_a_tied_tensor_needs_only_one_of_its_names(self, tmp_path):
        code = LINEAR.replace(
            "return Net(torch.nn.Linear(3, width)", "one = torch.nn.Linear(3, 3); return Net(one, one"
        )
        self.save(tmp_path, **{"0_weight": np.eye(3, dtype=np.float32), "0_bias": np.zeros(3, np.float32)})
        case = GoldenSet.load(run(torch_request(tmp_path, code, weights="w.safetensors")).golden).cases[0]
        assert np.array_equal(case.expected["output"], np.maximum(case.inputs["x"], 0))

    def test_without_weights_the_seeded_ones_are_used_with_a_note(self, tmp_path):
        first_result, second_result = (run(torch_request(tmp_path, LINEAR)) for _ in range(2))
        assert digest_of_file(first_result.onnx) == digest_of_file(second_result.onnx)
        assert any("no weights file" in note for note in first_result.notes)
