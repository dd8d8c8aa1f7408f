"""The client of serving nodes: resolve, pull, watch, and what configures these.

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
    from enginesmith.client.layouts.base import ALL_GENERATIONS
    from enginesmith.client.layouts.model_package import ModelPackage
    from enginesmith.client.layouts.triton import Triton
    from enginesmith.client.layouts.triton_config import DynamicBatching
    from enginesmith.client.resolve import Policy
    from enginesmith.client.watching.server import Command, HealthCommand, HealthUrl, Post, ReportUrl
    from enginesmith.registry.rollouts.state import ServingNode

__all__ = [
    "ALL_GENERATIONS",
    "Command",
    "DynamicBatching",
    "HealthCommand",
    "HealthUrl",
    "ModelPackage",
    "Policy",
    "Post",
    "ReportUrl",
    "ServingNode",
    "Triton",
]

__getattr__ = on_first_use(
    __name__,
    {
        "ALL_GENERATIONS": "enginesmith.client.layouts.base",
        "Command": "enginesmith.client.watching.server",
        "DynamicBatching": "enginesmith.client.layouts.triton_config",
        "HealthCommand": "enginesmith.client.watching.server",
        "HealthUrl": "enginesmith.client.watching.server",
        "ModelPackage": "enginesmith.client.layouts.model_package",
        "Policy": "enginesmith.client.resolve",
        "Post": "enginesmith.client.watching.server",
        "ReportUrl": "enginesmith.client.watching.server",
        "ServingNode": "enginesmith.registry.rollouts.state",
        "Triton": "enginesmith.client.layouts.triton",
    },
)
