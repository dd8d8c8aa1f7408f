import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from enginesmith.cli import enginesmith
from enginesmith.core.errors import UntrustedError
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.names import parse_reference
from enginesmith.registry.store.base import open_store
from pipeline.canary.engines import choose
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.trust.keys import written


def run(*arguments: object) -> tuple[int, str, str]:
    found = CliRunner().invoke(enginesmith, [str(item) for item in arguments], catch_exceptions=True)
    return found.exit_code, found.stdout, repr(found.exception)


def test_sign_and_verify_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINESMITH_REGISTRY", str(tmp_path / "registry"))
    store = open_store(tmp_path / "registry", create=True)
    publish_engines(store, [engine(store)])
    secret, public = written(tmp_path, "release")
    assert "digits@1 has 0 of the 1" in run("registry", "verify", "digits", "--public-key", public)[2]
    code, out, _ = run("registry", "sign", "digits", "--key", secret, "--json")
    assert code == 0 and json.loads(out)["signatures"][0]["new"]
    assert "was signed: manifest by key" in run("registry", "sign", "digits", "--key", secret)[1]
    assert run("registry", "verify", "digits", "--public-key", public)[:2] == (0, "digits@1 is signed by release.pub\n")
    policy = tmp_path / "trust.yaml"
    policy.write_text("format: 1\nsigners: {r: {public_key: release.pub}}\nrules: [{models: '*', signers: [r]}]\n")
    code, out, _ = run("pull", "digits", "--target", "cpu", "--dest", tmp_path / "dest", "--trust", policy)
    assert code == 0 and "signed: by r\n" in out
    publish_engines(store, [engine(store, data=b"two")], "b")
    monkeypatch.setenv("ENGINESMITH_TRUST_POLICY", str(policy))
    for command in ("promote", "validate"):
        assert "UntrustedError" in run(command, "digits@2")[2]
    with pytest.raises(UntrustedError):
        choose(store, parse_reference("digits@2"), parse_targets("cpu")[0], None)
    assert "give the path of a PEM" in run("registry", "sign", "digits", "--key", tmp_path / "absent")[2]
    assert "sign needs --key" in run("registry", "sign", "digits")[2]
