"""What docs/reference/promises.md promises from 0.1.0 is there, and the page names tests and versions that exist."""

import json
import re

import pytest

from tests.frozen.surface import PROMISES, ROOT, surface

PAGE = (ROOT / "docs/reference/promises.md").read_text()
PROMISED: dict[str, list[str]] = json.loads(PROMISES.read_text())


@pytest.fixture(scope="module")
def present() -> dict[str, list[str]]:
    return surface()


@pytest.mark.parametrize("kind", sorted(PROMISED))
def test_all_promised_names_exist(present: dict[str, list[str]], kind: str) -> None:
    gone_names = sorted(set(PROMISED[kind]) - set(present[kind]))
    assert gone_names == [], f"{kind}: this is promised from 0.1.0: docs/reference/promises.md"


def test_all_checked_names_are_promised(present: dict[str, list[str]]) -> None:
    assert present.keys() == PROMISED.keys() and all(PROMISED.values())


def test_the_page_names_existing_tests() -> None:
    named_matches = set(re.findall(r"`(tests/[\w/.]+)`", PAGE))
    assert len(named_matches) > 2
    assert [name for name in sorted(named_matches) if not (ROOT / name).exists()] == []


def test_versions_on_the_page_are_those_of_the_packages_and_of_this_installation() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| `([^`]+)` \| ([\d.]+\d|not run)", PAGE, re.MULTILINE)
    assert len(rows) > 5
    project = (ROOT / "pyproject.toml").read_text()
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for name, supported_name, tested_name in rows:
        assert f'"{name}{supported_name}' in project
        assert tested_name == pins.get(name.replace("-", "_"), pins.get(name, "not run"))
