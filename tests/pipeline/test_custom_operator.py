import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml

from enginesmith.client.client import pull
from enginesmith.core.errors import EnginesmithError, UnknownNameError
from enginesmith.opening import open_onnx
from enginesmith.registry.versions import lookup
from enginesmith.serving.router import Router
from tests.pipeline.projects import Project

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_operator"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_version_contains_the_library_of_its_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = Project(tmp_path / "spec", capsys)
    shutil.copytree(EXAMPLE, project.folder)
    subprocess.run([sys.executable, project.folder / "prepare.py"], check=True)
    spec = project.folder / "cube.yaml"
    spec.write_text(spec.read_text().replace("[fp32]", "[fp32, int8]"))
    result = project.run("build", spec)
    assert result.code == 0, result.err
    assert "no library of them is for tensorrt-rtx; tensorrt-rtx opens none; use another backend" in result.out
    assert "ranges are measured without the libraries" in result.out
    weight = onnx.numpy_helper.to_array(onnx.load(project.folder / "cube.onnx").graph.initializer[0])
    shutil.rmtree(project.folder)

    entries = {entry.unit: entry for entry in lookup.load(project.store, "cube", "1").engines}
    assert [item.kind for item in entries["sm_89 fp32 onnxruntime-cuda"].requires].count("library") == 1
    pulled_engine = pull("cube", registry=project.registry, dest=tmp_path / "pulled")
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_allclose(open_onnx(pulled_engine)({"x": x})["y"], x**3 @ weight, rtol=1e-4)
    model = pull("cube", registry=project.registry, dest=tmp_path / "model", target="sm_75", fallback="onnx")
    np.testing.assert_allclose(open_onnx(model)({"x": x})["y"], x**3 @ weight, rtol=1e-4)
    with Router.opened([pulled_engine, model]) as router:
        wide_array = np.arange(160, dtype=np.float32).reshape(40, 4)  # which no bucket holds
        np.testing.assert_allclose(router.run({"x": wide_array})["y"], wide_array**3 @ weight, rtol=1e-4)
    with pytest.raises(UnknownNameError, match=r"needs the library libcube\.so, .* linux-x86_64, and not for linux-aa"):
        pull("cube", registry=project.registry, dest=tmp_path / "arm", target="arm64")
    result = project.run("validate", "cube", "--json")
    assert result.code == 0, result.err
    result = project.run("pull", "cube", "--layout", "triton", "--dest", tmp_path / "triton")
    (library,) = [path for path in pulled_engine.path.parent.iterdir() if path.suffix == ""]
    assert f'op_library_filename: ["{tmp_path}/triton/cube/1/{library.name}"]' in (
        (tmp_path / "triton" / "cube" / "config.pbtxt").read_text()
    )

    library.unlink()  # the file is a link to the blob
    library.write_bytes(b"hostile")
    with pytest.raises(EnginesmithError, match="was published; pull it again"):
        open_onnx(pulled_engine)


def test_commands_with_custom_operators_need_their_library(project: Project) -> None:
    model = onnx.load(project.folder / "tiny.onnx")
    model.graph.node[2].domain = "example"
    model.opset_import.append(onnx.helper.make_opsetid("example", 1))
    onnx.save(model, project.folder / "tiny.onnx")
    assert "name its library in source.libraries" in project.build().err
    project.change_spec(source={"onnx": "tiny.onnx", "libraries": [{"file": "relu.so"}]})
    (project.folder / "relu.so").write_bytes(b"text")
    assert "relu.so is not a shared library of Linux" in project.build().err
    project.change_spec(source=yaml.safe_load("{torch: 'm.py:build', libraries: [{file: relu.so}]}"))
    assert "libraries belongs to an ONNX source" in project.build().err
