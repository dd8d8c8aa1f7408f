"""Hostile documents and names: every command gives an error of this project or an answer, and touches nothing else."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginesmith.core.codec import encode
from enginesmith.core.errors import EnginesmithError, IntegrityError, canonical_json, digest_of, digest_of_bytes
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.names import parse_reference
from enginesmith.registry.builds.runs import recall, remember
from enginesmith.registry.evidence.canaries import quantization_records
from enginesmith.registry.manifest import parse, request_of
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.layout import attestation_key, channel_key, latency_key, manifest_key, record_key
from enginesmith.registry.trust.policy import load_policy
from enginesmith.registry.trust.signatures import read_bundle
from enginesmith.registry.trust.signing import SigningKey
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.index import list_models, list_versions, show_version
from enginesmith.registry.versions.lookup import locate
from enginesmith.registry.versions.publish import add_attestation, add_signatures
from tests.enginesmith.registries import engine, publish_engines, pull, refusal, report
from tests.enginesmith.registry.trust.keys import written
from tests.hostile import NAMES, calm, damaged, either
from tests.validation.latency.reports import latency_report
from validation.attribution.result import attributions

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
EXAMPLES = int(os.environ.get("ENGINESMITH_HOSTILE_EXAMPLES", "60"))
FEW = settings(max_examples=max(1, EXAMPLES // 5))
CPU = parse_targets("cpu")[0]
STEP = "5" * 64


def resealed(document: dict[str, Any]) -> dict[str, Any]:
    return {**document, "digest": digest_of({key: value for key, value in document.items() if key != "digest"})}


class Scene:
    """A registry with one of every document, that is put back as it was before each attack."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = open_store(folder / "registry", create=True)
        entry = engine(self.store)
        other = engine(self.store, "sm_89", status="unproven")
        self.manifest = publish_engines(self.store, [entry, other], others=[refusal()], channel="candidate").manifest
        proof = add_attestation(self.store, self.manifest, report(other, "proven"))
        timing = encode(latency_report(engine=entry.digest, unit=entry.unit))
        timed_text = digest_of_bytes(canonical_json(timing))
        remember(self.store, "build", STEP, {"digest": entry.digest}, [str(entry.digest)])
        self.policy = folder / "trust.yaml"
        self.policy.write_text(
            "format: 1\nsigners: {a: {public_key: a.pub}}\nrules: [{models: 'digits*', signers: [a]}]\n"
        )
        self.store.create(latency_key("digits", "1", str(entry.digest), timed_text), canonical_json(timing))
        signatures = add_signatures(self.store, self.manifest, SigningKey(written(folder, "a")[0]))[0]
        self.keys = {
            "manifest": manifest_key("digits", "1"),
            "channel": channel_key("digits", "candidate"),
            "attestation": attestation_key("digits", "1", str(other.digest), proof),
            "latency": latency_key("digits", "1", str(entry.digest), timed_text),
            "signature": signatures.key,
            "record": record_key("build", STEP),
            "marker": "enginesmith-registry.json",
        }
        self.document = digest_of_bytes(self.manifest.to_bytes())
        self.valid = {name: self.store.read(key) or b"" for name, key in self.keys.items()}

    def put(self, name: str, data: bytes, moved: str | None = None) -> None:
        """Overwrite a document, or put it under the name that its bytes ask for."""
        for stored_key, key in self.keys.items():
            path = self.folder / "registry" / key
            if path.read_bytes() != self.valid[stored_key]:
                path.write_bytes(self.valid[stored_key])
        (self.folder / "registry" / (moved or self.keys[name])).write_bytes(data)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    actual = Scene(tmp_path_factory.mktemp("hostile"))
    show_version(actual.store, parse_reference("digits@1"))
    assert verify(actual.store).sound  # or the attacks would be on what is broken already
    return actual


def everything(scene: Scene) -> None:
    """Every way of reading the registry that a client or an operator has."""
    folder, reference = scene.folder, parse_reference("digits:candidate")
    shutil.rmtree(folder / "dest", ignore_errors=True)
    names_before = sorted(path.name for path in folder.iterdir())
    paths = sorted(Path().iterdir())
    store = calm(lambda: open_store(folder / "registry"))
    if store is None:
        return
    policy = load_policy(scene.policy)
    version = parse_reference("digits@1")
    for work in (
        lambda: pull(store, reference, CPU, folder / "dest"),
        lambda: pull(store, version, CPU, folder / "dest"),
        lambda: pull(store, version, CPU, folder / "dest", trust=policy),
        lambda: json.dumps(show_version(store, version).to_json(), allow_nan=False),
        lambda: json.dumps([row.to_json() for row in list_versions(store, "digits")]),
        lambda: json.dumps([vars(row) for row in list_models(store)]),
        lambda: verify(store),
        lambda: quantization_records(store, locate(store, version).manifest),
        lambda: attributions(store, locate(store, version).manifest),
        lambda: [request_of(entry) for entry in locate(store, version).manifest.engines],
        lambda: channels.policy_refusal(store, locate(store, version).manifest, "stable"),
        lambda: recall(store, "build", STEP),
    ):
        calm(work)
    assert sorted(Path().iterdir()) == paths
    assert [name for name in sorted(path.name for path in folder.iterdir()) if name != "dest"] == names_before
    if (folder / "dest").exists():
        assert all(path.name.startswith("digits-") for path in (folder / "dest").iterdir())


def _hostile(scene: Scene, name: str) -> st.SearchStrategy[bytes]:
    seal = resealed if name == "manifest" else lambda document: document
    return either(json.loads(scene.valid[name]), seal)


@pytest.mark.parametrize("name", ["manifest", "channel", "record", "marker", "signature"])
def test_a_hostile_document_with_a_fixed_name_is_refused(scene: Scene, name: str) -> None:
    @FEW
    @given(_hostile(scene, name))
    def attack(data: bytes) -> None:
        scene.put(name, data)
        everything(scene)

    attack()


@pytest.mark.parametrize("name", ["attestation", "latency"])
def test_a_hostile_document_with_its_own_digest_is_refused(scene: Scene, name: str) -> None:
    @FEW
    @given(_hostile(scene, name))
    def attack(data: bytes) -> None:
        folder = scene.keys[name].rpartition("/")[0]
        moved_text = f"{folder}/{digest_of_bytes(data)}.json"
        scene.put(name, data, moved_text)
        everything(scene)
        (scene.folder / "registry" / moved_text).unlink()

    attack()
    scene.put(name, scene.valid[name])


@pytest.mark.parametrize("field", ["machine", "created_at", "unit", "buckets", "anatomy"])
def test_a_latency_report_without_its_shown_fields_is_damaged(scene: Scene, field: str) -> None:
    document = json.loads(scene.valid["latency"])
    for hostile_entries in ({**document, field: 1}, {key: value for key, value in document.items() if key != field}):
        data = canonical_json(hostile_entries)
        moved_text = f"{scene.keys['latency'].rpartition('/')[0]}/{digest_of_bytes(data)}.json"
        scene.put("latency", data, moved_text)
        with pytest.raises(IntegrityError, match=f"{field} "):
            show_version(scene.store, parse_reference("digits@1"))
        (scene.folder / "registry" / moved_text).unlink()


def test_parsers_accept_any_bytes(scene: Scene) -> None:
    @settings(max_examples=4 * EXAMPLES)
    @given(_hostile(scene, "manifest"), _hostile(scene, "signature"), damaged(scene.policy.read_bytes()))
    def attack(manifest: bytes, signature: bytes, policy: bytes) -> None:
        calm(lambda: parse(manifest))
        calm(lambda: read_bundle(signature))
        path = scene.folder / "hostile.yaml"
        path.write_bytes(policy)
        calm(lambda: load_policy(path))
        path.unlink()

    attack()


@pytest.mark.parametrize("name", [*NAMES, "digits@../x", "digits:/x", "digits@1/../../x", "digits:a:b"])
def test_names_never_become_other_paths(scene: Scene, name: str) -> None:
    actual = calm(lambda: parse_reference(name))
    if actual is not None:
        calm(lambda: locate(scene.store, actual))  # type: ignore[arg-type]
    for part in ("read", "create", "list"):
        with suppress(EnginesmithError):
            result = getattr(scene.store, part)(name, *([b"x"] if part == "create" else []))
            assert part != "create" or (scene.folder / "registry" / name).is_file()
            assert result is not None or part == "read"
    for digest in (name, "A" * 64, "\uff10" * 64, "0" * 64 + "\n"):
        with pytest.raises(EnginesmithError):
            scene.store.path(digest)
    assert not (scene.folder.parent / "escaped").exists() and not Path("/escaped").exists()
