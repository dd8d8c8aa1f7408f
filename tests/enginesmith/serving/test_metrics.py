import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from enginesmith.core.state import Padding
from enginesmith.serving.metrics import ROUTER_METRICS, prometheus_text, register
from enginesmith.serving.router import Router
from tests.enginesmith.serving.engines import PADDING, engine, profile, request

PAGE = Path(__file__).parents[3] / "docs/guides/router.md"


def routed():
    router = Router(
        [engine("a", profile((1, 4), (1, 16)))],
        Padding(PADDING.inputs, {"sequence": (8, 16)}),
        fallbacks=[engine("graph")],
    )
    for sequence in (6, 8, 20):
        router.run(request(2, sequence))
    return router


def test_the_text_has_every_metric_with_its_labels():
    families = {family.name: family for family in text_string_to_metric_families(prometheus_text(routed(), "m"))}
    assert families.keys() == ROUTER_METRICS.keys()
    result = {(s.name, *sorted(s.labels.values())): s.value for family in families.values() for s in family.samples}
    bucket = "a: batch 1..4, sequence <= 8"
    assert result["enginesmith_router_requests_total", bucket, "m"] == 2
    assert result["enginesmith_router_elements_total", bucket, "m", "own"] == 56
    assert result["enginesmith_router_elements_total", bucket, "m", "padding"] == 8
    assert result["enginesmith_router_fallbacks_total", "graph", "m"] == 1


def test_a_registry_shows_the_current_counts():
    router, registry = routed(), CollectorRegistry()
    register(router, "m", registry)
    value_before = registry.get_sample_value("enginesmith_router_fallbacks_total", {"model": "m", "fallback": "graph"})
    router.run(request(2, 20))
    after = registry.get_sample_value("enginesmith_router_fallbacks_total", {"model": "m", "fallback": "graph"})
    assert (value_before, after) == (1, 2)


def test_the_guide_has_every_metric():
    page = PAGE.read_text()
    assert [name for name in ROUTER_METRICS if f"`{name}_total`" not in page] == []


def test_serving_imports_no_framework_before_its_use():
    code = (
        "import sys, enginesmith; enginesmith.Router, enginesmith.Batcher;"
        "print([n for n in ('onnxruntime', 'prometheus_client', 'torch', 'onnx', 'pydantic') if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_guides_example_runs():
    (snippet,) = [part for part in PAGE.read_text().split("```python\n")[1:] if "import numpy" in part]
    result = subprocess.run([sys.executable, "-c", snippet.split("```")[0]], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
