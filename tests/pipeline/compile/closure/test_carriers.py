"""What is left out of a step's key cannot change what the step gives; and what a step runs is not left out."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from builders.backends import discovery
from builders.execution.jobs import Job
from enginesmith.core.errors import digest_of_bytes, digest_of_file
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.store.files import BlobDigest
from enginesmith.registry.store.layout import MAX_DOCUMENT_BYTES
from pipeline.compile.closure.code import root_name
from pipeline.compile.closure.definitions import CARRIERS, SourceFiles, _walk, is_carrier
from pipeline.compile.steps import keys
from pipeline.compile.steps.attributions import AttributeEngine, AttributeGraph
from pipeline.compile.steps.calibration import MergeParts, ObservePart
from pipeline.compile.steps.engines import BuildEngine
from pipeline.compile.steps.exports import ExportModel
from pipeline.compile.steps.graphs import CheckGraph, WriteGraph
from pipeline.compile.steps.keys import MeasureEngine
from pipeline.compile.steps.proofs import CheckEngine
from pipeline.compile.steps.search import SearchQuantization
from tests.pipeline.compile.closure.running import Traced, run

KEYED: set[type] = {ExportModel, ObservePart, MergeParts, SearchQuantization, WriteGraph, CheckGraph, CheckEngine}
KEYED |= {AttributeGraph, AttributeEngine}
ORT, OPENING = discovery.entry_point("onnxruntime"), {CheckEngine, AttributeEngine, SearchQuantization}


@dataclass
class Bytes:
    """The least that can be a store: bytes by their digest. It has nothing else, so whoever asks for more fails."""

    uri: str
    blobs: dict[str, bytes] = field(default_factory=dict)

    def put_bytes(self, data: bytes) -> str:
        digest = digest_of_bytes(data)
        self.blobs[digest] = data
        return digest

    def put_file(self, path: Path) -> str:
        return self.put_bytes(path.read_bytes())

    def put_and_digest_file(self, path: Path) -> BlobDigest:
        import blake3

        return BlobDigest(self.put_file(path), blake3.blake3(path.read_bytes()).hexdigest())

    def path(self, digest: str) -> Path:
        raise OSError(f"{digest} lies in no file to link to")

    def read_blob(self, digest: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        return self.blobs.get(digest) or behind(self.uri).read_blob(digest, max_bytes)

    def fetch(self, digest: str, dest: Path) -> None:
        dest.write_bytes(self.read_blob(digest))
        assert digest_of_file(dest) == digest


def is_timed(job: Job) -> bool:
    """Whether what a job gives depends on how long something took: a search's record says what it cost."""
    request = job.request
    return isinstance(request, MeasureEngine | BuildEngine | SearchQuantization) or bool(
        getattr(request, "calls", None)
    )


def behind(uri: str) -> Store:
    """The store that the first run used, asked for verified bytes alone."""
    return open_store(uri)


@pytest.mark.slow
def test_a_step_gives_the_same_through_a_store_that_only_holds_bytes(ran, monkeypatch):
    """So no code of a store decides what a step gives: where blobs lie, how they are fetched, what else is there."""
    assert list(CARRIERS) == ["enginesmith.registry"], "each carrier needs a test of its own"
    assert {type(job.request) for job, _ in ran.done} >= KEYED
    for name in [name for name in sys.modules if name.startswith("pipeline.compile.steps.")]:
        monkeypatch.setattr(f"{name}.open_store", Bytes, raising=False)
    second_jobs = [(job, value) for job, value in ran.done if not is_timed(job)]
    assert {type(job.request) for job, _ in second_jobs} >= KEYED - {SearchQuantization}
    for job, value in second_jobs:
        assert run(job) == value, job.name


def test_a_step_uses_only_the_store_of_its_carriers() -> None:
    walk = _walk([*sorted(map(root_name, [*KEYED, MeasureEngine])), ORT], SourceFiles())
    read_names = set()
    for name, reached_value in walk.found.items():
        module = walk.modules[name]
        assert module is not None
        for definition in (module.definitions[item] for item in reached_value if item in module.definitions):
            read_names |= {target for target, _ in definition.references if is_carrier(target[0])}
    assert read_names == {
        ("enginesmith.registry.store.base", "open_store"),
        ("enginesmith.registry.store.base", "Store"),
        ("enginesmith.registry.store.files", "BlobDigest"),  # a value: two digests
    }


@pytest.mark.parametrize("request_type", sorted(KEYED, key=lambda kind: kind.__name__))
def test_every_called_function_is_in_a_steps_closure(ran: Traced, request_type: type) -> None:
    """The closure is computed from the source; here the steps are run, and every call of theirs is looked at."""
    reached_names = _walk([root_name(request_type), *([ORT] if request_type in OPENING else [])], SourceFiles()).found
    codec = ("enginesmith.core.codec", "builders.execution.jobs")
    called_modules = {(module, name) for module, name in ran.called[request_type] if module not in codec}
    assert len(called_modules) > 5
    # A lambda or a comprehension outside of functions has no name to look for.
    missing_texts = {f"{module}:{name}" for module, name in called_modules if name not in reached_names.get(module, ())}
    assert {place for place in missing_texts if ":<" not in place} == set()


def test_an_exported_models_record_depends_on_its_own_roots(ran: Traced) -> None:
    """Of what `ExportModel` calls, these decide the first record: they are called by it, and closed in themselves."""
    reached = dict(_walk(keys.WRITE_MODEL, SourceFiles()).found)
    assert {root.partition(":")[2] for root in keys.WRITE_MODEL} <= {name for _, name in ran.called[ExportModel]}
    assert "carries_qdq" in reached["pipeline.quantization.schemes.qdq"]
    assert "validation.comparison.sessions" not in reached and "validation.golden.golden_set" not in reached
