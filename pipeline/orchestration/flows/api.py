"""The Prefect API as something that may be out of reach."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
from prefect.settings import PREFECT_API_URL

from enginery.core.errors import UnavailableError
from pipeline.orchestration.artifacts import show_document

if TYPE_CHECKING:
    from validation.canary.report import CanaryReport
    from validation.reporting.version_document import VersionDocument


@contextmanager
def api_in_reach(remedy: str = "start its server, or correct PREFECT_API_URL") -> Iterator[None]:
    """Turn what Prefect raises when its API does not answer (a bare RuntimeError, or httpx's) into UnavailableError."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("Failed to reach API"):
            raise
        raise UnavailableError(f"Prefect: {error}; {remedy}") from error
    except httpx.TransportError as error:
        raise UnavailableError(f"Prefect: {PREFECT_API_URL.value()} does not answer ({error}); {remedy}") from error


def require_api(why: str) -> str:
    """The configured API's URL. why: what it is needed for. Raises UnavailableError."""
    url: str | None = PREFECT_API_URL.value()
    if not url:
        raise UnavailableError(f"no Prefect server is configured, and {why}; set PREFECT_API_URL")
    return url


def show_report(document: "VersionDocument | CanaryReport", page: str) -> list[str]:
    """Leave a version's or a canary's report (`publication.pages`) on the Prefect server; the keys of its artifacts.

    page: address of the HTML. Raises UnavailableError without a server, or when it does not answer.
    """
    require_api("one shall have the report")
    with api_in_reach():
        return show_document(document, page)
