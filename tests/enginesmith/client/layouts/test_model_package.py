import json
from dataclasses import replace
from pathlib import Path

import pytest

from enginesmith import cli
from enginesmith.client.client import Client
from enginesmith.client.layouts.base import Placed
from enginesmith.client.layouts.model_package import ModelPackage
from enginesmith.core.errors import InputError, IntegrityError, UnknownNameError
from enginesmith.core.requirements import Library
from enginesmith.registry.manifest import EngineEntry
from enginesmith.registry.store.base import Store
from tests.enginesmith.client.layouts.engines import adds, cpu_engine, plan, stripped, wide
from tests.enginesmith.client.layouts.package_reader import Loader
from tests.enginesmith.registries import engine, flip, names_in, publish_engines


def cuda_engine(store: Store, target: str, number: float = 7) -> EngineEntry:
    entry = engine(store, target, "fp16", status="unproven", data=adds(number))
    return replace(entry, backend="onnxruntime-cuda", suffix=".onnx")


def place(store: Store, dest: Path, *machines: str) -> Placed:
    return Client(store.uri).place("digits", dest, ModelPackage(), target=list(machines))


def test_onnx_runtime_opens_it_with_the_providers_variant(store: Store, tmp_path: Path) -> None:
    publish_engines(store, [cpu_engine(store, 5), cuda_engine(store, "sm_89")])
    placement = place(store, tmp_path / "m", "l4", "cpu")
    assert placement.folder == tmp_path / "m" / "digits-1.ortpackage" and placement.swapped
    loader = Loader(placement.folder)
    assert loader.components() == ["digits"]
    assert loader.variants("digits") == {"sm_89-fp16": "CUDAExecutionProvider", "cpu-fp32": "CPUExecutionProvider"}
    assert loader.select("digits") == ("cpu-fp32", 1)
    assert {item.path.read_bytes() for item in placement.pulled} == {adds(5), adds(7)}


def test_a_package_that_the_loader_would_refuse_is_not_written(store: Store, tmp_path: Path) -> None:
    """The loader is strict, so that the test above would fail with a key that it does not know."""
    publish_engines(store, [cpu_engine(store, 5)])
    folder = place(store, tmp_path / "m", "cpu").folder
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "engine": 1}))
    with pytest.raises(ValueError, match="unknown field 'engine'"):
        Loader(folder)


def test_a_second_pull_repairs_it_and_other_engines_leave_it(store: Store, tmp_path: Path) -> None:
    publish_engines(store, [cpu_engine(store, 5), cuda_engine(store, "sm_89")])
    placement = place(store, tmp_path / "m", "cpu")
    model = placement.pulled[0].path
    model.unlink()
    model.write_bytes(b"damaged")
    again = place(store, tmp_path / "m", "cpu")
    assert model.read_bytes() == adds(5) and (again.swapped, again.identity) == (False, placement.identity)
    with pytest.raises(InputError, match="has other engines; delete it, or give another --dest"):
        place(store, tmp_path / "m", "cpu", "l4")
    assert Loader(placement.folder).select("digits") == ("cpu-fp32", 1)


def test_a_failed_pull_leaves_no_package_and_no_remains(store: Store, tmp_path: Path) -> None:
    publish_engines(store, [cpu_engine(store, 5), cuda_engine(store, "sm_89"), cuda_engine(store, "sm_80", 8)])
    digest = str(cuda_engine(store, "sm_80", 8).digest)
    flip(store, digest)
    with pytest.raises(IntegrityError):
        place(store, tmp_path / "m", "cpu", "a100")
    assert not list((tmp_path / "m").glob("*.ortpackage"))
    folder = place(store, tmp_path / "m", "l4").folder
    assert names_in(folder) == ["manifest.json", "sm_89-fp16"]


def test_two_indistinguishable_engines_are_refused_before_a_folder_is_made(store: Store, tmp_path: Path) -> None:
    publish_engines(store, [cuda_engine(store, "sm_89"), cuda_engine(store, "sm_80", 8), cuda_engine(store, "sm_75")])
    with pytest.raises(InputError, match="are both for CUDAExecutionProvider"):
        place(store, tmp_path / "m", "l4", "a100")
    assert not (tmp_path / "m").exists()
    assert len(place(store, tmp_path / "m", "l4", "t4").pulled) == 2, "the same bytes are one engine"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("plan", "opens engines of tensorrt"), ("stripped", "no weights"), ("wide", "saturate"), ("library", "a library")],
)
def test_engines_that_no_provider_opens_alone_are_refused(store: Store, tmp_path: Path, kind: str, reason: str) -> None:
    entry = cpu_engine(store, 5)
    library = replace(entry, requires=(*entry.requires, Library("cube", "RegisterCustomOps", ())))
    kinds = {"plan": plan(store, "l4"), "stripped": stripped(entry), "wide": wide(entry), "library": library}
    assert reason in str(ModelPackage().reject(kinds[kind]))
    if kind == "plan":
        publish_engines(store, [kinds[kind]])
        with pytest.raises(UnknownNameError, match="serve: onnxruntime"):
            place(store, tmp_path / "m", "l4")


def test_the_command_prints_each_variant(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish_engines(store, [cpu_engine(store, 5)])
    words = ["pull", "digits", "--layout", "ortpackage", "--target", "cpu", "--dest", str(tmp_path / "m")]
    for extra_names, code in (([], 0), (["--follow"], 2)):
        with pytest.raises(SystemExit) as error:
            cli.main([*words, *extra_names, "--registry", store.uri])
        assert error.value.code == code
    captured_namespace = capsys.readouterr()
    assert "chosen: cpu-fp32/model.onnx: cpu fp32 onnxruntime of digits@1" in captured_namespace.out
    assert "writes the package of a version once; leave out --follow" in captured_namespace.err
