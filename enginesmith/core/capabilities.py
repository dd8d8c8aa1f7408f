"""The capabilities of a backend, as data; `enginesmith.core.types.Backend` has its methods.

Code outside a backend's folder uses neither its class nor its name, and decides by these fields.
"""

from dataclasses import dataclass
from typing import Literal

Determinism = Literal["bytes", "outputs", "budget"]


@dataclass(frozen=True)
class SharedOptions:
    """The names of the options that mean the same in every backend; '' where a backend has no such option.

    workspace_mib: scratch memory of the compiler in MiB, 0 for no limit. A build that runs out of memory is repeated
    with less.
    cuda_graphs: whether a session replays CUDA graphs; both settings are measured.
    cpu_level: the x86-64 level of code for CPUs, or 'host' (`enginesmith.core.hardware.machine`).
    wide_profile: option and value that give a request one optimization profile over all buckets, not one each.
    """

    workspace_mib: str = ""
    cuda_graphs: str = ""
    cpu_level: str = ""
    wide_profile: tuple[str, str] | None = None


@dataclass(frozen=True)
class SupportMatrix:
    """A vendor's table of supported hardware. source: its name.  capabilities: the compute capabilities in it.

    without: (compute capability, precision) pairs that the table excludes.
    """

    source: str
    capabilities: tuple[tuple[int, int], ...]
    without: tuple[tuple[tuple[int, int], str], ...] = ()

    def explain_absence(self, capability: tuple[int, int] | None, precision: str) -> str:
        """The reason why a pair is unsupported: 'sm_80 is not in NVIDIA's support matrix (...)'; '' if listed, and for
        CPUs."""
        if capability is None:
            return ""
        name = "sm_{}{}".format(*capability)
        if capability in self.capabilities:
            name = f"{precision} on {name}" if (capability, precision) in self.without else ""
        return name and f"{name} is not in {self.source}"


@dataclass(frozen=True)
class Capabilities:
    """What a compiler, its engines and its sessions can do, for any value of its options.

    determinism: what two builds of one request have in common: 'bytes' (the engine's bytes), 'outputs' (equal outputs)
    or 'budget' (outputs within the limits).  tunes_on_target: whether `build` measures kernels on a GPU of its target.
    It then needs a node with such a GPU, which runs nothing else. If False, a build runs on hosts without the target's
    hardware.  thread_safe: whether several threads may run one session at once, which proofs and conformance tests try
    with two. If False, only the thread that opened a session runs it.
    rounds_activations: whether products with block-quantized weights round their activations to 8 bits, block by block.
    shards: whether it compiles graphs whose weights are in files beside them, as for graphs over 1 GiB.
    library_entries: the entry functions, one of which a library with custom operators must have; empty if none can be
    loaded.
    options: the names of the options that other code may read or set.
    opened_by: servers and runtimes that open its engines, by their usual names; empty if only its session does.
    matrix: the vendor's table of supported hardware; None if none was read.
    """

    determinism: Determinism
    tunes_on_target: bool = False
    thread_safe: bool = False
    rounds_activations: bool = False
    shards: bool = False
    library_entries: tuple[str, ...] = ()
    options: SharedOptions = SharedOptions()
    opened_by: tuple[str, ...] = ()
    matrix: SupportMatrix | None = None
