from dataclasses import replace

import pytest

from enginesmith.client.locate import rank_located
from enginesmith.client.resolve import Policy
from enginesmith.core.errors import InputError, IntegrityError
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.names import Reference
from enginesmith.core.state import ENSEMBLE, PinnedGraph
from enginesmith.registry.collection.references import Rules
from enginesmith.registry.collection.sweep import Garbage, Sweep, find_garbage
from enginesmith.registry.evidence.attestations import attest, judge_entries
from enginesmith.registry.gc import GRACE, collect
from enginesmith.registry.leases import unmark
from enginesmith.registry.manifest import (
    EngineEntry,
    Manifest,
    load_pinned,
    parse,
    read_engines,
    require_model,
    write_engines,
)
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import blob_key, manifest_key
from enginesmith.registry.verification import verify
from enginesmith.registry.versions.channels import policy_refusal
from enginesmith.registry.versions.lookup import load, locate, versions
from enginesmith.registry.versions.publish import publish
from tests.enginesmith.registries import approval, draft, engine, on_each_store, publish_engines, report
from tests.enginesmith.registry.memory import MemoryStore

GRAPHS = ("encoder", "decoder")


def publish_graphs(store: Store, content: object = "a", statuses: dict[str, str] | None = None) -> dict[str, Manifest]:
    entries = {}
    for name in GRAPHS:
        status = (statuses or {}).get(name, "proven")
        entry = engine(store, "sm_89", "fp16", status, data=f"{name} {content}".encode())
        entries[name] = publish_engines(store, [entry], content, channel=None, model=f"pair-{name}").manifest
    return entries


def publish_whole(
    store: Store, graphs: dict[str, Manifest], content: object = "a", channel: str | None = "candidate"
) -> Manifest:
    engines = {name: manifest.engines[0] for name, manifest in graphs.items()}
    status = "proven" if all(entry.status == "proven" for entry in engines.values()) else "unproven"
    data = write_engines(engines)
    entry = replace(engine(store, "sm_89", "fp16", status, data=data), backend=ENSEMBLE)
    pins = tuple(pin(name, manifest) for name, manifest in graphs.items())
    whole_draft = replace(draft(store, content, "pair"), graphs=pins)
    return publish(store, whole_draft, [(entry, approval(entry))], channel=channel).manifest


def pin(name: str, manifest: Manifest) -> PinnedGraph:
    return PinnedGraph(name, manifest.model, manifest.version, manifest.digest, {"image": f"{name}.image"})


def test_pins_keep_their_order(store: Store) -> None:
    whole_manifest = publish_whole(store, publish_graphs(store))
    second_manifest = parse(whole_manifest.to_bytes())
    assert second_manifest == whole_manifest
    assert [graph.name for graph in second_manifest.graphs] == ["encoder", "decoder"]
    assert second_manifest.graphs[0].reference == "pair-encoder@1"


@on_each_store
def test_an_ensemble_whose_graph_is_gone_is_not_published(store: Store) -> None:
    graphs = publish_graphs(store)
    store.remove(manifest_key("pair-decoder", "1"))
    with pytest.raises(IntegrityError, match="graph 'decoder' is pair-decoder@1, which is not in"):
        publish_whole(store, graphs)
    assert versions(store, "pair") == []


def test_a_graph_equals_its_pinned_version(store: Store) -> None:
    graphs = publish_graphs(store)
    other_pin = replace(pin("encoder", graphs["encoder"]), manifest="0" * 64)
    with pytest.raises(IntegrityError, match=f"with manifest {'0' * 64}, but the manifest is now"):
        load_pinned(store, other_pin)


def test_an_ensemble_is_no_graph(store: Store) -> None:
    graphs = publish_graphs(store)
    whole_manifest = publish_whole(store, graphs)
    with pytest.raises(IntegrityError, match="an ensemble cannot contain an ensemble"):
        publish_whole(store, {**graphs, "third": whole_manifest}, "b")
    with pytest.raises(InputError, match="works on a model of one graph: give one of pair-encoder@1, pair-decoder@1"):
        require_model(whole_manifest)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"format": 2, "engines": {}}', b'{"format": 1, "engines": {"a": 1}}']
)
def test_a_document_that_names_no_engines_is_refused(data: bytes, store: Store) -> None:
    with pytest.raises(IntegrityError, match=r"of an ensemble: .*(; build it again|: upgrade enginesmith)$"):
        read_engines(store, store.put_bytes(data))


def test_an_ensemble_engine_has_the_worst_status_of_its_graphs(store: Store) -> None:
    graphs = publish_graphs(store)
    whole_manifest = publish_whole(store, graphs)
    assert judged(store, whole_manifest).status == "proven"
    attest(store, graphs["encoder"], report(graphs["encoder"].engines[0], "failed", host="there"))
    result = judged(store, whole_manifest)
    assert result.status == "failed"
    assert result.reason.startswith("graph 'encoder': failed when validated later")
    assert "has no usable engine" in str(policy_refusal(store, whole_manifest, "stable"))


def test_proven_graphs_alone_do_not_prove_the_ensemble(store: Store) -> None:
    graphs = publish_graphs(store, statuses={"decoder": "unproven"})
    whole_manifest = publish_whole(store, graphs)
    decoder = graphs["decoder"].engines[0]
    attest(store, graphs["decoder"], report(decoder, "proven"))
    assert judged(store, graphs["decoder"]).status == "proven"
    assert judged(store, whole_manifest).status == "unproven"


def test_a_missing_pinned_version_fails_the_ensemble(store: Store) -> None:
    whole_manifest = publish_whole(store, publish_graphs(store))
    store.remove(manifest_key("pair-decoder", "1"))
    assert judged(store, whole_manifest).status == "failed"
    assert [problem.what for problem in verify(store).problems if problem.kind == "dangling"] == ["pair@1"]


def judged(store: Store, manifest: Manifest) -> EngineEntry:
    return judge_entries(store, load(store, manifest.model, manifest.version))[0]


def test_an_engine_whose_graph_has_lost_its_own_is_rejected(store: Store) -> None:
    graphs = publish_graphs(store)
    publish_whole(store, graphs)
    machine = Machine.from_name("l4")
    assert rank_located(store, locate(store, Reference("pair")), machine, Policy())[1].candidates
    store.remove(blob_key(str(graphs["decoder"].engines[0].digest)))
    result = rank_located(store, locate(store, Reference("pair")), machine, Policy())[1]
    assert not result.candidates
    assert result.lost[0][1].startswith("lost: graph 'decoder': published, but its file")


def test_pinned_versions_are_kept_as_long_as_the_ensemble(store: Store) -> None:
    for content in ("a", "b", "c"):
        graphs = publish_graphs(store, content)
        publish_whole(store, graphs, content, channel="candidate" if content == "a" else None)
    garbage = find_garbage(store, Rules(versions=1, moves=0))
    assert sorted(garbage.versions) == [("pair", "2"), ("pair-decoder", "2"), ("pair-encoder", "2")]
    assert garbage.reasons["pair-encoder", "1"] == ("graph of pair@1",)
    engines = {name: load(store, f"pair-{name}", "1").engines[0].digest for name in GRAPHS}
    assert not garbage.blobs.keys() & set(engines.values())


def test_pinned_versions_of_an_undeletable_ensemble_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer secures the ensemble first, then its graphs; a collection may come in between."""
    store, rules, mark = MemoryStore(), Rules(versions=1, moves=0), Sweep._mark
    for content in ("a", "b"):
        publish_whole(store, publish_graphs(store, content), content, channel=None)
    collect(store, rules, delete=True)
    store.clock.now += GRACE

    def secure_meanwhile(sweep: Sweep, garbage: Garbage) -> None:
        mark(sweep, garbage)
        unmark(store, ["pair@1"])

    with monkeypatch.context() as context:
        context.setattr(Sweep, "_mark", secure_meanwhile)
        collect(store, rules, delete=True)
    assert all(versions(store, model) == ["1", "2"] for model in ("pair", "pair-encoder", "pair-decoder"))
    assert verify(store).sound
    collect(store, rules, delete=True)
    store.clock.now += GRACE
    collect(store, rules, delete=True)
    assert all(versions(store, model) == ["2"] for model in ("pair", "pair-encoder", "pair-decoder"))
