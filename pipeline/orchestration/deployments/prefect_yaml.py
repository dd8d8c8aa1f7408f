"""The deployments as a `prefect.yaml`, for those who register with `prefect deploy --all`.

It makes no work pool and no concurrency limits, which `prefect.yaml` cannot hold.
"""

import yaml

from pipeline.compile.run_context import version_of
from pipeline.orchestration.deployments.wanted import DeploymentPlan, WantedDeployment

# Prefect puts the environment variable in when it deploys.
REGISTRY = "{{ $ENGINERY_REGISTRY }}"

_HEAD = """\
# Written by `enginery deploy --print-yaml`; a test keeps it so. `enginery deploy` registers the same, and with it the
# work pool and the limits of GPU generations that these need:
#
#     ENGINERY_REGISTRY=s3://bucket/registry prefect --no-prompt deploy --all
"""


def text(plan: DeploymentPlan) -> str:
    """The file. The registry may be `REGISTRY`."""
    document = {"name": "enginery", "deployments": [_entry(item) for item in plan.deployments()]}
    return _HEAD + yaml.safe_dump(document, sort_keys=False, width=120)


def _entry(item: WantedDeployment) -> dict[str, object]:
    pool: dict[str, object] = {"name": item.pool}
    if item.variables:
        pool["job_variables"] = dict(item.variables)
    entry: dict[str, object] = {
        "name": item.name,
        "version": version_of("enginery"),
        "description": item.description,
        "entrypoint": item.entrypoint,
        "tags": ["enginery"],
        "parameters": dict(item.parameters),
        "work_pool": pool,
        # No step: workers have Enginery installed.
        "pull": [],
    }
    if item.trigger:
        entry["triggers"] = [item.trigger.to_json(item.full_name)]
    if item.cron:
        entry["schedules"] = [{"cron": item.cron, "timezone": "UTC"}]
    return entry
