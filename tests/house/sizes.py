"""How large a tree is: lines, files in a folder, functions, prose."""

from collections import Counter
from statistics import median

from tests.house.tree import PACKAGES, Function, Tree
from tests.house.wrap import long_lines

LONG_FILE, LONG_FUNCTION, FULL_FOLDER = 200, 40, 14


def count_lines(tree: Tree) -> int:
    """Lines of Python in the four packages."""
    return sum(module.lines for module in tree.modules.values())


def count_lines_of_scripts(tree: Tree) -> int:
    """Lines of Python outside of the packages and the tests (examples, benchmarks, chart scripts)."""
    others = (p for p in tree.paths if p.suffix == ".py" and p.parts[0] not in (*PACKAGES, "tests"))
    return sum(len(tree.text(path).splitlines()) for path in others)


def count_lines_of_tests(tree: Tree) -> int:
    """Lines of Python below tests/."""
    return sum(len(tree.text(p).splitlines()) for p in tree.paths if p.suffix == ".py" and p.parts[0] == "tests")


def count_files_of_largest_folder(tree: Tree) -> int:
    """Most Python files directly in one folder."""
    return max(files_by_folder(tree).values())


def count_full_folders(tree: Tree) -> int:
    """Folders with over 14 Python files of their own."""
    return sum(count > FULL_FOLDER for count in files_by_folder(tree).values())


def count_long_files(tree: Tree) -> int:
    """Modules of over 200 lines."""
    return sum(module.lines > LONG_FILE for module in tree.modules.values())


def count_lines_of_median_function(tree: Tree) -> int:
    """Median length of a function, in lines with its docstring."""
    return int(median(_length(function) for _, function in tree.functions))


def count_long_functions(tree: Tree) -> int:
    """Functions of over 40 lines."""
    return sum(_length(function) > LONG_FUNCTION for _, function in tree.functions)


def count_readme_lines(tree: Tree) -> int:
    """Lines of README.md."""
    return len((tree.root / "README.md").read_text(encoding="utf-8").splitlines())


def count_long_prose(tree: Tree) -> int:
    """Lines of over 120 characters in Markdown files, tables and code blocks aside."""
    return sum(len(long_lines(tree.text(path))) for path in tree.paths if path.suffix == ".md")


def lines_by_package(tree: Tree) -> dict[str, int]:
    """Lines of each of the four packages."""
    return {name: sum(m.lines for m in tree.modules.values() if m.package == name) for name in PACKAGES}


def files_by_folder(tree: Tree) -> Counter[str]:
    """How many Python files each folder of the packages has of its own."""
    return Counter(module.room for module in tree.modules.values())


def _length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1
