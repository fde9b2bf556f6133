"""The page: the answer first, everything escaped, and whole in a real browser, on a phone and in print."""

from __future__ import annotations

import base64
import copy
import html.parser
import json
import os
import re
import shutil
import sys

import pytest

from theodolite.report import page

from . import sample

HOSTILE = "<script>alert(1)</script>\"&'"
TWELVE = ("none", *(f"{kind}:{factor}" for kind in ("linear", "ntk", "yarn") for factor in (1.5, 2, 4)), "dynamic")
SAMPLES = {
    "usual": sample.with_passkey(sample.summary()),
    "partial": sample.summary(names=("none", "yarn:1.5"), passed=()) | {"truncated_window": None},
    "maps": sample.summary(names=("none", *sample.MAPS), passed=("none", *sample.MAPS)),
    "crowded": sample.summary(names=TWELVE, passed=TWELVE, to=16384, model=HOSTILE + "long" * 50),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The page of each sample, written once."""
    return {kind: page.write(made, tmp_path_factory.mktemp(kind)) for kind, made in SAMPLES.items()}


class Reader(html.parser.HTMLParser):
    """Collects tags with their attributes, and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def written(made, folder):
    return page.write(made, folder).read_text("utf-8")


class TestFile:
    def test_is_one_file_that_asks_for_nothing(self, pages):
        text = pages["usual"].read_text("utf-8")
        read = Reader(text)
        assert [path.name for path in pages["usual"].parent.iterdir()] == ["report.html"]
        addresses = [a[key] for _, a in read.tags for key in ("src", "href", "srcset") if key in a]
        assert len(addresses) == 9
        assert all(address.startswith("data:") for address in addresses)
        assert not read.all("script")
        assert not re.search(r"url\(|@import", text)

    def test_is_the_same_for_the_same_numbers(self, pages, tmp_path):
        assert written(SAMPLES["usual"], tmp_path) == pages["usual"].read_text("utf-8")

    def test_is_accessible(self, pages):
        read = Reader(pages["usual"].read_text("utf-8"))
        assert read.all("html")[0]["lang"] == "en"
        assert len(read.all("h1")) == 1
        assert all(image["alt"] for image in read.all("img"))
        assert all(head["scope"] in {"col", "row"} for head in read.all("th"))
        assert len(read.all("caption")) == len(read.all("table"))

    def test_the_answer_stands_before_pictures_and_numbers(self, pages):
        text = pages["usual"].read_text("utf-8")
        parts = ("Take yarn:1.5", "At a glance", "Settings to paste", "Pictures", "Numbers", "Definitions")
        places = [text.lower().index(f">{part.lower()}" if part != "At a glance" else "at a glance") for part in parts]
        assert places == sorted(places)

    def test_says_everything_that_was_measured(self, pages):
        made = SAMPLES["usual"]
        text = " ".join(Reader(pages["usual"].read_text("utf-8")).text)
        wanted = [*made["definitions"].values(), made["recommendation"]["why"], made["settings"]["vllm"]]
        wanted += [made["texts"][1]["name"], made["texts"][1]["sha256"], "52.55", "31.05", "12,288"]
        assert [one for one in wanted if one not in text] == []

    def test_says_what_each_map_is(self, pages):
        text = " ".join(Reader(pages["maps"].read_text("utf-8")).text)
        for relative in sample.MAPS.values():
            assert f"relative: {json.dumps(relative)}" in text
        assert "a map of distances: leaky-rerope" in text
        assert SAMPLES["maps"]["model_details"]["fingerprint"] in text

    def test_a_summary_from_before_maps(self, tmp_path):
        made = copy.deepcopy(SAMPLES["partial"])
        for scaling in made["scalings"]:
            del scaling["relative"]
        del made["model_details"]["fingerprint"], made["settings"]["theodolite"]
        assert "rope_parameters: {" in " ".join(Reader(written(made, tmp_path)).text)

    def test_names_from_files_are_escaped(self, tmp_path):
        made = sample.summary(names=("none", "yarn:1.5"), passed=("none",), model=HOSTILE)
        made["texts"] = [{"name": HOSTILE, "tokens": 1, "sha256": HOSTILE}]
        made["settings"] = dict.fromkeys(made["settings"], HOSTILE)
        made["definitions"] = dict.fromkeys(made["definitions"], HOSTILE)
        made["scalings"][1]["name"] = HOSTILE
        made["scalings"][1]["rope_parameters"] = {HOSTILE: HOSTILE}
        made["recommendation"] = {"name": HOSTILE, "why": HOSTILE}
        read = Reader(written(made, tmp_path))
        assert not read.all("script")
        assert "alert(1)" in "".join(read.text)
        known = {"class", "aria-label", "aria-labelledby", "tabindex", "role", "scope", "id", "lang", "charset", "alt"}
        known |= {"http-equiv", "content", "name", "rel", "href", "media", "srcset", "src"}
        assert {key for _, attributes in read.tags for key in attributes} <= known

    def test_nothing_to_recommend(self, tmp_path):
        made = sample.summary(passed=()) | {"recommendation": {"name": None, "why": "No full pass was run."}}
        assert "Nothing is recommended" in written(made, tmp_path)

    def test_the_shipped_model_can_win(self, tmp_path):
        made = sample.summary() | {"recommendation": {"name": "none", "why": "It holds."}}
        assert "Take the model as shipped" in written(made, tmp_path)

    def test_a_failure_leaves_the_old_report(self, tmp_path, monkeypatch):
        path = page.write(SAMPLES["partial"], tmp_path)
        before = path.read_bytes()

        def fails(*_):
            raise OSError("disk full")

        monkeypatch.setattr("os.replace", fails)
        with pytest.raises(OSError, match="disk full"):
            page.write(SAMPLES["usual"], tmp_path)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    def test_missing_jinja2_says_what_to_install(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "jinja2", None)
        with pytest.raises(ImportError, match=r"jinja2 is needed .*pip install 'theodolite\[survey\]'"):
            page.write(SAMPLES["usual"], tmp_path)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Headless Chromium with a profile of its own, logging its console and its network."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        if os.environ.get("CI"):
            pytest.fail("chromium and chromedriver are needed: apt-get install chromium chromium-driver")
        pytest.skip("chromium and chromedriver are not installed: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    flags = "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
    for flag in f"{flags} disable-component-update disable-sync disable-dev-shm-usage hide-scrollbars".split():
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driven = webdriver.Chrome(options=options, service=Service(driver))
    yield driven
    driven.quit()


class TestBrowser:
    @pytest.mark.parametrize("width", [360, 1280])
    @pytest.mark.parametrize("kind", list(SAMPLES))
    def test_fits_the_window_shows_every_picture_and_asks_for_nothing(self, browser, pages, kind, width):
        address = pages[kind].as_uri()
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get_log("performance")
        browser.get(address)
        overflow = "return document.documentElement.scrollWidth - window.innerWidth"
        assert browser.execute_script("return window.innerWidth") == width
        assert browser.execute_script(overflow) <= 0
        natural = browser.execute_script("return [...document.images].map(i => i.naturalWidth)")
        assert len(natural) == (2 if kind == "partial" else 4)
        assert all(one > 0 for one in natural)
        assert browser.get_log("browser") == []
        requested = re.findall(r'"url":"((?:https?|file|ftp|wss?):[^"]*)"', self.requests(browser))
        assert set(requested) == {address}

    @staticmethod
    def requests(browser) -> str:
        entries = [entry["message"] for entry in browser.get_log("performance")]
        return "\n".join(entry for entry in entries if "Network.requestWillBeSent" in entry)

    def test_a_table_scrolls_inside_its_own_box(self, browser, pages):
        size = {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(pages["crowded"].as_uri())
        script = "return [...document.querySelectorAll('.scroll')].some(box => box.scrollWidth > box.clientWidth)"
        assert browser.execute_script(script)

    @pytest.mark.parametrize("kind", list(SAMPLES))
    def test_prints_whole(self, browser, pages, kind):
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.get(pages[kind].as_uri())
        printed = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
        pdf = base64.b64decode(printed["data"])
        assert pdf.startswith(b"%PDF")
        assert len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 1
        # The paper is 182 mm wide within its margins: nothing may stand past it.
        size = {"width": 688, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        try:
            assert browser.execute_script("return document.documentElement.scrollWidth") <= 688
        finally:
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
