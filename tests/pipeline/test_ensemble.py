import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

import enginesmith
from enginesmith.core.errors import InputError, canonical_json, digest_of
from enginesmith.core.names import parse_reference
from enginesmith.core.reports.proof import Report, approve
from enginesmith.core.types import Tensors
from enginesmith.exchange.mirror import mirror
from enginesmith.exchange.oci import export_oci
from enginesmith.registry.evidence.attestations import attestations
from enginesmith.registry.manifest import EngineEntry, Manifest, pinned_engines
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.versions.channels import promote, rollback
from enginesmith.registry.versions.index import show_version
from enginesmith.registry.versions.lookup import load, locate
from enginesmith.registry.versions.publish import publish
from pipeline.cli.operations.attribute import refit
from pipeline.cli.registry.registry import _show_layers, _show_quantization
from pipeline.cli.run_options import local_context
from pipeline.operations.golden import golden_of
from pipeline.operations.validate import pending_of, spec_of, validate
from pipeline.operations.validate import validate_pending as prove
from pipeline.outcome import Outcome
from pipeline.regressions import rehearsal
from pipeline.regressions.rehearsal_verdicts import Trial, UnitRehearsal, apply
from tests.ensembles import DECODER, ENCODER, PAIR, change, rewrite, write_ensemble
from tests.pipeline.projects import arrays
from validation.latency.machine import machine


def opens(path: Path) -> Callable[[Tensors], Tensors]:
    session = ort.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, dict(inputs)), strict=True))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("ensemble")
    # The decoder has no int8: the whole's int8 has it in fp32. The encoder alone has the target avx2.
    encoder = {**ENCODER, "targets": ["cpu", "avx2"]}
    path = write_ensemble(folder / "project", encoder=encoder, decoder={**DECODER, "precisions": ["fp32"]})
    return folder, enginesmith.build(path, registry=folder / "registry")


@pytest.fixture
def store(built: tuple[Path, Outcome]) -> Store:
    return open_store(str(built[0] / "registry"))


def test_each_graph_is_a_version_and_the_ensemble_pins_them(built: tuple[Path, Outcome], store: Store) -> None:
    _, outcome = built
    assert outcome.version == "1"
    assert {name: graph.version for name, graph in outcome.graphs.items()} == {"encoder": "1", "decoder": "1"}
    pins = load(store, "pair", "1").graphs
    assert [(pin.name, pin.reference) for pin in pins] == [("encoder", "pair-encoder@1"), ("decoder", "pair-decoder@1")]
    assert all(pin.manifest == load(store, pin.model, pin.version).digest for pin in pins)
    assert pins[1].sources == {"y": "decoder.y", "memory": "encoder.hidden", "mask": "mask"}
    assert outcome.channel == "candidate"
    assert {graph.channel for graph in outcome.graphs.values()} == {None}


def test_show_has_the_total_size_of_a_pull(built: tuple[Path, Outcome], store: Store) -> None:
    whole_bytes = {entry.unit: entry.size_bytes for entry in show_version(store, parse_reference("pair@1")).engines}
    for precision in ("fp32", "int8"):
        parts = [
            entry.size_bytes or 0
            for model in ("pair-encoder", "pair-decoder")
            for entry in load(store, model, "1").engines
            if entry.unit == f"cpu {'fp32' if model == 'pair-decoder' else precision} onnxruntime"
        ]
        assert (len(parts), whole_bytes[f"cpu {precision} ensemble"]) == (2, sum(parts))
    assert whole_bytes["x86-64-v3 fp32 ensemble"] is None


def test_a_target_that_a_graph_lacks_is_not_offered(built: tuple[Path, Outcome]) -> None:
    statuses = {engine.entry.unit: (engine.entry.status, engine.entry.reason) for engine in built[1].engines}
    assert [statuses[f"cpu {name} ensemble"][0] for name in ("fp32", "int8")] == ["proven", "proven"]
    for precision in ("fp32", "int8"):
        status, reason = statuses[f"x86-64-v3 {precision} ensemble"]
        assert status == "refused"
        assert reason == "graph 'decoder' has no engine: its spec has no x86-64-v3 fp32"


def test_the_report_describes_each_engine_alone(built: tuple[Path, Outcome]) -> None:
    place = built[0] / "registry" / "models" / "pair" / "versions" / "1"
    assert (place / "report.html").is_file()
    reports = {report["unit"]: report for report in json.loads((place / "report.json").read_text())["reports"]}
    values = {
        (check["stage"], check["case"]): (check["value"], check["limit"])
        for check in reports["cpu int8 ensemble"]["checks"]
        if (check["name"], check["output"]) == ("sqnr_db", "decoder.logits")
    }
    assert values["quantization", "golden"][1] == 15 and values["engine", "golden"][1] == 80
    # The decoder is in fp32, so that all of the error is the encoder's.
    assert values["engine", "encoder alone"] == values["engine", "end to end"]
    assert values["engine", "end to end"] == (values["quantization", "golden"][0], None)
    assert values["engine", "decoder alone"][0] == "inf"


def test_pulled_engines_answer_like_the_models(built, tmp_path, monkeypatch):
    folder, _ = built
    pulled_engine = enginesmith.pull("pair:candidate", registry=folder / "registry", dest=tmp_path, precision="fp32")
    assert pulled_engine.description.name == "pair-1-cpu-fp32.json"
    whole_description = enginesmith.Ensemble.described(opens, pulled_engine.description)
    assert [spec.name for spec in whole_description.inputs] == ["encoder.x", "mask", "decoder.y"]
    golden = {name: array[:3] for name, array in arrays(folder / "project" / "golden.npz").items()}
    encoder, decoder = (opens(folder / "project" / f"{name}.onnx") for name in ("encoder", "decoder"))
    hidden_values = encoder({"x": golden["encoder.x"], "attention": golden["mask"]})["hidden"]
    expected = decoder({"y": golden["decoder.y"], "memory": hidden_values, "mask": golden["mask"]})["logits"]
    np.testing.assert_allclose(whole_description.run(golden)["decoder.logits"], expected, atol=1e-5)
    assert enginesmith.pull("pair:candidate", registry=folder / "registry", dest=tmp_path, precision="fp32").cached
    monkeypatch.setattr("enginesmith.registry.store.folder.FileStore.near", False)
    client = enginesmith.Client(folder / "registry", cache=tmp_path / "cache")
    assert [client.pull("pair@1", tmp_path / name).origin for name in "ab"] == ["registry", "cache"]


def test_the_ensemble_is_validated_as_served(built: tuple[Path, Outcome], tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "copy"), create=True)
    mirror(open_store(str(built[0] / "registry")), [parse_reference("pair@1")], store)
    pair_manifest = load(store, "pair", "1")
    with local_context(store, quiet=True) as context:
        validated_items = {item.unit: item for item in validate(pair_manifest, context)}
    expected = {"cpu fp32 ensemble": "proven", "cpu int8 ensemble": "proven"}
    assert {unit: item.verdict for unit, item in validated_items.items()} == expected
    assert {item.engine for item in attestations(store, pair_manifest)} == {
        entry.digest for entry in pair_manifest.engines if entry.digest
    }


@pytest.mark.slow
def test_an_unproven_ensemble_runs_with_the_pending_engines(built, tmp_path):
    store = open_store(str(tmp_path / "copy"), create=True)
    mirror(open_store(str(built[0] / "registry")), [parse_reference("pair@1")], store)
    pair_manifest = load(store, "pair", "1")
    entries = tuple(replace(entry, status="unproven") for entry in pair_manifest.engines if entry.digest)
    fresh_text = publish_waiting(store, pair_manifest, entries)
    assert [entry.unit for entry in pending_of(store, "pair", fresh_text).engines] == [entry.unit for entry in entries]
    with local_context(store, quiet=True) as context:
        proofs = prove(pending_of(store, "pair", fresh_text), context)
    assert {item.unit: item.verdict for item in proofs} == dict.fromkeys([entry.unit for entry in entries], "proven")
    assert not pending_of(store, "pair", fresh_text).engines


def publish_waiting(store: Store, whole: Manifest, entries: tuple[EngineEntry, ...]) -> str:
    """The version of the same ensemble as it is published where none of its engines has run."""
    approved_entries = []
    for entry in entries:
        report = Report.from_json(json.loads(store.read_blob(str(entry.report))))
        report = replace(report, verdict="unproven", reason="not run here", checks=())
        proof = approve(report)
        assert proof is not None
        store.put_bytes(canonical_json(report.to_json()))
        approved_entries.append((replace(entry, report=report.digest, reason="not run here", checks={}), proof))
    return publish(store, replace(whole, content=digest_of("another"), engines=()), approved_entries, []).version


@pytest.mark.parametrize("use", ["oci", "spec", "golden", "layers", "quantization", "refit"])
def test_commands_for_one_graph_name_the_graphs(use: str, store: Store, tmp_path: Path) -> None:
    pair_manifest, reference = load(store, "pair", "1"), parse_reference("pair@1")
    uses: dict[str, Callable[[], object]] = {
        "oci": lambda: export_oci(store, locate(store, reference), tmp_path / "oci"),
        "spec": lambda: spec_of(pair_manifest),
        "golden": lambda: golden_of(store, "pair@1"),
        "layers": lambda: _show_layers(store, pair_manifest, "cpu int8 ensemble", as_json=False),
        "quantization": lambda: _show_quantization(store, pair_manifest, as_json=False),
        "refit": lambda: refit.main(
            ["pair@1", "--weights-from", "pair@1", "--registry", store.uri], standalone_mode=False
        ),
    }
    with pytest.raises(InputError, match=r"pair@1 is an ensemble, .* give one of pair-encoder@1, pair-decoder@1"):
        uses[use]()
    assert not list(tmp_path.iterdir())


def test_channels_move_the_ensemble(built: tuple[Path, Outcome], store: Store, tmp_path: Path) -> None:
    project = built[0] / "project"
    changed_spec = change(PAIR, "limits", {"int8": {"quantization": {"sqnr_db": 14}}})
    second_build = enginesmith.build(rewrite(project, changed_spec), registry=built[0] / "registry")
    assert second_build.version == "2"
    assert {graph.version for graph in second_build.graphs.values()} == {"1"}
    for version in ("1", "2"):
        promote(store, load(store, "pair", version), "stable", proven_only=True)
    assert locate(store, parse_reference("pair:stable")).manifest.version == "2"
    rollback(store, "pair", "stable")
    pulled_engine = enginesmith.pull("pair:stable", registry=built[0] / "registry", dest=tmp_path)
    assert pulled_engine.located.manifest.version == "1"


def test_a_drifting_ensemble_fails_and_the_graph_is_named(built: tuple[Path, Outcome], tmp_path: Path) -> None:
    changed_spec = change(PAIR, "limits", {"int8": {"quantization": {"sqnr_db": 90}}})
    registry = shutil.copytree(built[0] / "registry", tmp_path / "registry")
    outcome = enginesmith.build(rewrite(built[0] / "project", changed_spec), registry=registry)
    statuses = {engine.entry.precision: engine.entry for engine in outcome.engines if engine.entry.target == "cpu"}
    assert statuses["fp32"].status == "proven" and statuses["int8"].status == "failed"
    assert statuses["int8"].digest is None and "quantization sqnr_db of decoder.logits" in statuses["int8"].reason
    assert "with one engine among graphs in fp32: encoder alone" in statuses["int8"].reason


def test_an_ensemble_moves_to_another_toolchain_with_its_graphs(
    built: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The toolchain is the same, so that engines and proofs are on record; the old one and what was measured of a graph
    are drawn up. Where a graph stays, another machine says that the whole moves."""

    def there(self: rehearsal.Rehearser, manifest: Manifest, entry: EngineEntry) -> UnitRehearsal:
        whole_rehearsal = UnitRehearsal(manifest.reference, entry.unit, Trial.of(entry), Trial.of(entry), "moves")
        return whole_rehearsal if manifest.graphs else self._here(manifest, entry)

    def unit(self: rehearsal._Unit) -> UnitRehearsal:
        trial = replace(Trial.of(self.entry), report=self.entry.report)
        verdict = "stays" if self.entry.unit == staying_text else "moves"
        trials = trial, replace(trial, toolchain=self.entry.toolchain)
        return UnitRehearsal(self.manifest.reference, self.entry.unit, *trials, verdict, "slow", None, machine())

    monkeypatch.setattr(rehearsal._Unit, "rehearse", unit)
    monkeypatch.setattr(rehearsal.Rehearser, "_there", there)
    monkeypatch.setattr(Trial, "of", lambda entry: Trial({}, entry.status, entry.reason, entry.digest))
    monkeypatch.setattr(rehearsal.Rehearser, "recall", lambda *_: None)
    store = open_store(str(shutil.copytree(built[0] / "registry", tmp_path / "registry")))
    promote(store, load(store, "pair", "1"), "mine", proven_only=True)
    upgrade = rehearsal.Upgrade({"onnxruntime": ort.__version__})
    for staying_text, expected in [("cpu int8 onnxruntime", "stays"), ("", "moves")]:
        with local_context(store, quiet=True) as context:
            served_versions = rehearsal.list_served(store, upgrade, ["pair@1"])
            remote_executor = context.executor if staying_text else None
            rehearse = rehearsal.rehearse(served_versions, rehearsal.Rehearser(upgrade, context, remote_executor))
            verdicts = {item.unit: (item.verdict, item.why) for item in rehearse.units if item.version == "pair@1"}
            assert verdicts["cpu fp32 ensemble"] == ("moves", "")
            assert verdicts["cpu int8 ensemble"] == (expected, "graph 'encoder': slow" if staying_text else "")
            assert [(plan.version, plan.verdict) for plan in rehearse.plan] == [("pair@1", expected)]
            applied_result = apply(rehearse, served_versions, context)
    assert [(item.before, item.channels["mine"]) for item in applied_result] == [("pair@1", "")]
    before, after = load(store, "pair", "1"), load(store, "pair", applied_result[0].version)
    assert [pin.reference for pin in after.graphs] == ["pair-encoder@2", "pair-decoder@2"]
    for entry in (entry for entry in after.engines if entry.usable):
        assert [engine.unit for *_, engine in pinned_engines(store, after, entry)]
    assert [(entry.unit, entry.status) for entry in after.engines] == [(e.unit, e.status) for e in before.engines]
    assert rollback(store, "pair", "mine").version == "1"
