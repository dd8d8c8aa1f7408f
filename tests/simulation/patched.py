"""Clocks, randomness, threads and pauses of the product's modules, taken from the simulated world."""

import random
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from unittest import mock

from enginesmith.registry import leases
from enginesmith.registry.collection import claim
from tests.simulation.world import World

_ROOMS = ("enginesmith", "pipeline", "validation", "builders")


class _Inline(futures.Executor):
    """An executor that runs each call where it is submitted."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "futures.Future[Any]":
        found: futures.Future[Any] = futures.Future()
        try:
            found.set_result(fn(*args, **kwargs))
        except Exception as error:
            found.set_exception(error)
        return found

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], **_: Any) -> Iterator[Any]:
        return iter([fn(*args) for args in zip(*iterables, strict=False)])


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
            if name.partition(".")[0] not in _ROOMS:
                continue
            for attribute, replacement in (("ThreadPoolExecutor", _Inline), ("datetime", clock)):
                original = vars(module).get(attribute)
                if original is futures.ThreadPoolExecutor or original is datetime:
                    held.append((module, attribute, original))
                    setattr(module, attribute, replacement)
        try:
            yield
        finally:
            for module, attribute, original in held:
                setattr(module, attribute, original)
