"""What the command line says of bad input: which file, which value, and what to do."""

import numpy as np
import onnx
import pytest

from enginesmith.core.errors import UnavailableError
from enginesmith.registry.store.folder import FileStore
from tests.pipeline.projects import Project, arrays


def said(project: Project) -> str:
    """What a build says that fails for bad input."""
    done = project.build("--quiet")
    assert done.code == 2, done.err
    return done.err


def test_a_model_of_an_old_opset_is_named_as_the_user_has_it(project: Project) -> None:
    x, y = (onnx.helper.make_tensor_value_info(name, 1, ["batch", 8]) for name in ("x", "logits"))
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["logits"])], "g", [x], [y])
    old = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 5)], ir_version=3)
    onnx.save(old, project.folder / "tiny.onnx")
    assert said(project).startswith(f"error: {project.folder}/tiny.onnx: onnxruntime has no operator Relu of opset 5; ")


def test_a_wrong_name_in_golden_data_is_said_with_both_names(project: Project) -> None:
    data = arrays(project.folder / "golden.npz")
    np.savez(project.folder / "golden.npz", z=data["x"], label=data["label"])
    assert "golden.npz has no array 'x': it holds z, label; the model wants x, and beside them label; " in said(project)


def test_a_wrong_name_of_an_input_in_the_spec_is_no_fault_of_the_data(project: Project) -> None:
    project.change_spec(inputs={"z": {"dtype": "float32", "shape": ["batch", 8]}})
    text = said(project)
    assert "inputs: the model's input 'x' is missing; its inputs are x: add it" in text
    assert "inputs.z: the model has no such input" in text and ".npz" not in text


def test_a_wrong_name_in_calibration_data_is_said_with_both_names(project: Project) -> None:
    np.savez(project.folder / "calibration.npz", z=arrays(project.folder / "calibration.npz")["x"])
    assert "calibration.npz has no array 'x': it holds z; the model wants x; " in said(project)


@pytest.mark.parametrize("name", ["golden.npz", "calibration.npz"])
def test_a_file_that_is_no_spec_says_what_to_run_instead(project: Project, name: str) -> None:
    err = project.run("build", project.folder / name).err
    assert err.startswith(f"error: {project.folder}/{name}: is a ") and "`enginesmith init`" in err
    assert "codec" not in err and err.count("\n") == 1


def test_a_disk_that_is_full_after_publication_says_what_is_missing(project, monkeypatch):
    replace = FileStore.replace

    def full(self: FileStore, key: str, data: bytes, expected: bytes | None) -> bool:
        if key.endswith("report.html"):
            raise UnavailableError(f"writing {key}: No space left on device")
        return replace(self, key, data, expected)

    monkeypatch.setattr(FileStore, "replace", full)
    done = project.build("--target", "cpu", "--quiet")
    assert done.code == 3
    assert done.err.startswith("error: tiny@1 is published, but its page could not be written: writing ")
