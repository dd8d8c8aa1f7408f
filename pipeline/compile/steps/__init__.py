"""The steps on the driver's side: what each one reads (its key), and the job that does it when the key is new.

Every step is a plain function: tests call it directly, the in-process runner calls it, a Prefect task wraps it.
"""

from pipeline.compile.steps.attributions import attribute, suspects
from pipeline.compile.steps.calibration import choose, find_searched_kinds, merge, observe, parts_of
from pipeline.compile.steps.engines import build
from pipeline.compile.steps.exports import export, recorded_export
from pipeline.compile.steps.graphs import quantize, write
from pipeline.compile.steps.latency import measure
from pipeline.compile.steps.proofs import validate

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
    "find_searched_kinds",
    "suspects",
    "validate",
    "write",
]
