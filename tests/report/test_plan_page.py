"""The page of a plan: its script has the formulas of the plan, and whatever a file says stays text."""

from __future__ import annotations

import base64
import html
import json
import re

import numpy as np
import pytest

from theodolite.plan import NTK, DynamicNTK, Linear, Llama3, Rotary, Scaling, YaRN
from theodolite.plan.derived import derive
from theodolite.plan.findings import find
from theodolite.plan.huggingface import read_config
from theodolite.plan.open import Opened
from theodolite.report import plan_page

from .test_report_page import Reader, browser  # noqa: F401

HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>\u2028&amp;\"'"
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
    "max_position_embeddings": 8192, "rope_theta": 10000.0,
}  # fmt: skip
MODELS = {
    "plain": LLAMA,
    "llama3": LLAMA | {"rope_theta": 5e5, "max_position_embeddings": 32768, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 5.0,
        "original_max_position_embeddings": 4096}},
    "yarn": LLAMA | {"max_position_embeddings": 16384, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 24.0,
        "truncate": False}},
    "gemma3": LLAMA | {"model_type": "gemma3_text", "sliding_window": 512, "rope_theta": 1e6, "num_hidden_layers": 6,
        "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "longrope": LLAMA | {"model_type": "phi3", "original_max_position_embeddings": 1024, "rope_scaling": {
        "type": "longrope", "short_factor": [1.0 + pair / 40 for pair in range(32)],
        "long_factor": [1.0 + pair for pair in range(32)]}},
    "partial": LLAMA | {"model_type": "stablelm", "partial_rotary_factor": 0.25},
    "hostile": LLAMA | {"model_type": HOSTILE, HOSTILE: HOSTILE},
    "alibi": {"model_type": "bloom", "n_layer": 2, "n_head": 2},
}  # fmt: skip


def opened(kind: str) -> Opened:
    raw = dict(MODELS[kind])
    name = HOSTILE if kind == "hostile" else "mine"
    plan = read_config(raw | {"model_type": "llama"} if kind == "hostile" else raw)
    if kind == "hostile":
        import dataclasses

        layers = tuple(dataclasses.replace(layer, layer_type=HOSTILE) for layer in plan.layers)
        plan = dataclasses.replace(plan, model_type=HOSTILE, layers=layers)
    return Opened(plan=plan, name=name, location=f"{name}/config.json", kind="config", raw=raw)


def findings_of(kind: str):
    from theodolite.plan.findings import Finding

    if kind == "hostile":
        said = {"field": HOSTILE, "message": HOSTILE, "fix": HOSTILE, "reference": HOSTILE}
        return (Finding(severity="error", **said),)
    made = opened(kind)
    return find(made.plan, made.raw, source="config")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The page of each model, written once."""
    folder = tmp_path_factory.mktemp("pages")
    return {kind: plan_page.write(opened(kind), findings_of(kind), folder / f"{kind}.html") for kind in MODELS}


class TestFile:
    def test_is_one_file_that_asks_for_nothing(self, pages):
        for path in pages.values():
            text = path.read_text("utf-8")
            read = Reader(text)
            addresses = [a[key] for _, a in read.tags for key in ("src", "href", "srcset") if key in a]
            assert addresses == ["data:,"]
            assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|import\(", text)
        assert len(list(pages["plain"].parent.iterdir())) == len(MODELS)

    def test_is_the_same_for_the_same_plan(self, pages, tmp_path):
        again = plan_page.write(opened("yarn"), findings_of("yarn"), tmp_path / "again.html")
        assert again.read_bytes() == pages["yarn"].read_bytes()

    def test_names_from_files_are_text(self, pages):
        text = pages["hostile"].read_text("utf-8")
        read = Reader(text)
        assert [a.get("type") for a in read.all("script")] == ["application/json", None]
        assert not read.all("img")
        assert not [key for _, a in read.tags for key in a if key.startswith("on")]
        assert "<!--" not in text
        assert text.count("alert(1)") >= 6
        data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
        assert not re.search(r"[<>&\u2028]", data)
        assert json.loads(data)["rotations"][0]["rotary_dim"] == 64

    def test_data_cannot_end_its_element(self):
        made = plan_page.embedded({"name": HOSTILE})
        assert not re.search(r"[<>&\u2028\u2029]", made)
        assert json.loads(made) == {"name": HOSTILE}

    def test_only_its_own_script_may_run(self, pages):
        import hashlib

        text = pages["plain"].read_text("utf-8")
        allowed = re.search(r"script-src '(sha256-[^']+)'", html.unescape(text))[1]
        script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
        assert allowed == "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()

    def test_findings_and_layers_are_told(self, pages):
        text = " ".join("".join(Reader(pages["gemma3"].read_text("utf-8")).text).split())
        for finding in findings_of("gemma3"):
            assert " ".join(finding.message.split()) in text
            assert finding.reference in text
        assert "layers 0-4" in text
        assert "linear scaling 8" in text

    def test_a_model_without_rotation_has_no_script(self, pages):
        read = Reader(pages["alibi"].read_text("utf-8"))
        assert not read.all("script")
        assert "nothing to move" in " ".join(read.text)

    def test_controls_have_names(self, pages):
        read = Reader(pages["plain"].read_text("utf-8"))
        named = {a["for"] for a in read.all("label")}
        ids = {a["id"] for _, a in read.tags if "id" in a}
        for control in [*read.all("input"), *read.all("select")]:
            assert control["id"] in named or control["aria-labelledby"] in ids
        for output in read.all("output"):
            assert set(output["for"].split()) <= ids

    def test_the_name_must_be_a_page_s(self, tmp_path):
        with pytest.raises(ValueError, match=r"html: got .*config\.json'; the name must end in \.html or \.htm"):
            plan_page.write(opened("plain"), (), tmp_path / "config.json")
        assert not list(tmp_path.iterdir())


SETTINGS = [
    {"base": base, "factor": factor, "length": length, "original": original}
    for base, factor, length, original in (
        (10000.0, 4.0, 8192, 2048), (500000.0, 7.5, 100003, 8192), (123.0, 1.0, 500, 500), (1e7, 32.0, 1048576, 4097),
    )
]  # fmt: skip


def scalings(s: dict) -> dict[str, Scaling]:
    """What the page offers, as plans have it."""
    factor, length = s["factor"], s["original"]
    return {
        "none": Scaling(),
        "linear": Linear(factor=factor),
        "ntk": NTK(factor=factor),
        "dynamic": DynamicNTK(factor=factor, original_max_position_embeddings=length),
        "yarn": YaRN(factor=factor, original_max_position_embeddings=length),
        "llama3": Llama3(
            factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=length
        ),
    }


class TestFormulas:
    """The script computes for itself, so it is held to the plan's float64."""

    @staticmethod
    def load(browser, path):  # noqa: F811
        browser.get(path.as_uri())
        assert browser.get_log("browser") == []

    @pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s['base']:g}-{s['factor']:g}")
    def test_every_scaling(self, browser, pages, settings):  # noqa: F811
        self.load(browser, pages["plain"])
        script = "theodolite.set(arguments[0]); return [theodolite.invFreq(), theodolite.numbers()]"
        for name, scaling in scalings(settings).items():
            found, numbers = browser.execute_script(script, {**settings, "scaling": name})
            rotary = Rotary(head_dim=64, rope_theta=settings["base"], scaling=scaling)
            np.testing.assert_allclose(found, rotary.inv_freq(length=settings["length"]), rtol=1e-12, atol=0)
            told = derive(rotary, settings["length"])
            assert (numbers["pairs"], numbers["unturned"]) == (told.pairs, told.unturned_pairs), name
            assert numbers["firstNegative"] == told.first_negative, name
            assert numbers["longest"] == pytest.approx(told.longest_wavelength, rel=1e-12)
            assert numbers["shortest"] == pytest.approx(told.shortest_wavelength, rel=1e-12)
            waves = 2 * np.pi / rotary.inv_freq(length=settings["length"])
            live = waves[waves <= settings["length"]]
            assert numbers["longestLive"] == pytest.approx(live.max() if len(live) else None, rel=1e-12)

    @pytest.mark.parametrize("kind", ["plain", "llama3", "yarn", "gemma3", "longrope", "partial"])
    def test_starts_at_the_models_own(self, browser, pages, kind):  # noqa: F811
        self.load(browser, pages[kind])
        plan = opened(kind).plan
        # Layers that see every distance stand first.
        order = plan.rotaries[::-1] if kind == "gemma3" else plan.rotaries
        for number, rotary in enumerate(order):
            script = "theodolite.set({rotation: arguments[0]}); return theodolite.invFreq()"
            wanted = rotary.inv_freq(length=plan.max_position_embeddings)
            np.testing.assert_allclose(browser.execute_script(script, number), wanted, rtol=1e-12, atol=0)
        # With the settings that only this model has, at another base and length.
        script = "theodolite.set({rotation: 0, base: 54321, length: 900}); return theodolite.invFreq()"
        import dataclasses

        moved = dataclasses.replace(order[0], rope_theta=54321.0)
        np.testing.assert_allclose(browser.execute_script(script), moved.inv_freq(length=900), rtol=1e-12, atol=0)

    def test_channels_that_stand_still(self, browser, tmp_path):  # noqa: F811
        import dataclasses

        made = opened("plain")
        layer = dataclasses.replace(
            made.plan.layers[0], rotate=dataclasses.replace(made.plan.layers[0].rotate, live_pairs=5)
        )
        made = dataclasses.replace(made, plan=dataclasses.replace(made.plan, layers=(layer,)))
        self.load(browser, plan_page.write(made, (), tmp_path / "p.html"))
        found, numbers = browser.execute_script("return [theodolite.invFreq(), theodolite.numbers()]")
        np.testing.assert_allclose(found, layer.rotate.inv_freq(), rtol=1e-12, atol=0)
        assert (numbers["pairs"], numbers["unturned"]) == (32, 0)


WAIT = """
const done = arguments[arguments.length - 1], until = performance.now() + 20000;
(function look() {
  if (document.getElementById("out-first")?.textContent !== "searching" || performance.now() > until) done();
  else setTimeout(look, 20);
})();
"""


class TestBrowser:
    """Sliders move what is drawn and told, by keyboard too, in every width, scheme and print."""

    def open(self, browser, path, *, width=1100, scheme="light"):  # noqa: F811
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": features})
        browser.get_log("performance")
        browser.get(path.as_uri())
        browser.execute_async_script(WAIT)

    def told(self, browser):  # noqa: F811
        script = "return Object.fromEntries([...document.querySelectorAll('output')].map(o => [o.id, o.textContent]))"
        return browser.execute_script(script)

    @pytest.mark.parametrize("kind", list(MODELS))
    def test_asks_for_nothing_and_runs_nothing_of_a_name(self, browser, pages, kind):  # noqa: F811
        self.open(browser, pages[kind])
        assert browser.get_log("browser") == []
        messages = [entry["message"] for entry in browser.get_log("performance")]
        sent = "\n".join(message for message in messages if "Network.requestWillBeSent" in message)
        assert set(re.findall(r'"url":"((?:https?|file|ftp|wss?):[^"]*)"', sent)) == {pages[kind].as_uri()}
        assert browser.execute_script("return document.images.length") == 0
        if kind == "hostile":
            assert HOSTILE.split("\u2028")[0] in browser.find_element("css selector", "h1").text

    @pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
    @pytest.mark.parametrize("kind", ["gemma3", "hostile", "longrope"])
    def test_fits_the_window(self, browser, pages, kind, width, scheme):  # noqa: F811
        self.open(browser, pages[kind], width=width, scheme=scheme)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        beyond = """return [...document.querySelectorAll('.charts svg')].flatMap(svg => {
            const box = svg.getBoundingClientRect();
            return [...svg.querySelectorAll('*')].map(e => e.getBoundingClientRect())
                .filter(b => b.left < box.left - 1 || b.right > box.right + 1 || b.bottom > box.bottom + 1);
        }).length"""
        assert browser.execute_script(beyond) == 0

    def test_a_slider_moves_by_keyboard(self, browser, pages):  # noqa: F811
        from selenium.webdriver.common.keys import Keys

        self.open(browser, pages["plain"])
        before, path = self.told(browser), "return document.querySelector('#wavelengths .line').getAttribute('d')"
        drawn = browser.execute_script(path)
        slider = browser.find_element("id", "base-slider")
        slider.send_keys(Keys.ARROW_RIGHT)
        browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        browser.execute_async_script(WAIT)
        state = browser.execute_script("return theodolite.state()")
        low, high = 2, 1e9
        step = round(2000 * np.log(10000 / low) / np.log(high / low)) + 1
        assert state["base"] == float(f"{low * (high / low) ** (step / 2000):.4g}")
        after = self.told(browser)
        assert after["out-base"] == f"{state['base']:,.10g}" != before["out-base"]
        assert browser.execute_script(path) != drawn
        assert slider.get_attribute("aria-valuetext") == after["out-base"]

    def test_numbers_are_told(self, browser, pages):  # noqa: F811
        self.open(browser, pages["plain"])
        told = derive(opened("plain").plan.rotaries[0], 8192)
        shown = self.told(browser)
        assert shown["out-base"] == "10,000"
        assert shown["out-factor"] == "not used"
        assert shown["out-length"] == "8,192"
        assert shown["out-unturned"] == f"{told.unturned_pairs} of 32"
        assert shown["out-longest"] == f"{told.longest_wavelength:,.0f}"
        assert shown["out-first"] == f"{told.first_negative:,}"

    def test_the_first_negative_is_there_when_the_page_is(self, browser, pages):  # noqa: F811
        """A picture of the page is taken before any search is done; its answer was known when it was written."""
        browser.get(pages["llama3"].as_uri())
        told = derive(opened("llama3").plan.rotaries[0], opened("llama3").plan.max_position_embeddings)
        assert told.first_negative is not None
        assert browser.execute_script("return document.getElementById('out-first').textContent") == (
            f"{told.first_negative:,}"
        )

    def test_a_layer_with_a_window_meets_no_more(self, browser, pages):  # noqa: F811
        self.open(browser, pages["gemma3"])
        plan = opened("gemma3").plan
        far, local = (browser.execute_script(f"return document.getElementById('rotation').options[{i}].text")
                      for i in (0, 1))  # fmt: skip
        window = plan.layers[0].mask.sliding_window
        assert local.endswith(f"(see {window:,} tokens)")
        assert "see" not in far
        numbers = browser.execute_script("theodolite.set({rotation: 1}); return theodolite.numbers()")
        waves = 2 * np.pi / plan.layers[0].rotate.inv_freq()
        assert numbers["unturned"] == int((waves > window).sum()) > int((waves > numbers["length"]).sum())
        assert numbers["longestLive"] == pytest.approx(waves[waves <= window].max(), rel=1e-12)

    def test_curves_are_where_the_numbers_are(self, browser, pages):  # noqa: F811
        self.open(browser, pages["plain"])
        browser.execute_script("theodolite.set({scaling: 'linear', factor: 4, length: 5000})")
        browser.execute_async_script(WAIT)
        dots = browser.execute_script(
            "return ['wavelengths', 'coverage'].map(id => [...document.querySelectorAll(`#${id} circle`)]"
            ".map(c => [Number(c.getAttribute('cy')), c.classList.contains('hollow')]))"
        )
        waves = 4 * 2 * np.pi * 10000.0 ** (np.arange(32) / 32)
        for made, values in ((dots[0], waves), (dots[1], 5000 / waves)):
            heights = np.array([height for height, _ in made])
            # A logarithmic axis is a straight line of the logarithm.
            slope, offset = np.polyfit(np.log(values), heights, 1)
            np.testing.assert_allclose(heights, slope * np.log(values) + offset, atol=0.02)
            # The height is counted downwards.
            assert slope < 0
            assert [hollow for _, hollow in made] == list(waves > 5000)

    def test_a_wrong_number_is_marked_and_changes_nothing(self, browser, pages):  # noqa: F811
        from selenium.webdriver.common.keys import Keys

        self.open(browser, pages["plain"])
        box = browser.find_element("id", "base-number")
        for wrong in ("0.5", "", "-3"):
            box.clear()
            box.send_keys(wrong, Keys.TAB)
            assert box.get_attribute("aria-invalid") == "true"
            assert browser.execute_script("return theodolite.state().base") == 10000
        box.clear()
        box.send_keys("20000", Keys.TAB)
        browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        assert box.get_attribute("aria-invalid") is None
        assert browser.execute_script("return theodolite.state().base") == 20000

    def test_everything_goes_back(self, browser, pages):  # noqa: F811
        self.open(browser, pages["yarn"])
        before = browser.execute_script("return theodolite.state()")
        browser.execute_script("theodolite.set({base: 77, factor: 2, length: 300, original: 99, scaling: 'ntk'})")
        browser.find_element("id", "reset").click()
        browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        assert browser.execute_script("return theodolite.state()") == before
        assert (before["scaling"], before["factor"], before["original"]) == ("yarn", 4, 4096)

    def test_dark_and_light_can_be_read(self, browser, pages):  # noqa: F811
        script = """return ['.charts .line', '.charts .tick', '.charts .own'].map(one => {
            const style = getComputedStyle(document.querySelector(one));
            return one.endsWith('tick') ? style.fill : style.stroke;
        }).concat(getComputedStyle(document.body).backgroundColor)"""

        def luminance(colour):
            parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
            linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
            return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

        for scheme in ("light", "dark"):
            self.open(browser, pages["gemma3"], scheme=scheme)
            browser.execute_script("theodolite.set({base: 20000})")
            *inks, paper = map(luminance, browser.execute_script(script))
            ratios = [(max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) for ink in inks]
            # WCAG: 3 for graphics, 4.5 for text.
            assert min(ratios[0], ratios[2]) >= 3
            assert ratios[1] >= 4.5

    def test_prints_whole(self, browser, pages):  # noqa: F811
        self.open(browser, pages["gemma3"], width=688)
        printed = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
        assert base64.b64decode(printed["data"]).startswith(b"%PDF")
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 688
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
