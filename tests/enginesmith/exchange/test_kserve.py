"""The example of KServe's objects against its own CRDs, and the URIs that its storage initializer is called with."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from enginesmith.cli import main
from enginesmith.core.errors import InputError, UnknownNameError
from enginesmith.exchange.kserve import pull_arguments
from enginesmith.registry.store.base import Store, open_store
from tests.enginesmith.client.layouts.engines import cpu_engine
from tests.enginesmith.registries import names_in, publish_engines

OBJECTS = list(yaml.safe_load_all((Path(__file__).parents[3] / "manifests/examples/kserve.yaml").read_text()))
# A folder with CRDs, with those of https://github.com/kserve/kserve, charts/kserve-crd (templates/ and files/). One of
# them has 2 MB, so no copy is here.
VARIABLE = "ENGINESMITH_CRDS"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "registry", create=True)


def strict(schema: Any) -> Any:
    """A schema of a CRD that refuses fields which Kubernetes would drop without a word."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("anyOf", None)
    return found


@cache
def validator_of(kind: str, version: str) -> jsonschema.Draft202012Validator:
    folder = os.environ.get(VARIABLE)
    for path in Path(folder).rglob(f"serving.kserve.io_{kind.lower()}s.yaml") if folder else ():
        crd = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        (found,) = (each for each in crd["spec"]["versions"] if each["name"] == version and each["served"])
        schema = strict(found["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        return jsonschema.Draft202012Validator(schema)
    pytest.skip(f"{VARIABLE} names no folder with the CRD of {kind}")


@pytest.mark.parametrize("item", OBJECTS, ids=lambda item: item["kind"])
def test_every_object_is_valid_by_kserves_own_schema(item: dict[str, Any]) -> None:
    validator = validator_of(item["kind"], item["apiVersion"].rpartition("/")[2])
    validator.validate(item)
    assert not validator.is_valid({**item, "spec": {**item["spec"], "no-such-field": 1}})


def test_the_examples_uri_is_one_that_the_examples_container_pulls() -> None:
    container, service = OBJECTS
    uri = service["spec"]["predictor"]["model"]["storageUri"]
    assert any(uri.startswith(each["prefix"]) for each in container["spec"]["supportedUriFormats"])
    assert container["spec"]["container"]["command"] == ["enginesmith", "initialize"]
    assert pull_arguments(uri) == ["digits@4", "--target", "l4", "--precision", "fp16", "--layout", "triton"]


def test_uris_are_arguments_of_pull() -> None:
    uri = "enginesmith://digits:stable?target=l4&runtime=tensorrt%3D10.16.1&proven-only="
    assert pull_arguments(uri) == [
        "digits:stable", "--target", "l4", "--runtime", "tensorrt=10.16.1", "--proven-only", "--layout", "triton",
    ]  # fmt: skip
    assert pull_arguments("enginesmith://digits@3?layout=plain") == ["digits@3", "--layout", "plain"]
    for uri, error in [
        ("s3://bucket/model", InputError),
        ("enginesmith:digits", InputError),
        ("enginesmith://digits?dest=%2Fetc", InputError),
        ("enginesmith://digits?hook=rm", InputError),
        ("enginesmith://digits?proven-only=false", InputError),
        ("enginesmith://../digits", UnknownNameError),
        ("enginesmith://--help", UnknownNameError),
    ]:
        with pytest.raises(error):
            pull_arguments(uri)


def run(*arguments: str) -> int:
    try:
        main(list(arguments))
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def test_the_command_answers_as_kserve_asks(store: Store, tmp_path: Path, capsys) -> None:
    publish_engines(store, [cpu_engine(store, 1)])
    publish_engines(store, [cpu_engine(store, 2)], model="letters")
    dest = [str(tmp_path / name) for name in ("one", "two")]
    pairs = ["enginesmith://digits@1?target=cpu", dest[0], "enginesmith://letters?target=cpu&layout=plain", dest[1]]
    assert run("initialize", *pairs, "--registry", store.uri) == 0
    assert names_in(tmp_path / "one" / "digits") == ["1", "config.pbtxt"]
    assert names_in(tmp_path / "two") == ["letters-1-cpu-fp32.json", "letters-1-cpu-fp32.onnx"]
    assert run("initialize", "enginesmith://digits?target=l4", dest[0], "--registry", store.uri) == 2
    assert "has no engine for sm_89" in capsys.readouterr().err
    assert (
        run("initialize", "enginesmith://digits?target=cpu&max-batch-size=few", dest[0], "--registry", store.uri) == 2
    )
    assert (
        "error: 'enginesmith://digits?target=cpu&max-batch-size=few': Invalid value for '--max-batch-size'"
        in capsys.readouterr().err
    )
    assert run("initialize", "enginesmith://digits", "--registry", store.uri) == 2
    assert "has no folder" in capsys.readouterr().err
