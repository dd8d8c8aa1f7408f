"""Engines under real traffic: requests routed to buckets and batched, fallbacks, and how often those are used.

`router.Router` sends each request to the cheapest bucket of an engine that holds it; `batcher.Batcher` joins requests
before a router or a session. Their public signatures are described at the head of those two files.
"""

from typing import TYPE_CHECKING

from enginesmith.core.names import on_first_use

if TYPE_CHECKING:
    from enginesmith.core.state import Padding
    from enginesmith.serving.buckets import RoutedEngine

__all__ = ["Padding", "RoutedEngine"]

__getattr__ = on_first_use(
    __name__,
    {
        "Padding": "enginesmith.core.state",
        "RoutedEngine": "enginesmith.serving.buckets",
    },
)
