from pathlib import Path

import pytest

from enginesmith.core.errors import InputError
from enginesmith.registry.trust.policy import load_policy
from tests.enginesmith.registry.trust.keys import written

GOOD = "format: 1\nsigners:\n  a: {public_key: a.pub}\nrules:\n  - {models: '*', signers: [a]}\n"
DEEP = "[" * 5000


def load(folder: Path, text: str) -> None:
    written(folder, "a")
    written(folder, "b")
    (folder / "trust.yaml").write_text(text)
    load_policy(folder / "trust.yaml")


def test_the_documented_policy_is_read(tmp_path: Path) -> None:
    load(tmp_path, GOOD)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format: 1", "format: 2", "format is 2"),
        ("signers: [a]", "signer: [a]", "no field 'signer'"),
        ("rules:", "required: false\nrules:", "no field 'required'"),
        ("public_key: a.pub", "public_key: a.pub, identity: x", "no field 'identity'"),
        ("signers: [a]", "signers: [b]", "names 'b'"),
        ("signers: [a]", "signers: []", "needs 1 of 0"),
        ("signers: [a]", "signers: [a, a], needed: 2", "each signer once"),
        ("signers: [a]", "signers: [a], needed: 0", "needs 0 of 1"),
        ("signers: [a]", "signers: [a], needed: 2", "needs 2 of 1"),
        ("signers: [a]", "signers: [a], required: 'no'", "true or false"),
        ("signers: [a]", "signers: [a], min_version: ../x", "min_version"),
        ("models: '*'", "models: '../*'", "must be a glob"),
        ("models: '*'", "models: 'a', models: '*'", "twice"),
        ("rules:", "rules: []\nrulez:", "no field 'rulez'"),
        ("a.pub", "absent.pub", "nothing is trusted"),
        ("a.pub", "a.pem", "not a public key"),
        ("a.pub", "/dev/zero", "over 65536 bytes"),
        ("{public_key: a.pub}", "{public_key: a.pub}\n  b: {public_key: a.pub}", "have the same key; keep one"),
        ("{public_key: a.pub}", "{certificate_roots: [], identity: ci}", "name 1 to"),
        ("{public_key: a.pub}", "{certificate_roots: [a.pub]}", "identity is missing"),
        ("{public_key: a.pub}", "{keyless_identity: me}", "keyless_issuer is missing"),
        ("{public_key: a.pub}", "&x {public_key: a.pub}\n  b: *x", "aliases"),
        ("{public_key: a.pub}", "!!python/object/apply:os.system [ls]", "not plain YAML"),
        ("[a]", DEEP, "deep nesting"),
    ],
)
def test_a_policy_with_a_mistake_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(InputError, match=message) as error:
        load(tmp_path, GOOD.replace(old, new))
    assert "trust" in str(error.value)
