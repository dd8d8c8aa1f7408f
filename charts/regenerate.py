"""Writes the chart's generated files: `make chart`. With `--check` it lists those that are out of date.

files/gpus.yaml         generations and products, from enginesmith/core/hardware/machine.py
files/defaults.json     values.yaml without values that may be null; the templates refuse null for the others
files/dashboard.json    the Grafana dashboard, from manifests/grafana
values.schema.json      from values.yaml and charts/values_schema.py
README.md               the table of values, from the comments of values.yaml
tests/charts/golden     the samples, rendered
manifests/enginesmith      the chart as plain YAML
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from charts import readme, renders
from charts.values_schema import values_schema
from enginesmith.core.hardware.machine import GENERATIONS

ROOT = Path(__file__).parents[1]
CHART = renders.CHART
DASHBOARD = ROOT / "manifests/grafana/enginesmith.json"


def inputs() -> Iterator[tuple[Path, str]]:
    """Path and text of the files that templates read, and of those that describe the values."""
    gpus = {
        item.sm: {"labels": item.labels, "products": {name: list(labels) for name, labels in item.products.items()}}
        for item in GENERATIONS
    }
    head = "# Made from enginesmith/core/hardware/machine.py by `make chart`.\n"
    yield CHART / "files/gpus.yaml", head + yaml.safe_dump(gpus, sort_keys=False)
    if DASHBOARD.exists():
        yield CHART / "files/dashboard.json", DASHBOARD.read_text()
    values = (CHART / "values.yaml").read_text()
    loaded = yaml.safe_load(values)
    yield CHART / "values.schema.json", json.dumps(values_schema(loaded), indent=2) + "\n"
    yield CHART / "files/defaults.json", json.dumps(_required({**loaded, "podSecurity": {}})) + "\n"
    yield CHART / "README.md", readme.with_table((CHART / "README.md").read_text(), values)


def _required(values: dict[str, Any]) -> dict[str, Any]:
    """Values without those that may be null: those with the default null, and all keys of `resources` and `labels`."""
    required = {name: value for name, value in values.items() if value is not None}
    return {
        name: ({} if name in ("resources", "labels") else _required(value)) if isinstance(value, dict) else value
        for name, value in required.items()
    }


def outputs() -> Iterator[tuple[Path, str]]:
    """Path and text of each rendered file; the inputs must be up to date."""
    for name in renders.SAMPLES:
        yield ROOT / f"tests/charts/golden/{name}.yaml", renders.golden(name)
    values = yaml.safe_load((ROOT / "manifests/values.yaml").read_text())
    for name, text in renders.manifests(values).items():
        yield ROOT / "manifests/enginesmith" / name, text


def outdated() -> list[str]:
    """The generated files that are out of date."""
    paths = [*inputs(), *outputs()]
    return [str(path.relative_to(ROOT)) for path, text in paths if not path.exists() or path.read_text() != text]


def main(check: bool) -> int:
    """Write the generated files, or with `check` print the outdated ones. Returns the exit code."""
    if check:
        stale = outdated()
        print("\n".join(f"{name}: out of date; run `make chart`" for name in stale) or "everything is up to date")
        return 1 if stale else 0
    for part in (inputs, outputs):
        for path, text in part():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
