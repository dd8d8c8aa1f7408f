"""Sessions of graphs that round as other kernels would, as `SKIP` and `FLIPS` say at each call."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.arrays import Array
from enginesmith.core.types import Session, Tensors
from validation.perturbation.graph import FLIPS, SKIP, traits, with_rounding

if TYPE_CHECKING:
    from enginesmith.core.types import Precision
    from validation.comparison.sessions import Opener


@dataclass(frozen=True)
class Perturbed:
    """A session with the inputs SKIP and FLIPS beside its own. halves: whether something in it rounds to 16 bits.
    grids: whether something is quantized."""

    session: Session
    halves: bool
    grids: bool


@contextmanager
def perturb_graph(
    graph: Path, opens: "Opener", workdir: Path, half: "Precision | None" = None, activation_blocks: bool = False
) -> Iterator[Perturbed]:
    """A graph, opened so. opens: opens an ONNX file without rewriting it.  workdir: for such a file.
    half, activation_blocks: as in `with_rounding`, which says what is raised."""
    from builders.onnx_graphs.shards import write_graph
    from builders.onnx_graphs.weights import load_graph

    path = workdir / "rounding.onnx"
    changed = with_rounding(load_graph(graph), half, activation_blocks)
    write_graph(changed, path)
    with opens(path) as session:
        yield Perturbed(session, *traits(changed))


@contextmanager
def perturb_chain(
    opens: Callable[[Mapping[str, Session]], AbstractContextManager[Session]], graphs: Mapping[str, Perturbed]
) -> Iterator[Perturbed]:
    """A chain of such graphs as one. opens: the chain with these sessions in the place of graphs, by name."""
    controls = dict[str, Array]()
    with opens({name: _Controlled(graph.session, controls) for name, graph in graphs.items()}) as chain:
        found = graphs.values()
        whole = _Controls(chain, controls)
        yield Perturbed(whole, any(graph.halves for graph in found), any(graph.grids for graph in found))


class _Controlled(Session):
    """A graph of a chain, which is given SKIP and FLIPS apart from its inputs. controls: the two, by name."""

    def __init__(self, session: Session, controls: Mapping[str, Array]) -> None:
        self.inputs = [spec for spec in session.inputs if spec.name not in (SKIP, FLIPS)]
        self.outputs = session.outputs
        self._session, self._controls = session, controls

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """As of the graph."""
        return self._session.run({**inputs, **self._controls})


class _Controls(Session):
    """A chain of such graphs, which takes SKIP and FLIPS beside its inputs. controls: where they are put for graphs."""

    def __init__(self, chain: Session, controls: dict[str, Array]) -> None:
        self.inputs, self.outputs = chain.inputs, chain.outputs
        self._chain, self._controls = chain, controls

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """As of the chain."""
        given = dict(inputs)
        self._controls.update({name: given.pop(name) for name in (SKIP, FLIPS)})
        return self._chain.run(given)
