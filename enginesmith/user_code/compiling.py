"""The task of compiling a PyTorch model with torch.compile, cold or out of a cache, as a server would: what it answers,
and what the process has used by then."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginesmith.compile_caches.probes import record_probes
from enginesmith.compile_caches.recipe import CacheRecipe, CompileOptions
from enginesmith.compile_caches.warm_start import WarmStart, count_frames, count_misses, open_cache, use_folder
from enginesmith.core.errors import ModelError
from enginesmith.core.types import Scalar
from enginesmith.user_code.channel import Arrays, MessageChannel
from enginesmith.user_code.entry_point import call_entry_point, importing_from, reason
from enginesmith.user_code.torch_source import SEED, load_weights, name_fields, named_outputs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RunCompiled:
    """Run the compiled model on the arrays that come with this."""


@dataclass(frozen=True)
class RanCompiled:
    """The outputs come with this. cpu_s, wall_s: seconds of the process and of those that it waited for, since it was
    started.  misses: what was compiled and was in no cache, by kind.  frames: compiled by dynamo so far.
    probes: of a cold process, as `record_probes` has them.
    """

    cpu_s: float
    wall_s: float
    misses: Mapping[str, int]
    frames: int
    probes: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class CompileModel:
    """Compile the module of an entry point and answer its calls. The fields are those of `TorchProgram`.

    folder: of a cold process, where Inductor is to keep what it compiles.  cache, digest: of a warm one, the file that
    it starts from. The first answer is the model's `CacheRecipe`; then each `RunCompiled` gets one `RanCompiled`.
    """

    root: Path
    file: str
    function: str
    options: CompileOptions
    arguments: Mapping[str, Scalar] = field(default_factory=dict)
    weights: str | None = None
    module: str = ""
    device: str = "cpu"
    folder: Path | None = None
    cache: Path | None = None
    digest: str = ""

    def serve(self, channel: MessageChannel) -> None:
        """Answer until the other end is closed. Raises EOFError then, and ModelError, naming the user's line."""
        with importing_from(self.root, self.file, self.module):
            model = self._load()
            probes: dict[str, bool] = {}
            if self.cache is None and self.folder is not None:
                use_folder(self.folder)
                probes = record_probes()
            # Beside the file: this process is ended without what Python does at exit.
            warm = open_cache(self.cache, self.digest, self.cache.with_suffix(".files")) if self.cache else None
            compiled = warm.compile(model) if warm else self.options.compile(model)
            channel.send(CacheRecipe.of_model(model, self.options, self.device))
            while True:
                _, arrays = channel.receive(RunCompiled)
                channel.answer(lambda: self._run(compiled, arrays, warm, probes))  # noqa: B023 - called at once

    def _load(self) -> "torch.nn.Module":
        """The module as a server has it: the entry point's, with its weights, on the device, not training."""
        import torch

        torch.manual_seed(SEED)
        model = call_entry_point(self.root, self.file, self.function, dict(self.arguments), self.module)
        if not isinstance(model, torch.nn.Module):
            raise ModelError(f"{self.file}: {self.function} returned {type(model).__name__}; return a torch.nn.Module")
        if self.weights:
            load_weights(model, self.root / self.weights)
        return model.to(self.device).eval()

    def _run(
        self, compiled: Callable[..., Any], arrays: Arrays, warm: WarmStart | None, probes: Mapping[str, bool]
    ) -> tuple[RanCompiled, Arrays]:
        import torch

        given = {name: torch.tensor(array, device=self.device) for name, array in arrays.items()}
        try:
            result = name_fields(compiled(**given))
            found = {name: value.cpu().numpy() for name, value in named_outputs(result).items()}
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"{self.file}: {self.function}'s model cannot be compiled: {reason(error)}") from error
        times = os.times()
        misses = warm.misses() if warm else count_misses()
        cpu_s = times.user + times.system + times.children_user + times.children_system
        return RanCompiled(cpu_s, _seconds_since_start(), misses, count_frames(), probes), found


def _seconds_since_start() -> float:
    """Wall-clock seconds since this process was started, by the kernel's clocks (proc(5): starttime, uptime); NaN where
    there is no /proc."""
    with suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return uptime - ticks / os.sysconf("SC_CLK_TCK")
    return float("nan")
