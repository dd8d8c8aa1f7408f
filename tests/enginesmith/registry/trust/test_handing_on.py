from pathlib import Path

import pytest

from enginesmith.core.errors import ConflictError, InputError, UntrustedError
from enginesmith.core.names import parse_reference
from enginesmith.exchange.mirror import mirror
from enginesmith.exchange.oci import export_oci
from enginesmith.registry.evidence.attestations import attest
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.trust import require
from enginesmith.registry.trust.policy import load_policy
from enginesmith.registry.trust.signing import SigningKey, sign
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.lookup import locate
from tests.enginesmith.registries import engine, overwrite, publish_engines, report
from tests.enginesmith.registry.trust.keys import written

POLICY = "format: 1\nsigners: {r: {public_key: release.pub}}\nrules: [{models: '*', signers: [r]}]\n"
DIGITS = parse_reference("digits@1")


@pytest.fixture
def trust(tmp_path: Path) -> Path:
    path = tmp_path / "trust.yaml"
    path.write_text(POLICY)
    return path


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return SigningKey(written(tmp_path, "release")[0])


@pytest.fixture
def manifest(store: Store) -> Manifest:
    entries = [engine(store), engine(store, "sm_89", status="unproven")]
    result = publish_engines(store, entries, channel=None).manifest
    attest(store, result, report(entries[1], "proven"))
    return result


def test_nothing_untrusted_is_passed_on(store, manifest, tmp_path, trust, key, monkeypatch):
    monkeypatch.setenv("ENGINESMITH_TRUST_POLICY", str(trust))
    dest = open_store(tmp_path / "other", create=True)
    names_before = set(dest.list())
    with pytest.raises(UntrustedError):
        mirror(store, [DIGITS], dest)
    with pytest.raises(UntrustedError):
        export_oci(store, locate(store, DIGITS), tmp_path / "oci")
    assert set(dest.list()) == names_before and not (tmp_path / "oci").exists()
    sign(store, manifest, key)
    assert mirror(store, [DIGITS], dest).versions == ("digits@1",)
    assert export_oci(store, locate(store, DIGITS), tmp_path / "oci")[0] == "digits-1"


def test_an_unsigned_proof_moves_no_channel_and_proves_no_image(store, tmp_path, trust, key):
    policy = load_policy(trust)
    # Only the manifest is signed: attestations come later.
    entries = [engine(store), engine(store, "sm_89", status="unproven")]
    result = publish_engines(store, entries, channel=None).manifest
    sign(store, result, key)
    attest(store, result, report(entries[1], "proven"))
    counts = require(store, locate(store, DIGITS).manifest, policy).counts
    with pytest.raises(InputError, match="has unproven ones: sm_89"):
        channels.promote(store, result, "stable", counts=counts)
    tags = export_oci(store, locate(store, DIGITS), tmp_path / "oci", proven_only=True, trust=policy)
    assert tags == ("digits-1", "digits-1-cpu-fp32-onnxruntime")
    sign(store, result, key)
    assert channels.promote(store, result, "stable", counts=counts).version == "1"


def test_a_version_signed_at_both_sites_can_be_mirrored_again(store, manifest, tmp_path, trust, key):
    """Two signatures of one document by one key have different bytes."""
    dest = open_store(tmp_path / "other", create=True)
    mirror(store, [DIGITS], dest)
    [at_source, *_], [at_dest, *_] = sign(store, manifest, key), sign(dest, manifest, key)
    assert at_source.key == at_dest.key and store.read(at_source.key) != dest.read(at_dest.key)
    mirror(store, [DIGITS], dest)
    assert require(dest, locate(dest, DIGITS).manifest, trust).signers == ("r",) and verify(dest).problems == ()
    overwrite(dest, at_dest.key, b"{}")
    with pytest.raises(ConflictError, match="edited by hand"):
        mirror(store, [DIGITS], dest)
