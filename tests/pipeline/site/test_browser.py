"""The site in Chromium: widths, schemes, search, keyboard, and axe-core where it is installed (`make site-check`)."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from enginesmith.registry.store.base import open_store
from enginesmith.registry.versions import lookup
from pipeline.rollout.operations import Operator, start
from tests.pipeline.rollout.fleet import BEGIN, plan
from tests.pipeline.site.chromium import Tab, chromium
from tests.pipeline.site.sites import move, publish_hostile, publish_small, write
from tests.validation.browser import CHROMIUM

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
AXE = Path(os.environ.get("ENGINESMITH_AXE", "build/site-check/node_modules/axe-core/axe.min.js")).absolute()
PAGES = (
    "index.html", "canaries.html", "runs.html", "models/digits/index.html",
    "models/digits/versions/2/index.html", "models/hostile/versions/1/index.html",
    "models/hostile/index.html",
)  # fmt: skip
WIDE = """[...document.querySelectorAll('body *')].filter(item => !item.closest('.scroll, pre, .hidden, .skip')
  && item.getBoundingClientRect().right > innerWidth + 1).map(item => item.outerHTML.slice(0, 120))"""

# Texts that are so narrow that each letter has a line.
SQUEEZED = """[...document.querySelectorAll('caption:not(.hidden), th, td, p, h2, h3')].filter(item => item.offsetWidth
  && item.textContent.trim().length > 8 && item.clientHeight > 6 * item.clientWidth).map(item => item.outerHTML)"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("browser")
    store = open_store(place / "registry", create=True)
    for content in "ab":
        publish_small(store, content=content)
    move(store, "digits", "1")
    publish_hostile(store)
    waves, operator = plan("5%", "100%", approve=True), Operator("ada", BEGIN, "faster")
    start(store, lookup.load(store, "digits", "2"), "stable", waves, operator, proven_only=True)
    write(store, place / "site")
    return place / "site"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.mark.parametrize("page", PAGES)
def test_every_page_fits_its_width_and_loads_only_its_own_files(tab: Tab, site: Path, page: str) -> None:
    for width in (360, 1600):
        tab.resize(width, dark=width == 360)
        tab.open(f"{site.as_uri()}/{page}")
        assert tab.evaluate(WIDE) == [], width
        assert tab.evaluate(SQUEEZED) == [], width
        assert tab.evaluate("[...document.querySelectorAll('.badge')].every(item => item.offsetWidth > 20)")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert all(url.startswith((site.as_uri(), "data:,")) for url in tab.requests()), tab.requests()
        assert tab.complaints() == []


def test_search_and_filter_work_from_a_folder_and_stay_in_the_address(tab: Tab, site: Path) -> None:
    tab.resize(1600)
    tab.open(f"{site.as_uri()}/index.html")
    names = "[...document.querySelectorAll('.models tbody th')].map(item => item.textContent)"
    assert tab.evaluate(names) == ["digits", "hostile"] and "models.js" not in " ".join(tab.requests())
    tab.evaluate("document.querySelector('input[type=search]').focus()")
    tab.type("dig")
    tab.wait("document.querySelector('.found').textContent === '1 of 2 models'")
    assert tab.evaluate(names) == ["digits"] and tab.evaluate("location.hash") == "#q=dig"
    assert tab.evaluate("document.querySelector('.models tbody a').getAttribute('href')") == "models/digits/index.html"
    tab.open(f"{site.as_uri()}/index.html?x#channel=candidate&status=unproven")
    tab.wait("document.querySelector('.found').textContent === '1 of 2 models'")
    tab.evaluate("for (const name of ['channel', 'status']) document.forms[0].elements[name].value = ''")
    tab.evaluate("document.forms[0].dispatchEvent(new Event('input', {bubbles: true}))")
    assert tab.evaluate(names) == ["digits", "hostile"] and tab.complaints() == []


def test_all_functions_work_with_a_keyboard(tab: Tab, site: Path) -> None:
    tab.resize(1600)
    tab.open(f"{site.as_uri()}/models/digits/versions/2/index.html")
    tab.press("Tab", 9)
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert tab.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    focused_texts = []
    for _ in range(12):
        tab.press("Tab", 9)
        style = tab.evaluate(
            "(style => [style.outlineStyle, parseFloat(style.outlineWidth)])(getComputedStyle(document.activeElement))"
        )
        focused_texts.append(tab.evaluate("document.activeElement.textContent.trim()"))
        assert style[0] == "solid" and style[1] >= 2, (focused_texts[-1], style)
    assert focused_texts[:3] == ["Models", "Canaries", "Runs"] and len(set(focused_texts)) > 9


def test_a_deep_link_shows_its_engine(tab: Tab, site: Path) -> None:
    tab.resize(1600)
    tab.open(f"{site.as_uri()}/models/digits/versions/2/index.html#engine-sm_89-fp16-tensorrt-rtx")
    assert "no sm_89 here" in tab.evaluate("document.querySelector(':target').textContent")
    assert 0 <= tab.evaluate("document.querySelector(':target').getBoundingClientRect().top") < 900


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.skipif(not AXE.is_file(), reason="no axe-core here: make site-check")
def test_axe_finds_no_problem(tab: Tab, site: Path, dark: bool) -> None:
    script = AXE.read_text()
    entries: dict[str, list[str]] = {}
    for page in PAGES:
        for width in (360, 1600):
            tab.resize(width, dark=dark)
            tab.open(f"{site.as_uri()}/{page}")
            tab.evaluate(script)
            run = "axe.run().then(r => r.violations.map(v => v.id + ': ' + v.nodes.map(n => n.html).slice(0, 3)))"
            entries |= {f"{page} at {width}": violations} if (violations := tab.evaluate(run)) else {}
    assert not entries, json.dumps(entries, indent=1)
