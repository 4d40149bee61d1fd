"""Pages in a real Chromium: opened from a file, with every console error and request recorded.

Without Playwright or a browser the tests are skipped, with how to install what is missing.
"""

import shutil
from dataclasses import dataclass, field
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 15_000  # milliseconds until something on a page is given up

LIGHT = """(text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }"""  # the relative luminance of a colour as getComputedStyle gives it
CONTRAST = """() => {
  const light = LIGHT;
  const behind = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    if (!/, 0\\)$/.test(colour) || !element.parentElement) return colour;
    return behind(element.parentElement);
  };
  return [...document.body.querySelectorAll("*")].filter((element) =>
    [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())
    && !["SCRIPT", "NOSCRIPT"].includes(element.tagName)
  ).map((element) => {
    const both = [light(getComputedStyle(element).color), light(behind(element))];
    return [(Math.max(...both) + 0.05) / (Math.min(...both) + 0.05),
            `${element.tagName}.${element.className}: ${element.textContent.slice(0, 40)}`];
  });
}""".replace("LIGHT", LIGHT)


@dataclass
class Opened:
    """A page in the browser: what Playwright drives, and what went wrong so far."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)  # all but the file itself


@pytest.fixture(scope="module")
def chromium():
    """An installed Chromium, started once for the tests of a file."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("NO BROWSER TESTS: python -m pip install 'regard[dev]' brings playwright")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"NO BROWSER TESTS: none of {', '.join(NAMES)}; apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium, tmp_path):
    """Opens HTML as a file: `open_page(html, width=400, dark=True).page` is Playwright's page.

    At the end of the test no page may have had an error on its console or asked for anything.
    """
    opened: list[tuple[Opened, Any]] = []

    def open_one(html: str, *, width=1200, height=900, dark=False, scripts=True) -> Opened:
        context = chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            java_script_enabled=scripts,
            offline=True,
        )
        context.set_default_timeout(PATIENCE)
        file = tmp_path / f"page{len(opened)}.html"
        file.write_text(html, encoding="utf-8")
        made = Opened(context.new_page())
        _record(made, file.as_uri())
        opened.append((made, context))
        made.page.goto(file.as_uri())
        if scripts and "regard.start();" in html:
            made.page.locator("html[data-ready]").wait_for(state="attached")
        return made

    yield open_one
    for each, context in opened:
        context.close()
        assert each.errors == [], "errors on the console"
        assert each.requests == [], "a page that needs no network asked for something"


def _record(opened: Opened, address: str) -> None:
    """Note errors and requests; nothing but the file itself is let through."""
    page = opened.page

    def route(each: Any) -> None:
        if each.request.url.partition("#")[0] == address:
            each.continue_()
        else:
            opened.requests.append(each.request.url)
            each.abort()

    page.route("**/*", route)
    page.on("pageerror", lambda error: opened.errors.append(str(error)))
    page.on("console", lambda said: said.type == "error" and opened.errors.append(said.text))


def contrasts(opened: Opened) -> list[tuple[float, str]]:
    """The contrast of every element that shows text (WCAG 2.2), worst first, with the element."""
    return sorted(map(tuple, opened.page.evaluate(CONTRAST)))


def focused(opened: Opened) -> str:
    """The element that has the focus: its tag and its id, name, text or label."""
    return opened.page.evaluate(
        """() => {
          const at = document.activeElement;
          const name = at.id || at.name || at.dataset.show || at.ariaLabel || at.textContent;
          return `${at.tagName.toLowerCase()} ${name.trim()}`;
        }"""
    )
