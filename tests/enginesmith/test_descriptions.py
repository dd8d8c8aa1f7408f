import json
from pathlib import Path

import pytest

from enginesmith.core.errors import DataError, digest_of_bytes
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.requirements import Library, LibraryBuild
from enginesmith.descriptions import (
    OtherBytesError,
    check_engine,
    find_file,
    find_library,
    read_description,
    read_engine,
)

ENGINE, SHARD, WEIGHTS = b"engine", b"shard", b"weights"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    result = tmp_path / "engines"
    result.mkdir()
    (tmp_path / "secret").write_bytes(ENGINE)
    (result / "a.engine").write_bytes(ENGINE)
    (result / digest_of_bytes(SHARD)).write_bytes(SHARD)
    (result / "a.weights.onnx").write_bytes(WEIGHTS)
    return result


def described(folder: Path, **changes: object) -> tuple[Path, dict[str, object]]:
    entries = {
        "file": "a.engine",
        "digest": digest_of_bytes(ENGINE),
        "shards": [digest_of_bytes(SHARD)],
        "weights": "a.weights.onnx",
        "graph": digest_of_bytes(WEIGHTS),
        **changes,
    }
    path = folder / "a.json"
    path.write_text(json.dumps(entries))
    return path, read_description(path)


def test_an_engine_is_given_only_if_all_its_files_are_as_published(folder: Path) -> None:
    assert read_engine(*described(folder)) == ENGINE
    assert check_engine(*described(folder)) == (folder / "a.engine").resolve()


@pytest.mark.parametrize("name", ["a.engine", digest_of_bytes(SHARD), "a.weights.onnx"])
def test_other_bytes_are_refused(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"other")
    for ask in (read_engine, check_engine):
        with pytest.raises(OtherBytesError, match=f"{name[:20]}.* has the digest .*; pull it again"):
            ask(*described(folder))


@pytest.mark.parametrize(
    "changes",
    [{"file": name} for name in ("../secret", "/etc/passwd", "a/b", ".", "", "a\x00b", "gone", 3)]
    + [{"weights": "../secret"}, {"shards": ["../secret"]}, {"digest": "../secret"}, {"digest": None}],
)
def test_links_outside_and_files_without_digest_are_refused(folder: Path, changes: dict[str, object]) -> None:
    for ask in (read_engine, check_engine):
        with pytest.raises(DataError):
            ask(*described(folder, **changes))


def test_links_are_followed_within_the_folder_and_not_out_of_it(folder: Path) -> None:
    (folder / "..data").mkdir()
    (folder / "..data" / "real").write_bytes(ENGINE)
    (folder / "link").symlink_to("..data/real")
    assert find_file(folder, "link").name == "real"
    for name, target in (("out", "../secret"), ("circle", "circle"), ("folder", "..data")):
        (folder / name).symlink_to(target)
        with pytest.raises(DataError):
            find_file(folder, name)


def test_a_description_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginesmith.descriptions.MOST_BYTES", 10)
    (folder / "long.json").write_text('{"a": "aaaaaaaaaaaaaaaa"}')
    with pytest.raises(DataError, match=r"long\.json describes no engine: is 11 bytes long; the limit is 10"):
        read_description(folder / "long.json")


def test_a_library_is_given_for_this_machine_with_the_published_bytes(folder: Path) -> None:
    digest, text = digest_of_bytes(SHARD), f"linux-{this_kind().machine}"
    other_build = LibraryBuild("linux-other", "b" * 64)
    library = Library("a.so", "init", (other_build, LibraryBuild(text, digest)))
    assert find_library(folder, library) == folder / digest
    (folder / digest).write_bytes(b"hostile")
    with pytest.raises(OtherBytesError, match="pull it again"):
        find_library(folder, library)
    (folder / digest).unlink()
    with pytest.raises(DataError, match=r"cannot be opened.*pull it again"):
        find_library(folder, library)
    with pytest.raises(DataError, match=f"has for linux-other, and not for {text}; add one to source.libraries"):
        find_library(folder, Library("a.so", "init", (other_build,)))
