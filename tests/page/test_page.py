"""The page of a report: its content, and what it does in a browser."""

from __future__ import annotations

import dataclasses
import html
import json
import os
import re
import shutil
import subprocess
import time
import webbrowser
from pathlib import Path

import pytest
import torch

import l2l_compile
from l2l_compile.lanes import AT_WORK
from l2l_compile.options import Options
from l2l_compile.report.page.data import lane_texts
from l2l_compile.report.page.write import page_of
from l2l_compile.simulation.machine import Machine
from l2l_compile.timeline import Span, Timeline
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
    labels = {(lanes[row], data["timeline"]["labels"][label]) for row, _, _, label, _ in data["timeline"]["spans"]}
    assert {("h2d", "fetch_weights layers.0"), ("compute", "backward layers.3, micro-batch 2")} <= labels
    assert all(
        0 <= start <= start + length <= data["timeline"]["end"] * 1.001 for _, start, length, *_ in data["timeline"]["spans"]
    )
    options = {name: (value, change) for name, value, change in data["options"]}
    assert options["micro_batches"][0] == "2" and options["optimizer"][0] == "AdamW" and "of host memory" in options["update"][1]
    assert data["text"] == str(report.on(Machine.load("h200")))


def test_memory_over_a_step_reaches_its_peak_in_order_of_time():
    model = Stack(4)
    report = explained(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    memory = data_in(report.page("h200"))["memory"]
    report = report.on(Machine.load("h200"))
    assert max(map(sum, memory["device"]["bytes"])) == report.device_memory.peak
    for curve in memory.values():
        assert curve["times"] == sorted(curve["times"]) and curve["times"][0] == 0 and len(curve["times"]) > 5
    gradients = memory["host"]["kinds"].index("gradients")
    stashes = memory["host"]["kinds"].index("stashes")
    held = memory["host"]["bytes"]
    assert held[0][gradients] == 0 and held[-1][gradients] == report.host_memory.gradients
    assert held[0][stashes] == held[-1][stashes] == 0 < max(values[stashes] for values in held)


UPDATES = ["at_step", "in_backward", "in_forward"]


@pytest.mark.parametrize("update", UPDATES)
def test_a_measured_step_on_the_host_shows_memory_over_time(tmp_path, update):
    """Spans of the host lane, which updates, do not hide the caller's, which computes."""
    model = Stack(4)
    optimizer = torch.optim.AdamW(model.parameters())
    behind = {"optimizer": optimizer, "update": update} if update != "at_step" else {}
    step, x = compiled(model, micro_batches=2, **behind), rows(6, dtype=torch.float32)
    for _ in range(2):
        loss_of(step(x)).backward()
        optimizer.step()
    with l2l_compile.profile(step):
        loss_of(step(x)).backward()
        optimizer.step()
    data = data_in(l2l_compile.view(step, tmp_path / "page.html", show=False).read_text())
    curve = data["memory"]["device"]
    held = list(map(sum, curve["bytes"]))
    assert len(curve["times"]) > 20 and held[0] == 0 and max(held) == curve["counted"]
    spans = data["timeline"]["spans"]
    backwards = [start for _, start, _, label, _ in spans if data["timeline"]["labels"][label].startswith("backward")]
    assert backwards and curve["times"][-1] >= max(backwards) and min(held[1:]) < 0.5 * max(held)


@pytest.mark.parametrize("update", UPDATES)
def test_the_curve_of_the_host_stays_below_the_reports_figure(update):
    model = Stack(4)
    report = explained(model, optimizer=torch.optim.AdamW(model.parameters()), update=update)
    data = data_in(report.page("h200"))
    curve = data["memory"]["host"]
    assert max(map(sum, curve["bytes"])) <= curve["counted"]


def test_every_lane_that_a_timeline_may_have_is_explained():
    for update in UPDATES:
        options = Options.build({"update": update, "optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)})
        assert set(lane_texts(options)) == set(AT_WORK)


def test_lane_texts_fit_the_update_mode():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    texts = {u: lane_texts(Options.build({"update": u, "optimizer": optimizer})) for u in UPDATES}
    assert "optimizer.step() runs here" in texts["at_step"]["caller"] and "update" not in texts["at_step"]["host"]
    assert texts["in_backward"]["host"].endswith("updates each layer while the device computes the layers before it")
    assert texts["in_forward"]["host"].endswith("updates the layers after optimizer.step(), while the next forward runs")
    late = lane_texts(Options.build({"update": "in_forward", "delay": 1, "optimizer": optimizer}))
    assert "lane of their own" in late["host"] and "step before" in late["update"]
    near = lane_texts(Options.build({"stash": "device"}))
    assert "stashes" in texts["at_step"]["h2d"] and "stashes" not in near["h2d"] + near["d2h"]
    assert "also computes" in lane_texts(Options.build({}), host_computes=True)["caller"]


def page_on(machine: str, report=None, **figures):
    chosen = dataclasses.replace(Machine.load(machine), **figures)
    report = report if report is not None else explained(Stack(4))
    return report, chosen, data_in(report.page(chosen))


def test_the_top_names_the_model_the_batch_and_the_machine():
    _, machine, data = page_on("rtx4090")
    count = sum(p.numel() for p in Stack(4).parameters())
    assert data["about"] == f"Stack, {count:,} parameters, a batch of 6 rows; on {machine.name}"
    names = [name for name, _ in data["figures"]]
    assert names[:4] == ["samples/s", "seconds a step", "device memory at its peak", "host memory at its peak"]
    rate, seconds = (float(text.replace(",", "")) for _, text in data["figures"][:2])
    assert rate * seconds == pytest.approx(6, rel=0.01)


def test_the_verdict_and_the_limits_are_those_of_the_report():
    report, machine, data = page_on("rtx4090")
    assert data["verdict"]["fits"] and data["verdict"]["text"].startswith("fits: device memory ")
    for name, room in (("device", machine.device_room), ("host", machine.host_room)):
        assert data["limits"][name] == {"bytes": room, "text": data["limits"][name]["text"], "fits": True}
    assert data["limits"]["device"]["text"] == "23.0 GiB: 24.0 GiB less 1.0 GiB for driver and context"
    assert data["memory"]["host"]["counted"] == report.on(machine).host_memory.total
    assert data["memory"]["device"]["counted"] == report.on(machine).device_memory.peak

    peak = data["memory"]["device"]["counted"]
    _, _, full = page_on("rtx4090", report, device_memory=peak, device_reserve=0)
    _, _, lacks = page_on("rtx4090", report, device_memory=peak - 1, device_reserve=0)
    assert full["verdict"]["fits"] and full["limits"]["device"]["fits"]
    assert not lacks["verdict"]["fits"] and lacks["verdict"]["text"].startswith("does not fit: device memory ")
    assert not lacks["limits"]["device"]["fits"] and lacks["limits"]["host"]["fits"]


def test_a_trace_of_two_steps_gives_the_seconds_of_one(tmp_path):
    step, x = compiled(Stack(3), micro_batches=2), rows(6, dtype=torch.float32)
    loss_of(step(x)).backward()
    with l2l_compile.profile(step) as measured:
        for _ in range(2):
            loss_of(step(x)).backward()
    data = data_in(l2l_compile.view(step, tmp_path / "page.html", show=False).read_text())
    (seconds,) = [float(value) for name, value in data["figures"] if name == "seconds a step"]
    assert seconds == pytest.approx(measured.timeline.seconds / 2, rel=1e-3)
    assert data["about"].startswith("Stack, ") and data["verdict"] is None and data["limits"] == {}


def test_tokens_of_a_measured_step_are_counted(tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    step = compiled(model, micro_batches=2)
    with l2l_compile.profile(step):
        step(torch.zeros(6, 5, dtype=torch.int64)).sum().backward()
    data = data_in(l2l_compile.view(step, tmp_path / "page.html", show=False).read_text())
    assert "a batch of 6 rows with 30 tokens" in data["about"] and data["figures"][0][0] == "tokens/s"


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
    with l2l_compile.profile(step):
        loss_of(step(x)).backward()
    where = l2l_compile.view(step)
    assert opened == [where.as_uri()]
    data = data_in(where.read_text())
    assert data["title"].endswith("a measured step") and data["timeline"]["spans"]
    assert max(map(sum, data["memory"]["device"]["bytes"])) > 0


def test_a_notebook_shows_the_page():
    shown = explained(Stack(2))._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "<script>" not in shown, "escaped"


MARKUP = (
    "</script><img src=x onerror=document.title=1>",
    "<!--<script>",
    "a'b\"c`${document.title=1}`\\",
    "&lt;b&gt;\u2028\u2029",
    "__proto__",
    "]]><![CDATA[",
    "/*DATA*/null",
)


class Named(torch.nn.Module):
    """Its layers have names that are markup."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleDict({name.replace(".", ""): torch.nn.Linear(8, 8) for name in MARKUP})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


def hostile_report():
    """A report whose segments have names that are markup."""
    report = explained(Stack(len(MARKUP)))
    for segment, name in zip(report.segments, MARKUP, strict=False):
        segment.name = name
    return report


def test_a_name_that_is_markup_is_text_of_the_page():
    report = hostile_report()
    template = (Path(l2l_compile.__file__).parent / "report" / "page" / "page.html").read_text()
    page = page_of(report, None, MARKUP[0])
    for mark in ("<", ">", "&"):
        assert page.count(mark) == template.count(mark), "the data add none"
    assert "\u2028" not in page and "\u2029" not in page
    data = data_in(page)
    assert data["title"] == MARKUP[0]
    assert {s["name"] for s in data["segments"]} >= set(MARKUP)


def test_modules_with_names_that_are_markup_have_a_page():
    page = explained(Named(), torch.randn(6, 8)).page()
    assert "<img" not in page and page.count("</script>") == 1


def test_the_frame_of_a_notebook_is_sandboxed():
    shown = hostile_report()._repr_html_()
    assert re.findall(r"<\w+", shown) == ["<iframe"], "everything else is in the attribute"
    (attributes,) = re.findall(r"sandbox=\"([^\"]*)\"", shown)
    assert attributes == "allow-scripts", "with allow-same-origin, the page could reach the notebook"


@pytest.fixture(scope="module")
def playwright():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no chromium is installed (its path may be in the variable CHROMIUM)")
    with sync_api.sync_playwright() as started:
        yield started


def launched(playwright):
    """A browser of one process, which may end where it opens a second page."""
    arguments = ["--no-sandbox", "--headless=shell", "--single-process", "--no-zygote", "--disable-gpu"]
    return playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)


@pytest.fixture
def browser(playwright):
    opened = launched(playwright)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def tab(playwright):
    """The page of a browser, for one test after the other."""
    opened = launched(playwright)
    yield opened.new_page(viewport={"width": 1200, "height": 900})
    opened.close()


@pytest.fixture
def errors(tab):
    """The errors of the script of the page."""
    found: list[str] = []

    def of_script(error):
        found.append(str(error))

    def of_console(message):
        if message.type == "error":
            found.append(message.text)

    tab.on("pageerror", of_script)
    tab.on("console", of_console)
    yield found
    tab.remove_listener("pageerror", of_script)
    tab.remove_listener("console", of_console)


def test_a_page_of_96_layers_in_a_browser(tab, errors, tmp_path):
    """It loads fast and without an error of its script; hovering names things; the wheel zooms, a double click shows all."""
    machine = Machine.load("h200")
    explained(Stack(96)).save(tmp_path / "report.html", machine)
    assert (tmp_path / "report.html").stat().st_size < MOST_BYTES
    page = tab
    start = time.monotonic()
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_load_state("load")
    assert time.monotonic() - start < MOST_SECONDS

    page.hover("#strip div:nth-child(3)")
    assert page.inner_text("#tip").startswith("layers.1\n") and "2 micro-batches" in page.inner_text("#tip")
    box = page.locator("#lanes").bounding_box()
    first = "data.timeline.spans.find((span) => span[0] === 1 && span[1] > 0)"
    span = page.evaluate(f"(([, start, length]) => xOf(byId('lanes'), start + length / 2))({first})")
    page.mouse.move(box["x"] + span, box["y"] + 54)
    assert "micro-batch" in page.inner_text("#tip") and "from" in page.inner_text("#tip")
    span = "view.to - view.from"
    whole = page.evaluate(span)
    for _ in range(5):
        page.mouse.wheel(0, -100)
    page.wait_for_function(f"{span} < {whole} / 2")
    before = page.evaluate("view.from")
    page.mouse.down()
    page.mouse.move(box["x"] + span - 40, box["y"] + 54)
    page.mouse.up()
    assert page.evaluate("view.from") > before, "dragging moves"
    page.locator("#lanes").dblclick(position={"x": 200, "y": 50})
    assert page.evaluate(span) == whole
    page.locator("#device").hover(position={"x": 300, "y": 60})
    assert "weights" in page.inner_text("#tip")
    ink = "(() => { const c = byId('lanes'); return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v); })()"
    assert page.evaluate(ink) and not errors


def ink_of_row(page, row: int) -> float:
    """The share of the pixels of a lane that are drawn."""
    return page.evaluate(f"""(() => {{
        const c = byId('lanes'), ratio = c.width / c.clientWidth, top = ({row} * ROW + 6) * ratio, tall = TALL * ratio;
        const left = LEFT * ratio, pixels = c.getContext('2d').getImageData(left, top, c.width - left, tall).data;
        let drawn = 0;
        for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 128 && pixels[i] + pixels[i + 1] + pixels[i + 2] < 700) drawn++;
        return drawn / (pixels.length / 4);
    }})()""")


def test_a_lane_that_is_hardly_busy_is_not_drawn_solid(tab, tmp_path):
    """Ten thousand spans, of which each is narrower than a pixel: ink is about the share of the time that they take."""
    count, shares = 10_000, {"caller": 0.001, "compute": 0.5, "h2d": 0.05}
    spans = [
        Span(lane, f"forward layers.{n % 4}", n / count, (n + share) / count)
        for lane, share in shares.items()
        for n in range(count)
    ]
    (tmp_path / "report.html").write_text(page_of(explained(Stack(4)), Timeline(0.0, 1.0, tuple(spans)), "a step"))
    page = tab
    page.goto((tmp_path / "report.html").as_uri())
    assert page.evaluate("data.timeline.busy") == ["0.1 %", "50 %", "5 %"]
    caller, compute, h2d = (ink_of_row(page, row) for row in range(3))
    assert caller < 0.15 and h2d < 0.2 and 0.4 < compute < 0.6


@pytest.mark.parametrize("share", [0.5, 2.0, 50.0])
def test_the_memory_of_the_machine_is_a_line_in_the_picture(tab, errors, tmp_path, share):
    """Below the peak, above it on the same scale, and far above it."""
    report = explained(Stack(4))
    peak = report.device_memory.peak
    machine = dataclasses.replace(Machine.load("rtx4090"), device_memory=round(share * peak), device_reserve=0)
    report.save(tmp_path / "report.html", machine)
    page = tab
    page.goto((tmp_path / "report.html").as_uri())
    assert page.get_attribute("#verdict", "class") == ("fits" if share >= 1 else "lacks")
    dark = page.evaluate("""(() => {
        const c = byId('device'), ratio = c.width / c.clientWidth, pen = c.getContext('2d'), rows = [];
        for (let y = 0; y < c.height; y++) {
            const line = pen.getImageData(LEFT * ratio, y, 300 * ratio, 1).data; let drawn = 0;
            for (let i = 0; i < line.length; i += 4) {
                const [r, g, b, a] = line.slice(i, i + 4), is = (x, y, z) => Math.abs(r - x) + Math.abs(g - y) + Math.abs(b - z) < 60;
                if (a > 128 && (is(68, 68, 68) || is(192, 48, 38))) drawn++;
            }
            if (drawn > line.length / 4 * 0.4) rows.push(y / ratio);
        }
        return rows;
    })()""")
    assert dark and max(dark) - min(dark) < 4 and not errors, "one dashed line"


def test_the_script_takes_the_picture_of_the_readme(browser, tmp_path, monkeypatch):
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.syspath_prepend(str(examples))
    import page_picture

    page_picture.report_of_a_step().save(tmp_path / "report.html", machine="h200")
    page_picture.take_picture(browser, tmp_path / "report.html", tmp_path / "page.png")
    taken, of_the_readme = (path.read_bytes() for path in (tmp_path / "page.png", examples.parent / "docs" / "page.png"))
    assert taken[:8] == of_the_readme[:8] and taken[16:20] == of_the_readme[16:20], "PNGs of one width"


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (its path may be in the variable CHROMIUM)")
def test_markup_in_names_runs_nothing_in_a_browser(tmp_path):
    (tmp_path / "page.html").write_text(hostile_report().page(), encoding="utf-8")
    arguments = ["--headless=shell", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *arguments, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=60)
    assert "<title>l2l report</title>" in done.stdout and "<img" not in done.stdout
    assert f"<span>{html.escape(MARKUP[0], quote=False)}" in done.stdout, "the script of the page has run, and shows the name"
