"""A site's pages as a browser without scripts reads them: links that lead somewhere, and marks in order.

It follows the rules of HTML that a person with a keyboard or a screen reader depends on.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# After these the text goes on.
INLINE = {"a", "b", "i", "span", "code", "time"}
VOID = {"meta", "link", "br", "img", "input", "hr", "rect", "line", "polyline"}


@dataclass
class Seen(HTMLParser):
    """What was found in a page. wrong: what breaks a rule, in words."""

    path: Path
    links: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text())
        self.close()
        self.wrong += [f"<{tag}> is not closed" for tag in self.open]
        for tag in ("h1", "main", "title"):
            if self.tags.count(tag) != 1:
                self.wrong.append(f"{self.tags.count(tag)} <{tag}>")
        if len(set(self.ids)) < len(self.ids):
            self.wrong.append("an id that stands twice")
        if self.tags.count("table") != self.tags.count("caption"):
            self.wrong.append("a table without a caption")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        inputs = dict(attrs)
        self.tags += [tag] if "svg" not in self.open else []  # a title there is a hint
        self.ids += [inputs["id"] or ""] if "id" in inputs else []
        self.links += [inputs[name] or "" for name in ("href", "src") if name in inputs]
        if "style" in inputs or tag == "style" or any(name.startswith("on") for name in inputs):
            self.wrong.append(f"<{tag}> with a style or a script of its own")
        if tag == "script" and "src" not in inputs:
            self.wrong.append("a script in the page")
        if tag == "th" and "scope" not in inputs:
            self.wrong.append("a <th> without a scope")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        self.text += [" "] if tag not in INLINE else []
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> in the wrong place")

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        """The text of the page, each run of white space one space."""
        return " ".join("".join(self.text).split())


def pages(root: Path) -> Iterator[Seen]:
    """Each of our own pages; the copies of reports are a page of another template."""
    for path in sorted(root.rglob("*.html")):
        if path.name != "report.html":
            yield Seen(path)


def broken_links(root: Path, among: Collection[Path] | None = None) -> list[str]:
    """Links of a site that lead nowhere, out of it, or to an absolute path. among: the pages looked at, if not all."""
    result = {seen_value.path: seen_value for seen_value in pages(root) if among is None or seen_value.path in among}
    return [
        f"{seen_value.path.relative_to(root)}: {link}"
        for seen_value in result.values()
        for link in seen_value.links
        if not _leads(root, seen_value.path, link, result)
    ]


def _leads(root: Path, page: Path, link: str, pages: dict[Path, Seen]) -> bool:
    if link == "data:,":  # no icon
        return True
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or parts.path.startswith("/"):
        return False
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.is_file() or not target.is_relative_to(root.resolve()):
        return False
    return not parts.fragment or target not in pages or parts.fragment in pages[target].ids


def linked(root: Path) -> set[Path]:
    """The files that can be reached from the first page by links."""
    seen_pages: set[Path] = set()
    waiting_paths = [root / "index.html"]
    while waiting_paths:
        page = waiting_paths.pop()
        if page in seen_pages:
            continue
        seen_pages.add(page)
        if page.suffix == ".html" and page.name != "report.html":
            targets = (urlsplit(link).path for link in Seen(page).links if link != "data:,")
            waiting_paths += [(page.parent / unquote(path)).resolve() for path in targets if path]
    return seen_pages
