"""Each figure on a tree of a few files whose counts are known, and the table that is made of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house import graphs
from tests.house.names import is_participle
from tests.house.page import BEFORE, PAGE, markdown, measure, read_before, with_table
from tests.house.tree import Tree
from tests.house.wrap import is_same, long_lines, wrap

FILES = {
    "pyproject.toml": "[[tool.importlinter.contracts]]\n",
    "README.md": "# A\n\n" + "x" * 121 + "\n\n| a |\n|---|\n| " + "y" * 121 + " |\n",
    "enginesmith/__init__.py": "",
    "builders/__init__.py": "",
    "validation/__init__.py": "",
    "pipeline/__init__.py": "",
    "pipeline/cli/__init__.py": "",
    "pipeline/cli/registry/pull.py": (
        "import click\n@click.command()\ndef pull():\n    from pipeline.client import Client\n    Client().fetch()\n"
    ),
    "pipeline/client.py": (
        "from typing import Any\nfrom pipeline import store\nclass Client:\n    def fetch(self) -> dict[str, Any]:\n"
        '        """The blob, [n, 4] bytes.\n\n        Raises StoreError."""\n        return store.read()["bytes"]\n'
    ),
    "pipeline/store.py": "class Client: ...\ndef read(): return {}\ndef held(): return 'pipeline.work:build'\n",
    "pipeline/work.py": (
        "import pipeline.compile.publication.publish\ndef build(x: dict, y: int): ...\ndef _idle():\n"
        + "    pass\n" * 200
    ),
    "pipeline/compile/publication/publish.py": "from pipeline import work\ndef publish_version(): work.build({}, 1)\n",
    "benchmarks/bench.py": "one\ntwo\n",
    "tests/test_it.py": "one\n",
}
EXPECTED = {
    "lines": 5 + 8 + 3 + 203 + 2,
    "lines pipeline": 221,
    "lines builders": 0,
    "lines_of_scripts": 2,
    "lines_of_tests": 1,
    "files_of_largest_folder": 4,
    "full_folders": 0,
    "long_files": 1,
    "long_functions": 1,
    "anys": 2,
    "dicts_of_any": 1,
    "literal_subscripts": 1,
    "jobs_by_name": 1,
    "loose_job_parameters": 1,
    "repeated_class_names": 1,
    "public_participles": 1,
    "private_participles": 0,
    "docstrings": 1,
    "docstrings_with_errors": 1,
    "docstrings_with_shapes": 1,
    "untested_commands": 1,
    "circles": 1,
    "contracts": 1,
    "pull_modules": 3,
    "pull_rooms": 2,
    "functions_called_pull": 1,
    "publish_modules": 2,
    "publish_rooms": 2,
    "readme_lines": 7,
    "long_prose": 1,
}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return Tree.read(tmp_path)


@pytest.mark.parametrize("name", EXPECTED)
def test_each_figure_counts_what_it_says(tree, name):
    assert measure(tree)[name] == EXPECTED[name]


def test_circles_and_what_a_function_crosses_are_named(tree):
    assert graphs.import_circles(tree) == [["pipeline.compile.publication.publish", "pipeline.work"]]
    pull = tree.modules["pipeline.cli.registry.pull"]
    assert graphs.crossed(tree, pull, pull.functions[0]) == {
        "pipeline.cli.registry.pull",
        "pipeline.client",
        "pipeline.store",
    }


def test_no_modules_of_this_tree_import_each_other():
    assert graphs.import_circles(Tree.read(PAGE.parents[1])) == []


def test_what_git_ignores_is_not_counted(tree):
    (tree.root / ".gitignore").write_text("pipeline/work.py\n")
    assert "pipeline.work" not in Tree.read(tree.root).modules


def test_a_verb_is_no_participle():
    assert [name for name in ("held", "_asked", "waiting", "built") if not is_participle(name)] == []
    assert [name for name in ("read", "run", "bring", "held_shapes", "feed") if is_participle(name)] == []


def test_the_table_has_every_figure_of_before_and_now(tree):
    table = markdown(read_before(), measure(tree))
    assert len(table.splitlines()) == 2 + len(measure(tree))
    assert "| Lines of Python in the four packages. | 61,034 | 221 | 50,000 |" in table
    assert with_table("a\n<!-- figures -->\nold\n<!-- /figures -->\nb\n", table).count(table) == 1


def test_the_page_was_written_from_this_list_of_figures():
    rows = [line.rsplit("|", 4)[0] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    wanted = [line.rsplit("|", 4)[0] for line in markdown({}, json.loads(BEFORE.read_text())).splitlines()]
    assert rows == [line for line in wanted if line.startswith("| ")]


def test_a_folder_that_is_no_checkout_is_bad_input(tmp_path):
    command = [sys.executable, "-m", "tests.house", "--tree", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    )
    assert done.returncode == 2 and "not a git checkout" in done.stderr and "--tree" in done.stderr


WORDS = " ".join(["word"] * 40)


@pytest.mark.parametrize(
    "text",
    [
        f"{WORDS} `a code span` {WORDS} [a link](to/a page) {WORDS}",
        f"- {WORDS}\n  {WORDS}\n\n  > {WORDS}\n  > {WORDS}\n\n1. {WORDS}\n   - {WORDS}",
        " ".join(["a", "-", "1.", "#", "+", "2)", ">", "==="] * 20),
        f"> quoted {WORDS}",
    ],
)
def test_prose_is_wrapped_and_renders_alike(text):
    wrapped = wrap(text)
    assert long_lines(text) and not long_lines(wrapped)
    assert is_same(text, wrapped) and wrap(wrapped) == wrapped


def test_tables_code_headings_and_hard_breaks_are_left_alone():
    table = f"| a | b |\n|---|---|\n| {WORDS} | x |"
    text = f"# {WORDS}\n\n{table}\n\n```\n{WORDS}\n```\n\n    {WORDS}\n\n{WORDS}  \n{WORDS}\n"
    assert wrap(text) == text
    assert len(long_lines(text)) == 3


def test_no_prose_of_this_tree_is_longer():
    tree = Tree.read(PAGE.parents[1])
    texts = {path: tree.text(path) for path in tree.paths if path.suffix == ".md"}
    assert [str(path) for path, text in texts.items() if long_lines(text)] == [], "run `make format`"
