import numpy as np
import onnx
import pytest

from enginesmith.core.errors import UnavailableError
from enginesmith.registry.store.folder import FileStore
from tests.pipeline.projects import Project, arrays
from tests.pipeline.quantization.small_nets import build


def said(project: Project) -> str:
    """What a build says that fails for bad input."""
    result = project.build("--quiet")
    assert result.code == 2, result.err
    return result.err


def test_a_model_of_an_old_opset_has_the_users_name(project: Project) -> None:
    old_build = build("float[batch,8] x", "float[batch,8] logits", "logits = Relu(x)", {}, 5)
    onnx.save(old_build, project.folder / "tiny.onnx")
    assert said(project).startswith(f"error: {project.folder}/tiny.onnx: onnxruntime has no operator Relu of opset 5; ")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("golden.npz", "it holds label, z; the model wants x, and beside them label; "),
        ("calibration.npz", "it holds z; the model wants x; "),
    ],
)
def test_a_wrong_name_in_data_is_reported_with_both_names(project: Project, name: str, expected: str) -> None:
    data = arrays(project.folder / name)
    np.savez(project.folder / name, **{"z" if key == "x" else key: array for key, array in sorted(data.items())})
    assert f"{name} has no array 'x': {expected}" in said(project)


@pytest.mark.parametrize("name", ["golden.npz", "calibration.npz"])
def test_an_invalid_spec_file_names_the_right_command(project: Project, name: str) -> None:
    err = project.run("build", project.folder / name).err
    assert err.startswith(f"error: {project.folder}/{name}: is a ") and "`enginesmith init`" in err
    assert "codec" not in err and err.count("\n") == 1


def test_a_full_disk_after_publication_names_the_missing_part(project, monkeypatch):
    replace = FileStore.replace

    def full(self: FileStore, key: str, data: bytes, expected: bytes | None) -> bool:
        if key.endswith("report.html"):
            raise UnavailableError(f"writing {key}: No space left on device")
        return replace(self, key, data, expected)

    monkeypatch.setattr(FileStore, "replace", full)
    result = project.build("--target", "cpu", "--quiet")
    assert result.code == 3
    assert result.err.startswith("error: tiny@1 is published, but its page could not be written: writing ")
