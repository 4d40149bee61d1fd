"""The site of the documents: it builds without warnings, and everything on it can be reached."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

import pytest

from pages import ROOT, pages, prose, read

CONFIG = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
REFERENCE = runpy.run_path(str(ROOT / "scripts/reference.py"))
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


class Page(NamedTuple):
    """What the browser gets."""

    language: str
    anchors: set[str]
    links: list[str]
    pictures: list[tuple[str, str]]  # the source, and what is read aloud
    translations: dict[str, str]  # by language
    is_for_phones: bool
    titles: int
    text: str


class Parser(HTMLParser):
    """Gathers from HTML what `Page` holds."""

    def __init__(self) -> None:
        super().__init__()
        self.language, self.is_for_phones, self.titles = "", False, 0
        self.anchors, self.links, self.pictures = {""}, [], []
        self.translations, self.text, self.outside = {}, [], ""

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag in ("script", "style", "pre", "code"):
            self.outside = self.outside or tag
        if tag == "html":
            self.language = given["lang"]
        elif tag == "meta" and given.get("name") == "viewport":
            self.is_for_phones = "width=device-width" in given["content"]
        elif tag == "link" and given.get("rel") == "alternate":
            self.translations[given["hreflang"]] = given["href"]
        elif tag == "img":
            self.pictures.append((given["src"], given.get("alt") or ""))
        elif tag == "h1":
            self.titles += 1
        for key in ("href", "src"):
            if given.get(key):
                self.links.append(given[key])

    def handle_endtag(self, tag):
        if tag == self.outside:
            self.outside = ""

    def handle_data(self, data):
        if not self.outside:
            self.text.append(data)


def parsed(html: str) -> Page:
    parser = Parser()
    parser.feed(html)
    return Page(
        parser.language, parser.anchors, parser.links, parser.pictures,
        parser.translations, parser.is_for_phones, parser.titles, "".join(parser.text),
    )  # fmt: skip


class Site(NamedTuple):
    """The site that was built."""

    folder: Path
    said: str
    pages: dict[str, Page]  # by address, such as guides/masks/


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Site:
    """The site, built from a copy: its folder must be inside of the one that is built."""
    root = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", root / "docs")
    shutil.copy(ROOT / "zensical.toml", root)
    (root / "src").symlink_to(ROOT / "src")
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean"],
        cwd=root, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    built = {
        path.parent.relative_to(root / "site").as_posix().removeprefix(".") + "/": path
        for path in (root / "site").rglob("index.html")
    }
    found = {
        address.removeprefix("/"): parsed(path.read_text(encoding="utf-8"))
        for address, path in built.items()
    }
    return Site(root / "site", done.stdout + done.stderr, found)


def listed(nav: list) -> list[str]:
    """Every page of the navigation, in its order."""
    found = []
    for entry in nav:
        for value in entry.values():
            found += listed(value) if isinstance(value, list) else [value]
    return found


def address_of(page: str) -> str:
    """Where the site has a page of docs/."""
    return re.sub(r"(?:(^|/)index)?\.md$", "/", page).removeprefix("/")


def test_addresses_of_pages():
    pairs = {"index.md": "", "a.md": "a/", "zh/index.md": "zh/", "zh/b/a.md": "zh/b/a/"}
    assert {page: address_of(page) for page in pairs} == pairs


@pytest.mark.long
def test_it_builds_without_warnings(site):
    """Not by `--strict`, so that with a warning the rest can still be tested."""
    lines = [line for line in site.said.splitlines() if not line.startswith("Build")]
    assert lines == ["No issues found"]


@pytest.mark.long
def test_every_page_is_in_the_navigation_and_on_the_site(site):
    nav = listed(CONFIG["nav"])
    assert len(nav) == len(set(nav))
    assert {f"docs/{page}" for page in nav} == {p for p in pages() if p.startswith("docs/")}
    assert {address_of(page) for page in nav} == set(site.pages)


@pytest.mark.long
def test_every_page_can_be_read_aloud_and_on_a_phone(site):
    for address, page in site.pages.items():
        assert page.is_for_phones, address
        assert page.titles == 1, address
        assert page.language == ("zh" if address.startswith("zh/") else "en"), address
        assert not [source for source, words in page.pictures if len(words) < 10], address


@pytest.mark.long
def test_every_page_leads_to_its_translation(site):
    for address, page in site.pages.items():
        other = address.removeprefix("zh/") if address.startswith("zh/") else f"zh/{address}"
        language = "en" if address.startswith("zh/") else "zh-Hans"
        if other not in site.pages:
            assert not page.translations and not address.startswith("zh/"), address
            continue
        (link,) = page.translations.values()
        assert list(page.translations) == [language]
        assert urljoin(f"/{address}", link).strip("/") == other.strip("/"), address
        assert page.links.count(link) > 1, f"{address} has no link to {other} to click at"


def broken_links(pages: dict[str, Page], has_file) -> list[str]:
    """Links that lead to no file, or to no anchor of a page."""
    broken = []
    for address, page in pages.items():
        for link in page.links:
            if urlsplit(link).scheme or link.startswith("//"):
                continue
            target, _, anchor = urljoin(f"/{address}", link).partition("#")
            target = unquote(target).removeprefix("/")
            target += "/" if f"{target}/" in pages else ""
            if target in pages:
                if unquote(anchor) not in pages[target].anchors:
                    broken.append(f"{address}: {link} has no such anchor")
            elif not has_file(target):
                broken.append(f"{address}: {link} has no such file")
    return broken


@pytest.mark.long
def test_every_link_and_picture_of_the_site_leads_somewhere(site):
    assert sum(len(page.links) for page in site.pages.values()) > 1000
    assert broken_links(site.pages, lambda path: (site.folder / path).is_file()) == []


def test_a_link_that_leads_nowhere_is_found():
    html = '<html lang="en"><a id="here"></a><a href="{}"></a>'
    links = {"#here": 0, "#there": 1, "b/": 0, "b/#here": 0, "b/#no": 1, "c/": 1, "x.png": 1}
    for link, count in links.items():
        pages = {"": parsed(html.format(link)), "b/": parsed(html.format("../a.png"))}
        assert len(broken_links(pages, lambda path: path == "a.png")) == count, link


def unresolved(page: Page) -> list[str]:
    """References and directives that were meant to become something else."""
    return re.findall(r"\[[^\]\n]+\]\[[^\]\n]*\]|::: \w+|<autoref\b|\]\([\w./#-]+\)", page.text)


@pytest.mark.long
def test_no_reference_is_left_unresolved(site):
    left = {address: unresolved(page) for address, page in site.pages.items()}
    assert not {address: found for address, found in left.items() if found}


@pytest.mark.parametrize("text", ["[Causal][regard.Causal]", "[here](a.md#b)", "::: regard.no"])
def test_an_unresolved_reference_is_found(text):
    assert unresolved(parsed(f'<html lang="en"><p>See {text}.')) != []
    assert unresolved(parsed(f'<html lang="en"><p>See <code>{text}</code>.')) == []


def test_every_public_name_is_on_one_page_of_the_reference():
    names = [name for page in REFERENCE["PAGES"] for name, _ in REFERENCE["documented"](page)]
    assert sorted(names) == sorted(REFERENCE["public"]())


@pytest.mark.long
def test_every_public_name_is_an_anchor(site):
    for page in REFERENCE["PAGES"]:
        names = {name for name, _ in REFERENCE["documented"](page)}
        assert names and names <= site.pages[f"reference/{page}/"].anchors, page


@pytest.mark.parametrize("page", REFERENCE["PAGES"])
def test_a_page_of_the_reference_begins_with_what_is_on_it(page):
    head = read(f"docs/reference/{page}.md").partition("\n## ")[0]
    assert re.match(r"# .+\n\n[A-Z`].*(\n.+)*\n\n\|", head), "a paragraph, then a table"


def test_the_index_of_the_reference_is_current():
    current = read("docs/reference/index.md") == REFERENCE["index"]()
    assert current, "python scripts/reference.py writes docs/reference/index.md anew"


@cache
def search() -> re.Pattern[str]:
    """Where the search of the site divides a text into words, in Python's language."""
    separator = CONFIG["plugins"]["search"]["separator"]
    return re.compile(separator.replace(r"\p{Script=Han}", "[\u4e00-\u9fff]"))


@pytest.mark.long
def test_the_search_finds_chinese_words_inside_a_sentence(site):
    built = json.loads((site.folder / "search.json").read_text(encoding="utf-8"))
    assert built["config"]["separator"] == CONFIG["plugins"]["search"]["separator"]
    assert any("掩码" in item["text"] for item in built["items"])
    words = [word for word in search().split("因果掩码, 不是张量") if word]
    assert words == list("因果掩码不是张量")
    words = [word for word in search().split("attend(q, k, v) with num_heads=8") if word]
    assert words == ["attend", "q", "k", "v", "with", "num", "heads", "8"]


def anchors_of(page: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def lost(page: str, text: str) -> list[str]:
    """Links of a page in the repository that lead to no file or heading of it."""
    found = []
    for link in LINK.findall(text):
        if urlsplit(link).scheme:
            continue
        path, _, anchor = link.partition("#")
        target = ROOT / Path(page).parent / path if path else ROOT / page
        if not target.exists() or (
            anchor
            and target.suffix == ".md"
            and "reference" not in target.parts
            and anchor not in anchors_of(target.resolve().relative_to(ROOT).as_posix())
        ):
            found.append(link)
    return found


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere_in_the_repository_too(page):
    assert lost(page, prose(page)) == []


@pytest.mark.parametrize(
    "link", ["docs/nothing.md", "docs/design.md#no-such-heading", "docs/no.png", "#no-heading"]
)
def test_a_lost_link_is_found(link):
    assert lost("README.md", f"see [this]({link})") == [link]
    assert lost("README.md", "see [this](docs/design.md#caches-have-one-verb)") == []
