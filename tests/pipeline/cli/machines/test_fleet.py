"""`enginesmith fleet` and `enginesmith fleet plan` as a person runs them; tables as they are printed, in `golden/`."""

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from prefect.logging import disable_run_logger

from enginesmith.cli import enginesmith
from enginesmith.registry.store.base import Store
from pipeline.orchestration import watch
from pipeline.orchestration.watch import SentEvent
from tests.pipeline.fleet import nodes
from tests.pipeline.fleet.fleets import built, published, without_engine

GOLDEN = Path(__file__).parent / "golden"
CATALOG = """
serve:
  - {model: digits, on: [gpu]}
  - {model: ranker, channel: stable, on: [ada], precisions: [fp16, int8], proven: true}
runtimes: {tensorrt: 10.16.1}
planned: {tensorrt: "11.4"}
"""


@pytest.fixture
def place(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a registry, the nodes of a cluster and a catalog."""
    full_fields = {"status": "proven", "backend": "tensorrt"}
    published(
        store,
        "digits",
        [
            built(store, "l4", "int8", "proven"),
            built(store, "a100"),
            built(store, "h200", **full_fields),
            built(store, "t4", **full_fields),
        ],
        targets=["t4", "a100", "l4", "h200", "sm_100", "sm_120"],
        others=[without_engine(store, "sm_120", "refused", "no such kernel")],
    )
    published(store, "ranker", [built(store, "sm_89", status="proven")], targets=["sm_89"], channel="stable")
    fields = [{**nodes.WHOLE["l4"], "metadata": {**nodes.WHOLE["l4"]["metadata"], "name": f"l4-{i}"}} for i in (1, 2)]
    tainted_node = nodes.node("l4-3", nodes.L4_LABELS, gpus=1, cordoned=True, taints=[nodes.GPU_TAINT])
    a100 = nodes.node("a100-new", nodes.gfd(nodes.A100, "8.0", 81920, "580.95.05", "13.0", "ampere", 8), gpus=8)
    a100s = [a100, *nodes.WHOLE.values(), *fields, tainted_node, nodes.MIG_SINGLE, nodes.MIG_MIXED, nodes.TIME_SHARED]
    text = json.dumps({"kind": "NodeList", "items": [*a100s, nodes.NO_GFD, nodes.MIG_INVALID, nodes.CPU]})
    (tmp_path / "nodes.json").write_text(text)
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ENGINESMITH_REGISTRY", raising=False)
    return tmp_path


def run(*arguments: str) -> Result:
    sources = ("--inventory", "nodes.json", "--catalog", "catalog.yaml")
    return CliRunner().invoke(enginesmith, ["fleet", *arguments, *sources])


def same_as(name: str, text: str) -> None:
    """Compare with a golden file. ENGINESMITH_WRITE_GOLDEN=1 writes it, to be looked at with `git diff`."""
    lines = [line.rstrip() for line in text.splitlines()]
    path = GOLDEN / name
    if os.environ.get("ENGINESMITH_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    assert lines == path.read_text().splitlines()


def test_the_fleet_as_a_table(place: Path) -> None:
    result = run()
    assert result.exit_code == 1
    same_as("fleet.txt", result.output)


def test_a_plan_as_a_table(place: Path) -> None:
    result = run("plan", "--runtime", "tensorrt=11.4", "--driver", "590.44", "--add", "b200=16", "--remove", "t4=2")
    assert result.exit_code == 0
    same_as("plan.txt", result.output)


def test_fleet_and_plan_have_json(place: Path) -> None:
    document = json.loads(run("--json").stdout)
    assert document["good"] is False and sum(document["counts"].values()) == len(document["standings"])
    expected = [("enginesmith.model.registered", "digits"), ("enginesmith.engine.unproven", "digits")]
    assert [(event["event"], event["model"]) for event in document["events"]] == expected
    plan = json.loads(run("plan", "--runtime", "tensorrt=11.4", "--json").stdout)
    assert [item["group"] for item in plan["dying"]] == ["h100", "h100 mig-1g.10gb", "h100 mig-3g.40gb", "h200"]
    assert plan["predicted"].pop("unknown") > 0
    assert plan["predicted"] == {"hours": 0, "units": 0}


def test_exit_code_is_0_if_everything_required_can_be_served(place: Path) -> None:
    (place / "catalog.yaml").write_text("serve:\n  - {model: digits, on: [l4, h200]}\n")
    result = run("--runtime", "tensorrt=10.16.1")
    assert result.exit_code == 0 and "2 pairs of model and group: 2 covered" in result.output
    (place / "catalog.yaml").write_text("serve:\n  - {model: digits, on: [l4, h200, b200]}\n")
    worse = run("--runtime", "tensorrt=10.16.1")
    assert worse.exit_code == 1 and "groups on which no model must be served: t4, t4 shared by 4, a100" in worse.output


def test_apply_sends_events_or_names_the_next_action(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent_events: list[tuple[str, str]] = []

    def send(event: str, model: str, payload: object) -> SentEvent:
        sent_events.append((event, model))
        return SentEvent(f"id-{len(sent_events)}", event, "server")

    monkeypatch.setattr(watch, "send_event", send)
    result = run("--apply")
    assert sent_events == [("enginesmith.model.registered", "digits"), ("enginesmith.engine.unproven", "digits")]
    assert "sent enginesmith.model.registered of digits: id-1" in result.stderr
    (place / "catalog.yaml").write_text("serve:\n  - {model: ranker, on: [h200]}\n")
    monkeypatch.setitem(sys.modules, "pipeline.orchestration.watch", None)  # Prefect need not be there for this
    assert "nothing to send: do what the column 'do first' says" in run("--apply").stderr


def test_the_scheduled_flow_sends_events(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow's own function; Prefect's part, tasks and artifacts, is left out."""
    from pipeline.orchestration.flows import reconcile_fleet as module

    log: list[str] = []
    tables: list[list[dict[str, object]]] = []
    monkeypatch.setattr(module, "send_event", lambda event, *_: log.append(event) or SentEvent("id", event, "server"))
    monkeypatch.setattr(module, "show_table", lambda key, description, rows: tables.append(rows))
    monkeypatch.setattr(module.PrefectRunner, "call", lambda self, step, *arguments: step(*arguments))
    with disable_run_logger():
        state = module.reconcile_fleet.fn(str(place / "registry"), "catalog.yaml", "nodes.json", apply=True)
    assert state.is_failed() and "missing" in state.message
    assert ("b200", "digits", "missing") in {(row["on"], row["model"], row["state"]) for row in tables[0]}
    assert log == ["enginesmith.model.registered", "enginesmith.engine.unproven"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "nothing changes: give --driver"),
        (["--timeout", "3", "plan", "--driver", "590"], "--timeout: give options after `fleet plan`"),
        (["plan", "--driver", "new"], "--driver 'new': must be a version"),
        (["plan", "--add", "b200"], "'b200' is not PRODUCT=NODES, as in b200=16"),
        (["plan", "--add", "b201=1"], "target 'b201' is not known; did you mean 'b20"),
        (["plan", "--on", "l5", "--driver", "590"], "target 'l5' is not known"),
        (["--runtime", "tensorrt=x"], "--runtime tensorrt 'x': must be a version"),
        (["--runtime", "tensorrt"], "'tensorrt' is not NAME=VERSION"),
    ],
)
def test_contradictory_options(place: Path, arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert message in result.output + str(result.exception)
