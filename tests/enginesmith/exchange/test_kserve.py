"""KServe's objects against its own CRDs, and the URIs that its storage initializer is called with."""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from enginesmith.cli import main
from enginesmith.core.errors import InputError, UnknownNameError
from enginesmith.core.hardware.machine import Machine
from enginesmith.exchange.kserve import Deployment, pull_arguments, storage_uri
from enginesmith.registry.store.base import Store
from tests.enginesmith.client.layouts.engines import cpu_engine, plan
from tests.enginesmith.registries import names_in, publish_engines

IMAGE = "registry.example/enginesmith/client@sha256:" + "0" * 64
CAR = "registry.example/engines/digits@sha256:" + "1" * 64
# A folder with CRDs, with those of https://github.com/kserve/kserve, charts/kserve-crd (templates/ and files/). One of
# them has 2 MB, so no copy is here.
VARIABLE = "ENGINESMITH_CRDS"


def deployment(store: Store, **how: Any) -> Deployment:
    manifest = publish_engines(store, [plan(store, "l4"), cpu_engine(store, 1)])
    how = {"image": IMAGE, "registry": "s3://models/registry", "options": (("target", "l4"),), **how}
    return Deployment(manifest.manifest, manifest.manifest.engines[0], Machine.from_name("l4"), **how)


def strict(schema: Any) -> Any:
    """A schema of a CRD that refuses fields which Kubernetes would drop without a word."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("anyOf", None)
    return result


@cache
def validator_of(kind: str, version: str) -> jsonschema.Draft202012Validator:
    folder = os.environ.get(VARIABLE)
    for path in Path(folder).rglob(f"serving.kserve.io_{kind.lower()}s.yaml") if folder else ():
        crd = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        (result,) = (item for item in crd["spec"]["versions"] if item["name"] == version and item["served"])
        schema = strict(result["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        return jsonschema.Draft202012Validator(schema)
    pytest.skip(f"{VARIABLE} names no folder with the CRD of {kind}")


@pytest.mark.parametrize("how", [{}, {"image": "", "car": CAR}])
def test_every_object_is_valid_by_kserves_own_schema(store: Store, how: dict[str, str]) -> None:
    for item in deployment(store, **how).to_objects():
        validator = validator_of(item["kind"], item["apiVersion"].rpartition("/")[2])
        validator.validate(item)
        assert not validator.is_valid({**item, "spec": {**item["spec"], "no-such-field": 1}})


def test_a_uri_needs_the_clients_image_and_an_image_needs_none(store: Store) -> None:
    container, service = deployment(store).to_objects()
    assert container["spec"]["supportedUriFormats"] == [{"prefix": "enginesmith://"}]
    assert container["spec"]["container"]["command"] == ["enginesmith", "initialize"]
    predictor = service["spec"]["predictor"]
    assert predictor["model"]["storageUri"] == "enginesmith://digits@1?target=l4"
    assert predictor["model"]["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert predictor["nodeSelector"] == {"nvidia.com/gpu.compute.major": "8", "nvidia.com/gpu.compute.minor": "9"}
    (service,) = deployment(store, image="", car=CAR).to_objects()
    assert service["spec"]["predictor"]["model"]["storageUri"] == f"oci://{CAR}"


def test_names_are_those_of_kubernetes(store: Store) -> None:
    result = deployment(store)
    for model, name in (("digits.v2_a", "digits-v2-a"), ("2d", "m-2d"), ("a-", "a")):
        service = replace(result, manifest=replace(result.manifest, model=model)).to_objects()[-1]
        assert service["metadata"]["name"] == name


@pytest.mark.parametrize("how", [{"image": ""}, {"car": CAR}, {"image": "registry.example/client:latest"}])
def test_images_are_named_once_and_by_digest(store: Store, how: dict[str, str]) -> None:
    with pytest.raises(InputError, match="give"):
        deployment(store, **how)


def test_uris_become_arguments_of_pull() -> None:
    uri = storage_uri("digits:stable", [("target", "l4"), ("runtime", "tensorrt=10.16.1"), ("proven-only", "")])
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


def test_the_command_answers_like_kserve_requires(store: Store, tmp_path: Path, capsys) -> None:
    publish_engines(store, [cpu_engine(store, 1)])
    publish_engines(store, [cpu_engine(store, 2)], model="letters")
    dest = [str(tmp_path / name) for name in ("one", "two")]
    pairs = ["enginesmith://digits@1?target=cpu", dest[0], "enginesmith://letters?target=cpu&layout=plain", dest[1]]
    assert run("initialize", *pairs, "--registry", store.uri) == 0
    assert names_in(tmp_path / "one" / "digits") == ["1", "config.pbtxt"]
    assert names_in(tmp_path / "two") == ["letters-1-cpu-fp32.json", "letters-1-cpu-fp32.onnx"]
    assert run("initialize", "enginesmith://digits?target=l4", dest[0], "--registry", store.uri) == 2
    assert "has no engine for sm_89" in capsys.readouterr().err
    wrong_text = "enginesmith://digits?target=cpu&max-batch-size=few"
    assert run("initialize", wrong_text, dest[0], "--registry", store.uri) == 2
    assert f"error: {wrong_text!r}: Invalid value for '--max-batch-size'" in capsys.readouterr().err
    assert run("initialize", "enginesmith://digits", "--registry", store.uri) == 2
    assert "has no folder" in capsys.readouterr().err


def test_pull_writes_the_objects(store: Store, tmp_path: Path) -> None:
    publish_engines(store, [cpu_engine(store, 1)])
    arguments = ("pull", "digits", "--layout", "kserve", "--dest", str(tmp_path / "k"), "--registry", store.uri)
    assert run(*arguments, "--target", "cpu", "--image", IMAGE) == 0
    objects = list(yaml.safe_load_all((tmp_path / "k" / "digits.yaml").read_text()))
    assert [item["kind"] for item in objects] == ["ClusterStorageContainer", "InferenceService"]
    uri = objects[1]["spec"]["predictor"]["model"]["storageUri"]
    assert uri == "enginesmith://digits@1?target=cpu&precision=fp32"
    assert run("initialize", uri, str(tmp_path / "m"), "--registry", store.uri) == 0
    assert run(*arguments, "--target", "cpu") == 2 and run(*arguments, "--image", IMAGE) == 2
    assert run(*arguments, "--target", "cpu", "--image", IMAGE, "--follow") == 2
