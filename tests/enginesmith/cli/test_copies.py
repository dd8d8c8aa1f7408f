from pathlib import Path

from enginesmith.core.errors import UnknownNameError
from enginesmith.registry.store.base import Store
from tests.enginesmith.cli.commands import run, said, told


def test_mirror_and_export(three: Store, tmp_path: Path) -> None:
    said("promote", "digits@2")
    actual = told("registry", "mirror", "digits:stable", "digits@3", tmp_path / "other", "--channels")
    assert (actual["versions"], actual["moved"]) == (["digits@2", "digits@3"], ["digits:stable"])
    text = said("registry", "mirror", "digits@2", tmp_path / "other")
    assert "digits@2\n0 blobs copied (0 B)" in text
    assert told("list", "--registry", tmp_path / "other")[0]["channels"] == {"stable": "2"}
    result = run("registry", "export", "digits:stable", tmp_path / "oci")
    assert f"oci:{tmp_path / 'oci'}:digits-2-cpu-fp32-onnxruntime" in result.stdout and "skopeo copy" in result.stderr
    assert told("registry", "export", "digits:stable", tmp_path / "oci")["tags"][0] == "digits-2"


def test_a_missing_version_is_not_copied(three: Store, tmp_path: Path) -> None:
    for words in (("mirror", "digits@9", tmp_path / "other"), ("export", "digits@9", tmp_path / "oci")):
        assert isinstance(run("registry", *words).exception, UnknownNameError)
    assert not (tmp_path / "oci").exists()
