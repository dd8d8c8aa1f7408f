"""`enginesmith rehearse`: with the same toolchain in another process, and with versions that are not there."""

import sys
from importlib.metadata import version
from pathlib import Path

from tests.pipeline.cli.operations.test_check import files_of
from tests.pipeline.projects import Project

SAME = f"onnxruntime=={version('onnxruntime')}"


def test_what_is_served_is_built_proven_and_timed_beside_itself_and_nothing_is_published(built: Project) -> None:
    before = files_of(built.registry / "models")
    words = ("--toolchain", SAME, "--python", sys.executable, "--seconds", "0.2", "--json")
    done = built.run("rehearse", *words)
    units = {item["unit"]: item for item in done.json["units"]}
    assert list(units) == ["cpu fp32 onnxruntime", "cpu int8 onnxruntime"], done.err
    for item in units.values():
        old, new = item["old"], item["new"]
        assert (old["status"], old["sqnr_db"], old["metrics"]) == (new["status"], new["sqnr_db"], new["metrics"])
        assert new["status"] == "proven" and old["digest"] == new["digest"]
        assert old["median_s"] > 0 and new["median_s"] > 0 and item["times"]["bucket"] == "batch=4"
        assert item["verdict"] != "stays" or "times the time" in item["why"]
    assert [(plan["version"], plan["channels"]) for plan in done.json["plan"]] == [("tiny@1", ["candidate"])]
    assert files_of(built.registry / "models") == before


def test_an_environment_with_another_version_is_refused(built: Project) -> None:
    done = built.run("rehearse", "tiny", "--toolchain", "onnxruntime==0.1", "--python", sys.executable)
    assert done.code == 2 and f"has onnxruntime {version('onnxruntime')}, not 0.1; install that there" in done.err
    bare = Path(sys.base_prefix) / "bin" / "python3"
    done = built.run("rehearse", "tiny", "--toolchain", SAME, "--python", bare)
    assert done.code == 2 and "No module named" in done.err and "install enginesmith there" in done.err


def test_a_toolchain_that_builds_nothing_here_is_named_beside_those_that_do(built: Project) -> None:
    done = built.run("rehearse", "tiny", "--toolchain", "nothing==1", "--python", sys.executable)
    assert done.code == 2 and "no served engine is built with nothing; they are built with" in done.err
    assert built.run("rehearse", "tiny", "--toolchain", "--index-url").code == 2
