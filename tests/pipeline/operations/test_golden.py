"""`enginesmith debug golden`: made once, shown with who uses it, its changes told, and a frozen one kept to."""

import re

import pytest
import yaml

from enginesmith.core.errors import InputError
from pipeline.compile.publication.publish import resolved_spec
from pipeline.operations.golden import write_frozen
from pipeline.spec.model import load_spec
from tests.pipeline.projects import SPEC, Project


@pytest.mark.parametrize("flow", [True, False])
def test_freezing_changes_one_entry_of_the_spec_and_nothing_else(project: Project, flow: bool) -> None:
    text = yaml.safe_dump({**SPEC}, sort_keys=False)
    if flow:
        text = yaml.safe_dump({**SPEC, "golden": None}, sort_keys=False).replace(
            "golden: null", "golden: {data: golden.npz}  # real"
        )
    project.spec.write_text(text)
    for digest in ("a" * 64, "b" * 64):
        write_frozen(project.spec, digest)
        assert load_spec(project.spec).golden.frozen == digest
        left = re.sub(r'frozen: "b{64}"(, |\n *)', "", project.spec.read_text())
    assert left == text
    assert not list(project.folder.glob(".*.new"))


def test_freezing_makes_no_new_version(project: Project) -> None:
    before = resolved_spec(load_spec(project.spec))
    write_frozen(project.spec, "a" * 64)
    assert resolved_spec(load_spec(project.spec)) == before


def test_a_spec_without_golden_data_has_nothing_to_freeze(project: Project) -> None:
    project.change_spec(golden=None)
    with pytest.raises(InputError, match="golden"):
        write_frozen(project.spec, "a" * 64)
