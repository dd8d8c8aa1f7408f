from typing import Any

import helm_python as helm
import prefect.settings
import pytest

from charts import renders
from tests.charts.kube import Object, label, policies, with_value
from tests.charts.test_objects import built_in


def made_with(path: str, **changed: Any) -> dict[str, Object]:
    """Objects of a sample with PostgreSQL by their labels, with values below `path`."""
    values = with_value(path, {**renders.sample("aws")["prefect"].get(path.split(".")[1], {}), **changed})
    return {label(item): item for item in renders.objects(renders.rendered(values))}


def env_of_server(objects: dict[str, Object]) -> dict[str, Any]:
    (container,) = objects["Deployment enginesmith-prefect-server"]["spec"]["template"]["spec"]["containers"]
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container["env"]}


def test_several_servers_share_a_redis_and_a_schema_that_a_hook_updates() -> None:
    one, two = made_with("prefect.server"), made_with("prefect.server", replicas=2, redis={"existingSecret": "shared"})
    server = two["Deployment enginesmith-prefect-server"]["spec"]
    assert server["replicas"] == 2 and server["strategy"].keys() == {"type", "rollingUpdate"}, "tests/cluster says why"
    env = env_of_server(two)
    assert all(hasattr(prefect.settings, name) for name in env if name.startswith("PREFECT_SERVER_"))
    assert env["PREFECT_SERVER_DATABASE_MIGRATE_ON_START"] == "false"
    redis = [name for name, value in env.items() if value == {"secretKeyRef": {"name": "shared", "key": "url"}}]
    assert len(redis) == 3 and not any("filesystem" in str(value) for value in env.values())
    assert "filesystem" in env_of_server(one)["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"]
    hooks = [item["Job enginesmith-prefect-migrate"]["metadata"]["annotations"]["helm.sh/hook"] for item in (one, two)]
    assert hooks == ["pre-upgrade", "pre-install,pre-upgrade"]
    assert policies(two.values())["prefect-server-to-redis"]["egress"][0]["ports"] == [
        {"port": 6379, "protocol": "TCP"}
    ]
    assert "prefect-server-to-redis" not in policies(one.values())
    values = with_value("networkPolicy.redis.cidrs", [], with_value("prefect.server.redis.existingSecret", "shared"))
    with pytest.raises(helm.HelmError, match=r"networkPolicy\.redis\.cidrs is empty, so nothing could reach the Redis"):
        renders.rendered(values)


def test_the_autoscaler_sets_the_number_of_workers() -> None:
    scale = {"enabled": True, "max": 6}
    worker = made_with("prefect.worker", replicas=2, autoscaling=scale)
    scaler = worker["HorizontalPodAutoscaler enginesmith-prefect-worker"]
    assert not [*built_in("1.36", "autoscaling/v2", scaler["kind"]).iter_errors(scaler)]
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (2, 6)
    assert "replicas" not in worker["Deployment enginesmith-prefect-worker"]["spec"]
    keda = {"prometheus": "http://prometheus.monitoring:9090"}
    worker = made_with("prefect.worker", replicas=2, autoscaling={**scale, "keda": keda})
    (trigger,) = worker["ScaledObject enginesmith-prefect-worker"]["spec"]["triggers"]
    (rule,) = [
        rule
        for group in worker["PrometheusRule enginesmith"]["spec"]["groups"]
        for rule in group["rules"]
        if rule["alert"] == "EnginesmithNotBuilt"
    ]
    assert trigger["metadata"]["query"] == f"count({rule['expr']}) or vector(0)"
    assert not any(name.startswith("HorizontalPodAutoscaler") for name in worker)
