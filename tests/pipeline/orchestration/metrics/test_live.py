import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginesmith.core.errors import HttpAddress, UnavailableError
from enginesmith.registry.store import files
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.files import reachable
from pipeline.orchestration.metrics import live as definitions
from pipeline.orchestration.metrics.live import Exporter, serve_metrics
from tests.waiting import PATIENCE_S

TROUBLES = ("errors", "retries")


def test_errors_of_the_registry_are_counted(tmp_path: Path) -> None:
    exporter = Exporter(open_store(tmp_path / "registry", create=True))

    def counted() -> dict[str, float]:
        counts = {sample.name: sample.value for result in exporter.collect() for sample in result.samples}
        return {f"enginesmith_registry_{kind}_total": counts[f"enginesmith_registry_{kind}_total"] for kind in TROUBLES}

    count_before = counted()
    with pytest.raises(UnavailableError), reachable("writing"):
        raise OSError(28, "No space left on device")
    files.count_io("retries")
    assert {name: value - count_before[name] for name, value in counted().items()} == {
        "enginesmith_registry_errors_total": 1.0,
        "enginesmith_registry_retries_total": 1.0,
    }


def test_a_scraper_reaches_the_port_while_it_is_open(tmp_path: Path) -> None:
    exporter = Exporter(open_store(tmp_path / "registry", create=True)).registry()
    with serve_metrics(exporter, HttpAddress("127.0.0.1", 0)) as server:
        port = server.address.port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
        assert {family.name for family in text_string_to_metric_families(text)} == {
            metric.name for metric in definitions.METRICS
        }
        with (
            pytest.raises(UnavailableError, match=f"127.0.0.1:{port}: .*give another port"),
            serve_metrics(exporter, HttpAddress("127.0.0.1", port)),
        ):
            pass
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) != 0, "closed with the run"


def test_documented_metrics_are_the_exported_ones() -> None:
    text = (Path(__file__).parents[4] / "docs/guides/observability.md").read_text()
    for metric in definitions.METRICS:
        named_text = f"`{metric.name}{'_total' if metric.kind == 'counter' else ''}`"
        assert named_text in text, f"{named_text} is not documented"
        assert all(f"`{label}`" in text for label in metric.labels)
