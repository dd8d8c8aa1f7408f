"""What a backend can do, as data: its `capabilities`, beside the methods of `enginesmith.core.types.Backend`.

Code outside a backend's own folder uses neither its class nor its name, and decides by these fields.
"""

from dataclasses import dataclass
from typing import Literal

Determinism = Literal["bytes", "outputs", "budget"]


@dataclass(frozen=True)
class SharedOptions:
    """Names of a backend's options whose meaning is the same in every backend that has them; '' where it has none.

    workspace_mib: scratch memory of the compiler in MiB, 0 for no limit. It is lowered for a second build where the
    first ran out of memory.
    cuda_graphs: whether a session replays CUDA graphs; both settings are measured.
    cpu_level: the level of x86-64 that code for CPUs is compiled for, or 'host' (`enginesmith.core.hardware.machine`).
    wide_profile: (option, value) with which a request has one optimization profile over all buckets, not one for each.
    """

    workspace_mib: str = ""
    cuda_graphs: str = ""
    cpu_level: str = ""
    wide_profile: tuple[str, str] | None = None


@dataclass(frozen=True)
class SupportMatrix:
    """What a vendor's table lists. source: which table, for people.  capabilities: the compute capabilities in it.

    without: (compute capability, precision) pairs that it leaves out of these.
    """

    source: str
    capabilities: tuple[tuple[int, int], ...]
    without: tuple[tuple[tuple[int, int], str], ...] = ()

    def explain_absence(self, capability: tuple[int, int] | None, precision: str) -> str:
        """'sm_80 is not in NVIDIA's support matrix (...)'; '' for a pair that it lists, and for CPUs."""
        if capability is None:
            return ""
        name = "sm_{}{}".format(*capability)
        if capability in self.capabilities:
            name = f"{precision} on {name}" if (capability, precision) in self.without else ""
        return name and f"{name} is not in {self.source}"


@dataclass(frozen=True)
class Capabilities:
    """What a compiler, its engines and its sessions can do, whatever the options are set to.

    determinism: what two builds of one request share: 'bytes' of the engine, or the 'outputs' bit by bit, or no more
    than outputs within the budgets ('budget').
    tunes_on_target: whether `build` measures kernels on a GPU of its target: it then needs a node that has one, and
    that GPU for itself. Else it builds on hosts without its target's hardware.
    thread_safe: whether several threads may run one session at once, which proofs and conformance try with two. Any
    other is run by the thread that opened it.
    rounds_activations: whether products with weights in blocks round their activations to 8 bits, block by block.
    shards: whether it compiles graphs whose weights lie in files beside them, as those of over 1 GiB do.
    library_entries: functions of which a shared library with custom operators has one; none where it opens none.
    options: names of options that others may read or set.
    opened_by: servers and runtimes that open its engines, as people call them; empty where only its session does.
    matrix: the vendor's table of supported hardware; None where none was read.
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
