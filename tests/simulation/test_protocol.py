import re
from pathlib import Path

from tests.simulation import actors, folders, rules, runs

ROOT = Path(__file__).parents[2]
PAGES = ("concepts/registry-protocol.md", "decisions/0031-no-needed-blob-is-deleted.md", "concepts/security.md")
PAGE = "".join((ROOT / "docs" / name).read_text() for name in PAGES)
HOLDERS = (rules.Rules, actors.Registry, folders.Folder, runs)


def test_each_test_on_the_pages_exists() -> None:
    texts = [file.read_text() for file in (ROOT / "tests").rglob("test_*.py")]
    named_matches = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named_matches) > 30
    assert [name for name in sorted(named_matches) if not any(f"def {name}(" in text for text in texts)] == []


def test_each_rule_on_the_pages_exists() -> None:
    names = {name for part in re.findall(r"rules? ((?:`\w+`(?:,\s)?)+)", PAGE) for name in re.findall(r"`(\w+)`", part)}
    assert len(names) > 10
    assert [name for name in sorted(names) if not any(hasattr(holder, name) for holder in HOLDERS)] == []


def test_each_rule_is_on_a_page() -> None:
    checks = {name for name in vars(rules.Rules) if name.startswith("_") and not name.startswith("__")}
    assert [name for name in sorted(checks - {"_is_live", "_is_held", "_count_time"}) if f"`{name}`" not in PAGE] == []
