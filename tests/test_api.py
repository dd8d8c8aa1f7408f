import inspect
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import enginesmith
from enginesmith.core.errors import InputError, SpecError
from enginesmith.registry.store.base import open_store
from pipeline.api import _join
from pipeline.orchestration.run import RunOptions
from tests.pipeline.projects import Project, write_project


def test_the_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, enginesmith; print(sorted({'pydantic', 'numpy', 'torch', 'click', 'pipeline'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_serving_code_is_light_too(tmp_path: Path) -> None:
    code = (
        "import sys, enginesmith; enginesmith.Recorder('traffic.jsonl').append({}); "
        "enginesmith.recording.ObservationLog('log.jsonl')\n"
        "heavy = {'pipeline', 'pydantic', 'click', 'torch', 'onnx', 'onnxruntime', 'prefect', 'ray', 'jinja2'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=env)
    assert result.stdout == "[]\n"


def test_build_then_pull(tmp_path: Path) -> None:
    write_project(tmp_path / "project")
    project = Project(tmp_path / "project")
    outcome = enginesmith.build(project.spec, registry=project.registry, targets=["cpu"])
    assert outcome.version == "1"
    assert not outcome.failed
    fields = {"registry": project.registry, "dest": tmp_path / "engines"}
    pulled_engine = enginesmith.pull("tiny", target="cpu", precision="int8", **fields)
    assert pulled_engine.path.is_file()
    assert pulled_engine.engine.precision == "int8"
    assert pulled_engine.warning is None
    assert repr(pulled_engine) == "Pulled('tiny-1-cpu-int8.onnx': cpu int8 onnxruntime of tiny@1, proven)"


def test_the_parameters_of_build_are_named_and_typed() -> None:
    signature = inspect.signature(enginesmith.build, eval_str=True)
    _, *options = signature.parameters.values()
    assert {option.kind for option in options} == {inspect.Parameter.KEYWORD_ONLY}
    assert [option.name for option in options] == [field.name for field in fields(RunOptions)]
    assert all(option.annotation not in (object, Any, inspect.Parameter.empty) for option in options)
    assert [option.name for option in options if f"{option.name}" not in str(enginesmith.build.__doc__)] == []


@pytest.mark.parametrize(
    ("names", "expected"), [(None, None), ("cpu,l4", "cpu,l4"), (["cpu"], "cpu"), (("cpu", "l4"), "cpu,l4")]
)
def test_names_may_be_one_text_or_a_sequence(names: Any, expected: str | None) -> None:
    assert _join("targets", names) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": 123}, "targets 123: give names, such as"),
        ({"targets": []}, r"targets \[\]: give names"),
        ({"precisions": ["int8", 4]}, r"precisions \['int8', 4\]: give names"),
        ({"registry": 5}, "registry 5: give a path or a URI"),
        ({"executor": "slurm"}, "executor 'slurm': give 'local' or 'ray'"),
        ({"jobs": 0}, "jobs 0: give 1 or more"),
    ],
)
def test_build_refuses_other_types(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        enginesmith.build("model.yaml", **options)


def test_a_loaded_spec_is_refused_in_one_line(tmp_path: Path) -> None:
    write_project(tmp_path / "project")
    loaded_spec: Any = enginesmith.load_spec(Project(tmp_path / "project").spec)
    with pytest.raises(InputError, match="give a path or a URI") as error:
        enginesmith.build(loaded_spec)
    assert len(str(error.value)) < 120


@pytest.mark.parametrize("options", [{"targets": ""}, {"precisions": " ,"}, {"backends": ""}])
def test_an_empty_name_does_not_mean_everything(tmp_path: Path, capsys: Any, options: Any) -> None:
    write_project(tmp_path / "project")
    project = Project(tmp_path / "project", capsys)
    with pytest.raises(InputError, match="contains no name; give one, or leave the option out for the whole spec"):
        enginesmith.build(project.spec, registry=project.registry, **options)
    assert project.run("plan", project.spec, *(f"--{name[:-1]}={text}" for name, text in options.items())).code == 2


def test_paths_and_references_of_other_types_are_refused(tmp_path: Path) -> None:
    number: Any = 7
    with pytest.raises(InputError, match="spec 7: give the path of its file"):
        enginesmith.load_spec(number)
    with pytest.raises(InputError, match="reference 7: give NAME, NAME@VERSION or NAME:CHANNEL"):
        enginesmith.pull(number, registry=open_store(tmp_path, create=True).uri, dest=tmp_path)


def test_a_client_and_a_machine_refuse_other_types(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="registry 123: give a path, file://, s3://, gs:// or az://"):
        enginesmith.Client(123)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"'l4': give a pair such as \(8, 9\), or use Machine.from_name\('l4'\)"):
        enginesmith.Machine("l4")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="target 89: give a Machine, or a target's name"):
        enginesmith.Client(open_store(tmp_path, create=True).uri).resolve("tiny", target=89)  # type: ignore[arg-type]
    for wrong_numbers in ((8,), [8, 9], ("8", "9"), 89):
        with pytest.raises(InputError, match="give a pair"):
            enginesmith.Machine(wrong_numbers)  # type: ignore[arg-type]
    assert enginesmith.Machine((8, 9)) == enginesmith.Machine.from_name("sm_89")


def test_errors_are_the_projects_own(tmp_path: Path) -> None:
    with pytest.raises(SpecError):
        enginesmith.load_spec(tmp_path / "gone.yaml")
    with pytest.raises(AttributeError, match="load_spec"):
        enginesmith.nonsense  # noqa: B018 - the access is the test


@pytest.mark.parametrize(("name", "options"), [("spec", []), ("ensemble", ["--ensemble"])])
def test_the_published_schema_equals_the_codes(name: str, options: list[str]) -> None:
    page = Path(__file__).parent.parent / f"docs/reference/{name}.schema.json"
    printed_stdout = subprocess.run(
        [sys.executable, "-m", "enginesmith", "debug", "schema", *options], capture_output=True, text=True, check=True
    ).stdout
    assert page.read_text() == printed_stdout, "run `make docs`"


def test_the_root_has_sixteen_names_and_each_public_package_lists_its_own() -> None:
    assert len(enginesmith.__all__) <= 16
    for name in enginesmith.__all__:
        assert getattr(enginesmith, name)
    for package in ("client", "compile_caches", "recording", "serving", "user_code"):
        module = getattr(enginesmith, package)
        assert all(getattr(module, name) for name in module.__all__)
        with pytest.raises(AttributeError, match=f"'enginesmith.{package}' has no attribute 'nonsense'; it has"):
            module.nonsense  # noqa: B018 - the access is the test
