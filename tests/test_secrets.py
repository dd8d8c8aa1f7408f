import itertools
from pathlib import Path

import pytest
from click.testing import CliRunner

from enginesmith.cli import enginesmith
from enginesmith.registry.store.base import open_store
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.trust.keys import private, private_pem, written

SECRET = "hunter2hunter2"
URIS = (
    f"s3://AKIA:{SECRET}@bucket/registry",
    f"s3://{SECRET}@bucket",
    f"s3://AKIA:a/{SECRET}/b@bucket/registry",
    f"s3://bucket/x?endpoint=http://user:{SECRET}@server.example",
    f"https://user:{SECRET}@registry.example/x",
    f"file://user:{SECRET}@host/registry",
    f"ftp://user:{SECRET}@[bad/registry",
)
COMMANDS = (
    ("list",), ("show", "digits"), ("pull", "digits", "--target", "cpu"), ("registry", "fsck"),
    ("registry", "sign", "digits", "--key", "k.pem"), ("registry", "verify", "digits", "--public-key", "k.pub"),
    ("promote", "digits"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "ENGINESMITH_SIGNING_KEY_PASSWORD",
        "ENGINESMITH_IDENTITY_TOKEN",
    ):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:{SECRET}@proxy.example:1")
    monkeypatch.setenv("PREFECT_API_KEY", SECRET)
    monkeypatch.chdir(tmp_path)


def said(*arguments: str) -> str:
    result = CliRunner().invoke(enginesmith, list(arguments))
    errors: list[str] = []
    error: BaseException | None = result.exception
    while error is not None:
        errors.append(f"{error} {error!r} {getattr(error, 'log', '')}")
        error = error.__cause__ or error.__context__
    return result.output + result.stderr + "\n".join(errors)


@pytest.mark.parametrize("uri", URIS)
def test_a_registry_named_with_credentials_is_never_repeated(uri: str) -> None:
    for command in COMMANDS:
        result = said(*command, "--registry", uri)
        assert result and SECRET not in result, (command, result)


def test_environment_variables_are_neither_printed_nor_written(tmp_path: Path) -> None:
    store = open_store(tmp_path / "registry", create=True)
    publish_engines(store, [engine(store)])
    written(tmp_path, "k")
    (tmp_path / "k.pem").write_bytes(private_pem(private("k"), SECRET.encode()))
    for command, flag in itertools.product(COMMANDS, ((), ("--json",))):
        result = said(*command, *flag, "--registry", str(tmp_path / "registry"))
        assert result and SECRET not in result, (command, result)
    assert SECRET not in said("doctor")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name.endswith(".sig.json") for path in files)
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
