"""Versions that pin other versions: read, judged, kept, and never published in part."""

from dataclasses import replace
from pathlib import Path

import pytest

from enginesmith.client.locate import locate_and_rank
from enginesmith.client.resolve import Policy
from enginesmith.core.errors import InputError, IntegrityError
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.names import Reference
from enginesmith.core.state import ENSEMBLE, PinnedGraph
from enginesmith.registry.collection.garbage import find_garbage
from enginesmith.registry.collection.references import Rules
from enginesmith.registry.evidence.attestations import attest, judge_entries
from enginesmith.registry.manifest import (
    EngineEntry,
    Manifest,
    load_pinned,
    parse,
    read_engines,
    require_model,
    write_engines,
)
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.store.layout import blob_key, manifest_key
from enginesmith.registry.verification import verify
from enginesmith.registry.versions.channels import policy_refusal
from enginesmith.registry.versions.lookup import load, versions
from enginesmith.registry.versions.publish import publish
from tests.enginesmith.registries import approval, draft, engine, on_each_store, publish_engines, report

GRAPHS = ("encoder", "decoder")


def publish_graphs(store: Store, content: object = "a", statuses: dict[str, str] | None = None) -> dict[str, Manifest]:
    found = {}
    for name in GRAPHS:
        status = (statuses or {}).get(name, "proven")
        entry = engine(store, "sm_89", "fp16", status, data=f"{name} {content}".encode())
        found[name] = publish_engines(store, [entry], content, channel=None, model=f"pair-{name}").manifest
    return found


def publish_whole(
    store: Store, graphs: dict[str, Manifest], content: object = "a", channel: str | None = "candidate"
) -> Manifest:
    engines = {name: manifest.engines[0] for name, manifest in graphs.items()}
    status = "proven" if all(entry.status == "proven" for entry in engines.values()) else "unproven"
    data = write_engines(engines)
    entry = replace(engine(store, "sm_89", "fp16", status, data=data), backend=ENSEMBLE)
    pins = tuple(pin(name, manifest) for name, manifest in graphs.items())
    whole = replace(draft(store, content, "pair"), graphs=pins)
    return publish(store, whole, [(entry, approval(entry))], channel=channel).manifest


def pin(name: str, manifest: Manifest) -> PinnedGraph:
    return PinnedGraph(name, manifest.model, manifest.version, manifest.digest, {"image": f"{name}.image"})


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "registry"), create=True)


def test_pins_are_read_back_in_their_order(folder: Store) -> None:
    whole = publish_whole(folder, publish_graphs(folder))
    again = parse(whole.to_bytes())
    assert again == whole
    assert [graph.name for graph in again.graphs] == ["encoder", "decoder"]
    assert again.graphs[0].reference == "pair-encoder@1"


@on_each_store
def test_an_ensemble_whose_graph_is_gone_is_not_published(store: Store) -> None:
    graphs = publish_graphs(store)
    store.remove(manifest_key("pair-decoder", "1"))
    with pytest.raises(IntegrityError, match="graph 'decoder' is pair-decoder@1, which is not in"):
        publish_whole(store, graphs)
    assert versions(store, "pair") == []


def test_a_graph_is_the_version_that_was_pinned(folder: Store) -> None:
    graphs = publish_graphs(folder)
    other = replace(pin("encoder", graphs["encoder"]), manifest="0" * 64)
    with pytest.raises(IntegrityError, match=f"with manifest {'0' * 64}, and that is now"):
        load_pinned(folder, other)


def test_an_ensemble_is_no_graph(folder: Store) -> None:
    graphs = publish_graphs(folder)
    whole = publish_whole(folder, graphs)
    with pytest.raises(IntegrityError, match="which is an ensemble itself"):
        publish_whole(folder, {**graphs, "third": whole}, "b")
    with pytest.raises(InputError, match="works on a model of one graph: give one of pair-encoder@1, pair-decoder@1"):
        require_model(whole)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"format": 2, "engines": {}}', b'{"format": 1, "engines": {"a": 1}}']
)
def test_a_document_that_names_no_engines_is_refused(data: bytes, folder: Store) -> None:
    with pytest.raises(IntegrityError, match=r"of an ensemble: .*; build it again"):
        read_engines(folder, folder.put_bytes(data))


def test_engines_are_no_better_than_those_of_their_graphs(folder: Store) -> None:
    graphs = publish_graphs(folder)
    whole = publish_whole(folder, graphs)
    assert judged(folder, whole).status == "proven"
    attest(folder, graphs["encoder"], report(graphs["encoder"].engines[0], "failed", host="there"))
    found = judged(folder, whole)
    assert found.status == "failed"
    assert found.reason.startswith("graph 'encoder': failed when validated later")
    assert "has no usable engine" in str(policy_refusal(folder, whole, "stable"))


def test_a_proof_of_its_graphs_alone_is_none_of_the_whole(folder: Store) -> None:
    graphs = publish_graphs(folder, statuses={"decoder": "unproven"})
    whole = publish_whole(folder, graphs)
    decoder = graphs["decoder"].engines[0]
    attest(folder, graphs["decoder"], report(decoder, "proven"))
    assert judged(folder, graphs["decoder"]).status == "proven"
    assert judged(folder, whole).status == "unproven"


def test_a_version_that_is_gone_fails_the_whole(folder: Store) -> None:
    whole = publish_whole(folder, publish_graphs(folder))
    folder.remove(manifest_key("pair-decoder", "1"))
    assert judged(folder, whole).status == "failed"
    assert [problem.what for problem in verify(folder).problems if problem.kind == "dangling"] == ["pair@1"]


def judged(store: Store, manifest: Manifest) -> EngineEntry:
    return judge_entries(store, load(store, manifest.model, manifest.version))[0]


def test_an_engine_whose_graph_has_lost_its_own_is_rejected(folder: Store) -> None:
    graphs = publish_graphs(folder)
    publish_whole(folder, graphs)
    machine = Machine.from_name("l4")
    assert locate_and_rank(folder, Reference("pair"), machine, Policy())[1].candidates
    folder.remove(blob_key(str(graphs["decoder"].engines[0].digest)))
    found = locate_and_rank(folder, Reference("pair"), machine, Policy())[1]
    assert not found.candidates
    assert found.lost[0][1].startswith("lost: graph 'decoder': published, and no file")


def test_what_is_pinned_is_kept_as_long_as_the_ensemble(folder: Store) -> None:
    for content in ("a", "b", "c"):
        graphs = publish_graphs(folder, content)
        publish_whole(folder, graphs, content, channel="candidate" if content == "a" else None)
    found = find_garbage(folder, Rules(versions=1, moves=0))
    assert sorted(found.versions) == [("pair", "2"), ("pair-decoder", "2"), ("pair-encoder", "2")]
    assert found.kept["pair-encoder", "1"] == ("graph of pair@1",)
    engines = {name: load(folder, f"pair-{name}", "1").engines[0].digest for name in GRAPHS}
    assert not found.blobs.keys() & set(engines.values())
