"""The documentation as a site: `make docs`."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("material")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Page(HTMLParser):
    """What a page loads, where it leads, and the places in it."""

    def __init__(self, path):
        super().__init__()
        self.loaded, self.links, self.places = [], [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.places |= {values.get("id"), values.get("name")}
        if tag in ("script", "img", "iframe", "source") and "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(values["href"])
        elif tag == "a" and "href" in values:
            self.links.append(values["href"])


def test_every_page_is_made_and_loads_nothing_from_a_network(site):
    pages = sorted(site.rglob("*.html"))
    for page in (ROOT / "docs").rglob("*.md"):
        assert site / page.relative_to(ROOT / "docs").with_suffix(".html") in pages
    found = {path: Page(path) for path in pages}
    for path, page in found.items():
        for address in page.loaded:
            assert not urlsplit(address).netloc, (path, address)
        for address in [*page.loaded, *page.links]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), (path, address)
            if parts.fragment and target in found and not parts.path.endswith(".svg"):
                assert unquote(parts.fragment) in found[target].places, (path, address)
    assert "unpkg" not in "".join(path.read_text() for path in pages)


def test_the_reference_has_every_public_name(site):
    import fedpsa_strategy

    text = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    places = set(re.findall(r'id="([\w.]+)"', text))
    missing = [n for n in fedpsa_strategy.__all__ if not any(p.endswith(f".{n}") for p in places)]
    assert missing == []


def test_the_first_page_is_the_readme(site):
    assert (ROOT / "README.md").read_text().startswith("# fedpsa")
    assert "Asynchronous federated learning" in (site / "index.html").read_text()


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
def test_search_works_in_pages_that_are_opened_as_files(site, tmp_path):
    options = ["--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")
    address = (site / "index.html").as_uri() + "?q=thermometer"
    command = [CHROMIUM, *options, f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000"]
    done = subprocess.run(
        [*command, "--dump-dom", address], capture_output=True, text=True, check=True, timeout=60
    )
    items = re.findall(r'<li class="md-search-result__item">.*?</li>', done.stdout, re.DOTALL)
    assert items
    assert "thermometer" in "".join(items).lower()
