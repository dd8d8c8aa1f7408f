"""Finding the engines that wait for a proof this machine can give."""

import pytest

from builders.local import LocalExecutor
from pipeline.pending import pending, prove
from pipeline.registry.store import Store, open_store
from pipeline.workshop import Workshop
from tests.pipeline.registry.registries import engine, publish_engines


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_store(tmp_path_factory.mktemp("r") / "registry", create=True)


def units(store: Store) -> dict[str, list[str]]:
    return {item.reference: [entry.unit for entry in item.engines] for item in pending(store)}


def test_only_unproven_engines_that_run_here_wait(store: Store) -> None:
    entries = [
        engine(store, "cpu", status="unproven"),
        engine(store, "cpu", "fp16"),
        engine(store, "sm_89", status="unproven"),
    ]
    publish_engines(store, entries)
    assert units(store) == {"digits@1": ["cpu fp32 onnxruntime"]}


def test_the_newest_and_what_channels_serve_are_looked_at(store: Store) -> None:
    for content in ("one", "two", "three"):
        publish_engines(
            store,
            [engine(store, status="unproven", data=content.encode())],
            content,
            channel="beta" if content == "one" else None,
        )
    assert list(units(store)) == ["digits@3"], "no channel takes what is unproven, and older versions wait no more"


def test_what_goes_wrong_with_a_version_is_its_row(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_engines(store, [engine(store, status="unproven")])
    [item] = pending(store)
    executor = LocalExecutor()
    [found] = prove(item, Workshop(store, executor, executor))
    assert found.verdict == "error" and not found.good and found.reference == "digits@1"
