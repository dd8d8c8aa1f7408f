"""Published engines in a folder, to be run on a machine without the registry and judged on another one.

    carry.json             model, version and manifest of the engines; digest, request and file of each
    cases.json, cases.npz  the golden cases
    engines/               the engines' files
    graphs/NAME/           of an ensemble, such a folder for each graph; its own has the golden data of the whole

`enginesmith validate REF --carry FOLDER` writes it; `enginesmith validate --import RESULTS` judges the kit's results.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from builders.onnx_graphs.shard_names import list_shards
from enginesmith.core import parsing
from enginesmith.core.codec import OMIT_DEFAULT, decode, encode
from enginesmith.core.constraints import Format
from enginesmith.core.digest import Digest, canonical_json, digest_of_file
from enginesmith.core.errors import IntegrityError, ModelError
from enginesmith.core.names import FileName, NodeName
from enginesmith.core.types import BuildRequest, Scalar, TensorSpec

FORMAT = 1


@dataclass(frozen=True)
class _Entry:
    digest: Digest
    request: BuildRequest
    file: FileName


@dataclass(frozen=True)
class BundledNode:
    """A graph of an ensemble. engine: digest of the one that it is run by.  sources: what gives each of its inputs."""

    name: NodeName
    engine: Digest
    sources: Mapping[str, str]


@dataclass(frozen=True)
class BundledEnsemble:
    """An engine of an ensemble. inputs, outputs: of the whole."""

    unit: str
    digest: str
    nodes: tuple[BundledNode, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class _BundleDocument:
    model: str
    version: str
    manifest: str
    golden: str
    engines: tuple[_Entry, ...]
    ensembles: tuple[BundledEnsemble, ...] = field(default=(), metadata=OMIT_DEFAULT)
    kind: Literal["enginesmith-carried"] = "enginesmith-carried"
    format: Annotated[int, Format(FORMAT)] = FORMAT


@dataclass(frozen=True)
class BundledEngine:
    """One engine. path: its file."""

    digest: str
    request: BuildRequest
    path: Path

    @property
    def options(self) -> dict[str, Scalar]:
        """The backend's."""
        return dict(self.request.options)


@dataclass(frozen=True)
class OfflineBundle:
    """The contents of a folder. manifest, golden: digests of the version's manifest and golden set.

    ensembles: of a version that is one.  graphs: the folders of its graphs, by name.
    """

    model: str
    version: str
    manifest: str
    golden: str
    engines: tuple[BundledEngine, ...]
    folder: Path
    ensembles: tuple[BundledEnsemble, ...] = ()
    graphs: Mapping[str, "OfflineBundle"] = field(default_factory=dict)

    def save(self) -> None:
        """Write carry.json; the files that it names exist already."""
        engines = tuple(_Entry(item.digest, item.request, item.path.name) for item in self.engines)
        document = _BundleDocument(self.model, self.version, self.manifest, self.golden, engines, self.ensembles)
        (self.folder / "carry.json").write_bytes(canonical_json(encode(document)))

    def engine(self, node: BundledNode) -> BundledEngine:
        """The engine of a graph. Raises IntegrityError where its folder does not have it."""
        for found in self.graphs[node.name].engines:
            if found.digest == node.engine:
                return found
        raise IntegrityError(f"{self.folder} lacks engine {node.engine} of graph {node.name!r}; carry it anew")

    @classmethod
    def load(cls, folder: Path) -> "OfflineBundle":
        """Read a folder and check its engines' digests. Raises IntegrityError for other or damaged files."""
        try:
            found = decode(parsing.load_json((folder / "carry.json").read_bytes()), _BundleDocument)
            engines = tuple(_check_engine(item, folder) for item in found.engines)
            names = {node.name for ensemble in found.ensembles for node in ensemble.nodes}
            graphs = {name: cls.load(folder / "graphs" / name) for name in sorted(names)}
            about = found.model, found.version, found.manifest, found.golden
            return cls(*about, engines, folder, found.ensembles, graphs)
        except (OSError, ValueError, IntegrityError, ModelError, RecursionError) as error:
            raise IntegrityError(
                f"{folder} was not written by `enginesmith validate --carry` ({str(error)[:200]}); carry it anew"
            ) from error


def _check_engine(item: _Entry, folder: Path) -> BundledEngine:
    path = folder / "engines" / item.file
    if digest_of_file(path) != item.digest:
        raise ValueError(f"{path.name} was changed on the way")
    for shard in list_shards(path) if path.suffix == ".onnx" else ():
        if digest_of_file(path.with_name(shard)) != shard:
            raise ValueError(f"shard {shard} of {path.name} was changed on the way")
    return BundledEngine(item.digest, item.request, path)
