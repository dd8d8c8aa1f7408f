"""What `enginesmith prefect deploy` would register, without a server."""

from unittest.mock import patch

from click.testing import CliRunner

from enginesmith.cli import enginesmith
from pipeline.orchestration.deployments.plan import DeploymentPlan


def deployed(*words: str) -> tuple[str, DeploymentPlan | None]:
    """What the command says, and its plan; None where it refuses the words."""
    plans: list[DeploymentPlan] = []
    place = "pipeline.orchestration.deployments.deploy.deploy"
    with patch(place, side_effect=lambda plan, **_: plans.append(plan) or []):
        result = CliRunner().invoke(enginesmith, ["prefect", "deploy", *words], env={"ENGINESMITH_REGISTRY": None})
    return f"{result.output}{result.exception or ''}", plans[0] if plans else None
