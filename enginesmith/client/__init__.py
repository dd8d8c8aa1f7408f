"""The client of serving nodes (resolve, pull, watch), and the classes that configure it.

>>> import enginesmith
>>> from enginesmith.client import Triton
>>> client = enginesmith.Client("registry")
>>> placed = client.place("tiny:candidate", "models", Triton(), target="cpu")
>>> [pulled.path.name for pulled in placed.pulled]
['model.onnx']
"""

from typing import TYPE_CHECKING

from enginesmith.core.names import on_first_use

if TYPE_CHECKING:
    from enginesmith.client.layouts.base import ALL_GENERATIONS as ALL_GENERATIONS
    from enginesmith.client.layouts.model_package import ModelPackage as ModelPackage
    from enginesmith.client.layouts.triton import Triton as Triton
    from enginesmith.client.layouts.triton_config import DynamicBatching as DynamicBatching
    from enginesmith.client.resolve import Policy as Policy
    from enginesmith.client.watching.server import Command as Command
    from enginesmith.client.watching.server import HealthCommand as HealthCommand
    from enginesmith.client.watching.server import HealthUrl as HealthUrl
    from enginesmith.client.watching.server import Post as Post
    from enginesmith.client.watching.server import ReportUrl as ReportUrl
    from enginesmith.registry.rollouts.rollout_state import ServingNode as ServingNode

_HOMES = {
    "ALL_GENERATIONS": "enginesmith.client.layouts.base",
    "Command": "enginesmith.client.watching.server",
    "DynamicBatching": "enginesmith.client.layouts.triton_config",
    "HealthCommand": "enginesmith.client.watching.server",
    "HealthUrl": "enginesmith.client.watching.server",
    "ModelPackage": "enginesmith.client.layouts.model_package",
    "Policy": "enginesmith.client.resolve",
    "Post": "enginesmith.client.watching.server",
    "ReportUrl": "enginesmith.client.watching.server",
    "ServingNode": "enginesmith.registry.rollouts.rollout_state",
    "Triton": "enginesmith.client.layouts.triton",
}
__all__ = list(_HOMES)
__getattr__ = on_first_use(__name__, _HOMES)
