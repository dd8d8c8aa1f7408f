"""All exports and builds of these tests fork from one server, and pages are drawn without what is in a picture."""

from collections.abc import Iterator
from functools import cache

import pytest

from pipeline.compile.publication import pages
from tests.one_server import OneServer
from validation import plotting

# Modules that look into pictures.
PICTURES = (
    "test_capacity", "test_missed", "test_mixed_precision", "test_pages", "test_quantization_report", "test_selection",
    "test_summary", "test_traffic", "test_trend",
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def forked(one_server: OneServer) -> Iterator[None]:
    """Has it take their place. What is installed is read once: it takes 0.08 s for each version that is published."""
    with pytest.MonkeyPatch.context() as patched_context:
        patched_context.setattr(pages, "environment_sbom", cache(pages.environment_sbom))
        yield


@pytest.fixture(scope="module", autouse=True)
def empty_pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a page puts into a picture is taken out before matplotlib lays it out, which takes longer than all else."""
    with pytest.MonkeyPatch.context() as patched_context:
        if request.module.__name__.rpartition(".")[2] not in PICTURES:
            add = plotting._add_legends
            patched_context.setattr(plotting, "_add_legends", lambda figure, size: add(figure, size) or figure.clear())
        yield
