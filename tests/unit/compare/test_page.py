"""The report page: what it holds, what it cannot be made to hold, and how it behaves in a real browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from samestep.compare.finished import compare_finished
from samestep.compare.page import page
from tests.unit.compare import browser
from tests.unit.compare.made_runs import csv_log, falling, made_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&\"'"


def made_page(folder: Path) -> tuple[str, dict[str, Any]]:
    a = made_run(folder / "mixed")
    b = made_run(folder / "zero3", "engine.name=zero3")
    c = made_run(folder / "low", "precision.regime=low", loss=lambda u: falling(0.1 * u), master="bfloat16", lost=0.98)
    report, outcomes = compare_finished([a, b, c], tested=["precision"])
    return page(report, outcomes), report


class Elements(HTMLParser):
    """All elements with their attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag in self.inside:
            self.inside[tag].append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:  # the parser is inside a script or a style
            self.inside[self.found[-1][0]][-1] += data


def test_nothing_in_the_page_asks_the_network(tmp_path: Path) -> None:
    elements = Elements(made_page(tmp_path)[0])
    names = {tag for tag, _ in elements.found}
    assert not names & {"link", "img", "iframe", "object", "embed", "base", "form", "video", "audio"}
    attributes = {name for _, given in elements.found for name in given}
    assert not attributes & {"src", "href", "action", "srcset", "style"}
    assert not any(name.startswith("on") for name in attributes)
    policy = next(given["content"] for _, given in elements.found if given.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    allowed = set(re.findall(r"'(sha256-[^']+)'", policy))
    held = [elements.inside["style"][0], elements.inside["script"][-1]]
    assert allowed == {"sha256-" + base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in held}


def test_names_from_outside_stay_text(tmp_path: Path) -> None:
    a, b = made_run(tmp_path / "good"), made_run(tmp_path / "other", "engine.name=zero3")
    report, outcomes = compare_finished([a, b])
    described = json.loads(json.dumps(report).replace("other", json.dumps(EVIL)[1:-1]))
    evil = [outcomes[0], replace(outcomes[1], variant=replace(outcomes[1].variant, name=EVIL))]
    text = page({**described, "name": EVIL}, evil)
    elements = Elements(text)
    assert [tag for tag, _ in elements.found].count("script") == 2
    assert "img" not in {tag for tag, _ in elements.found}
    data = json.loads(elements.inside["script"][0])
    assert EVIL in {series["name"] for chart in data["charts"] for series in chart["series"]}


def test_the_page_says_what_the_report_says(tmp_path: Path) -> None:
    text, report = made_page(tmp_path)
    shown = re.sub(r"<[^>]+>", " ", text).replace("&#x27;", "'")
    assert report["verdict"] in shown
    assert "optimizer works in bfloat16: forecast 98% of updates lost" in shown
    assert len(re.findall(r"<figure ", text)) == 4
    assert '<tr class="differs"><th scope="row">master</th>' in text


def test_a_page_of_losses_alone_and_of_one_step(tmp_path: Path) -> None:
    report, outcomes = compare_finished([csv_log(tmp_path / "a.csv", [4.0]), csv_log(tmp_path / "b.csv", ["nan"])])
    text = page(report, outcomes)
    assert "chart-loss" in text
    assert "chart-norm" not in text
    assert "NaN" not in text


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[browser.Browser]:
    program = browser.find()
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(browser.NAMES)} is installed")
    path = tmp_path / "compare.html"
    path.write_text(made_page(tmp_path)[0])
    with browser.Browser(program, tmp_path / "profile") as found:
        found.open(path)
        yield found


VALUE = "document.querySelector('#chart-loss button[data-series=\"0\"] .value').textContent"


def test_in_a_browser(opened: browser.Browser) -> None:
    opened.call("Emulation.setDeviceMetricsOverride", width=1280, height=1600, deviceScaleFactor=1, mobile=False)
    assert "must" in opened.value("document.querySelector('.verdict').innerText")
    # The pointer over the left edge shows the first step, whose loss is 4.
    box = opened.value(
        "(r => [r.left, r.top, r.width, r.height])(document.querySelector('.plot').getBoundingClientRect())"
    )
    opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + 1, y=box[1] + box[3] / 2)
    assert opened.value(VALUE) == "4.0000"
    assert opened.value("document.querySelector('#chart-norm .at').textContent") == "at step 1"
    # Tab reaches the first chart; the arrow goes one step on, to 2 + 2 exp(-1/12).
    opened.press("Tab")
    assert opened.value("document.activeElement.getAttribute('role')") == "slider"
    assert opened.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    opened.press("ArrowRight")
    assert opened.value(VALUE) == "3.8401"
    assert "step 2: mixed 3.8401" in opened.value("document.activeElement.getAttribute('aria-valuetext')")
    # A legend's button hides its curve in every chart.
    opened.value("document.querySelector('#chart-loss button[data-series=\"2\"]').click()")
    assert opened.value("document.querySelector('#chart-norm button[data-series=\"2\"]').ariaPressed") == "false"
    assert (
        opened.value("getComputedStyle(document.querySelector('#chart-gap .plot [data-series=\"2\"]')).display")
        == "none"
    )
    # On a phone nothing is wider than the screen.
    opened.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    assert opened.value("document.documentElement.scrollWidth") == 360
    requested = [e["params"]["request"]["url"] for e in opened.events if e["method"] == "Network.requestWillBeSent"]
    assert [url.partition(":")[0] for url in requested] == ["file"]
    assert [e for e in opened.events if e["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")] == []
