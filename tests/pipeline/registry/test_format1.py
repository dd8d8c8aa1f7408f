"""A registry that the first format's code wrote (format1/README.md) is read, pulled from, moved, collected."""

import json
import shutil
from datetime import timedelta
from pathlib import Path

import pytest

from builders.targets import parse_targets
from pipeline.registry import channels, versions
from pipeline.registry.history import history
from pipeline.registry.mirror import mirror
from pipeline.registry.names import parse_reference
from pipeline.registry.pull import pull
from pipeline.registry.records import recall
from pipeline.registry.retention.gc import collect
from pipeline.registry.retention.marks import Rules
from pipeline.registry.shown import listed_models, listed_versions, shown
from pipeline.registry.store import Store, open_store
from pipeline.registry.verify import verify
from tests.pipeline.registry.registries import engine, on_each_store, publish_engines

HERE = Path(__file__).parent / "format1" / "registry"


@pytest.fixture
def old(store: Store, tmp_path: Path) -> Store:
    """A copy of it, in a folder or object by object in a bucket."""
    shutil.copytree(HERE, tmp_path / "old")
    for path in sorted((tmp_path / "old").rglob("*")):
        key = path.relative_to(tmp_path / "old").as_posix()
        if path.is_file() and key.startswith("blobs/"):
            assert store.put_file(path) == path.name
        elif path.is_file() and store.read(key) is None:
            assert store.create(key, path.read_bytes())
    return store


@on_each_store
def test_a_registry_of_the_first_format_lives_on(old: Store, tmp_path: Path) -> None:
    assert [(problem.kind, problem.fault) for problem in verify(old).problems] == [("orphaned", False)]
    rows = listed_models(old)
    assert [(row["model"], row["versions"]) for row in rows] == [("digits", ["1", "2", "3"]), ("encoder", ["1"])]
    assert rows[0]["channels"] == {"candidate": "3", "stable": "1"}
    assert [row["engines"] for row in listed_versions(old, "digits")] == [{"proven": 2, "refused": 1}] * 3
    assert shown(old, parse_reference("digits@2"))["engines"][0]["status"] == "proven"
    assert recall(old, "export", "0" * 64) is not None
    pulled = pull(old, parse_reference("digits:stable"), parse_targets("l4")[0], tmp_path / "out")
    assert pulled.path.read_bytes() == b"first sm_89" and pulled.engine.status == "proven"
    described = json.loads(pulled.description.read_bytes())
    assert (described["version"], described["channel"]) == ("1", "stable")
    assert [row["action"] for row in history(old, parse_reference("digits:stable"))] == [
        "promote",
        "promote",
        "rollback",
    ]


def test_it_is_written_to_and_collected(tmp_path: Path) -> None:
    shutil.copytree(HERE, tmp_path / "old")
    old = open_store(tmp_path / "old", create=True)
    third = versions.load(old, "digits", "3")
    after = channels.promote(old, third, "stable", why="upgraded")
    assert [move.version for move in after.history] == ["1", "2", "1", "3"]
    assert publish_engines(old, [engine(old, data=b"new")], "new").version == "4"
    other = open_store(tmp_path / "mirror", create=True)
    assert mirror(old, [parse_reference("digits:stable")], other, with_channels=True).versions == ("digits@3",)
    assert verify(other).problems == ()
    before = set(old.list("models/digits/versions/3/"))
    gone = collect(old, Rules(versions=1, moves=1), timedelta(0), delete=True)
    assert {item.name for item in gone.items if item.kind == "version"} == {"digits@2"}
    assert versions.versions(old, "digits") == ["1", "3", "4"] and before == set(old.list("models/digits/versions/3/"))
    assert verify(old).problems == ()
    assert channels.rollback(old, "digits", "stable").version == "1"
