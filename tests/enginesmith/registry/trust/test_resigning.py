from pathlib import Path

from enginesmith.core.errors import digest_of_bytes
from enginesmith.core.names import parse_reference
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import signature_key
from enginesmith.registry.trust import require
from enginesmith.registry.trust.policy import load_policy
from enginesmith.registry.trust.signatures import key_id_of_pem
from enginesmith.registry.trust.signing import SigningKey, sign
from enginesmith.registry.versions.lookup import locate
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.trust.keys import certificate, written
from tests.enginesmith.registry.trust.test_signing import NEEDS_RELEASE, key, policy_file


def test_a_forged_signature_does_not_prevent_the_owner_from_signing(store: Store, tmp_path: Path) -> None:
    """Whoever may write to the registry can put anything under the name of a key's signature."""
    manifest = publish_engines(store, [engine(store)]).manifest
    policy = load_policy(policy_file(tmp_path, NEEDS_RELEASE))
    [wrong_signed] = sign(store, manifest, key(tmp_path, "other"))
    release = key_id_of_pem(written(tmp_path, "release")[1].read_bytes())
    wrong_data = (store.read(wrong_signed.key) or b"").replace(wrong_signed.key_id.encode(), release.encode())
    certificate(tmp_path, "release")
    certified_key = SigningKey(written(tmp_path, "release")[0], tmp_path / "release.crt")
    for hostile_data in (wrong_data, wrong_data.replace(b'"sig"', b'"gis"'), b"{", b""):
        place = signature_key("digits", "1", digest_of_bytes(manifest.to_bytes()), release)
        assert store.replace(place, hostile_data, store.read(place))
        [signature] = sign(store, manifest, key(tmp_path))
        assert signature.new and signature.key == place
        assert require(store, locate(store, parse_reference("digits@1")).manifest, policy).signers == ("release",)
        assert not sign(store, manifest, key(tmp_path))[0].new
    # With a certificate it is another statement, and the last one stays.
    assert sign(store, manifest, certified_key)[0].new and not sign(store, manifest, certified_key)[0].new
    assert sign(store, manifest, key(tmp_path))[0].new
