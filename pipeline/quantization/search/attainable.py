"""Floors that cannot do their work end in an error: those that nothing can miss, and those that nothing reaches."""

from enginery.core.errors import DataError
from enginery.core.types import Tensors
from pipeline.quantization.search.floor import SearchFloor
from pipeline.quantization.search.sensitivity import Quality, decides


def check_decisions(outputs: Tensors) -> None:
    """Raises DataError when a floor of decisions would hold whatever int8 does: no output of the model has any."""
    if not any(decides(values) for values in outputs.values()):
        raise DataError(
            "quantization.floor.argmax_agreement: every output has one value along its last axis, whose argmax cannot "
            "change; ask for sqnr_db or cosine"
        )


def check_reached(floor: SearchFloor, found: Quality) -> None:
    """Raises DataError when not even the float model (found) is good enough; what only compares with it cannot miss."""
    if not found.finite:
        raise DataError(
            "quantization.floor cannot be judged: the float model itself gives NaN or infinities on the calibration "
            "samples; correct the samples or the model"
        )
    if floor.accuracy is not None and (found.accuracy is None or found.accuracy < floor.accuracy):
        own = "was not measured" if found.accuracy is None else f"has {found.accuracy:.4f} on the calibration samples"
        raise DataError(
            f"quantization.floor.accuracy {floor.accuracy:g} is out of reach: the float model itself {own}; "
            "ask for less, or correct calibration.labels"
        )
