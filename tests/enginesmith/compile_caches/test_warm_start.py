"""What stands between a published cache and code that runs: its publisher, its bytes, this machine, this model."""

import json
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import enginesmith
from enginesmith.client.client import Client
from enginesmith.client.pull import Pulled
from enginesmith.client.resolve import Policy
from enginesmith.compile_caches.archive import pack
from enginesmith.compile_caches.recipe import CacheRecipe, CompileOptions
from enginesmith.compile_caches.warm_start import FOLDER_VARIABLE, StaleCacheError
from enginesmith.core.errors import InputError, IntegrityError, UnknownNameError, UntrustedError, canonical_json
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.hardware.evaluation import list_facts
from enginesmith.core.requirements import Cpu, Gpu, Installation, Requirement, Runtime
from enginesmith.registry.manifest import EngineEntry
from enginesmith.registry.store.base import Store
from enginesmith.registry.trust.signing import SigningKey, sign
from enginesmith.registry.versions.publish import Published, publish
from tests.enginesmith.registries import approval, draft, engine, report
from tests.enginesmith.registry.trust.keys import written
from tests.enginesmith.registry.trust.test_signing import policy_file

FACTS = tuple(list_facts(cuda=False).items())
RECIPE = CacheRecipe(CompileOptions(), "cpu", 1)


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
) -> Published:
    """A version with an engine and a cache, of which a graph is a hostile pickle."""
    folder, file = tmp_path / "inductor" / "fxgraph" / "ab", tmp_path / "net.cache"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "graph").write_bytes(pickle.dumps(Hostile(mark)))
    pack(folder.parents[1], RECIPE, file)
    requires: tuple[Requirement, ...] = (Cpu("cpu", cpu), Installation(facts))
    found = replace(engine(store, data=file.read_bytes()), backend="torch-compile", suffix=".cache", requires=requires)
    found = replace(found, report=store.put_bytes(canonical_json(report(found).to_json())))
    own = engine(store)
    return publish(store, draft(store), [(own, approval(own))], caches=[(found, approval(found))])


def pulled(store: Store, dest: Path, trust: Path | None = None) -> Pulled:
    return Client(store.uri, policy=Policy(kind="cache", trust=trust)).pull("digits:candidate", dest)


def test_a_cache_is_pulled_beside_the_engine_and_by_name(store: Store, tmp_path: Path, mark: Path) -> None:
    version = published(store, tmp_path, mark)
    found, usual = pulled(store, tmp_path / "dest"), Client(store.uri).pull("digits:candidate", tmp_path / "dest")
    assert found.is_cache and found.engine.backend == "torch-compile"
    assert not usual.is_cache and usual.engine.backend == "onnxruntime"
    assert json.loads(found.description.read_bytes())["kind"] == "cache"
    assert {found.description, found.path}.isdisjoint({usual.description, usual.path})
    assert found.engine.digest in version.manifest.blobs()  # which no collection deletes


def test_nothing_is_read_of_a_cache_that_nobody_vouches_for(store: Store, tmp_path: Path, mark: Path) -> None:
    published(store, tmp_path, mark)
    found = pulled(store, tmp_path / "dest")
    for given in (found, found.description):
        with pytest.raises(UntrustedError, match=r"is code .* allow_unsigned=True"):
            enginesmith.warm_start(given)
    assert not mark.exists() and os.environ[FOLDER_VARIABLE] == "before"


def test_a_signature_that_a_policy_asked_for_is_enough(store: Store, tmp_path: Path, mark: Path) -> None:
    version = published(store, tmp_path, mark)
    trust = policy_file(tmp_path, "  - {models: '*', signers: [release]}\n")
    with pytest.raises(UntrustedError, match="has 0 of the 1"):
        pulled(store, tmp_path / "dest", trust)
    sign(store, version.manifest, SigningKey(written(tmp_path, "release")[0]))
    warm = enginesmith.warm_start(pulled(store, tmp_path / "dest", trust))
    assert warm.recipe == RECIPE and os.environ[FOLDER_VARIABLE] == str(warm.folder)
    assert warm.folder.stat().st_mode & 0o077 == 0  # others may not write code there
    assert not mark.exists()  # only torch reads a graph, when it looks for one


@pytest.mark.parametrize("change", ["cut", "swapped"])
def test_other_bytes_than_were_published_are_refused(store: Store, tmp_path: Path, mark: Path, change: str) -> None:
    published(store, tmp_path, mark)
    found = pulled(store, tmp_path / "dest")
    data = found.path.read_bytes()
    found.path.chmod(0o644)
    found.path.write_bytes(data[:-9] if change == "cut" else bytes([*data[:-30], data[-30] ^ 1, *data[-29:]]))
    for given in (found, found.description):
        with pytest.raises(IntegrityError, match="was published; pull it again"):
            enginesmith.warm_start(given, allow_unsigned=True)
    assert not mark.exists() and os.environ[FOLDER_VARIABLE] == "before"


def stale_facts() -> Iterator[tuple[str, str, str]]:
    for name, text in FACTS:
        if name != "CPU instructions":
            yield name, "another", f"made with {name} another, and {text} is here"
    flags = dict(FACTS)["CPU instructions"]
    yield "CPU instructions", f"{flags} avx9000".strip(), "this one lacks avx9000"


@pytest.mark.parametrize(("name", "text", "words"), [*stale_facts()])
def test_a_stale_cache_is_not_chosen_and_the_reason_says_what_differs(
    store: Store, tmp_path: Path, mark: Path, name: str, text: str, words: str
) -> None:
    published(store, tmp_path, mark, tuple({**dict(FACTS), name: text}.items()))
    with pytest.raises(UnknownNameError) as refused:
        pulled(store, tmp_path / "dest")
    assert words in str(refused.value) and "no compile cache for cpu" in str(refused.value)


def test_a_cache_of_another_kind_of_cpu_is_not_chosen(store: Store, tmp_path: Path, mark: Path) -> None:
    published(store, tmp_path, mark, cpu="arm64")
    with pytest.raises(UnknownNameError, match="laid out for arm64 CPUs, and this one is"):
        pulled(store, tmp_path / "dest")


def test_a_machine_that_changed_after_the_pull_is_seen(
    store: Store, tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(store, tmp_path, mark)
    found = pulled(store, tmp_path / "dest")
    monkeypatch.setenv("CXX", "no-such-compiler")
    for given in (found, found.description):
        with pytest.raises(StaleCacheError, match=r"made with C\+\+ compiler .*, and absent is here; pull the one"):
            enginesmith.warm_start(given, allow_unsigned=True)


def test_an_engine_is_no_cache(store: Store, tmp_path: Path, mark: Path) -> None:
    published(store, tmp_path, mark)
    found = Client(store.uri).pull("digits:candidate", tmp_path / "dest")
    for given in (found, found.description, found.path, tmp_path / "none.json"):
        with pytest.raises(InputError, match="compile cache"):
            enginesmith.warm_start(given, allow_unsigned=True)


def test_a_version_without_caches_says_so(store: Store, tmp_path: Path) -> None:
    own = engine(store)
    publish(store, draft(store), [(own, approval(own))])
    with pytest.raises(UnknownNameError, match=r"(?s)has no compile cache for cpu.*it has no compile caches at all"):
        pulled(store, tmp_path / "dest")


def test_a_cache_for_a_gpu_asks_for_its_driver_and_runtimes() -> None:
    """Of this machine without a GPU the requirement on the GPU already says no."""
    from enginesmith.core.hardware.evaluation import evaluate
    from enginesmith.core.hardware.machine import Machine

    facts = (("driver", "580.65.06"),)
    requires = (Gpu("l4", (8, 9)), Runtime("triton", "3.5.0"), Installation(facts))
    ada, hopper = Machine((8, 9), runtimes={"triton": "3.5.0"}), Machine((9, 0))
    assert [found.state for found in evaluate(requires, ada)] == ["met", "met", "unknown"]
    assert evaluate(requires, hopper)[0].state == "unmet"
    assert "driver" in list_facts(cuda=True) and "driver" not in list_facts(cuda=False)


def test_caches_are_written_to_a_manifest_and_read_back(store: Store, tmp_path: Path, mark: Path) -> None:
    manifest = published(store, tmp_path, mark).manifest
    from enginesmith.registry.manifest import parse

    again = parse(manifest.to_bytes())
    assert again == manifest and [type(item) for item in again.caches] == [EngineEntry]
