"""What a compile cache was made from, as far as a model in memory shows it: options, classes, tensors, threads.

torch finds a cached graph by the graph itself, so another model costs time and never gives another model's answers.
The recipe tells such a model beforehand, and says what differs.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from enginesmith.core.errors import digest_of
from enginesmith.core.types import Precision

if TYPE_CHECKING:
    import torch

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
# What stands for the compiler in the name of a unit that is a cache, and its precision.
BACKEND = "torch-compile"
PRECISION: Precision = "fp32"


@dataclass(frozen=True)
class CompileOptions:
    """What torch.compile is called with. dynamic: axes by input whose sizes are symbols from the first call on, so that
    a second size compiles nothing; a size of 1 has a graph of its own in torch all the same."""

    mode: CompileMode = "default"
    fullgraph: bool = False
    dynamic: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def compile(self, model: "torch.nn.Module") -> Callable[..., Any]:
        """The model as a function that compiles itself when it is called, and records no gradients."""
        import torch

        compiled = torch.compile(model, mode=self.mode, fullgraph=self.fullgraph)
        inputs = inspect.signature(model.forward)

        def call(*given: Any, **named: Any) -> Any:
            for name, value in inputs.bind_partial(*given, **named).arguments.items():
                for axis in self.dynamic.get(name, ()):
                    # Not `dynamic=True`: that takes each size for a symbol, and equal ones for the same.
                    torch._dynamo.maybe_mark_dynamic(value, axis)
            with torch.no_grad():
                return compiled(*given, **named)

        return call


@dataclass(frozen=True)
class CacheRecipe:
    """The model of a cache. code: class of each module that is not torch's own -> digest of its source, without
    comments and docstrings.  tensors: parameter or buffer -> 'float32 [10, 64]'.  threads: of torch, which the kernels
    of a CPU are generated for.  device: 'cpu' or 'cuda'.  probes: as `record_probes` has them.
    """

    options: CompileOptions
    device: str
    threads: int
    code: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    probes: Mapping[str, bool] = field(default_factory=dict)

    @classmethod
    def of_model(cls, model: "torch.nn.Module", options: CompileOptions, device: str) -> "CacheRecipe":
        """The recipe of a model in this process."""
        import torch

        return cls(options, device, torch.get_num_threads(), _digest_classes(model), _describe_tensors(model))

    def differences(self, model: "torch.nn.Module") -> Iterator[str]:
        """What differs in a model of this process, in words."""
        here = self.of_model(model, self.options, self.device)
        if self.device == "cpu" and here.threads != self.threads:
            yield (
                f"its kernels are for {self.threads} threads, and torch has {here.threads}: "
                f"torch.set_num_threads({self.threads}), or OMP_NUM_THREADS={self.threads}"
            )
        yield from _differing("class", self.code, here.code)
        yield from _differing("tensor", self.tensors, here.tensors)


def _differing(kind: str, made: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*made} | {*here}):
        if made.get(name) == here.get(name):
            continue
        if name not in made or name not in here:
            yield f"{kind} {name} is {'new' if name in here else 'gone'}"
        else:
            yield f"{kind} {name} " + (
                "has other source" if kind == "class" else f"was {made[name]} and is {here[name]}"
            )


def _digest_classes(model: "torch.nn.Module") -> dict[str, str]:
    kinds = {type(part) for part in model.modules() if not type(part).__module__.startswith("torch.")}
    return {kind.__qualname__: _digest_class(kind) for kind in kinds}


def _digest_class(kind: type) -> str:
    """The digest of a class's syntax tree; of its names where there is no source, as in an interactive session."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return digest_of(sorted(vars(kind)))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return digest_of(ast.dump(tree))


def _describe_tensors(model: "torch.nn.Module") -> dict[str, str]:
    known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" for name, value in known.items()}
