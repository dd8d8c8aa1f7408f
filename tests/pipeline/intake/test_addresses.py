import shutil

import boto3
import pytest

from enginesmith.core.errors import InputError, SpecError
from enginesmith.registry.registered_specs import registrations
from pipeline.compile.steps.engines import reproduce
from pipeline.intake.registration import below, place_at, registry_of, spec_at
from pipeline.orchestration.catalog import gather_specs
from pipeline.spec.model import ModelSpec, load_spec
from tests.enginesmith.s3_server import BUCKET
from tests.pipeline.compile.test_steps import an_engine
from tests.pipeline.projects import Project

SMALL = {"precisions": ["fp32"], "targets": ["cpu"], "calibration": None}


def registered(project: Project) -> str:
    """Its address; nothing else is left of the project."""
    assert project.run("prefect", "register", project.spec, "--no-event").code == 0
    shutil.rmtree(project.folder)
    return registrations(project.store, "tiny")[0].address


def test_a_registered_spec_is_built_and_rebuilt_with_statuss_command(project: Project) -> None:
    project.change_spec(**SMALL)
    address = registered(project)
    assert project.run("build", "registered:tiny", "--json").json["version"] == "1"
    output = project.run("status", "tiny", "--json").json["spec"]
    assert output == address, "with the digest: another may be the newest tomorrow"
    second_result = project.run("build", output, "--json")
    assert second_result.code == 0 and second_result.json["cached"] is True
    plan = project.run("plan", output, "--json").json
    assert [unit["action"] for unit in plan["units"]] == ["cached"]


def test_remedies_name_the_registered_spec(project: Project) -> None:
    project.change_spec(**SMALL, golden={"data": "golden.npz", "labels": "label", "frozen": "0" * 64})
    address = registered(project)
    result = project.run("build", address)
    assert result.code != 0 and "golden.frozen is 000000000000" in result.err
    assert f"where the spec of {address} is kept, then enginesmith prefect register SPEC" in result.err
    with spec_at(address, str(project.registry)) as registered_spec:
        command = reproduce(an_engine().unit, registered_spec.load(), "/a registry")
        assert f" build {address} --registry '/a registry' " in command and str(registered_spec.path) not in command
    accepted = project.run("debug", "golden", "accept", address)
    assert accepted.code == 2 and "is a copy; accept the golden set where the spec is kept" in accepted.err


def test_mistakes_in_a_copy_name_its_address(project: Project) -> None:
    project.change_spec(precisions=["fp99"], source={"onnx": "gone.onnx"})
    with pytest.raises(SpecError, match=r"^registered:tiny@1:[0-9]+: precisions") as error:
        load_spec(project.spec, "registered:tiny@1")
    assert str(project.folder) not in str(error.value)
    project.change_spec(precisions=["fp32"])
    with pytest.raises(SpecError, match=r"'gone.onnx' does not exist in registered:tiny@1;"):
        load_spec(project.spec, "registered:tiny@1")


def test_without_its_registry_a_registered_spec_is_missing() -> None:
    with pytest.raises(SpecError, match="is in a registry; name the registry"), spec_at("registered:tiny", None):
        pass


def test_a_catalog_in_a_bucket_names_its_specs_by_address(project: Project, s3_server: str, s3_uri: str) -> None:
    client = boto3.client("s3", endpoint_url=s3_server)
    prefix = s3_uri.partition("?")[0].removeprefix(f"s3://{BUCKET}/")
    for path in project.folder.iterdir():
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/vision/{path.name}", Body=path.read_bytes())
    with gather_specs(s3_uri, None) as (result,):
        assert str(result) == below(s3_uri, "vision/tiny.yaml")
        with spec_at(result, None) as same_spec:
            assert same_spec is result
    expected = load_spec(project.spec)
    with spec_at(str(result), None) as second_spec:
        spec: ModelSpec = second_spec.load()
        assert spec.model_dump() == expected.model_dump() and spec.address == str(result) and spec.is_copy
    assert not second_spec.path.exists()
    with pytest.raises(InputError, match=r"there is no such file; `enginesmith build --all`"), spec_at(s3_uri, None):
        pass
    for uri, name in ((s3_uri, "vision/tiny.yaml"), (str(project.folder), "tiny.yaml")):
        with place_at(uri) as place:
            assert place.has(name) and not place.has("tiny") and not place.has("vision")
    with place_at(str(project.folder)), gather_specs(str(project.folder), None) as (local_spec,):
        assert str(local_spec) == str(project.spec)


def test_the_registry_is_the_options_then_the_variables_then_the_specs(project, monkeypatch):
    monkeypatch.delenv("ENGINESMITH_REGISTRY", raising=False)
    assert registry_of(None, None) == "./registry"
    project.change_spec(publication={"registry": "mine"})
    spec = load_spec(project.spec)
    assert registry_of(project.spec, None) == registry_of(spec, None) == str(project.folder / "mine")
    project.change_spec(publication={"registry": "s3://models/mine"})
    assert registry_of(load_spec(project.spec), None) == "s3://models/mine"
    monkeypatch.setenv("ENGINESMITH_REGISTRY", "s3://models/set")
    assert registry_of(spec, None) == registry_of(None, None) == "s3://models/set"
    assert registry_of(spec, "here") == "here"
