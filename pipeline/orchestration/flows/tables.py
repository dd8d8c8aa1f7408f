"""Tables in the Prefect UI."""

import re
from collections.abc import Sequence

from prefect.artifacts import create_table_artifact

from pipeline.values import Json


def show_table(key: str, description: str, rows: Sequence[Json]) -> None:
    """Leave a table; with no row it says so, as the newest of its key would otherwise be an old one."""
    clean = re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")
    create_table_artifact([dict(row) for row in rows] or [{"result": "nothing"}], key=clean, description=description)
