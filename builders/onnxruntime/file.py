"""What becomes of the file that ONNX Runtime saves, before it is an engine."""

from pathlib import Path

import onnx

# How ONNX Runtime names the fp32 values that stand in for fp16 ones without a kernel.
_WIDENED = "InsertedPrecisionFreeCast"


def settle(path: Path, source: Path) -> tuple[str, ...]:
    """Take external data from `source` into the engine, which must stand alone; notes on what the graph became."""
    engine = onnx.load(path, load_external_data=False)
    if any(onnx.external_data_helper.uses_external_data(tensor) for tensor in engine.graph.initializer):
        onnx.load_external_data_for_model(engine, str(source))
        onnx.save(engine, path)
    widened = sum(any(_WIDENED in name for name in (*node.input, *node.output)) for node in engine.graph.node)
    if not widened:
        return ()
    share = f"{widened} of {len(engine.graph.node)} operators"
    return (
        f"{share} compute in fp32 on this CPU, unrounded in between: fp16's overflow and rounding do not show here",
    )
