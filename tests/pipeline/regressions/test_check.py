"""What a check says of the things that it leaves out."""

import shutil
from pathlib import Path

from pipeline.regressions.check import list_left_out
from pipeline.spec.model import load_spec

DIGITS = Path(__file__).parents[3] / "examples" / "digits" / "digits.yaml"


def test_a_compile_cache_is_said_not_to_be_compared(tmp_path: Path) -> None:
    assert not list(list_left_out(load_spec(DIGITS)))
    shutil.copytree(DIGITS.parent, tmp_path, dirs_exist_ok=True)
    spec = tmp_path / "digits.yaml"
    spec.write_text(DIGITS.read_text() + "\ncompile_cache: {}\n")
    (found,) = list_left_out(load_spec(spec))
    assert found.rule == "not-compared" and found.level == "note" and "compile cache" in found.message
