"""A request that calls a function of the tests, so that not each of them needs a class of its own."""

import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any

from builders.execution.jobs import Job, WorkerContext


@dataclass(frozen=True)
class Call:
    """Call 'package.module:function'; its argument `workdir`, if it has one, is the worker's folder."""

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def run(self, context: WorkerContext) -> Any:
        module, _, name = self.function.partition(":")
        target = getattr(importlib.import_module(module), name)
        folder = {"workdir": context.workdir} if "workdir" in inspect.signature(target).parameters else {}
        return target(**self.arguments, **folder)


def call_job(name: str, function: str, arguments: dict[str, Any] | None = None, **options: Any) -> Job:
    """A job of such a request. options: the job's other fields."""
    return Job(name, Call(function, arguments or {}), **options)
