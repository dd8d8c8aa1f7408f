import ast
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from builders.backends import discovery
from pipeline.compile.closure import Closure
from pipeline.compile.closure.code import root_name
from pipeline.compile.closure.definitions import PACKAGES, SourceFile, SourceFiles, _walk, reach
from pipeline.compile.ensembles.proof import ProveEnsemble
from pipeline.compile.ensembles.whole import ComputeSamples
from pipeline.compile.steps import keys
from pipeline.compile.steps.attributions import AttributeEngine, AttributeGraph
from pipeline.compile.steps.calibration import MergeParts, ObservePart, ObservePartRemotely
from pipeline.compile.steps.exports import ExportModel
from pipeline.compile.steps.gains import RaceGraphs
from pipeline.compile.steps.graphs import CheckGraph, WriteGraph
from pipeline.compile.steps.keys import MeasureEngine
from pipeline.compile.steps.proofs import CheckEngine
from pipeline.compile.steps.search import SearchQuantization
from tests.scheduling import slow_after_first

ORT, RTX = (discovery.entry_point(name) for name in ("onnxruntime", "tensorrt-rtx"))
# The record that a step makes, and what its key is computed from.
STEPS: dict[str, tuple[str, ...]] = {
    "export": keys.WRITE_MODEL,
    **{
        step: tuple(map(root_name, roots))
        for step, roots in {
            "golden": (ExportModel,),
            "calibrate": (ObservePart, ObservePartRemotely),
            "merge": (MergeParts,),
            "choose": (SearchQuantization,),
            "choose, timed": (SearchQuantization, ORT),
            "quantize": (WriteGraph,),
            "check graph": (CheckGraph,),
            "prove onnxruntime": (CheckEngine, ORT),
            "prove tensorrt-rtx": (CheckEngine, RTX),
            "attribute graph": (AttributeGraph,),
            "attribute engine": (AttributeEngine, ORT),
            "latency": (MeasureEngine, ORT),
            "race": (RaceGraphs, ORT),
            "samples of a graph": (ComputeSamples,),
            "prove an ensemble": (ProveEnsemble, ORT),
        }.items()
    },
}
INSTALLED = SourceFiles()
REQUESTS = {
    node.name
    for folder in ("steps", "ensembles")
    for file in (Path(keys.__file__).parents[1] / folder).glob("*.py")
    for node in ast.parse(file.read_text()).body
    if isinstance(node, ast.ClassDef) and any(getattr(each, "name", "") == "run" for each in node.body)
}


class Overlay(SourceFiles):
    """The installed sources, some modules with other bytes."""

    def __init__(self, changed: dict[str, bytes]) -> None:
        super().__init__()
        self._changed = changed

    def read(self, module: str) -> SourceFile | None:
        source = INSTALLED.read(module)
        return replace(source, data=self._changed[module]) if source and module in self._changed else source


@cache
def closure(step: str) -> Closure:
    return reach(STEPS[step], INSTALLED)


@cache
def reached(step: str) -> dict[str, frozenset[str]]:
    return {module: frozenset(names) for module, names in _walk(STEPS[step], INSTALLED).found.items()}


@cache
def modules() -> list[str]:
    """Every module of Enginesmith, whether or not a step reaches it."""
    root = Path(keys.__file__).parents[3]
    files = (file.relative_to(root) for package in PACKAGES for file in (root / package).rglob("*.py"))
    return sorted(".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files)


@cache
def altered(module: str, keep: frozenset[str] = frozenset()) -> bytes:
    """The module with every function, class and constant changed but for `keep`; written as text, for speed."""
    lines, tree = parsed(module)
    inserted: list[tuple[int, int, bytes]] = []
    for node in tree.body:
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name) if name not in keep:
                first = node.body[0]
                line = min(item.lineno for item in [first, *getattr(first, "decorator_list", [])])
                inserted.append((line, first.col_offset, b"0; " if line == node.lineno else b"0\n" + b" " * 4))
            case ast.Assign() | ast.AnnAssign() if node.value is not None and not names_in(node) & keep:
                value = node.value
                inserted.append((value.lineno, value.col_offset, b"(("))
                inserted.append((value.end_lineno or 0, value.end_col_offset or 0, b"),)"))
            case _:
                pass
    changed_lines = list(lines)
    for line, column, text in sorted(inserted, reverse=True):
        changed_lines[line - 1] = changed_lines[line - 1][:column] + text + changed_lines[line - 1][column:]
    return b"".join(changed_lines)


@cache
def parsed(module: str) -> tuple[list[bytes], ast.Module]:
    source = INSTALLED.read(module)
    assert source is not None
    return source.data.splitlines(keepends=True), ast.parse(source.data)


def names_in(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)}


def digest(step: str, changed: dict[str, bytes]) -> str:
    return reach(STEPS[step], Overlay(changed)).digest


def edit(module: str, before: str, after: str) -> dict[str, bytes]:
    source = INSTALLED.read(module)
    assert source is not None and before.encode() in source.data, f"{module} reads otherwise: adapt this test"
    return {module: source.data.replace(before.encode(), after.encode())}


def redone(changed: dict[str, bytes], steps: Iterable[str] = STEPS) -> set[str]:
    return {step for step in steps if digest(step, changed) != closure(step).digest}


@pytest.mark.slow
def test_every_module_of_a_closure_repeats_only_its_steps() -> None:
    """One module at a time, all that it defines is changed."""
    inner_modules = sorted({module for step in STEPS for module in closure(step).modules})
    assert len(inner_modules) > 100
    for module in inner_modules:
        expected = {step for step in STEPS if has_definitions(reached(step).get(module, frozenset()))}
        # A step that does not so much as read the module cannot depend on it.
        readers = {step for step in STEPS if module in closure(step).read}
        assert redone({module: altered(module)}, readers) == expected, module


def has_definitions(names: frozenset[str]) -> bool:
    """Whether more is reached than what an import runs (''), and names that are handed on ('NAME of')."""
    return any(name and not name.endswith(" of") for name in names)


@pytest.mark.parametrize("step", slow_after_first(STEPS, 4))
def test_modules_outside_a_closure_repeat_nothing(step: str) -> None:
    """All other modules are changed at once, and so is what the step does not reach of its own modules."""
    outer_modules = [module for module in modules() if module not in closure(step).modules]
    assert len(outer_modules) > 300
    imported_data = {module: altered(module) for module in outer_modules if module in closure(step).read}
    unread_data = {module: b"raise SystemExit\n" for module in outer_modules if module not in closure(step).read}
    own_data = {module: altered(module, names) for module, names in reached(step).items()}
    assert redone(imported_data | unread_data | own_data, {step}) == set()


@pytest.mark.slow
def test_comments_docstrings_and_layout_repeat_nothing() -> None:
    """`ast.unparse` drops comments and layout; docstrings are made to differ."""
    changed_sources = {}
    for module in {module for step in STEPS for module in closure(step).read if INSTALLED.read(module)}:
        source = INSTALLED.read(module)
        assert source is not None
        tree = ast.parse(source.data)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body[0] = ast.Expr(ast.Constant("Other words."))
        changed_sources[module] = ast.unparse(tree).encode()
    assert redone(changed_sources) == set()


def test_settings_that_affect_an_exports_record_are_in_its_key() -> None:
    """`carries_qdq` stands in a module of another step."""
    body = 'return "QuantizeLinear" in op_types or op_types >= {"DequantizeLinear", "DynamicQuantizeLinear"}'
    quantizing = {"quantize", "choose", "choose, timed", "attribute graph"}
    changed_edit = edit("pipeline.quantization.schemes.qdq", body, "return False")
    assert redone(changed_edit) == {"export", "golden"} | quantizing


def test_pages_displays_and_commands_repeat_nothing() -> None:
    pages = [module for module in modules() if is_page(module)]
    assert "validation.gpu.page" in pages and len(pages) > 100
    imported_data = {page: altered(page) for page in pages if any(page in closure(step).read for step in STEPS)}
    assert redone(imported_data) == set()
    assert not {module for step in STEPS for module in closure(step).modules} & set(pages)


def is_page(module: str) -> bool:
    """Pages, pictures, displays, commands and orchestration."""
    rooms = ("enginesmith.cli", "pipeline.cli", "pipeline.progress", "pipeline.orchestration.runs")
    rooms += ("pipeline.orchestration.flows", "pipeline.orchestration.metrics")
    rooms += ("validation.plots", "validation.reporting.html", "validation.gpu")
    rooms += ("pipeline.compile.publication.pages", "enginesmith.registry", "builders.execution.ray")
    rooms += ("pipeline.fleet", "pipeline.orchestration.deployments", "pipeline.intake", "pipeline.api")
    rooms += ("enginesmith.client", "enginesmith.exchange")
    if module == "validation.gpu.devices":  # proofs replay what was recorded elsewhere
        return False
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


@pytest.mark.parametrize(
    ("module", "steps"),
    [
        ("pipeline.sources.canonical", {"export", "golden"}),
        ("pipeline.quantization.search.selection", {"choose", "choose, timed"}),
        (
            "pipeline.compile.steps.proofs",
            {
                *("check graph", "prove onnxruntime", "prove tensorrt-rtx", "prove an ensemble"),
                *("attribute engine", "attribute graph"),
            },
        ),
        ("builders.backends.tensorrt.session", {"prove tensorrt-rtx"}),
        (
            "builders.backends.onnxruntime.file",
            {
                *("calibrate", "choose, timed", "prove onnxruntime", "prove an ensemble", "latency", "race"),
                *("attribute engine", "attribute graph"),
            },
        ),
        ("validation.latency.measurement.measure", {"latency"}),
        ("validation.attribution.cuts", {"attribute engine", "attribute graph"}),
        ("builders.backends.iree.compile", set()),
    ],
)
def test_a_changed_module_repeats_its_results(module: str, steps: set[str]) -> None:
    assert redone({module: altered(module)}) == steps


def test_code_loaded_by_name_is_a_root_everywhere() -> None:
    """Code that is found at run time cannot be seen: a step that can load a backend names the backend's class."""
    for step, roots in STEPS.items():
        loads = "load" in reached(step).get("builders.backends.discovery", ())
        assert loads <= bool({ORT, RTX} & set(roots)) or step == "choose", step
    # With nothing to time, `choose` opens no engine (`steps.search._find_kind`).
    assert "load" in reached("choose")["builders.backends.discovery"]


# Where reached code finds code by a name that is put together at run time, and what stands for it in the key.
DYNAMIC = {
    ("builders.backends.discovery", "_entries"): "backend_root",
    ("builders.backends.discovery", "load_runtime"): "the compiler, whose version is in the build key",
    ("builders.backends.tensorrt.library", "recorder"): "the compiler, whose version is in the build key",
    ("builders.execution.fork_server", "main"): "the modules that jobs import for themselves",
    ("builders.execution.jobs", "decode_request"): "the class that an export names: `MeasureNoise`",
    ("enginesmith.core.names", "on_first_use"): "public names of a package, which its own modules do not use",
    ("enginesmith.core.errors", "error_from_json"): "classes of its own module; an error is no result",
    ("enginesmith.user_code.entry_point", "_import"): "the spec's own files, whose digests are in the key",
    ("enginesmith.user_code.channel", "PublishedModules"): "code of a version, by the digests in its manifest",
}


def test_code_found_at_run_time_is_listed() -> None:
    names = {"import_module", "__import__", "entry_points", "globals", "eval", "exec", "spec_from_file_location"}
    result = set()
    for module in {module for step in STEPS for module in reached(step)}:
        source = INSTALLED.read(module)
        assert source is not None
        for node in ast.parse(source.data).body:
            uses = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
            uses |= {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)} - {"eval"}
            name = getattr(node, "name", "")
            if uses & names and any(name in reached(step).get(module, ()) for step in STEPS):
                result.add((module, name))
    assert result == DYNAMIC.keys()


def test_a_steps_key_is_computed_from_its_jobs_request() -> None:
    """In each step's module, the class of what is given to `Job` is given to `code_key`."""
    for file in Path(keys.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        request_names = {ast.unparse(call.func) for call in calls} & REQUESTS
        unparses = {ast.unparse(arg) for call in calls if ast.unparse(call.func) == "code_key" for arg in call.args}
        if "type(request)" in unparses:  # whichever it is
            continue
        assert request_names - {"BuildEngine", "ReadExternalFiles", "BenchmarkPair"} <= unparses, file
