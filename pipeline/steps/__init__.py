"""The steps on the driver's side: what each one reads (its key), and the job that does it when the key is new.

Every step is a plain function: tests call it directly, the in-process runner calls it, a Prefect task wraps it.
"""

from pipeline.steps.attributions import attribute, suspects
from pipeline.steps.engines import build
from pipeline.steps.graphs import quantize, write
from pipeline.steps.latency import measure
from pipeline.steps.model import export, recorded_export
from pipeline.steps.proofs import validate
from pipeline.steps.ranges import choose, merge, observe, parts_of, searched

__all__ = [
    "attribute",
    "build",
    "choose",
    "export",
    "measure",
    "merge",
    "observe",
    "parts_of",
    "quantize",
    "recorded_export",
    "searched",
    "suspects",
    "validate",
    "write",
]
