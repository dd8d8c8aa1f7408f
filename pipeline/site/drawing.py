"""Draws the site's pages from templates, escaped and without inline scripts or styles, and its style sheet and script.

Texts come from specs, logs and people; names of models and versions are restricted and become paths. Every page has the
content security policy that a server would send, so that it holds in a bucket and in a folder, too.
"""

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from enginesmith.registry.manifest import EngineEntry
from pipeline.site.shown.series import line_of
from validation.canary.judging.formatting import describe_interval, describe_value
from validation.reporting.html import templates as report_templates

if TYPE_CHECKING:
    from jinja2 import Environment

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
)
# Of the copies of reports, which hold their style and no script.
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_HEAD = b'<!doctype html>\n<html lang="en">\n<head>\n'


def draw(template: str, path: str, **values: object) -> bytes:
    """A page. path: where it will lie, relative to the site's folder, for the links from it."""
    root = "../" * path.count("/")
    page = _templates().get_template(f"{template}.html.j2").render(root=root, here=template, policy=POLICY, **values)
    return page.lstrip().encode()


@cache
def _templates() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    known = report_templates()
    environment = Environment(
        loader=PackageLoader("pipeline.site", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=known.finalize,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= known.filters | {
        "anchor": engine_anchor,
        "interval": describe_interval,
        "line": line_of,
        "criterion": lambda value, kind: "" if value is None else describe_value(value, kind),
    }
    return environment


def engine_anchor(entry: EngineEntry) -> str:
    """The id of an engine on its version's page: 'engine-sm_89-fp16-tensorrt'."""
    return f"engine-{entry.unit.replace(' ', '-')}"


def style_sheet() -> bytes:
    """The style sheet: the report's, and what the site has besides."""
    report = resources.files("validation")
    sheets = [(report / "reporting" / name).read_text() for name in ("report.css", "drift.css")]
    sheets += [(report / "latency" / "latency.css").read_text(), (_own() / "site.css").read_text()]
    return "\n".join(sheets).encode()


def script() -> bytes:
    """The script that searches and filters the index."""
    return (_own() / "site.js").read_bytes()


def copy_report(page: bytes) -> bytes:
    """A report as it was published, with a policy in front of all else, under which no script of it would run: whoever
    can write to the registry can write a page."""
    meta = f'<meta http-equiv="Content-Security-Policy" content="{REPORT_POLICY}">\n'.encode()
    page = page.lstrip()
    return _HEAD + meta + (page.removeprefix(_HEAD))


def _own() -> "resources.abc.Traversable":
    return resources.files("pipeline.site") / "templates"
