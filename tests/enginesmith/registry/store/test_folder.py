import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from enginesmith.core.errors import EnginesmithError, InputError, IntegrityError, UnavailableError
from enginesmith.registry.store import files
from enginesmith.registry.store import folder as filestore
from enginesmith.registry.store.base import FileStore, open_store
from tests.enginesmith.registries import in_child, names_in


def test_only_create_makes_a_registry(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="--registry"):
        open_store(tmp_path / "a" / "b")
    store = open_store(str(tmp_path / "a" / "b"), create=True)
    assert store.read("enginesmith-registry.json") == b'{"format":1}'
    assert open_store(f"file://localhost{tmp_path}/a/b").uri == store.uri == f"file://{tmp_path}/a/b"


def test_a_path_with_spaces_and_percents_survives_its_uri(tmp_path: Path) -> None:
    store = open_store(tmp_path / "my 100% registry", create=True)
    assert open_store(store.uri) == store


def test_a_relative_path_and_a_home_folder_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("./registry", create=True) == open_store("~/registry") == FileStore(tmp_path / "registry")


@pytest.mark.parametrize(
    ("uri", "error", "words"),
    [
        ("file://other-host/x", InputError, "absolute path"),
        ("file:relative", UnavailableError, "no registry at"),  # a path like any other: only '://' makes a URI
        ("", InputError, "--registry"),
        ("a\0b", InputError, "not a path"),
    ],
)
def test_an_invalid_registry_is_reported(uri: str, error: type[EnginesmithError], words: str) -> None:
    with pytest.raises(error, match=words):
        open_store(uri)


def test_a_file_or_a_folder_with_other_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(InputError, match="is a file"):
        open_store(tmp_path / "file", create=True)
    with pytest.raises(InputError, match=r"holds 'thesis\.tex' and is not a registry"):
        open_store(tmp_path / "other", create=True)
    assert names_in(tmp_path / "other") == ["thesis.tex"]


def test_a_registry_that_another_process_creates_meanwhile_is_opened(tmp_path, monkeypatch):
    read_file = FileStore.read

    def read_before_creation(store: FileStore, key: str) -> None:
        monkeypatch.setattr(FileStore, "read", read_file)
        open_store(tmp_path, create=True).put_bytes(b"x")

    monkeypatch.setattr(FileStore, "read", read_before_creation)
    assert open_store(tmp_path, create=True).read("enginesmith-registry.json") == b'{"format":1}'


@pytest.mark.parametrize(
    ("marker", "error", "words"),
    [
        ('{"format": 2}', InputError, "upgrade enginesmith"),
        ("{", IntegrityError, "damaged"),
        ("[]", IntegrityError, "damaged"),
        ("{}", IntegrityError, "damaged"),
    ],
)
def test_a_marker_of_another_format_is_refused(tmp_path, marker, error, words):
    (tmp_path / "enginesmith-registry.json").write_text(marker)
    with pytest.raises(error, match=words):
        open_store(tmp_path, create=True)


def test_a_read_only_registry_can_be_read_and_not_opened_for_writing(tmp_path, monkeypatch):
    open_store(tmp_path / "r", create=True)
    monkeypatch.setattr(filestore.os, "access", lambda *_: False)  # as for a user other than root
    assert open_store(tmp_path / "r").read("enginesmith-registry.json")
    with pytest.raises(UnavailableError, match="not writable"):
        open_store(tmp_path / "r", create=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, where this user may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_named_and_leaves_nothing_half_written(small_disk: Path) -> None:
    store = open_store(small_disk / "r", create=True)
    kept_digest = store.put_bytes(b"k" * 50_000)
    (small_disk.parent / "big").write_bytes(b"b" * 400_000)
    for put in (lambda: store.put_file(small_disk.parent / "big"), lambda: store.put_bytes(b"c" * 400_000)):
        with pytest.raises(UnavailableError, match=r"No space left on device; free some space"):
            put()
    assert names_in(small_disk / "r" / "tmp") == []
    assert store.read_blob(kept_digest) == b"k" * 50_000
    assert [key.rpartition("/")[2] for key in store.list("blobs/")] == [kept_digest]
    assert store.put_bytes(b"d" * 50_000)
    with pytest.raises(OSError, match="No space"):
        (small_disk / "rest").write_bytes(b"r" * 400_000)
    assert store.now(), "`registry fsck` needs no room"


def test_a_full_disk_at_a_fetchs_destination_is_named(small_disk: Path) -> None:
    store = open_store(small_disk.parent / "r", create=True)
    digest = store.put_bytes(b"b" * 400_000)
    with pytest.raises(UnavailableError, match=f"{small_disk}.*No space left"):
        store.fetch(digest, small_disk / "out")
    assert names_in(small_disk) == []


def test_a_file_size_limit_is_named_and_leaves_nothing_half_written(store: FileStore, tmp_path: Path) -> None:
    def put() -> None:
        sys.dont_write_bytecode = True  # Python would keep the beginning of what it compiles
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(UnavailableError, match="ulimit -f"):
            store.put_bytes(b"x" * 200_000)

    assert os.waitpid(in_child(put), 0)[1] == 0
    assert names_in(tmp_path / "registry" / "tmp") == [] and list(store.list("blobs/")) == []


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (OSError(30, "Read-only file system"), UnavailableError, "Read-only file system; remount it writable"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_a_put_that_is_refused_or_interrupted_leaves_nothing(store, tmp_path, monkeypatch, error, expected, words):
    monkeypatch.setattr(files.os, "fsync", Mock(side_effect=error))
    with pytest.raises(expected, match=words):
        store.put_bytes(b"x")
    assert names_in(tmp_path / "registry" / "tmp") == []


def test_files_of_a_killed_writer_are_deleted(tmp_path: Path) -> None:
    root = tmp_path / "r"
    open_store(root, create=True)

    def die_writing() -> None:
        with files.start_atomic_write(root / "tmp") as file:
            file.stream.write(b"half")
            file.stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    assert os.waitpid(in_child(die_writing), 0)[1] == signal.SIGKILL
    with files.start_atomic_write(root / "tmp") as own_file:
        assert len(names_in(root / "tmp")) == 2
        assert len(open_store(root).strays()) == 1
        assert open_store(root, create=True).strays() == ()
        assert names_in(root / "tmp") == [own_file.path.name]
        own_file.stream.write(b"whole")
        own_file.commit(root / "landed")
    assert (root / "landed").read_bytes() == b"whole"


def test_a_sweep_between_creating_and_locking_a_file_only_changes_its_name(tmp_path, monkeypatch):
    lock, swept_keys = files.fcntl.flock, []

    def sweep_first(fd: int, how: int) -> None:
        if not swept_keys:
            swept_keys.append(next(tmp_path.iterdir()).unlink())
        lock(fd, how)

    monkeypatch.setattr(files.fcntl, "flock", sweep_first)
    files.write_whole(tmp_path / "file", b"whole")
    assert swept_keys and (tmp_path / "file").read_bytes() == b"whole"


def test_sweepers_never_take_a_file_from_a_living_writer(store: FileStore) -> None:
    running_counts = [in_child(lambda: [store.sweep() for _ in range(400)]) for _ in range(2)]
    for number in range(60):
        store.put_bytes(str(number).encode())
    assert [os.waitpid(pid, 0)[1] for pid in running_counts] == [0, 0]
    assert len(list(store.list("blobs/"))) == 60


def test_blobs_are_read_only_files(store: FileStore) -> None:
    assert store.path(store.put_bytes(b"x")).stat().st_mode & 0o222 == 0


def test_a_folder_in_the_place_of_a_blob_is_named(store: FileStore) -> None:
    blob = store.path(store.put_bytes(b"x"))
    blob.unlink()
    blob.mkdir()
    with pytest.raises(UnavailableError, match=f"{blob} is a folder where a file belongs: choose"):
        store.put_bytes(b"x")


@pytest.mark.parametrize("place", [
    os.mkfifo, Path.mkdir, partial(os.mknod, mode=stat.S_IFSOCK), partial(os.symlink, "index.json"),
    partial(os.symlink, "absent"), partial(os.symlink, "/dev/zero"),
])  # fmt: skip
def test_the_error_names_a_folder_in_place_of_a_document(store: FileStore, place: Callable[[Path], None]) -> None:
    place(store.root / "index.json")
    with pytest.raises(IntegrityError, match="not a regular file"):
        store.read("index.json")
    assert {*store.children()} == {"enginesmith-registry.json", "index.json" + "/" * (place is Path.mkdir)}


def test_a_pipe_in_place_of_the_lock_blocks_no_process(store: FileStore) -> None:
    (store.root / "lock").unlink(missing_ok=True)
    os.mkfifo(store.root / "lock")
    with pytest.raises(UnavailableError, match="writing"):
        store.create("models/a.json", b"{}")
