"""Many specs: one that fails stops no other, and what is no spec is passed over."""

import yaml

from enginesmith.registry.store.layout import registered_key
from pipeline.orchestration.catalog import gather_specs, spec_files
from tests.pipeline.projects import Project


def test_a_catalog_of_what_is_registered(project: Project) -> None:
    done = project.run("build", "--all", "registered")
    assert done.code == 3 or "no spec is registered" in done.err
    project.run("prefect", "register", project.spec, "--no-event")
    with gather_specs("registered", str(project.registry)) as found:
        assert [address.partition("@")[0] for address in found] == ["registered:tiny"]
    project.store.replace(registered_key("another"), b"damaged", None)
    with gather_specs("registered", str(project.registry)) as found:
        assert [address.partition("@")[0] for address in found] == ["registered:another", "registered:tiny"]


def test_only_yaml_that_names_a_model_means_to_be_a_spec(project: Project) -> None:
    (project.folder / "other.yaml").write_text(yaml.safe_dump({"deployments": [{"model": 1}]}))
    (project.folder / "broken.yaml").write_text("model: [\n")
    (project.folder / ".hidden.yaml").write_text("model: x\n")
    assert [path.name for path in spec_files(project.folder)] == ["broken.yaml", "tiny.yaml"]
