import shutil
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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of both distributions."""
    folder = tmp_path_factory.mktemp("dist")
    for place in (CLIENT, ROOT):
        build(place, folder)
    return folder


def build(place: Path, folder: Path, *options: str) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--directory", folder, *options]
    subprocess.run(command, cwd=place, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("wheel", "packages"),
    [("enginesmith-0", ["enginesmith"]), ("enginesmith_pipeline", ["builders", "pipeline", "validation"])],
)
def test_a_wheel_has_every_module_and_data_file_of_its_packages(built: Path, wheel: str, packages: list[str]) -> None:
    result = subprocess.run(["git", "ls-files", *packages], cwd=ROOT, check=True, capture_output=True, text=True)
    extra_texts = {f"enginesmith/{name}" for name in ("LICENSE", "README.md", "pyproject.toml")}
    (file,) = built.glob(f"{wheel}*.whl")
    files = {name for name in zipfile.ZipFile(file).namelist() if ".dist-info/" not in name}
    assert files == set(result.stdout.split()) - extra_texts


def test_a_second_build_gives_the_same_bytes(built: Path, tmp_path: Path) -> None:
    source = shutil.copytree(CLIENT, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("__pycache__"))
    (source / "__pycache__").mkdir()
    (source / "__pycache__/left.cpython-311.pyc").touch()
    shutil.copy(ROOT / ".gitignore", tmp_path)  # becomes a part of the sdist
    build(source, tmp_path)
    names = [file.name for file in built.glob("enginesmith-0*")]
    assert len(names) == 2
    assert [(tmp_path / name).read_bytes() for name in names] == [(built / name).read_bytes() for name in names]


def test_both_distributions_have_one_version() -> None:
    client, pipeline = (tomllib.loads((place / "pyproject.toml").read_text())["project"] for place in (CLIENT, ROOT))
    assert client["version"] == pipeline["version"]
    assert pipeline["dependencies"] == [f"enginesmith=={client['version']}"]


def test_the_client_runs_from_its_wheel_without_the_pipeline(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("enginesmith-0*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    paths = [str(tmp_path / "unpacked"), sysconfig.get_path("purelib")]
    result = {
        words: subprocess.run(
            [sys.executable, "-I", "-S", "-c", RUN, *paths, *words.split()],
            capture_output=True, text=True, cwd=tmp_path, check=False,
        )
        for words in ("--version", "pull --help", "list --registry nowhere", "build spec.yaml")
    }  # fmt: skip
    assert [value.returncode for value in result.values()] == [0, 0, 3, 3]
    assert "0.1.0" in result["--version"].stdout and "there is no registry" in result["list --registry nowhere"].stderr
    assert result["build spec.yaml"].stderr == (
        "error: this needs enginesmith-pipeline, which is not installed: pip install '.[build]' in a clone\n"
    )


@pytest.mark.parametrize("module", ["enginesmith", "enginesmith.client.client", "enginesmith.cli.pull"])
def test_the_client_does_not_import_the_pipeline(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'builders', 'pipeline', 'validation'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
