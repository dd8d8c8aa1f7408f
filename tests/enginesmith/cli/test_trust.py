from pathlib import Path

import pytest

from enginesmith.core.errors import UntrustedError
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.names import parse_reference
from enginesmith.registry.store.base import Store
from pipeline.canary.engines import choose
from tests.enginesmith.cli.commands import run, said, told
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.trust.keys import written


def test_sign_and_verify_signature(empty: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_engines(empty, [engine(empty)])
    secret, public_model = written(tmp_path, "release")
    assert "digits@1 has 0 of the 1" in str(run("registry", "verify", "digits", "--public-key", public_model).exception)
    assert told("registry", "sign", "digits", "--key", secret)["signatures"][0]["new"]  # type: ignore[index]
    assert "already signed: manifest by key" in said("registry", "sign", "digits", "--key", secret)
    assert said("registry", "verify", "digits", "--public-key", public_model) == "digits@1 is signed by release.pub\n"
    policy = tmp_path / "trust.yaml"
    policy.write_text("format: 1\nsigners: {r: {public_key: release.pub}}\nrules: [{models: '*', signers: [r]}]\n")
    assert "signed: by r\n" in said("pull", "digits", "--target", "cpu", "--dest", tmp_path / "dest", "--trust", policy)
    publish_engines(empty, [engine(empty, data=b"two")], "b")
    monkeypatch.setenv("ENGINESMITH_TRUST_POLICY", str(policy))
    for command in ("promote", "validate"):
        assert isinstance(run(command, "digits@2").exception, UntrustedError)
    with pytest.raises(UntrustedError):
        choose(empty, parse_reference("digits@2"), parse_targets("cpu")[0], None)
    assert "give the path of a PEM" in str(run("registry", "sign", "digits", "--key", tmp_path / "absent").exception)
    assert "sign needs --key" in str(run("registry", "sign", "digits").exception)
