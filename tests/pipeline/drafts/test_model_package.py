"""A spec out of a model package: as Olive writes them, as onnxruntime reads them, and hostile ones.

`ENGINESMITH_OLIVE` names the Python of an environment with Olive (`pip install olive-ai==0.13.0`), which writes one.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from enginesmith.core.errors import EnginesmithError, InputError, ModelError
from pipeline.drafts.model_package import look_at_package
from pipeline.spec.model import load_spec
from tests.pipeline.drafts.graphs import halving
from tests.pipeline.projects import exit_code

CPU, CUDA = ({"ep": f"{name}ExecutionProvider"} for name in ("CPU", "CUDA"))


def package(folder: Path, components: Any, files: dict[str, Any], **keys: Any) -> Path:
    """A package; of a file that is None, a model."""
    root = folder / "p.ortpackage"
    for name, content in {
        "manifest.json": {"schema_version": "1.0", "components": components, **keys},
        **files,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            halving(root / name)
        else:
            (root / name).write_text(json.dumps(content))
    return root


def compiled(path: Path) -> None:
    """Have a model be what a provider compiled."""
    model = onnx.load(path)
    model.graph.node.append(helper.make_node("EPContext", [], ["c"], domain="com.microsoft"))
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, path)


OLIVE = {"models/model/cpu/model.onnx": None, "models/model/gpu/model.onnx": None}


@pytest.mark.parametrize(
    ("components", "file"), [({"model": "models/model"}, "component.json"), (["model"], "metadata.json")]
)
def test_olives_packages_give_the_cpu_variant(tmp_path: Path, components: Any, file: str) -> None:
    """The two forms as Olive 0.13 and its sources after that (2602) write them."""
    documents = {f"models/model/{file}": {"component_name": "model", "variants": {"gpu": CUDA, "cpu": CPU}}}
    root = package(tmp_path, components, {**documents, **OLIVE}, package_name="Adder 2", configs_dir="configs")
    actual = look_at_package(root, tmp_path)
    assert actual.source == {"onnx": "p.ortpackage/models/model/cpu/model.onnx"}
    assert (actual.name, actual.serve) == ("adder-2", "onnxruntime")
    assert "not taken: model/gpu (CUDAExecutionProvider)" in actual.notes


@pytest.mark.parametrize(
    ("info", "file"),
    [
        ({"model_file": "b.onnx"}, "v/b.onnx"),
        ("ort.json", "v/b.onnx"),
        ({"model_file": "sha256:ab/c.onnx"}, "shared_assets/sha256-ab/c.onnx"),
    ],
)
def test_the_file_equals_onnx_runtimes_choice(tmp_path: Path, info: Any, file: str) -> None:
    files = {"v/a.onnx": None, "v/b.onnx": None, "shared_assets/sha256-ab/c.onnx": None}
    files |= {"v/ort.json": {"model_file": "b.onnx", "session_options": {}}}
    variants = {"one": {**CPU, "variant_directory": "v", "executor_info": {"ort": info}}}
    root = package(tmp_path, {"m": {"variants": variants}}, files)
    assert look_at_package(root, tmp_path).source == {"onnx": f"p.ortpackage/{file}"}


def test_a_variant_compiled_for_a_device_is_no_source(tmp_path: Path) -> None:
    root = package(tmp_path, {"m": {"variants": {"cpu": CPU, "gpu": CUDA}}}, {"cpu/x.onnx": None, "gpu/x.onnx": None})
    compiled(root / "cpu/x.onnx")
    assert look_at_package(root, tmp_path).source == {"onnx": "p.ortpackage/gpu/x.onnx"}
    compiled(root / "gpu/x.onnx")
    with pytest.raises(InputError, match=r"m/cpu, m/gpu.* are compiled for their devices"):
        look_at_package(root, tmp_path)


@pytest.mark.skipif("ENGINESMITH_OLIVE" not in os.environ, reason="ENGINESMITH_OLIVE names no Python with Olive")
def test_a_package_that_olive_itself_writes_is_read(tmp_path: Path) -> None:
    command = [os.environ["ENGINESMITH_OLIVE"], "-m", "olive", "generate-model-package", "-o", tmp_path / "p"]
    for name, options in (("gpu", [{"cuda": {}}]), ("cpu", [])):
        (tmp_path / name).mkdir()
        decoder = {
            "filename": halving(tmp_path / name / "net.onnx").name,
            "session_options": {"provider_options": options},
        }
        (tmp_path / name / "genai_config.json").write_text(json.dumps({"model": {"decoder": decoder}}))
        command += ["-s", tmp_path / name]
    subprocess.run(command, check=True, env={**os.environ, "OLIVE_DISABLE_TELEMETRY": "1"})
    actual = look_at_package(tmp_path / "p.ortpackage", tmp_path)
    assert str(actual.source["onnx"]).endswith("/cpu/net.onnx") and actual.name == "p"
    assert any(note.endswith("/gpu (CUDAExecutionProvider)") for note in actual.notes)


KEYS = st.sampled_from(["components", "variants", "m", "ep", "executor_info", "ort", "model_file"])
INLINE = {"m": {"variants": {"v": CPU}}}


@pytest.mark.parametrize(
    ("components", "files", "message"),
    [
        ({"m": {"variants": {"../../x": CPU}}}, {}, "must be a relative path"),
        ({"m": {"variants": {"v": {**CPU, "variant_directory": "/etc"}}}}, {}, "must be a relative path"),
        ({"m": "../other"}, {}, "must be a relative path"),
        ({"m": {"variants": {"v": {"executor_info": {"ort": {"model_file": "../../a.onnx"}}}}}}, {}, "relative path"),
        ({"m": {"variants": {"v": {"executor_info": {"ort": {"model_file": "sha256:../a"}}}}}}, {}, "does not exist"),
        ({"m": {"variants": {"v": {"executor_info": {"ort": 3}}}}}, {}, "executor_info.ort"),
        ({"m": {"variants": {}}}, {}, "none"),
        ({"m": "gone"}, {}, "does not exist"),
        ({"m": {"variants": 3}}, {}, "components.m"),
        (3, {}, "neither a list nor a table"),
        (INLINE, {}, "no ONNX file"),
        (INLINE, {"v/a.onnx": None, "v/b.onnx": None}, "v/a.onnx, v/b.onnx; name one of the files"),
        ({"a": {"variants": {"v": CPU}}, "b": {"variants": {"v": CPU}}}, {"v/a.onnx": None}, "several models, a, b"),
    ],
)
def test_other_folders_than_a_model_package_are_refused_with_the_reason(
    tmp_path: Path, components: Any, files: dict[str, Any], message: str
) -> None:
    with pytest.raises((InputError, ModelError), match=message):
        look_at_package(package(tmp_path, components, files), tmp_path)


def test_a_link_out_of_the_package_is_not_followed(tmp_path: Path) -> None:
    root = package(tmp_path, INLINE, {})
    halving(tmp_path / "secret.onnx")
    (root / "v").mkdir()
    (root / "v/model.onnx").symlink_to(tmp_path / "secret.onnx")
    with pytest.raises(ModelError, match="leads outside the package"):
        look_at_package(root, tmp_path)


@given(st.recursive(st.none() | st.integers() | st.text(max_size=8), lambda inner: st.dictionaries(KEYS, inner)))
def test_any_json_is_refused_with_an_error(tmp_path_factory: pytest.TempPathFactory, document: Any) -> None:
    folder = tmp_path_factory.mktemp("package")
    (folder / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(EnginesmithError):
        look_at_package(folder, folder)


def test_init_takes_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = package(tmp_path, INLINE, {"v/model.onnx": None}, package_name="halving")
    assert exit_code("init", root) == 0, capsys.readouterr().err
    assert load_spec(tmp_path / "halving.yaml").source_file == "p.ortpackage/v/model.onnx"
