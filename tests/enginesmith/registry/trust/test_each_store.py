from pathlib import Path

import pytest

from enginesmith.core.errors import InputError, UntrustedError
from enginesmith.core.names import parse_reference
from enginesmith.registry.store.base import Store
from enginesmith.registry.trust import require
from enginesmith.registry.trust.policy import policy_of_key
from enginesmith.registry.trust.signing import SigningKey
from enginesmith.registry.verification import verify
from enginesmith.registry.versions import channels, policies
from enginesmith.registry.versions.lookup import locate
from enginesmith.registry.versions.policies import ChannelPolicy
from enginesmith.registry.versions.publish import add_signatures
from tests.enginesmith.registries import engine, on_each_store, publish_engines
from tests.enginesmith.registry.trust.keys import written


@on_each_store
def test_every_kind_of_store_holds_signatures(store: Store, tmp_path: Path) -> None:
    manifest = publish_engines(store, [engine(store)]).manifest
    secret, public_model = written(tmp_path, "release")
    located_model, policy = locate(store, parse_reference("digits")), policy_of_key(public_model)
    with pytest.raises(UntrustedError):
        require(store, located_model.manifest, policy)
    [first_signature], [second_signature] = (add_signatures(store, manifest, SigningKey(secret)) for _ in range(2))
    assert first_signature.new and not second_signature.new
    assert require(store, located_model.manifest, policy).signers == ("release.pub",) and verify(store).sound


@on_each_store
def test_a_channel_accepts_only_versions_signed_with_one_of_its_keys(store: Store, tmp_path: Path) -> None:
    manifest = publish_engines(store, [engine(store)], channel=None).manifest
    (release, public_model), (other_model, _) = written(tmp_path, "release"), written(tmp_path, "other")
    policies.write(store, "digits", "stable", ChannelPolicy(signed_by=(public_model.read_text(),)))
    add_signatures(store, manifest, SigningKey(other_model))
    with pytest.raises(
        InputError, match=r"policy of digits:stable needs a signature.*has not signed.*enginesmith registry sign"
    ):
        channels.promote(store, manifest, "stable")
    assert channels.promote(store, manifest, "candidate").version == "1"
    add_signatures(store, manifest, SigningKey(release))
    assert channels.promote(store, manifest, "stable").version == "1"
    with pytest.raises(InputError, match=r"a key of the policy of digits:beta .*openssl"):
        policies.write(store, "digits", "beta", ChannelPolicy(signed_by=("-----BEGIN PUBLIC KEY-----",)))
