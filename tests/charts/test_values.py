import re
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from charts import renders
from tests.charts.kube import batches, label, with_value

L4 = {"name": "l4", "generation": "sm_89", "max": 1, "gpuLabels": True}
BIG = {"name": "BIG", "value": "x" * 120_000}


def cases(name: str) -> list[tuple[str, str, Any]]:
    """What is wrong, what the message says, and a wrong value, of a file of this folder."""
    rows = yaml.load((Path(__file__).parent / name).read_text(), yaml.CSafeLoader)
    return [(path, output, value) for path, output, *values in rows for value in values]


@pytest.mark.parametrize("batch", batches(cases("refused_by_schema.yaml")))
def test_the_schema_refuses(batch: list[tuple[str, str, Any]]) -> None:
    keys = {path: path.split(".")[0] for path, _, _ in batch}
    with pytest.raises(helm.HelmError) as error:
        renders.rendered(
            renders.sample("aws") | {keys[path]: with_value(path, bad)[keys[path]] for path, _, bad in batch}
        )
    lines = str(error.value).splitlines()
    for path, message, value in batch:
        named_texts = f"'/{keys[path]}", f"'{keys[path]}'"
        assert [line for line in lines if message in line and any(name in line for name in named_texts)], (path, value)


@pytest.mark.parametrize("batch", batches(cases("refused_by_templates.yaml")))
def test_the_templates_refuse(batch: list[tuple[str, str, Any]]) -> None:
    """The error is in words, not a template's. A value whose message another value hides is rendered alone."""
    base = "onprem" if "proxy" in str(batch) else "aws"
    together = renders.sample(base)
    for path, _, value in batch:
        key = path.split(".")[0]
        together[key] = with_value(path, value, base)[key]
    with pytest.raises(helm.HelmError) as error:
        renders.rendered(together)
    for path, message, value in batch:
        if not re.search(rf"^execution error at (.|\n)*{message}", str(error.value)):
            with pytest.raises(helm.HelmError, match=rf"^execution error at (.|\n)*{message}"):
                renders.rendered(with_value(path, value, base))


def test_containers_of_one_pod_have_different_names() -> None:
    container = {"name": "warm", "image": "registry.example/warm:1"}
    values = {**with_value("cpuGroup.extraContainers", [container]), "extraInitContainers": [container]}
    with pytest.raises(helm.HelmError, match=r"cpuGroup\.extraContainers: warm is there twice; remove one"):
        renders.rendered(values)


def test_more_groups_than_a_configmap_holds_are_refused() -> None:
    groups = [{**L4, "name": f"l4-{count}", "extraEnv": [BIG]} for count in range(9)]
    with pytest.raises(helm.HelmError, match=r"enginesmith-ray takes 1\d{6} bytes with 10 groups.*name fewer groups"):
        renders.rendered(with_value("gpuGroups", groups))


def test_invalid_networks_are_refused_with_a_message() -> None:
    cidrs = [
        "10.0.0.0/33", "10.0.0.256/32", "10.0.0.01/32", "10.0.0/24", "10.0.0.0.0/8", "fd00::/129", "fd00::1::2/64",
        ":fd00::/8", "1:2:3:4:5:6:7/64", "1:2:3:4:5:6:7:8:9/64", "1:2:3:4::5:6:7:8/64", "12345::/16", "::10.0.0.0/104",
    ]  # fmt: skip
    with pytest.raises(helm.HelmError) as error:
        renders.rendered(with_value("networkPolicy.prefect.cidrs", cidrs))
    for cidr in cidrs:
        assert f"networkPolicy.prefect.cidrs: {cidr} is not a network; give" in str(error.value)


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(helm.HelmError) as error:
        renders.rendered({})
    assert "images.control.repository" in str(error.value) and "registry: neither bucket" in str(error.value)


def test_a_numeric_release_name_has_string_labels_and_a_note_about_service_names() -> None:
    values = {**renders.sample("aws"), "fullnameOverride": "builds"}
    for item in renders.objects(renders.rendered(values, name="2024")):
        assert all(type(value) is str for value in item["metadata"]["labels"].values()), label(item)
    for name in ("2024", "a.b"):
        with pytest.raises(helm.HelmError, match=f'"{name}-enginesmith" does not begin with a letter or has a dot'):
            renders.rendered(renders.sample("aws"), name=name)


def test_a_tag_is_taken_only_when_allowed() -> None:
    values = renders.sample("minimal")
    values["images"] = {"allowTags": True, "control": {"repository": "registry.example/control", "tag": "1.2"}}
    texts = renders.rendered(values)
    assert 'image: "registry.example/control:1.2"' in texts["prefect/server.yaml"]
    assert "images are selected by tag" in texts["NOTES.txt"]
