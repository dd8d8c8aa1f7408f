import json
import os
import pickle
import shutil
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from enginesmith.client.client import Client
from enginesmith.client.pull import Pulled
from enginesmith.client.resolve import Policy
from enginesmith.compile_caches import loading, warm_start
from enginesmith.compile_caches.loading import (
    FOLDER_VARIABLE,
    StaleCacheError,
    load_entry_point,
    measure_start,
    open_cache,
    pack,
    read_requirements,
    use_folder,
)
from enginesmith.core.errors import InputError, IntegrityError, ModelError, UntrustedError, digest_of_file
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.hardware.evaluation import list_facts
from enginesmith.core.requirements import Cpu, Gpu, Installation, Runtime
from enginesmith.registry.evidence.attachments import COMPILE_CACHE
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.trust.signing import SigningKey
from enginesmith.registry.versions.publish import add_signatures
from tests.enginesmith.registries import attach, engine, publish_engines
from tests.enginesmith.registry.trust.keys import written
from tests.enginesmith.registry.trust.test_signing import policy_file

FACTS = tuple(list_facts(cuda=False).items())
UNSIGNED = Policy(allow_unsigned=True)


class Hostile:
    """A pickle that leaves a file where it is read."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._mark,)


@pytest.fixture(autouse=True)
def _variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "before")


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "was-run"


def published(
    store: Store, tmp_path: Path, mark: Path, facts: tuple[tuple[str, str], ...] = FACTS, cpu: str = this_kind().name
) -> Manifest:
    """A version with an engine and an attached cache, of which a graph is a hostile pickle."""
    folder, file = tmp_path / "inductor" / "fxgraph" / "ab", tmp_path / "net.cache"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "graph").write_bytes(pickle.dumps(Hostile(mark)))
    pack(folder.parents[1], (), file)
    manifest = publish_engines(store, [engine(store)]).manifest
    attach(store, manifest, file, COMPILE_CACHE, (Cpu("cpu", cpu), Installation(facts)))
    return manifest


def pulled(store: Store, dest: Path, policy: Policy = UNSIGNED) -> Pulled:
    return Client(store.uri, policy=policy).pull("digits:candidate", dest)


def test_an_untrusted_cache_is_neither_pulled_nor_read(store: Store, tmp_path: Path, mark: Path) -> None:
    published(store, tmp_path, mark)
    usual_engine = pulled(store, tmp_path / "usual", Policy())
    assert not usual_engine.attachments and "is code, and no signature of it was checked" in usual_engine.left_out[0][1]
    assert not (tmp_path / "usual" / "attachments").exists()
    with pytest.raises(InputError, match=r"has no compile cache: .* is code"):
        warm_start(usual_engine, allow_unsigned=True)
    result = pulled(store, tmp_path / "dest")
    for inputs in (result, *result.attachments, result.attachments[0].description):
        with pytest.raises(UntrustedError, match=r"is code .* allow_unsigned=True"):
            warm_start(inputs)
    assert not mark.exists() and os.environ[FOLDER_VARIABLE] == "before"


def test_a_signature_that_a_policy_requires_suffices(store: Store, tmp_path: Path, mark: Path) -> None:
    manifest = published(store, tmp_path, mark)
    policy = Policy(trust=policy_file(tmp_path, "  - {models: '*', signers: [release]}\n"))
    with pytest.raises(UntrustedError, match="has 0 of the 1"):
        pulled(store, tmp_path / "dest", policy)
    key = SigningKey(written(tmp_path, "release")[0])
    add_signatures(store, manifest, key)
    assert "lacks the signatures" in pulled(store, tmp_path / "dest", policy).left_out[0][1]
    add_signatures(store, manifest, key, [digest_of_file(tmp_path / "net.cache")])
    result = pulled(store, tmp_path / "dest", policy)
    assert result.attachments[0].signed_by == ("release",)
    start = warm_start(result)
    assert os.environ[FOLDER_VARIABLE] == str(start.folder)
    assert start.folder.parent.stat().st_mode & 0o077 == 0  # others may not write code there
    assert not mark.exists()  # only torch reads a graph, when it looks for one


@pytest.mark.parametrize("change", ["cut", "swapped"])
def test_other_bytes_than_were_published_are_refused(store: Store, tmp_path: Path, mark: Path, change: str) -> None:
    published(store, tmp_path, mark)
    result = pulled(store, tmp_path / "dest")
    path = result.attachments[0].path
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[:-9] if change == "cut" else bytes([*data[:-30], data[-30] ^ 1, *data[-29:]]))
    for inputs in (result, result.attachments[0].description):
        with pytest.raises(IntegrityError, match="was published; pull it again"):
            warm_start(inputs, allow_unsigned=True)
    assert not mark.exists() and os.environ[FOLDER_VARIABLE] == "before"


def stale_facts() -> Iterator[tuple[str, str, str]]:
    for name, text in FACTS:
        if name != "CPU instructions":
            yield name, "another", f"made with {name} another, but this machine has {text}"
    flags = dict(FACTS)["CPU instructions"]
    yield "CPU instructions", f"{flags} avx9000".strip(), "this one lacks avx9000"


@pytest.mark.parametrize(("name", "text", "words"), [*stale_facts()])
def test_a_stale_cache_is_not_pulled_and_the_reason_names_the_difference(store, tmp_path, mark, name, text, words):
    published(store, tmp_path, mark, tuple({**dict(FACTS), name: text}.items()))
    ((left_out, reason),) = pulled(store, tmp_path / "dest").left_out
    assert left_out == "net.cache" and words in reason


def test_a_cache_of_another_kind_of_cpu_is_not_pulled(store: Store, tmp_path: Path, mark: Path) -> None:
    published(store, tmp_path, mark, cpu="arm64")
    result = pulled(store, tmp_path / "dest")
    assert not result.attachments and "laid out for arm64 CPUs, and this one is" in result.left_out[0][1]


def test_a_machine_change_after_the_pull_is_detected(store, tmp_path, mark, monkeypatch):
    published(store, tmp_path, mark)
    result = pulled(store, tmp_path / "dest")
    monkeypatch.setenv("CXX", "no-such-compiler")
    for inputs in (result, result.attachments[0].description):
        with pytest.raises(StaleCacheError, match=r"made with C\+\+ compiler .*, but it is absent here; pull the one"):
            warm_start(inputs, allow_unsigned=True)


def test_engines_and_other_attachments_are_no_caches(store: Store, tmp_path: Path) -> None:
    manifest = publish_engines(store, [engine(store)]).manifest
    (tmp_path / "words.txt").write_text("one two")
    attach(store, manifest, tmp_path / "words.txt", "vocabulary")
    result = pulled(store, tmp_path / "dest", Policy())
    attachment = result.attachments[0]
    for inputs in (result, result.description, result.path, attachment, attachment.description, tmp_path / "none.json"):
        with pytest.raises(InputError, match="compile cache"):
            warm_start(inputs, allow_unsigned=True)


def test_a_gpu_cache_requires_its_driver_and_runtimes() -> None:
    """Of this machine without a GPU the requirement on the GPU already says no."""
    from enginesmith.core.hardware.evaluation import evaluate
    from enginesmith.core.hardware.machine import Machine

    facts = (("driver", "580.65.06"),)
    requires = (Gpu("l4", (8, 9)), Runtime("triton", "3.5.0"), Installation(facts))
    ada, hopper = Machine((8, 9), runtimes={"triton": "3.5.0"}), Machine((9, 0))
    assert [result.state for result in evaluate(requires, ada)] == ["met", "met", "unknown"]
    assert evaluate(requires, hopper)[0].state == "unmet"
    assert "driver" in list_facts(cuda=True) and "driver" not in list_facts(cuda=False)


NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 4)
    def forward(self, x):
        return torch.nn.functional.silu(self.fc(x)) * {factor}
def build():
    return torch.compile(Net().eval(), dynamic=True), [(torch.ones(rows, 8),) for rows in (4, 1, 5)]
def wrong():
    return Net()
"""


def test_a_process_knows_its_start_time(tmp_path, monkeypatch):
    """The system's own times of starts may be off by a second."""
    commands: list[list[str]] = []
    monkeypatch.setattr(loading.subprocess, "run", lambda command, **_: commands.append(command) or sys.exit())
    start_s = time.monotonic()
    with pytest.raises(SystemExit):
        measure_start("net:build", tmp_path / "net.cache")
    assert start_s <= float(commands[0][-1]) <= time.monotonic()


@pytest.mark.slow
def test_a_process_with_a_cache_compiles_nothing_and_is_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET.format(factor=2))
    cache = tmp_path / "net.cache"
    result = measure_start("net:build", cache)
    assert result.compiled_again == 0 and 0 < result.to_json()["warm_of_cold"] < 1
    requires = read_requirements(cache)
    assert requires[0] == Cpu("cpu", this_kind().name) and requires[-1] == Installation(FACTS)
    data_before = cache.read_bytes()
    (tmp_path / "net.py").write_text(NET.format(factor=3))
    assert measure_start("net:build", cache).compiled_again > 0, "the cache is of another model"
    assert cache.read_bytes() == data_before


def test_equal_files_give_equal_cache_bytes_without_locks(tmp_path: Path) -> None:
    for name in ("ab/kernel.main.so", "locks/kernel.lock"):
        (tmp_path / "inductor" / name).parent.mkdir(parents=True)
        (tmp_path / "inductor" / name).write_bytes(name.encode())
    first_path, second_path = tmp_path / "first.cache", tmp_path / "second.cache"
    pack(tmp_path / "inductor", (Cpu("cpu", "arm64"),), first_path)
    folder = open_cache(first_path, digest_of_file(first_path)).folder
    assert [str(file.relative_to(folder)) for file in folder.rglob("*.*")] == ["ab/kernel.main.so"]
    pack(folder, read_requirements(first_path), second_path)
    assert first_path.read_bytes() == second_path.read_bytes()


@pytest.mark.parametrize("damage", ["cut", "no requirements", "method"])
def test_an_invalid_cache_file_is_refused(tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "net.cache"
    with zipfile.ZipFile(cache, "w", zipfile.ZIP_LZMA if damage == "method" else zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("files/a" if damage == "no requirements" else "requires.json", "[]")
    cache.write_bytes(cache.read_bytes()[: -30 if damage == "cut" else None])
    with pytest.raises(IntegrityError, match="not a compile cache"):
        read_requirements(cache)


def test_a_cpu_probe_runs_once_per_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.cpu_vec_isa import VecAVX2, VecISA

    probes: list[str] = []
    monkeypatch.setattr(VecISA, "_probe_load", lambda self, library: probes.append(library) or True)
    for _ in range(2):
        use_folder(tmp_path)
        assert VecAVX2()._probe_load("/some/where/avx2.so")
    assert probes == ["/some/where/avx2.so"]
    assert json.loads((tmp_path / "probes.json").read_bytes()) == {"avx2.so": True}


def test_no_member_is_written_outside_the_folder_which_is_deleted_at_exit(tmp_path, monkeypatch):
    cache, at_exit = tmp_path / "net.cache", Mock()
    monkeypatch.setattr(loading, "atexit", at_exit)
    with zipfile.ZipFile(cache, "w") as archive:
        archive.writestr("files/../../../evil", "x")
        archive.writestr("/etc/evil", "x")
    folder = open_cache(cache, digest_of_file(cache)).folder.parent
    assert {file.name for file in folder.rglob("*") if file.is_file()} == {"evil"}
    assert not (folder.parent / "evil").exists()
    at_exit.register.assert_called_once_with(shutil.rmtree, folder, ignore_errors=True)


@pytest.mark.parametrize(
    ("entry_point", "words"),
    [
        ("net:wrong", "must return the result of torch.compile, and the inputs of a call"),
        ("net", "must return the result of torch.compile"),
        ("net:none", "has no attribute 'none'; give MODULE:FUNCTION"),
        ("nowhere:build", "No module named 'nowhere'; give MODULE:FUNCTION"),
    ],
)
def test_an_entry_point_without_a_model_is_refused_with_the_remedy(tmp_path, monkeypatch, entry_point, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "net", raising=False)
    (tmp_path / "net.py").write_text(NET.format(factor=2))
    with pytest.raises(InputError, match=words):
        load_entry_point(entry_point)


def test_a_warm_start_gives_the_results_of_the_cold_one(tmp_path: Path) -> None:
    import torch

    answers = [torch.ones(2), torch.zeros(3)]
    for _ in range(2):
        loading._compare(answers, tmp_path / "answers")
    with pytest.raises(ModelError, match="differ from those of a cold start: Tensor-likes are not"):
        loading._compare([torch.ones(2), torch.ones(3)], tmp_path / "answers")


def test_an_edited_description_is_refused(store: Store, tmp_path: Path, mark: Path) -> None:
    published(store, tmp_path, mark)
    description = pulled(store, tmp_path / "dest").attachments[0].description
    document = json.loads(description.read_bytes())
    for change in ({"name": "../../evil"}, {"digest": "x"}, {"kind": "vocabulary"}):
        description.write_text(json.dumps({**document, **change}))
        with pytest.raises(InputError, match="compile cache"):
            warm_start(description, allow_unsigned=True)
