import importlib.util
import py_compile
import sys
from pathlib import Path

import numpy as np
import pytest

from enginesmith.core.errors import DataError, IntegrityError, ModelError, digest_of_file
from enginesmith.user_code import load_function

FILES = {
    "reading.py": "import sizes\nfrom parts.inner import two\n\ndef run(x):\n    return {'y': x * sizes.SIDE + two()}",
    "sizes.py": "SIDE = 3\n",
    "parts/inner.py": "from parts import outer\n\ndef two():\n    return outer.ONE + 1\n",
    "parts/outer.py": "ONE = 1\n",
}
ONES = {"x": np.ones(2)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def digests(root: Path, *names: str) -> dict[str, str]:
    return {name: digest_of_file(root / name) for name in names or FILES}


def test_a_function_is_loaded_with_its_modules_which_are_unloaded(root: Path) -> None:
    modules_before = set(sys.modules)
    run = load_function(root, "reading.py", "run", digests(root))
    assert run(ONES)["y"].tolist() == [5, 5]
    assert not {"reading", "sizes", "parts", "parts.inner"} & (set(sys.modules) - modules_before)
    assert not list(root.rglob("__pycache__")), "nothing is written there"


def test_a_file_in_a_folder_imports_from_its_folder_and_the_root(root: Path) -> None:
    (root / "parts" / "own.py").write_text(
        "import outer, sizes\n\ndef run(x):\n    return {'y': outer.ONE + sizes.SIDE}\n"
    )
    files = digests(root, "parts/own.py", "parts/outer.py", "sizes.py")
    assert load_function(root, "parts/own.py", "run", files)(ONES)["y"] == 4


@pytest.mark.parametrize("name", FILES)
def test_changed_code_is_not_run(root: Path, name: str) -> None:
    files = digests(root)
    (root / name).write_text("raise SystemExit('attacked')\n")
    with pytest.raises(IntegrityError, match=r"has the digest .* was published; pull it again"):
        load_function(root, "reading.py", "run", files)


def test_unpublished_modules_are_not_found(root: Path) -> None:
    (root / "planted.py").write_text("SIDE = 7\n")
    (root / "reading.py").write_text("import planted\n\ndef run(x):\n    return {'y': x}\n")
    with pytest.raises(ModelError, match="No module named 'planted'"):
        load_function(root, "reading.py", "run", digests(root))
    with pytest.raises(ModelError, match=r"planted\.py is not a published Python file \(.*\); pull it again"):
        load_function(root, "planted.py", "run", digests(root))


def test_bytecode_beside_the_source_is_not_run(root: Path) -> None:
    source = root / "sizes.py"
    good_data, facts = source.read_bytes(), source.stat()
    source.write_text("SIDE = 9\n")
    cache = Path(importlib.util.cache_from_source(str(source)))
    py_compile.compile(str(source), str(cache), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    source.write_bytes(good_data)
    assert facts.st_size == source.stat().st_size and cache.is_file()
    assert load_function(root, "reading.py", "run", digests(root))(ONES)["y"].tolist() == [5, 5]


def test_paths_that_leave_the_folder_are_refused(root: Path) -> None:
    digest = digest_of_file(root / "sizes.py")
    for name in ("../sizes.py", "/etc/x.py", "./sizes.py", "a//b.py"):
        with pytest.raises(ModelError, match="is not a path of a file"):
            load_function(root, "reading.py", "run", {**digests(root), name: digest})
    folder = root / "parts"
    (folder / "linked.py").symlink_to(root / "sizes.py")
    with pytest.raises(DataError, match="is not a file below"):
        load_function(folder, "linked.py", "run", {"linked.py": digest})


def test_the_name_of_a_loaded_module_is_refused(root: Path) -> None:
    (root / "json.py").write_text("import sizes\n")
    with pytest.raises(ModelError, match=r"json\.py has the name of 'json', a module that is loaded already"):
        load_function(root, "reading.py", "run", digests(root, *FILES, "json.py"))


def test_code_that_ends_the_process_is_an_error(root: Path) -> None:
    (root / "sizes.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ModelError, match=r"reading\.py cannot be imported: SystemExit: 3"):
        load_function(root, "reading.py", "run", digests(root))
