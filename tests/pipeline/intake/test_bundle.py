from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginesmith.core.codec import decode
from enginesmith.core.errors import InputError, IntegrityError, UnknownNameError
from enginesmith.core.parsing import Malformed
from enginesmith.registry.gc import collect
from enginesmith.registry.registered_specs import KEPT, SpecBundle, addresses, find, parse, registrations
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import registered_key
from enginesmith.registry.verification import verify
from pipeline.intake.registration import bundle_of, register, spec_at
from pipeline.spec.document import is_ensemble
from pipeline.spec.ensembles.model import load_any
from pipeline.spec.model import load_spec
from tests.ensembles import write_ensemble
from tests.pipeline.projects import Project, weights, write_model

GENERATOR = "from helper import width\nimport numpy\n\ndef samples():\n    yield {'x': numpy.zeros((1, width))}\n"


def bundled(project: Project, **parts: object) -> SpecBundle:
    project.change_spec(**parts)
    return bundle_of(load_spec(project.spec))


def test_a_bundle_contains_the_spec_and_every_named_file(project: Project) -> None:
    files = {"tiny.yaml", "tiny.onnx", "calibration.npz", "golden.npz"}
    assert set(bundled(project).files) == files
    (project.folder / "relu.so").write_bytes(b"library")
    source = {"onnx": "tiny.onnx", "libraries": [{"file": "relu.so"}]}
    assert set(bundled(project, source=source).files) == {*files, "relu.so"}


def test_a_bundle_contains_a_generators_modules_and_a_folders_files(project: Project) -> None:
    (project.folder / "data.py").write_text(GENERATOR)
    (project.folder / "helper.py").write_text("width = 8\n")
    (project.folder / "unrelated.py").write_text("")
    result = bundled(project, calibration={"data": "data.py:samples"})
    assert {"data.py", "helper.py"} <= set(result.files) and "unrelated.py" not in result.files
    (project.folder / "samples" / "more").mkdir(parents=True)
    (project.folder / "samples" / "more" / "a.npy").write_bytes(b"1")
    assert "samples/more/a.npy" in bundled(project, calibration={"data": "samples"}).files


def test_a_bundle_contains_a_torch_sources_modules_and_weights(project: Project) -> None:
    (project.folder / "net.py").write_text("from layers import Layer\n\ndef build():\n    return Layer()\n")
    (project.folder / "layers.py").write_text("class Layer: pass\n")
    (project.folder / "w.safetensors").write_bytes(b"weights")
    result = bundled(project, source={"torch": "net.py:build", "weights": "w.safetensors"})
    assert {"net.py", "layers.py", "w.safetensors"} <= set(result.files) and "tiny.onnx" not in result.files


def test_any_changed_file_makes_another_bundle_and_its_place_does_not(project: Project) -> None:
    bundle_before = bundled(project)
    moved_folder = project.folder.rename(project.folder.parent / "elsewhere")
    assert bundle_of(load_spec(moved_folder / "tiny.yaml")).digest == bundle_before.digest
    write_model(moved_folder / "tiny.onnx", weights(seed=1))
    assert bundle_of(load_spec(moved_folder / "tiny.yaml")).digest != bundle_before.digest


def test_large_numerous_and_outside_files_are_refused(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_spec(project.spec)
    with pytest.raises(InputError, match="a bundle holds at most 100"):
        bundle_of(spec, most_bytes=100)
    monkeypatch.setattr("pipeline.intake.registration.MOST_FILES", 3)
    with pytest.raises(InputError, match="names 4 files"):
        bundle_of(spec)
    (project.folder / "data").mkdir()
    (project.folder / "data" / "a.npy").symlink_to("/etc/hostname")
    project.change_spec(calibration={"data": "data"})
    with pytest.raises(InputError, match="leads outside"):
        bundle_of(load_spec(project.spec))


@given(st.sampled_from(["../x", "/x", "a/../../x", "", "a\\b", "a/..", "\x00"]))
def test_a_bundle_that_leads_out_of_its_folder_is_not_read(name: str) -> None:
    with pytest.raises(Malformed):
        decode({"model": "tiny", "spec": name, "files": {name: "0" * 64}}, SpecBundle)


def test_a_registered_spec_is_built_with_only_the_registry(project: Project, store: Store) -> None:
    item, did_exist = register(store, load_spec(project.spec))
    assert not did_exist and register(store, load_spec(project.spec)) == (item, True)
    bundle_before = bundle_of(load_spec(project.spec))
    for path in project.folder.iterdir():
        path.unlink()
    with spec_at(item.address, store.uri) as spec:
        assert bundle_of(spec.load()) == bundle_before == item.bundle
        assert spec.load().address == item.address and spec.load().is_copy
        folder = spec.path.parent
    assert not folder.exists()
    with spec_at("registered:tiny", store.uri) as spec:
        assert spec.path.name == "tiny.yaml" and str(spec) == item.address, "the newest may be another tomorrow"


def test_the_newest_registration_counts_and_only_some_are_kept(project: Project, store: Store) -> None:
    digests = []
    for seed in [*range(KEPT + 1), 1]:
        write_model(project.folder / "tiny.onnx", weights(seed))
        digests.append(register(store, load_spec(project.spec))[0].bundle.digest)
    assert len(registrations(store, "tiny")) == KEPT
    assert find(store, "tiny").bundle.digest == digests[1] and addresses(store) == [f"registered:tiny@{digests[1]}"]
    with pytest.raises(UnknownNameError, match="the last 3 are kept"):
        find(store, "tiny", digests[0])


def test_gc_keeps_registered_specs_and_verify_accepts_them(project: Project, store: Store) -> None:
    item, _ = register(store, load_spec(project.spec))
    for _ in range(2):
        collect(store, grace=timedelta(0), delete=True)
    assert all(map(store.has, item.bundle.files.values()))
    assert verify(store).problems == ()


def test_an_edited_or_damaged_registration_is_not_built(project: Project, store: Store) -> None:
    item, _ = register(store, load_spec(project.spec))
    blob = store.path(item.bundle.files["golden.npz"])
    blob.chmod(0o644)
    blob.write_bytes(b"other")
    with pytest.raises(IntegrityError), spec_at(item.address, store.uri):
        pass
    key = registered_key("tiny")
    data = store.read(key)
    assert data is not None
    store.replace(key, data.replace(b"tiny.onnx", b"tiny.oonx"), data)
    with pytest.raises(IntegrityError, match="it was edited"):
        find(store, "tiny")
    assert [problem.kind for problem in verify(store).problems if problem.what == key] == ["edited"]
    with pytest.raises(IntegrityError, match="the limit is 16777216"):
        parse(bytes((16 << 20) + 1), "tiny")


def test_a_bundle_of_an_ensemble_holds_its_graphs_and_builds_elsewhere(tmp_path: Path, store: Store) -> None:
    path = write_ensemble(tmp_path / "project")
    item, did_exist = register(store, load_any(path))
    names = ("pair", "encoder", "decoder")
    data = {"golden.npz", "calibration.npz", "encoder.onnx", "decoder.onnx"}
    assert not did_exist and set(item.bundle.files) == data | {f"{name}.yaml" for name in names}
    with spec_at(f"registered:pair@{item.bundle.digest}", store.uri) as registered_spec:
        assert is_ensemble(registered_spec.path)
        loaded_spec = load_any(registered_spec.path, registered_spec.address)
        assert loaded_spec.model == "pair" and loaded_spec.folder != path.parent
