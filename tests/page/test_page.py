"""The page of a report: its content, and what it does in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import webbrowser
from pathlib import Path

import pytest
import torch

import l2l_compile
from l2l_compile.devices.machine import Machine
from l2l_compile.timeline import ORDER
from models import Broken, Stack, compiled, loss_of, rows

OPTIONS = {"micro_batches": 2, "device": "cpu"}
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
MOST_BYTES, MOST_SECONDS = 2_000_000, 2.0


def explained(model, x=None, **options):
    return l2l_compile.explain(model, {**OPTIONS, **options})(rows(6, dtype=torch.float32) if x is None else x)


def data_in(page: str):
    (found,) = re.findall(r"^const data = (.*);$", page, re.MULTILINE)
    return json.loads(found)


def test_a_page_is_one_file_that_needs_no_network(tmp_path):
    explained(Stack(4)).save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and not re.search(r"(src|href)\s*=|https?://|@import", page)


def test_a_page_has_segments_lanes_memory_and_options():
    model = Stack(4)
    optimizer = torch.optim.AdamW(model.parameters())
    report = explained(model, optimizer=optimizer, update="in_forward")
    data = data_in(report.page("h200"))
    assert data["title"].endswith("simulated on NVIDIA H200 SXM")
    assert [s["name"] for s in data["segments"]] == [s.name for s in report.segments]
    layers = [s for s in data["segments"] if s["repeats"] == 4]
    assert len({s["block"] for s in layers}) == 1 and all(s["how"] == "2 micro-batches" and s["bytes"] for s in layers)
    lanes = data["timeline"]["lanes"]
    labels = {(lanes[row], data["timeline"]["labels"][label]) for row, _, _, label, _ in data["timeline"]["pieces"]}
    assert {("h2d", "fetch_weights layers.0"), ("compute", "backward layers.3, micro-batch 2")} <= labels
    assert all(
        0 <= start <= start + length <= data["timeline"]["end"] * 1.001 for _, start, length, *_ in data["timeline"]["pieces"]
    )
    options = {name: (value, change) for name, value, change in data["options"]}
    assert options["micro_batches"][0] == "2" and options["optimizer"][0] == "AdamW" and "of host memory" in options["update"][1]
    assert data["text"] == str(report)


def test_memory_over_the_step_reaches_the_expected_peak_and_is_in_the_order_of_time():
    model = Stack(4)
    report = explained(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    memory = data_in(report.page())["memory"]
    assert max(map(sum, memory["device"]["bytes"])) == report.device_memory.peak
    for curve in memory.values():
        assert curve["times"] == sorted(curve["times"]) and curve["times"][0] == 0 and len(curve["times"]) > 5
    gradients = memory["host"]["kinds"].index("gradients")
    stashes = memory["host"]["kinds"].index("stashes")
    held = memory["host"]["bytes"]
    assert held[0][gradients] == 0 and held[-1][gradients] == report.host_memory.gradients
    assert held[0][stashes] == held[-1][stashes] == 0 < max(values[stashes] for values in held)


def test_every_lane_that_a_timeline_may_have_is_explained():
    page = (Path(l2l_compile.__file__).parent / "page" / "page.html").read_text()
    (lanes,) = re.findall(r"const LANES = \{(.*?)\};", page, re.DOTALL)
    assert set(re.findall(r"(\w+): \"", lanes)) == set(ORDER)


def test_warnings_stand_at_the_top_once():
    data = data_in(explained(Broken()).page())
    assert len(data["warnings"]) == 1 and data["warnings"][0].startswith("graph break: ")


def test_view_shows_the_step_that_was_measured(tmp_path, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    step, x = compiled(Stack(3), micro_batches=2), rows(6, dtype=torch.float32)
    with pytest.raises(l2l_compile.L2LError, match="has not run yet"):
        l2l_compile.view(step)
    loss_of(step(x)).backward()
    assert data_in(l2l_compile.view(step, tmp_path / "before.html", show=False).read_text())["timeline"] is None
    with l2l_compile.trace(step):
        loss_of(step(x)).backward()
    where = l2l_compile.view(step)
    assert opened == [where.as_uri()]
    data = data_in(where.read_text())
    assert data["title"].endswith("a measured step") and data["timeline"]["pieces"]
    assert max(map(sum, data["memory"]["device"]["bytes"])) > 0


def test_a_notebook_shows_the_page():
    shown = explained(Stack(2))._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "<script>" not in shown, "escaped"


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no chromium is installed (its path may be in the variable CHROMIUM)")
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--headless=shell", "--single-process", "--no-zygote", "--disable-gpu"]
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield opened
        opened.close()


def test_a_page_of_96_layers_in_a_browser(browser, tmp_path):
    """It loads fast and without an error of its script; hovering names things; the wheel zooms, a double click shows all."""
    machine = Machine.load("h200")
    explained(Stack(96)).save(tmp_path / "report.html", machine)
    assert (tmp_path / "report.html").stat().st_size < MOST_BYTES
    page, errors = browser.new_page(viewport={"width": 1200, "height": 900}), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    start = time.monotonic()
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_load_state("load")
    assert time.monotonic() - start < MOST_SECONDS

    page.hover("#strip div:nth-child(3)")
    assert page.inner_text("#tip").startswith("layers.1\n") and "2 micro-batches" in page.inner_text("#tip")
    box = page.locator("#lanes").bounding_box()
    first = "data.timeline.pieces.find((piece) => piece[0] === 1 && piece[1] > 0)"
    piece = page.evaluate(f"(([, start, length]) => xOf(byId('lanes'), start + length / 2))({first})")
    page.mouse.move(box["x"] + piece, box["y"] + 54)
    assert "micro-batch" in page.inner_text("#tip") and "from" in page.inner_text("#tip")
    span = "view.to - view.from"
    whole = page.evaluate(span)
    for _ in range(5):
        page.mouse.wheel(0, -100)
    page.wait_for_function(f"{span} < {whole} / 2")
    before = page.evaluate("view.from")
    page.mouse.down()
    page.mouse.move(box["x"] + piece - 40, box["y"] + 54)
    page.mouse.up()
    assert page.evaluate("view.from") > before, "dragging moves"
    page.locator("#lanes").dblclick(position={"x": 200, "y": 50})
    assert page.evaluate(span) == whole
    page.locator("#device").hover(position={"x": 300, "y": 60})
    assert "weights" in page.inner_text("#tip")
    ink = "(() => { const c = byId('lanes'); return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v); })()"
    assert page.evaluate(ink) and not errors


def test_the_script_takes_the_picture_of_the_readme(browser, tmp_path, monkeypatch):
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.syspath_prepend(str(examples))
    import page_picture

    page_picture.report_of_a_step().save(tmp_path / "report.html", machine="h200")
    page_picture.take_picture(browser, tmp_path / "report.html", tmp_path / "page.png")
    taken, of_the_readme = (path.read_bytes() for path in (tmp_path / "page.png", examples.parent / "docs" / "page.png"))
    assert taken[:8] == of_the_readme[:8] and taken[16:20] == of_the_readme[16:20], "PNGs of one width"
