"""Pages as headless Chromium lays them out: all of them in one run, because starting it is slow."""

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# It is to lay out a page, and to fetch nothing for itself.
QUIET = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
# A picture's text is 12 units of its view box high.
SCRIPT = """<script>
function measured(frame) {
  const page = frame.contentDocument, width = frame.clientWidth, root = page.documentElement;
  for (const details of page.querySelectorAll('details')) details.open = true;
  const boxes = [...page.querySelectorAll('body *')].filter(item => !item.closest('.scroll, pre, thead, svg, .hidden'));
  const wide = boxes.filter(item => item.getBoundingClientRect().right > width);
  const cropped = item => item.scrollWidth > item.clientWidth + 1;
  const named = item => item.className || item.tagName;
  const closed = boxes.filter(item => frame.contentWindow.getComputedStyle(item).overflowX !== 'visible');
  const svgs = [...page.querySelectorAll('svg:not(.level)')];
  const cut = svgs.flatMap(svg => {
    const box = svg.getBoundingClientRect();
    return [...svg.querySelectorAll('text')].filter(text => {
      const inner = text.getBoundingClientRect();
      return inner.left < box.left - 1 || inner.right > box.right + 1
        || inner.top < box.top - 2 || inner.bottom > box.bottom + 2;
    }).map(text => text.textContent);
  });
  const strokes = svgs.flatMap(svg => [...svg.querySelectorAll('path')].map(path => getComputedStyle(path).stroke));
  const shown = item => item.getBoundingClientRect().height > 0;
  return {
    width, overflow: root.scrollWidth - width, wide: wide.map(named), cut, clipped: closed.filter(cropped).map(named),
    scrolled: [...page.querySelectorAll('.scroll')].filter(cropped).map(item => item.firstElementChild.className),
    text: Math.min(...svgs.map(svg => 12 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)),
    svgs: svgs.filter(shown).length, tables: [...page.querySelectorAll('table')].filter(shown).length,
    verdict: page.querySelector('.verdict').getBoundingClientRect().top, height: root.scrollHeight,
    colours: new Set(strokes).size,
  };
}
onload = () => {
  const found = {};
  for (const frame of document.querySelectorAll('iframe')) found[frame.name] = measured(frame);
  document.body.innerHTML = '<pre id="found"></pre>';
  document.getElementById('found').textContent = JSON.stringify(found);
};
</script>"""


def laid_out(
    folder: Path, pages: Mapping[str, str], widths: tuple[int, ...] = (1600, 1400, 1280, 420, 360)
) -> dict[str, dict[str, Any]]:
    """What Chromium finds in each page at each width: 'name at width' -> measures."""
    frames = []
    for name, page in pages.items():
        bare_escape = html.escape(re.sub(r"<meta http-equiv=[^>]*>", "", page))
        frames += [
            f'<iframe name="{name} at {width}" srcdoc="{bare_escape}" style="width: {width}px; height: 900px"></iframe>'
            for width in widths
        ]
    (folder / "frames.html").write_text(
        f"<!doctype html><style>iframe {{ border: 0 }}</style><body>{''.join(frames)}</body>{SCRIPT}"
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += [*QUIET, f"--user-data-dir={folder}/profile"]
    command = [str(CHROMIUM), *options, "--window-size=1600,2000", "--dump-dom", f"file://{folder}/frames.html"]
    environment = {**os.environ, "HOME": str(folder)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    document: dict[str, dict[str, Any]] = json.loads(
        html.unescape(result.stdout.split('<pre id="found">')[1].split("</pre>")[0])
    )
    return document
