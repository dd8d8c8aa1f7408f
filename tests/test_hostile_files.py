import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginesmith.core.codec import encode
from enginesmith.core.errors import DataError, EnginesmithError, digest_of
from enginesmith.core.reports.proof import Report
from enginesmith.core.types import Dim, TensorSpec
from enginesmith.recording.traffic import encode_inputs, read_traffic
from pipeline.canary.verdicts import read_report_file
from tests.enginesmith.registries import engine, report
from tests.hostile import calm, damaged, documents, either, encoded
from tests.validation.canary.reports import report as canary_report
from validation.canary.judging.pairing import evidence_of
from validation.canary.observations import ObservationTable, add_to, read_head, read_observations
from validation.data.samples import Samples
from validation.golden.golden_set import GoldenSet, freeze

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
FEW = settings(max_examples=int(os.environ.get("ENGINESMITH_HOSTILE_EXAMPLES", "60")))
SPEC = TensorSpec("x", "float32", ("batch", 2))
BATCH = Dim("batch", 1, 2, 4)
X = np.arange(8, dtype=np.float32).reshape(4, 2)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def attacked(place: Path, name: str, attacks: st.SearchStrategy[bytes], read: Callable[[Path], object]) -> None:
    """Write what a strategy gives to a file of that name and read it, again and again."""
    folder = place / "read"
    folder.mkdir(exist_ok=True)

    @FEW
    @given(attacks)
    def attack(data: bytes) -> None:
        (folder / name).write_bytes(data)
        calm(lambda: read(folder / name))
        assert [path.name for path in folder.iterdir()] == [name]

    try:
        attack()
    finally:
        (folder / name).unlink(missing_ok=True)


def lines(*valid: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """JSON lines, one of which is hostile."""
    rest = [encoded(line) for line in valid]
    one = st.sampled_from(valid).flatmap(lambda line: either(line))
    return st.tuples(one, st.integers(0, len(rest))).map(lambda it: b"\n".join([*rest[: it[1]], it[0], *rest[it[1] :]]))


def test_traffic(place: Path) -> None:
    head = {"kind": "enginesmith-traffic", "format": 1, "sampling": 0.5}
    request = {"at": 0.5, "inputs": encode_inputs({"x": X[:1]})}
    by_hand = {"at": 1.0, "inputs": {"x": [[1.0, 2.0]]}}
    attacked(place, "t.jsonl", lines(head, request, by_hand), lambda path: read_traffic(path, [SPEC]))


def test_observations(place: Path) -> None:
    engine_of = {"model": "m", "version": "1", "manifest": "a" * 64, "engine": "b" * 64, "target": "cpu"}
    head = {"format": 1, "kind": "enginesmith-observations", "planned": 10, "precision": "fp32", **engine_of}
    seen = {"time": 1.0, "latency": 0.1, "ok": True, "request": "a"}
    failed = {"time": 2.0, "latency": 0.1, "ok": False, "request": 3, "error": "x", "sqnr_db": 3.0, "flipped": True}

    def read(path: Path) -> None:
        calm(lambda: read_head(path))
        observations = read_observations(path)
        evidence_of(observations, observations, 15.0)
        evidence_of(observations, other_table, 15.0)

    other_table = ObservationTable(place / "other.jsonl")
    for number in range(3):
        add_to(other_table, {**seen, "time": float(number), "request": number})
    attacked(place, "o.jsonl", lines(head, seen, failed, {"kind": "enginesmith-end", "requests": 2, "died": "x"}), read)


def test_canary_reports(place: Path) -> None:
    valid_value = encode(canary_report(place, 600))

    def sealed(document: dict[str, Any]) -> dict[str, Any]:
        return {**document, "digest": digest_of({key: value for key, value in document.items() if key != "digest"})}

    small_values = {key: value for key, value in valid_value.items() if key != "view"}
    attacks = st.one_of(documents(small_values, sealed), damaged(encoded(small_values)))
    attacked(place, "report.json", attacks, read_report_file)


def _used(golden: GoldenSet) -> None:
    for case in golden.cases:
        assert isinstance(case.name, str) and all(value.size >= 0 for value in case.inputs.values())


def test_golden_sets(place: Path) -> None:
    golden = freeze([{"x": X}], [SPEC], [BATCH], lambda inputs: {"y": inputs["x"] * 2}, labels=np.arange(4))
    golden.save(place / "golden.safetensors")
    data = (place / "golden.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    inner = json.loads(header["__metadata__"]["golden"])

    def built(text: bytes) -> bytes:
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    def with_inner(text: bytes) -> bytes:
        message = text.decode("utf-8", "replace")
        return built(json.dumps({**header, "__metadata__": {"golden": message}}).encode())

    same: Callable[[dict[str, Any]], dict[str, Any]] = lambda document: document  # noqa: E731
    attacks = st.one_of(damaged(data), documents(header, same).map(built), documents(inner, same).map(with_inner))
    attacked(place, "golden.safetensors", attacks, lambda path: _used(GoldenSet.load(path)))
    attacked(place, "data.safetensors", attacks, lambda path: list(Samples.open(path, [SPEC], [BATCH]).batches()))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed, np.save], ids=["npz", "deflated", "npy"])
def test_data(place: Path, save: Callable[..., None]) -> None:
    name = "data.npy" if save is np.save else "data.npz"
    save(place / name, **({"arr": X} if save is np.save else {"x": X, "label": np.arange(4)}))
    data = (place / name).read_bytes()
    attacked(place, name, damaged(data), lambda path: list(Samples.open(path, [SPEC], [BATCH]).batches()))


def test_specs(place: Path) -> None:
    import yaml

    from pipeline.spec.model import load_spec
    from tests.pipeline.projects import SPEC as TINY

    attacks = st.one_of(either(TINY), damaged(yaml.safe_dump(TINY).encode()))  # JSON is YAML
    attacked(place, "tiny.yaml", attacks, load_spec)


def test_inventories_and_catalogs(place: Path) -> None:
    import yaml

    from pipeline.fleet.catalog import load_catalog
    from pipeline.fleet.inventory import read_inventory
    from tests.pipeline.fleet.nodes import MIG_MIXED

    groups = {"groups": [{"product": "l4", "driver": "570.1.2", "count": 4, "mig": "1g.5gb"}, {"capability": "8.7"}]}
    for valid_groups in (groups, {"kind": "List", "items": [MIG_MIXED]}):
        attacks = st.one_of(either(valid_groups), damaged(json.dumps(valid_groups).encode()))
        attacked(place, "fleet.json", attacks, read_inventory)
    catalog = {"serve": [{"model": "digits", "on": ["l4"], "precisions": ["fp16"]}], "planned": {"driver": "590.4"}}
    attacks = st.one_of(either(catalog), damaged(yaml.safe_dump(catalog).encode()))
    attacked(place, "catalog.yaml", attacks, load_catalog)


def test_earlier_findings_stay_fixed(place: Path) -> None:
    """Each was once a traceback or a warning; the random examples of the default run need not come by them."""
    valid_value = encode(canary_report(place, 600))
    criteria = [{**item, "low": 10**400} for item in valid_value["criteria"]]
    body = {**{key: value for key, value in valid_value.items() if key != "digest"}, "criteria": criteria}
    (place / "huge.json").write_text(json.dumps({**body, "digest": digest_of(body)}))
    with pytest.raises(EnginesmithError, match="is invalid"):
        read_report_file(place / "huge.json")
    np.save(place / "old.npy", X)
    data = (place / "old.npy").read_bytes()
    (place / "old.npy").write_bytes(data.replace(b"}  ", b"}\n ", 1))  # as Python 2 indented it
    assert Samples.open(place / "old.npy", [SPEC], [BATCH]) is not None


def test_reports(tmp_path: Path) -> None:
    from enginesmith.registry.store.base import open_store

    valid_document = report(engine(open_store(tmp_path / "registry", create=True))).to_json()

    @FEW
    @given(documents(valid_document, lambda document: document))
    def attack(data: bytes) -> None:
        with suppress(ValueError, RecursionError):
            document = json.loads(data)
            calm(lambda: Report.from_json(document))

    attack()


@pytest.mark.parametrize(("dtype", "number"), [("float32", 1e308), ("int8", 300), ("int32", 1e30), ("uint8", -1)])
def test_handwritten_traffic_fits_its_dtype(place: Path, dtype: str, number: float) -> None:
    path = place / "by_hand.jsonl"
    path.write_text(json.dumps({"at": 0, "inputs": {"x": [[number, 1]]}}))
    with pytest.raises(DataError, match=r"NaN or infinity|cannot hold"):
        read_traffic(path, [TensorSpec("x", dtype, ("batch", 2))])
