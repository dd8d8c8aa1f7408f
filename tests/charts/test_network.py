import re
from typing import Any

import pytest

from charts import renders
from tests.charts import kube
from tests.charts.kube import Object, with_value

TEMPLATES = renders.CHART / "templates"
DATABASE = {"podSelector": {"matchLabels": {"app": "postgres"}}}
ELSEWHERE = [{"to": [DATABASE], "ports": [{"port": 5432, "protocol": "TCP"}]}]


def policies(values: dict[str, Any]) -> dict[str, Object]:
    return kube.policies(renders.objects(renders.rendered(values)))


def open_rules(specs: dict[str, Object]) -> list[str]:
    """Policies with a rule that has no peers, and so is open to everything. `dns` is meant to be."""
    rules = {name: [*spec.get("ingress", ()), *spec.get("egress", ())] for name, spec in specs.items() if name != "dns"}
    return [name for name, all_ in rules.items() for rule in all_ if not rule.get("from", rule.get("to"))]


@pytest.mark.parametrize(
    ("base", "part", "closed"),
    [
        ("aws", "registry", {"to-registry"}),
        ("onprem", "prefect", {"to-prefect"}),
        ("aws", "postgresql", {"prefect-server", "prefect-migrate"}),
    ],
)
def test_an_empty_list_allows_nothing(base: str, part: str, closed: set[str]) -> None:
    values = with_value(f"networkPolicy.{part}", {"cidrs": []}, base=base)
    actual = policies({**values, "networkPolicy": {**values["networkPolicy"], "extraEgress": ELSEWHERE}})
    assert not open_rules(actual)
    assert not [name for name in closed if actual[name].get("egress")]
    assert actual["extra-egress"]["egress"] == ELSEWHERE


def test_every_list_of_networks_goes_through_the_template_that_fails_closed() -> None:
    (place,) = [path.name for path in TEMPLATES.rglob("*.*") if "range .cidrs" in path.read_text()]
    assert place == "_helpers.tpl"
    assert not [path.name for path in TEMPLATES.rglob("*.yaml") if re.search(r"range .*\.cidrs", path.read_text())]


@pytest.mark.parametrize(
    ("base", "path", "value", "policy", "ports"),
    [
        ("onprem", "registry.endpoint", "https://minio:9001", "to-registry", {9000, 9001}),
        ("onprem", "registry.endpoint", "http://minio2", "to-registry", {9000, 80}),
        ("onprem", "registry.endpoint", "https://minio:0443", "to-registry", {9000, 443}),
        ("aws", "canary.traffic", "s3://t/x?endpoint=https://[fd00::1]:9443&region=x", "to-registry", {443, 9443}),
        ("aws", "nodeCache.through", "http://cache:8080,https://mirror:8443", "to-registry", {443, 8080, 8443}),
        ("onprem", "prefect.externalApi.url", "http://prefect.example:4200/api", "to-prefect", {443, 4200}),
        ("aws", "ray.gcsFaultTolerance.redisAddress", "redis.example:6380", "ray-head-to-redis", {6379, 6380}),
        ("aws", "ray.gcsFaultTolerance.redisAddress", "rediss://redis:6379", "ray-head-to-redis", {6379}),
    ],
)
def test_the_port_of_an_address_is_open(base: str, path: str, value: str, policy: str, ports: set[int]) -> None:
    (rule,) = policies(with_value(path, value, base=base))[policy]["egress"]
    assert {item["port"] for item in rule["ports"]} == ports


@pytest.mark.parametrize("part", ["prefect", "kuberay", "metrics"])
def test_an_empty_list_of_clients_denies_all(part: str) -> None:
    assert not open_rules(policies(with_value(f"networkPolicy.{part}", {"from": []})))


def test_a_registry_on_a_claim_opens_no_egress_without_a_bucket() -> None:
    values = renders.sample("minimal")
    assert "to-registry" not in policies(values)
    for more_fields in (
        {"catalog": {"place": "s3://specs/all"}},
        {"canary": {"enabled": True, "traffic": "s3://traffic/recorded"}},
    ):
        (rule,) = policies({**values, **more_fields})["to-registry"]["egress"]
        assert {peer["ipBlock"]["cidr"] for peer in rule["to"]} == {"0.0.0.0/0", "::/0"}
    assert "to-registry" not in policies({**values, "canary": {"enabled": False, "traffic": "s3://traffic/recorded"}})


@pytest.mark.parametrize("sample", renders.SAMPLES)
def test_no_rule_is_empty_and_an_open_rule_covers_both_families(sample: str) -> None:
    actual = policies(renders.sample(sample))
    assert not open_rules(actual)
    for name, spec in actual.items():
        for rule in spec.get("egress", ()):
            cidrs = {peer["ipBlock"]["cidr"] for peer in rule.get("to", ()) if "ipBlock" in peer}
            assert ("0.0.0.0/0" in cidrs) == ("::/0" in cidrs), name
