import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from sigstore.oidc import IdentityError

from enginesmith.client.client import Client
from enginesmith.client.resolve import Policy
from enginesmith.core.errors import (
    InputError,
    IntegrityError,
    UnavailableError,
    UntrustedError,
    canonical_json,
    digest_of_bytes,
)
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.names import parse_reference
from enginesmith.registry.evidence.attestations import attest, judge_entries
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import FileStore
from enginesmith.registry.store.layout import attestation_key, manifest_key, signature_key
from enginesmith.registry.trust import require
from enginesmith.registry.trust.policy import LARGEST_KEY_BYTES, load_policy
from enginesmith.registry.trust.signatures import KeylessSigner, ask_sigstore, key_id_of_pem, objection, read_bundle
from enginesmith.registry.trust.signing import Keyless, SigningKey, sign
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.lookup import locate
from enginesmith.registry.versions.publish import add_signatures
from tests.enginesmith.registries import engine, names_in, publish_engines, pull, report
from tests.enginesmith.registry.trust.keys import certificate, private, private_pem, written

CPU = parse_targets("cpu")[0]


@pytest.fixture
def manifest(store: FileStore) -> Manifest:
    return publish_engines(store, [engine(store)], channel="stable").manifest


def policy_file(folder: Path, rules: str, signers: str | None = None) -> Path:
    for name in ("release", "other"):
        written(folder, name)
    path = folder / "trust.yaml"
    named_text = signers or "  release: {public_key: release.pub}\n  other: {public_key: other.pub}\n"
    path.write_text(f"format: 1\nsigners:\n{named_text}rules:\n{rules}")
    return path


def key(folder: Path, name: str = "release") -> SigningKey:
    return SigningKey(written(folder, name)[0])


NEEDS_RELEASE = "  - {models: 'digits*', signers: [release]}\n"


@pytest.mark.parametrize(("size", "message"), [
    (0, "private EC key"), (1, "private EC key"), (LARGEST_KEY_BYTES, "private EC key"),
    (LARGEST_KEY_BYTES + 1, "not a file of at most"),
])  # fmt: skip
def test_an_invalid_key_is_explained(
    store: FileStore, manifest: Manifest, tmp_path: Path, size: int, message: str
) -> None:
    (tmp_path / "key").write_bytes(b"x" * size)
    with pytest.raises(InputError, match=message):
        add_signatures(store, manifest, SigningKey(tmp_path / "key"))


def test_without_a_network_the_error_names_sigstore_and_no_key(store, manifest, tmp_path, monkeypatch):
    monkeypatch.setattr("urllib3.util.connection.create_connection", Mock(side_effect=OSError("no route")))
    [signature] = add_signatures(store, manifest, key(tmp_path))
    bundle = read_bundle(store.read(signature.key))
    keyless = replace(bundle, certificate=b"one"), KeylessSigner("ci", "me", "issuer"), bundle.file, manifest.to_bytes()
    for work, remedy in (
        (lambda: sign(store, manifest, Keyless("a token")), ", or sign with a key"),
        (lambda: objection(*keyless), ""),
    ):
        with pytest.raises(UnavailableError, match=f"Failed to refresh TUF metadata; check the network{remedy}$"):
            work()
    with pytest.raises(InputError, match="ENGINESMITH_IDENTITY_TOKEN"):
        ask_sigstore(Mock(side_effect=IdentityError("malformed")))


def test_without_the_required_signature_nothing_is_pulled(store, manifest, tmp_path):
    policy, dest = load_policy(policy_file(tmp_path, NEEDS_RELEASE)), tmp_path / "dest"
    add_signatures(store, manifest, key(tmp_path, "other"))
    with pytest.raises(UntrustedError) as error:
        pull(store, parse_reference("digits"), CPU, dest, trust=policy)
    output = str(error.value)
    assert "digits@1 has 0 of the 1 signatures" in output and "release (key " in output and "has not signed" in output
    assert "enginesmith registry sign digits@1" in output and not dest.exists()
    [signature] = add_signatures(store, manifest, key(tmp_path))
    assert signature.new and not sign(store, manifest, key(tmp_path))[0].new
    pulled_engine = pull(store, parse_reference("digits"), CPU, dest, trust=policy)
    assert pulled_engine.located.signed_by == ("release",) and pulled_engine.path.read_bytes() == b"engine cpu fp32"
    assert verify(store).sound


def test_a_signature_is_valid_for_one_manifest_and_one_key(
    store: FileStore, manifest: Manifest, tmp_path: Path
) -> None:
    policy = load_policy(policy_file(tmp_path, "  - {models: '*', signers: [release]}\n"))
    [signature] = add_signatures(store, manifest, key(tmp_path))
    genuine = store.read(signature.key) or b""
    other_manifests = [
        publish_engines(store, [engine(store, data=b"worse")], "b").manifest,
        publish_engines(store, [engine(store)], model="faces").manifest,
    ]
    for other in other_manifests:  # the signature of another version or model, under the name where it is looked for
        moved_key = signature_key(other.model, other.version, digest_of_bytes(other.to_bytes()), signature.key_id)
        assert store.create(moved_key, genuine)
        with pytest.raises(UntrustedError, match=r"another manifest\.json"):
            require(store, locate(store, parse_reference(f"{other.model}@{other.version}")).manifest, policy)
    items = [problem for problem in verify(store).problems if problem.kind == "signature"]
    assert len(items) == 2 and all("moved by hand" in problem.detail for problem in items)
    # The signature by another key, under the name of the right one.
    [wrong_signed] = sign(store, manifest, key(tmp_path, "other"))
    store.replace(signature.key, store.read(wrong_signed.key) or b"", genuine)
    with pytest.raises(UntrustedError, match="it is not by release"):
        require(store, locate(store, parse_reference("digits@1")).manifest, policy)
    # The same, and it says that it is by the right one.
    wrong_data = (store.read(wrong_signed.key) or b"").replace(wrong_signed.key_id.encode(), signature.key_id.encode())
    store.replace(signature.key, wrong_data, store.read(signature.key))
    with pytest.raises(UntrustedError, match="does not verify"):
        require(store, locate(store, parse_reference("digits@1")).manifest, policy)


def test_an_engine_swapped_with_its_manifest_is_refused(store: FileStore, manifest: Manifest, tmp_path: Path) -> None:
    policy = load_policy(policy_file(tmp_path, NEEDS_RELEASE))
    sign(store, manifest, key(tmp_path))
    evil_digest = store.put_bytes(b"evil")
    forged_manifest = replace(manifest, engines=(replace(manifest.engines[0], digest=evil_digest, size_bytes=4),))
    place = manifest_key("digits", "1")
    assert store.replace(place, forged_manifest.to_bytes(), store.read(place))
    (store.root / "models/digits/channels/stable.json").unlink()
    channels.promote(store, forged_manifest, "stable")
    pull(store, parse_reference("digits"), CPU, tmp_path / "open")  # without a policy the registry is believed
    with pytest.raises(UntrustedError, match="digits@1 has 0 of the 1"):
        pull(store, parse_reference("digits"), CPU, tmp_path / "dest", trust=policy)
    assert not (tmp_path / "dest").exists()


def test_the_environment_variable_alone_protects_every_command(store, manifest, tmp_path, monkeypatch):
    import enginesmith

    path = policy_file(tmp_path, NEEDS_RELEASE)
    monkeypatch.setenv("ENGINESMITH_TRUST_POLICY", str(path))
    with pytest.raises(UntrustedError):
        enginesmith.pull("digits", registry=store.root, dest=tmp_path / "dest", target="cpu")
    path.unlink()
    with pytest.raises(InputError, match="nothing is trusted"):
        enginesmith.pull("digits", registry=store.root, dest=tmp_path / "dest", target="cpu")
    assert not (tmp_path / "dest").exists()


def test_a_follower_of_a_channel_keeps_the_signed_version(store: FileStore, manifest: Manifest, tmp_path: Path) -> None:
    """A channel that moves to an unsigned version is not followed, until the version is signed."""
    policy, received_items = policy_file(tmp_path, NEEDS_RELEASE), list[str]()
    sign(store, manifest, key(tmp_path))
    client = Client(store.root, policy=Policy(trust=policy))

    def look() -> str:
        swap = client.watch("digits:stable", tmp_path / "serving", target="cpu", once=True, say=received_items.append)
        assert swap is not None
        return swap.version

    assert look() == "1"
    newer_manifest = publish_engines(store, [engine(store, data=b"newer")], "b", channel="stable").manifest
    with pytest.raises(UntrustedError):
        look()
    assert (tmp_path / "serving/current").resolve().name.startswith("1-")
    sign(store, newer_manifest, key(tmp_path))
    assert look() == "2"


def test_rules_depend_on_name_number_and_age(store: FileStore, manifest: Manifest, tmp_path: Path) -> None:
    located_version = locate(store, parse_reference("digits@1"))

    def asked(rules: str) -> tuple[str, ...]:
        return require(store, located_version.manifest, load_policy(policy_file(tmp_path, rules))).signers

    sign(store, manifest, key(tmp_path))
    assert asked("  - {models: 'dig*', required: false}\n" + NEEDS_RELEASE) == ()
    assert asked(NEEDS_RELEASE) == ("release",)
    with pytest.raises(UntrustedError, match="no rule"):
        asked("  - {models: 'faces', signers: [release]}\n")
    with pytest.raises(UntrustedError, match="older than version 2"):
        asked("  - {models: 'digits', required: false, min_version: 2}\n")
    both_text = "  - {models: 'digits', signers: [release, other], needed: 2}\n"
    with pytest.raises(UntrustedError, match="1 of the 2"):
        asked(both_text)
    sign(store, manifest, key(tmp_path, "other"))
    assert asked(both_text) == ("release", "other")


def test_an_unsigned_attestation_can_only_remove_trust(store: FileStore, tmp_path: Path) -> None:
    entry = engine(store, "sm_89", status="unproven")
    manifest = publish_engines(store, [entry]).manifest
    sign(store, manifest, key(tmp_path))
    policy = load_policy(policy_file(tmp_path, NEEDS_RELEASE))

    def status() -> str:
        counts = require(store, locate(store, parse_reference("digits@1")).manifest, policy).counts
        return judge_entries(store, manifest, counts)[0].status

    attest(store, manifest, report(entry, "proven"))
    assert judge_entries(store, manifest)[0].status == "proven" and status() == "unproven"
    signature = sign(store, manifest, key(tmp_path))
    assert [item.new for item in signature] == [False, True] and status() == "proven"
    attest(store, manifest, report(entry, "failed", "elsewhere"))
    assert status() == "failed"


def test_an_attestations_signature_is_not_valid_for_a_manifest(store: FileStore, tmp_path: Path) -> None:
    entry = engine(store, "sm_89", status="unproven")
    manifest = publish_engines(store, [entry]).manifest
    digest = attest(store, manifest, report(entry, "proven"))
    signature = sign(store, manifest, key(tmp_path))
    bundle = json.loads(store.read(signature[1].key) or b"")
    assert store.read(attestation_key("digits", "1", str(entry.digest), digest))
    moved_key = signature_key("digits", "1", digest_of_bytes(manifest.to_bytes()), signature[1].key_id)
    store.replace(moved_key, canonical_json(bundle), store.read(moved_key))
    policy = load_policy(policy_file(tmp_path, NEEDS_RELEASE))
    with pytest.raises(UntrustedError, match=r"another attestation\.json"):
        require(store, locate(store, parse_reference("digits@1")).manifest, policy)


def test_certificates_are_valid_for_their_identity(store, manifest, tmp_path):
    certificate(tmp_path, "root")
    certificate(tmp_path, "otherroot")
    leaf_path = certificate(tmp_path, "ci", "root", san="ci@example.org")
    chain = (tmp_path / "root.crt",)
    sign(store, manifest, SigningKey(written(tmp_path, "ci")[0], leaf_path, chain))
    # Right under the root there is nothing between the two; a chain that was left out is another signature.
    [signature] = sign(store, manifest, SigningKey(written(tmp_path, "ci")[0], leaf_path))
    assert signature.new
    located_version = locate(store, parse_reference("digits@1"))

    def asked(root: str, identity: str) -> tuple[str, ...]:
        signers = f"  ci: {{certificate_roots: [{root}.crt], identity: {identity}}}\n"
        path = policy_file(tmp_path, "  - {models: '*', signers: [ci]}\n", signers)
        return require(store, located_version.manifest, load_policy(path)).signers

    assert asked("root", "ci@example.org") == ("ci",) == asked("root", "ci")
    with pytest.raises(UntrustedError, match="not by ci"):
        asked("root", "boss@example.org")
    with pytest.raises(UntrustedError, match="does not verify"):
        asked("otherroot", "ci@example.org")
    # A chain in two spellings, one for each reader: refused before the library sees it.
    bundle = json.loads(store.read(signature.key) or b"")
    bundle["verificationMaterial"]["x509_certificate_chain"] = bundle["verificationMaterial"]["x509CertificateChain"]
    store.replace(signature.key, canonical_json(bundle), store.read(signature.key))
    with pytest.raises(UntrustedError, match="has not signed"):
        asked("root", "ci@example.org")


def test_errors_name_unusable_keys_and_no_passwords(store, manifest, tmp_path, monkeypatch):
    locked_path = tmp_path / "locked.pem"
    locked_path.write_bytes(private_pem(private("release"), b"swordfish"))
    monkeypatch.setenv("ENGINESMITH_SIGNING_KEY_PASSWORD", "wrong-swordfish")
    with pytest.raises(InputError, match=r"locked\.pem") as error:
        sign(store, manifest, SigningKey(locked_path))
    assert "swordfish" not in str(error.value)
    monkeypatch.setenv("ENGINESMITH_SIGNING_KEY_PASSWORD", "swordfish")
    assert sign(store, manifest, SigningKey(locked_path))[0].new
    monkeypatch.delenv("ENGINESMITH_SIGNING_KEY_PASSWORD")
    for content in (b"", b"no key", written(tmp_path, "release")[1].read_bytes()):
        (tmp_path / "bad.pem").write_bytes(content)
        with pytest.raises(InputError, match=r"bad\.pem"):
            sign(store, manifest, SigningKey(tmp_path / "bad.pem"))
    with pytest.raises(InputError, match="PEM file"):
        sign(store, manifest, SigningKey(tmp_path / "absent.pem"))
    assert len(names_in(tmp_path / "registry/models/digits/versions/1/signatures")) == 1


def test_a_manifest_with_other_stored_bytes_is_not_signed(store: FileStore, manifest: Manifest, tmp_path: Path) -> None:
    place = manifest_key("digits", "1")
    data = store.read(place) or b""
    assert store.replace(place, data + b" ", data)
    with pytest.raises(IntegrityError, match="is missing or has other bytes"):
        sign(store, locate(store, parse_reference("digits@1")).manifest, key(tmp_path))


def test_a_signature_of_no_file_is_valid_for_no_file(store: FileStore, manifest: Manifest, tmp_path: Path) -> None:
    """Of an empty folder, with the manifest's name among what is ignored: it agrees with any manifest."""
    from model_signing import hashing, signing

    secret, public_model = written(tmp_path, "release")
    empty_path = tmp_path / "empty"
    empty_path.mkdir()
    ignoring_paths = hashing.Config().set_ignored_paths(paths=["manifest.json"])
    config = signing.Config().set_hashing_config(ignoring_paths).use_elliptic_key_signer(private_key=secret)
    config.sign(empty_path, tmp_path / "empty.json")
    place = signature_key("digits", "1", digest_of_bytes(manifest.to_bytes()), key_id_of_pem(public_model.read_bytes()))
    assert store.create(place, (tmp_path / "empty.json").read_bytes())
    with pytest.raises(UntrustedError, match=r"resources is \[\]; it must be a list of one"):
        require(
            store, locate(store, parse_reference("digits")).manifest, load_policy(policy_file(tmp_path, NEEDS_RELEASE))
        )
