"""Tables in the Prefect UI, and the meaning of its API's errors.

The UI shows the newest table of each key. Prefect is imported where one is posted, and nowhere else here.
"""

import re
from collections.abc import Sequence

from pipeline.values import Json


def api_problem(error: Exception, url: str | None) -> str | None:
    """The problem of the Prefect API at `url` and the remedy, for this error of its client; None: unknown."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        remedy = "set PREFECT_API_AUTH_STRING (USER:PASSWORD), or PREFECT_API_KEY for Prefect Cloud"
        return f"Prefect: {url} refuses the credentials ({status}); {remedy}"
    # A page of its UI, or of something else, is no JSON.
    if status in (404, 405) or isinstance(error, ValueError):
        return f"Prefect: {url} is not a Prefect API; the URL of an API ends in /api: correct PREFECT_API_URL"
    return None


def error_text(error: Exception) -> str:
    """An error of Prefect's client in words; httpx gives a timeout none."""
    return str(error) or type(error).__name__


def show_table(key: str, description: str, rows: Sequence[Json]) -> None:
    """Post a table. One without rows says so: otherwise an old table would be the newest of its key."""
    from prefect.artifacts import create_table_artifact

    # Prefect's keys are lower-case letters, digits and dashes.
    clean_key = re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")
    table_rows = [dict(row) for row in rows] or [{"result": "nothing"}]
    create_table_artifact(table_rows, key=clean_key, description=description)
