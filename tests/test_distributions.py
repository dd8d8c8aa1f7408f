"""Two distributions of one tree: `enginesmith` for serving nodes, `enginesmith-pipeline` for all that builds."""

import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLIENT = ROOT / "enginesmith"
# Without what `site` does: the folder of the wheel and the libraries, and no editable installation of this tree.
RUN = "import sys; sys.path[:0] = sys.argv[1:3]; del sys.argv[1:3]; from enginesmith.__main__ import main; main()"


def test_the_client_lists_all_its_packages() -> None:
    listed = tomllib.loads((CLIENT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = sorted({file.parent.relative_to(ROOT) for file in CLIENT.rglob("*.py")})
    assert listed == [".".join(folder.parts) for folder in folders]


def test_both_have_one_version() -> None:
    client, pipeline = (tomllib.loads((place / "pyproject.toml").read_text())["project"] for place in (CLIENT, ROOT))
    assert client["version"] == pipeline["version"]
    assert pipeline["dependencies"] == [f"enginesmith=={client['version']}"]


def test_a_wheel_of_the_client_holds_nothing_else_and_runs_without_the_pipeline(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, CLIENT]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    assert {path.name.partition("-")[0] for path in (tmp_path / "unpacked").iterdir()} == {"enginesmith"}
    paths = [str(tmp_path / "unpacked"), sysconfig.get_path("purelib")]
    done = {
        words: subprocess.run(
            [sys.executable, "-I", "-S", "-c", RUN, *paths, *words.split()],
            capture_output=True, text=True, cwd=tmp_path, check=False,
        )
        for words in ("--version", "pull --help", "list --registry nowhere", "build spec.yaml")
    }  # fmt: skip
    assert [each.returncode for each in done.values()] == [0, 0, 3, 3]
    assert "0.1.0" in done["--version"].stdout and "there is no registry" in done["list --registry nowhere"].stderr
    assert done["build spec.yaml"].stderr == (
        "error: this needs enginesmith-pipeline, which is not installed: pip install '.[build]' in a clone\n"
    )


@pytest.mark.parametrize("module", ["enginesmith", "enginesmith.client.client", "enginesmith.cli.pull"])
def test_the_client_imports_nothing_of_the_pipeline(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'builders', 'pipeline', 'validation'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
