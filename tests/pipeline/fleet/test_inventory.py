import io
import json
from pathlib import Path

import pytest

from enginesmith.core.errors import InputError, SpecError
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.names import Reference
from pipeline.fleet.catalog import GPUS, load_catalog
from pipeline.fleet.inventory import read_inventory
from tests.pipeline.fleet import nodes

GIB = 1 << 30
GROUPS = """
groups:
  - {product: l4, driver: 570.124.06, count: 40, memory_gib: 22.5}
  - {product: NVIDIA-A100-SXM4-80GB, mig: 1g.10gb, count: 2, gpus: 14}
  - {product: t4, sharing: mps, replicas: 4, runtimes: {tensorrt: "11.4"}}
  - {capability: "8.7", count: 3}
  - {product: NVIDIA-Thor, capability: "11.0"}
  - {product: cpu, count: 3}
"""


def file(folder: Path, text: str, name: str = "fleet.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_handwritten_groups_are_read(tmp_path: Path) -> None:
    inventory = read_inventory(file(tmp_path, GROUPS))
    assert [(group.name, group.nodes, group.gpus) for group in inventory.groups] == [
        ("cpu", 3, 0), ("t4 shared by 4", 1, 1), ("a100 mig-1g.10gb", 2, 14), ("sm_87", 3, 3), ("l4", 40, 40),
        ("sm_110", 1, 1),
    ]  # fmt: skip
    machines = {group.name: group.machine for group in inventory.groups}
    assert machines["l4"] == Machine((8, 9), "l4", "570.124.06", memory_bytes=int(22.5 * GIB))
    expected = {"tensorrt": "11.4"}
    assert machines["a100 mig-1g.10gb"] == Machine((8, 0)) and machines["t4 shared by 4"].runtimes == expected


def test_groups_are_read_from_json(tmp_path: Path) -> None:
    groups = json.dumps({"groups": [{"product": "l4", "driver": "570.124.06", "count": 40}]}, indent=1)
    (group,) = read_inventory(file(tmp_path, groups)).groups
    assert (group.name, group.nodes, group.machine.driver) == ("l4", 40, "570.124.06")


@pytest.mark.parametrize("dash", [False, True])
@pytest.mark.parametrize("kind", ["List", "NodeList", "Node"])
def test_output_of_kubectl_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dash: bool) -> None:
    if kind == "Node":
        document = {"kind": "Node", **nodes.WHOLE["l4"]}
    else:
        items = [nodes.WHOLE["l4"], nodes.CPU]
        document = {"kind": kind, "items": [{"kind": "Node", **item} for item in items] if kind == "List" else items}
    text = "\n" + json.dumps(document)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    inventory = read_inventory(Path("-") if dash else file(tmp_path, text))
    assert [group.name for group in inventory.groups if not group.machine.is_cpu] == ["l4"]
    assert inventory.source == ("standard input" if dash else str(tmp_path / "fleet.yaml"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("groups:\n- {product: l4, drivr: '1'}", ":2: groups.0.drivr: unknown key; did you mean 'driver'?"),
        ("groups:\n- {product: l4}\n- {product: l44}", ":3: groups.1: target 'l44' is not known; did you mean 'l4'?"),
        ("groups:\n- {product: ampere}", ":2: groups.0: product 'ampere' stands for several; give the capability, too"),
        ("groups:\n- {count: 1}", ":2: groups.0: has neither product nor capability; give one"),
        ("groups:\n- {product: l4, count: 0}", ":2: groups.0.count: 0: must be 1 or more"),
        (
            "groups:\n- {product: l4, driver: 570.1}",
            ":2: groups.0.driver: 570.1: is read as a number; put it in quotes",
        ),
        ("groups:\n- {product: l4, driver: x}", ":2: groups.0.driver: 'x': must be a version such as"),
        ("groups:\n- {capability: '89'}", ":2: groups.0.capability: '89': must be a compute capability such as '8.9'"),
        ("groups:\n- {product: l4, sharing: time}", ":2: groups.0.sharing: 'time' is not known; did you mean 'time-"),
        ("groups: []", ":1: groups: []: has 0 items; it needs 1 or more"),
        ("nodes: 3", ":1: groups: is missing; add it (docs/guides/fleet.md has one"),
        ("[]", ": holds a list; an inventory is a mapping of keys such as groups"),
    ],
)
def test_each_mistake_has_its_line(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(SpecError) as error:
        read_inventory(file(tmp_path, text))
    assert any(line.startswith(f"{tmp_path / 'fleet.yaml'}{expected}") for line in error.value.lines), error.value.lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"items": [{"kind": "Pod"}]}', "not a list of nodes"),
        ('{"items": 3}', "not a list of nodes"),
        ('{"items": [', "is not JSON"),
        ("{" * 100_000, "is not JSON"),
        ('{"items": [], "items": [{"kind": "Node"}]}', "'items' is given twice"),
        ("apiVersion: v1\nkind: List\nitems: []", "use `kubectl get nodes -o json`"),
    ],
)
def test_invalid_lists_of_nodes_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_inventory(file(tmp_path, text))


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no such file; docs/guides/fleet.md has one"):
        read_inventory(tmp_path / "none.yaml")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="is not UTF-8 text"):
        read_inventory(tmp_path / "bytes")


def test_a_catalog_is_read(tmp_path: Path) -> None:
    text = """
serve:
  - {model: digits, on: [l4, hopper], precisions: [fp16, int8], proven: true}
  - {model: ranker, version: "3"}
runtimes: {tensorrt: 10.16.1}
planned: {driver: "590.44", tensorrt_rtx: "1.8", Their.Runtime: "2"}
"""
    catalog = load_catalog(file(tmp_path, text))
    demand, second_demand = catalog.demands
    assert (demand.reference, demand.precisions, demand.proven) == (Reference("digits"), ("fp16", "int8"), True)
    assert [target.name for target in demand.on] == ["l4", "sm_90"]
    assert second_demand.reference == Reference("ranker", version="3") and second_demand.on == GPUS
    assert dict(catalog.runtimes) == {"tensorrt": "10.16.1"}
    assert dict(catalog.planned) == {"driver": "590.44", "tensorrt-rtx": "1.8", "their-runtime": "2"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("serve:\n- {modle: digits}", ":2: serve.0.modle: unknown key; did you mean 'model'?"),
        ("serve:\n- {model: digits, on: [l5]}", ":2: serve.0.on.0: target 'l5' is not known"),
        ("serve:\n- {model: Digits}", ":2: serve.0.model: model name 'Digits'"),
        ("serve:\n- model: digits\n  channel: a\n  version: b", ":2: serve.0: has both channel and version; keep one"),
        ("serve: [{model: a}]\nplaned: {driver: '1'}", ":2: planed: unknown key; did you mean 'planned'?"),
        ("serve: [{model: a}]\nplanned: {drivr: '1'}", ":2: planned.drivr: 'drivr': did you mean 'driver'?"),
    ],
)
def test_each_mistake_of_a_catalog_has_its_line(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(SpecError) as error:
        load_catalog(file(tmp_path, text))
    assert any(line.startswith(f"{tmp_path / 'fleet.yaml'}{expected}") for line in error.value.lines), error.value.lines
    assert not [line for line in error.value.lines if "at least 1 item" in line]
