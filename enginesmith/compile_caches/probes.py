"""Inductor's probes of vector instructions: recorded where a cache is made, and not made again where it is loaded.

To learn what a CPU has, Inductor compiles a small library for each set of instructions and starts a process that loads
it (torch 2.13, `_inductor.cpu_vec_isa.VecISA`): ten processes and a second of CPU time at each start, even where the
libraries are there. A cache is loaded only where CPU, compiler and torch are those of the probes, so they hold.
"""

from collections.abc import Mapping
from pathlib import Path

_PROBE = "_probe_load"


def record_probes() -> dict[str, bool]:
    """A record that fills as this process probes: name of the library -> whether it could be loaded."""
    return _answer_probes({})


def use_probes(known: Mapping[str, bool]) -> None:
    """Have probes of this process answered from a record; one that is not on it is made."""
    _answer_probes(known)


def _answer_probes(known: Mapping[str, bool]) -> dict[str, bool]:
    from torch._inductor.cpu_vec_isa import VecISA

    made, probe = dict(known), getattr(VecISA, _PROBE, None)
    if probe is None:  # a torch that probes in another way does so
        return made

    def answer(self: object, library: str) -> bool:
        name = Path(library).name
        if name not in made:
            made[name] = bool(probe(self, library))
        return made[name]

    setattr(VecISA, _PROBE, answer)
    return made
