"""Clocks, randomness, threads and pauses of the product's modules, taken from the simulated world."""

import random
import secrets
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from unittest import mock

from enginesmith.registry import leases
from enginesmith.registry.collection import claim
from tests.one_thread import ROOMS, Inline
from tests.simulation.world import World


class _Lock:
    """A lock that actors wait for by giving up their turn."""

    def __init__(self, world: World) -> None:
        self._world, self._held = world, False

    def __enter__(self) -> None:
        while self._held:
            self._world.sleep(0.1)
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False


@contextmanager
def patched(world: World) -> Iterator[None]:
    """Have all of the product's modules run in the world while the block runs."""
    clock = type("SimulatedDatetime", (datetime,), {"now": classmethod(lambda _, zone=None: world.now())})

    class SimulatedClaim(claim.Claim):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._lock = _Lock(world)  # type: ignore[assignment]

    with (
        mock.patch.multiple(time, sleep=world.sleep, time=lambda: world.now().timestamp()),
        mock.patch.multiple(secrets, token_hex=world.token, randbelow=lambda _: 0),
        mock.patch.object(random, "uniform", lambda low, high: (low + high) / 2),
        mock.patch.object(leases, "keep_renewing", world.repeat),
        mock.patch.object(claim, "Claim", SimulatedClaim),
    ):
        held: list[tuple[object, str, object]] = []
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] not in ROOMS:
                continue
            for attribute, replacement in (("ThreadPoolExecutor", Inline), ("datetime", clock)):
                original = vars(module).get(attribute)
                if original is futures.ThreadPoolExecutor or original is datetime:
                    held.append((module, attribute, original))
                    setattr(module, attribute, replacement)
        try:
            yield
        finally:
            for module, attribute, original in held:
                setattr(module, attribute, original)
