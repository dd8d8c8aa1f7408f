"""Serves engines under real traffic: routes requests to buckets, batches them, and counts the use of fallbacks.

>>> import enginesmith, numpy as np
>>> pulled = enginesmith.Client("registry").pull_all("tiny:candidate", "engines", target="cpu")
>>> router = enginesmith.Router.opened(pulled)
>>> router.run({"x": np.zeros((3, 8), np.float32)})["logits"].shape
(3, 10)

`Router` sends each request to the cheapest bucket of an engine that holds it; `Batcher` joins requests before a router
or a session.
"""

from typing import TYPE_CHECKING

from enginesmith.core.names import on_first_use

if TYPE_CHECKING:
    from enginesmith.core.state import Padding
    from enginesmith.serving.buckets import RoutedEngine

__all__ = ["Padding", "RoutedEngine"]

__getattr__ = on_first_use(
    __name__, {"Padding": "enginesmith.core.state", "RoutedEngine": "enginesmith.serving.buckets"}
)
