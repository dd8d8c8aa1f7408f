"""Where the client's tests put engines."""

from pathlib import Path

import pytest


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    """A folder that is not there yet."""
    return tmp_path / "engines"
