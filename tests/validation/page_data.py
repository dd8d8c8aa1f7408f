"""A made-up version of realistic size, in the shape that the page is rendered from."""

import hashlib
import math
from dataclasses import replace

from enginesmith.core.codec import encode, encode_document
from enginesmith.core.reports.proof import Check, Report, Spread, Worst, describe
from tests.validation.latency.reports import latency_report
from validation.attribution.result import (
    CheckChange,
    NamedAttribution,
    Proposal,
    ProposedOverride,
    SegmentRow,
    Taps,
    TensorError,
)

TARGETS = ["cpu", "sm_75", "sm_80", "sm_86", "sm_89", "l4", "sm_90", "sm_120"]
SQNR = {"fp32": 118.2, "fp16": 61.4, "bf16": 39.7, "int8": 23.6}
LIMIT = {"fp32": 80.0, "fp16": 45.0, "bf16": 25.0, "int8": 15.0}
ACCURACY = {"fp32": 0.9833, "fp16": 0.9833, "bf16": 0.9806, "int8": 0.9778}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def stage_checks(stage: str, sqnr: float, limit: float, passed: bool = True) -> list[Check]:
    checks = []
    for case in ("golden", "batch=32"):
        checks += [
            Check(stage, "nonfinite", "logits", case, 0.0, 0.0, True),
            Check(stage, "max_abs", "logits", case, 10 ** (-sqnr / 20) * 9, None, True, "at index [17, 3]"),
            Check(stage, "max_rel", "logits", case, 10 ** (-sqnr / 20) * 2, 10 ** (-limit / 20) * 4, True),
            Check(
                stage, "sqnr_db", "logits", case, sqnr, limit, passed, "" if case == "golden" else "worst of 4 edges"
            ),
            Check(stage, "cosine", "logits", case, 1 - 10 ** (-sqnr / 10), None, True),
            Check(stage, "argmax_agreement", "logits", case, 0.9972, None, True),
        ]
    return checks


def task(value: float) -> Check:
    return Check("task", "accuracy", "logits", "golden", value, 0.95, value >= 0.95, "the original model has 0.9833")


def status_of(target: str, precision: str) -> tuple[str, str]:
    if target == "sm_75" and precision in ("fp32", "bf16"):
        return "refused", f"sm_75 has no {precision.upper()} GEMM in TensorRT-RTX; use fp16"
    if target == "sm_90":
        return (
            "refused",
            "sm_90 is not a target of TensorRT-RTX; install full TensorRT: pip install '.[tensorrt]' in a clone",
        )
    if target == "cpu":
        if precision == "bf16":
            return "refused", "onnxruntime has no bf16 kernels on CPUs; use fp32 or int8"
        return "proven", "42 checks passed"
    if (target, precision) == ("sm_120", "int8"):
        return "failed", "the compiler was killed by SIGSEGV after 41 s"
    return (
        "unproven",
        f"no CUDA GPU of capability {target.removeprefix('sm_')} on this machine: libcuda is not installed",
    )


def report(entry: dict) -> Report:
    precision, is_ran = entry["precision"], entry["target"] == "cpu"
    checks = [*stage_checks("export", 127.3, 80.0), task(0.9833)]
    if precision != "fp32":
        checks += [*stage_checks("quantization", SQNR[precision], LIMIT[precision]), task(ACCURACY[precision])]
    if is_ran:
        checks += [*stage_checks("engine", SQNR[precision] + 12, LIMIT[precision] + 7), task(ACCURACY[precision])]
    spreads = [spread("export", 127.3)]
    spreads += [spread("quantization", SQNR[precision])] if precision != "fp32" else []
    spreads += [spread("engine", SQNR[precision] + 12)] if is_ran else []
    return Report(
        unit=f"{entry['target']} {precision} {entry['backend']}",
        target=entry["target"],
        precision=precision,
        backend=entry["backend"],
        engine=entry["digest"],
        golden=digest("golden"),
        checks=tuple(checks),
        verdict=entry["status"],
        reason=entry["reason"],
        created_at="2026-11-20T08:43:35+00:00",
        host={"name": "builder-7"},
        versions=entry["toolchain"],
        spreads=tuple(spreads),
    )


def spread(stage: str, sqnr: float) -> Spread:
    """A spread of 60 samples around an SQNR, with two worst cases."""
    samples = tuple(sqnr - 9 + 20 * math.sqrt(index / 60) for index in range(60))
    size = 10 ** (-sqnr / 20)
    errors = (0.0, *(size * 3 * (index / 100) ** 1.5 for index in range(1, 101)))
    worst_rows = (
        Worst("golden 2", 17, (17, 3), 4.218443, 4.218443 + 9 * size, sqnr - 9),
        Worst("batch=32", 5, (5, 0), -1.733, -1.733 - 4 * size, sqnr - 6),
    )
    return Spread(stage, "logits", 3600, 60, 12, 0, errors, samples, worst_rows)


def entry(target: str, precision: str) -> dict:
    backend = "onnxruntime" if target == "cpu" else "tensorrt-rtx"
    status, reason = status_of(target, precision)
    is_built = status in ("proven", "unproven")
    return {
        "target": target,
        "precision": precision,
        "backend": backend,
        "status": status,
        "reason": reason,
        "compute_capability": None,
        "product": "l4" if target == "l4" else None,
        "build_key": digest(target + precision),
        "digest": digest("engine" + target + precision) if is_built else None,
        "size_bytes": 187_334 + 911 * len(target) * len(precision) if is_built else None,
        "suffix": ".engine" if is_built else None,
        "options": {"optimization_level": 3, "workspace_mib": 1024, "tf32": False},
        "toolchain": {"tensorrt-rtx": "1.7.1", "tensorrt-rtx-cu13-libs": "1.7.1"},
        "inputs": [{"name": "image", "dtype": "float32", "shape": ["batch", 1, 8, 8]}],
        "outputs": [{"name": "logits", "dtype": "float32", "shape": ["batch", 10]}],
        "profiles": [{"inputs": [["image", [1, 1, 8, 8], [8, 1, 8, 8], [32, 1, 8, 8]]]}],
        "report": digest("report") if is_built else None,
        "requires": [
            {"kind": "cpu", "target": "cpu"}
            if target == "cpu"
            else {"kind": "gpu", "target": target, "capability": [8, 9]}
        ],
        "checks": {"passed": 42 if is_built else 0, "failed": 0},
        "notes": ["node '/encoder/Softmax' stays in fp32: its input reaches 71234 and fp16 ends at 65504"]
        if precision == "fp16"
        else [],
    }


def tensor(index: int, role: str) -> dict:
    name = f"/encoder/layers.{index}/attention/output/{'dense.weight' if role == 'weight' else 'Add_output_0'}"
    item = {
        "name": name,
        "role": role,
        "format": "int8" if role == "weight" else "uint8",
        "readers": [f"/encoder/layers.{index}/attention/{part}/MatMul" for part in ("query", "key", "value")],
        "range": [-2.0, 2.0 + index],
        "seen": [-3.5, 2.5 + index],
        "clipped": 0.00012 * (role == "activation"),
        "scale": 0.0157,
        "sqnr_db": 21.5 + index + (role == "weight") / 2,
        "measured": "weight" if role == "weight" else "rows" if index == 1 else "histogram",
    }
    if role == "activation" and index < 6:
        counts = [float(10 ** (5 - abs(bin_ - 25) / 8)) for bin_ in range(60)]
        item["histogram"] = {"span": [-3.5, 2.5 + index], "counts": counts}
    return item


def record() -> dict:
    """A quantization record, as `pipeline.quantization.record` makes it."""
    points = [
        {"share": 1 - rows / 12, "predicted_db": 18.0 + 3 * rows, "sqnr_db": None, "cosine": None, "left": rows}
        for rows in range(12)
    ]
    points.append({"share": 0.0, "predicted_db": None, "sqnr_db": None, "cosine": None, "left": 12})
    points[0] |= {"sqnr_db": 17.2, "cosine": 0.99}
    points[3] |= {"sqnr_db": 26.6, "cosine": 0.9989}
    rows = [{"node": f"/encoder/layers.{i}/attention/MatMul", "op_type": "MatMul"} for i in range(12)]
    rows = [{**node, "reason": "it multiplies two activations"} for node in rows]
    rows.append({"node": "/mask/MatMul", "op_type": "MatMul", "reason": "tensor 'mask' reaches 1e+09, as a mask does"})
    tensors = [tensor(index, role) for index in range(13) for role in ("activation", "weight")]
    exact_fields = {**tensors[-1], "name": "exact", "sqnr_db": None}
    return {
        "format": 1,
        "precision": "int8",
        "method": "mse uint8",
        "samples": 544,
        "dataset": digest("calibration data"),
        "quantized": 36,
        "macs_share": 0.9444,
        "tensors": [*tensors, exact_fields],
        "left": rows,
        "choice": {"floor_db": 26.0, "frontier": points, "chosen": points[3]},
    }


def attribution() -> dict:
    """What was found of a graph, as a page has it."""
    node = "/encoder/layers.{}/attention/output/dense/MatMul"

    def row(i: int) -> SegmentRow:
        error, inherited = TensorError(9.0 + i, 0.4), TensorError(8.0 + i / 2, 0.5)
        why = "9.0 dB by itself, limit 15 dB" if i == 0 else ""
        names = (node.format(i), "/Add"), (node.format(i),)
        return SegmentRow(f"/encoder/layers.{i}/Add_output_0", node.format(i), "MatMul", error, inherited, why, *names)

    failed_check = stage_checks("quantization", 12.1, 15.0, passed=False)[3]
    proposal = Proposal(
        groups=24,
        runs=7,
        minimal=True,
        leave=((node.format(0),),),
        overrides=(ProposedOverride(node.format(0), "fp16"),),
        snippet=f'quantization:\n  overrides:\n    - {{match: "{node.format(0)}", precision: fp16}}',
        quality=(CheckChange(failed_check, replace(failed_check, value=21.5, passed=True)),),
    )
    actual = NamedAttribution(
        stage="quantization",
        precision="int8",
        finding="blamed",
        rows=tuple(map(row, range(20))),
        taps=Taps(4),
        failed=(describe(failed_check),),
        cases=("golden 0", "batch=32"),
        points=61,
        cut=61,
        segments=20,
        proposal=proposal,
        name="graph int8 (uint8 activations, fp32 elsewhere)",
        units=("cpu int8 onnxruntime",),
    )
    return encode_document(actual)


def version_report() -> dict:
    engines = [entry(target, precision) for target in TARGETS for precision in SQNR]
    return {
        "format": 1,
        "model": "digits",
        "version": "14",
        "created_at": "2026-11-20T08:43:35+00:00",
        "content": digest("content"),
        "report": digest("version report"),
        "spec": {"golden": {"data": "golden.npz", "metric": {"name": "accuracy", "output": "logits", "floor": 0.95}}},
        "sources": {name: digest(name) for name in ("onnx", "golden", "graph fp16", "graph int8 signed")},
        "provenance": {name: digest(name) for name in ("spec", "source", "weights", "calibration data", "scales")},
        "toolchain": {"enginesmith": "0.1.0", "torch": "2.13.0", "onnx": "1.23.2", "onnxruntime": "1.31.1"},
        "host": {"name": "builder-7", "system": "Linux-6.8.0-x86_64-with-glibc2.36", "cpus": "2", "python": "3.11.7"},
        "metrics": {precision: {"accuracy": value} for precision, value in ACCURACY.items()},
        "engines": engines,
        "reports": [report(item).to_json() for item in engines if item["digest"]],
        "quantization": {"int8 (uint8 activations, fp32 elsewhere)": record()},
        "attributions": [attribution()],
        "latencies": {digest("fp32 engine"): [encode(latency_report(others=0.8))]},
        "failures": [
            {
                "unit": "sm_120 int8 tensorrt-rtx",
                "kind": "crash",
                "reason": "the compiler was killed by SIGSEGV after 41 s",
                "log": "[TRT] [W] "
                + "Using PTX of a lower capability for kernel " * 4
                + "\n"
                + "[TRT] [V] tactic\n" * 30,
                "command": "enginesmith build digits.yaml --target sm_120 --precision int8 --executor local",
            }
        ],
    }
