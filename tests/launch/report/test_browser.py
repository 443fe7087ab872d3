"""The page in a real browser, opened as a file, with the network forbidden."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.report.pages import browser, report_with, write

HOSTILE = (
    "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 2'><b>bold</b>"
    "<a href='https://example.org'>a</a>"
)


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


@contextmanager
def opening(chromium: Any, folder: Path) -> Iterator[Callable[..., Any]]:
    """Opens the page of a report; fails at an error of a script, or at any request but that for the page."""
    contexts, problems, requests = [], [], []

    def open_(report, **options):
        context = chromium.new_context(viewport={"width": 1280, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(error.message))
        page.on("console", lambda line: problems.append(line.text) if line.type in ("error", "warning") else None)
        page.on("request", lambda request: requests.append(request.url))
        address = write(report, folder / "report.html")
        page.goto(address)
        page.wait_for_selector("html[data-ready]", state="attached")
        page.address = address
        return page

    yield open_
    for context in contexts:
        context.close()
    assert problems == []
    assert all(url.startswith(("file://", "blob:")) for url in requests)


@pytest.fixture
def opened(chromium, tmp_path):
    with opening(chromium, tmp_path) as open_:
        yield open_


@pytest.fixture(scope="module")
def of_eight(chromium, tmp_path_factory):
    """A report of eight plans and its page, which takes seconds to open, for tests that choose a plan themselves."""
    report = report_with(8)
    with opening(chromium, tmp_path_factory.mktemp("eight")) as open_:
        page = open_(report)
        assert page.input_value("#plan") == str(report.details[0].row)
        yield report, page


def numbers(page) -> list[int]:
    """The numbers of the plans that the table shows, in its order."""
    rows = page.eval_on_selector_all(
        "#table tbody tr", "rows => rows.filter(r => !r.hidden).map(r => r.cells[0].innerText)"
    )
    return [int(row) for row in rows]


def test_the_table_sorts_filters_and_picks(opened):
    report = report_with(24)
    page = opened(report)
    assert numbers(page) == list(range(1, 25))
    assert page.inner_text("#count") == "24 plans"

    page.get_by_role("button", name="predicted (s)").or_(page.get_by_role("button", name="predicted (ms)")).click()
    shown = [report.rows[number - 1].predicted_s for number in numbers(page)]
    assert shown == pytest.approx(sorted(row.predicted_s for row in report.rows))
    page.get_by_role("button", name="error").click()
    page.get_by_role("button", name="error").click()
    assert page.get_attribute("th:has-text('error')", "aria-sort") == "descending"
    errors = [report.rows[n - 1].error for n in numbers(page)]
    assert errors[-1] is None, "an unknown value is last in either order"
    assert errors[:-1] == sorted(errors[:-1], reverse=True)

    for text, holds in {
        "chimera": lambda row: row.schedule == "chimera",
        "pp>=8 mb=2": lambda row: row.pp >= 8,
        "status=failed": lambda row: row.status == "failed",
        "error<5 schedule=1f1b": lambda row: row.error is not None and abs(row.error) < 0.05 and row.schedule == "1f1b",
    }.items():
        page.fill("#filter", text)
        shown = {place for place, row in enumerate(report.rows, 1) if holds(row)}
        assert set(numbers(page)) == shown, text
        assert page.inner_text("#count") == f"{len(shown)} of 24 plans"
    page.fill("#filter", "")

    page.focus("button.pick:text-is('3')")
    page.keyboard.press("Enter")
    assert page.input_value("#plan") == "2"
    assert report.rows[2].name in page.get_attribute("#timeline", "aria-label")
    assert "chosen" in page.get_attribute("#table tr:has(button.pick:text-is('3'))", "class")


def test_the_timeline_draws_what_the_simulator_made(of_eight):
    report, page = of_eight
    for detail in report.details:
        page.select_option("#plan", str(detail.row))
        bars = page.evaluate("(({x, base, y}) => ({x, base, y}))(document.getElementById('timeline').data[0])")
        scale = detail.operations.start[-1] / bars["base"][-1]
        assert [x * scale for x in bars["x"]] == pytest.approx(detail.operations.duration, rel=1e-4)
        assert [x * scale for x in bars["base"]] == pytest.approx(detail.operations.start, rel=1e-4, abs=1e-12)
        assert bars["y"] == detail.operations.device
        assert page.locator("#timeline .trace.bars").first.locator(".point").count() == len(detail.operations.start)
    colours = {
        mode: page.evaluate(
            "mode => { const list = document.getElementById('colours'); list.value = mode;"
            "list.dispatchEvent(new Event('change'));"
            "return new Set(document.getElementById('timeline').data[0].marker.color).size }", mode
        )
        for mode in ("micro", "kind")
    }  # fmt: skip
    assert colours["micro"] > colours["kind"] > 1


def test_the_keyboard_zooms_and_reads_the_timeline(of_eight):
    report, page = of_eight
    detail = report.details[0]
    page.select_option("#plan", str(detail.row))
    span = "(([a, b]) => b - a)(document.getElementById('timeline').layout.xaxis.range)"
    page.focus("#timeline")
    before = page.evaluate(span)
    page.keyboard.press("+")
    assert page.evaluate(span) == pytest.approx(before / 2)
    page.keyboard.press("0")
    assert page.evaluate(span) == pytest.approx(before, rel=0.01)
    page.keyboard.press("n")
    readout = page.inner_text("#timeline-readout")
    assert f"device {detail.operations.device[0]}: forward of micro-batch {detail.operations.label[0]}" in readout
    page.locator("#memory-chart").scroll_into_view_if_needed()
    page.wait_for_selector("#memory-chart .plot-container")
    page.focus("#memory-chart")
    page.keyboard.press("n")
    assert report.rows[report.fronts["measured"][0]].name in page.inner_text("#memory-readout")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_is_the_systems_until_the_reader_chooses(opened, scheme):
    page = opened(report_with(6), color_scheme=scheme)
    other = {"light": "dark", "dark": "light"}[scheme]
    look = "[document.documentElement.dataset.theme, document.getElementById('timeline').layout.paper_bgcolor]"
    (first, back), _ = page.evaluate(look), page.click("#theme")
    second, changed = page.evaluate(look)
    assert (first, second) == (scheme, other)
    assert back != changed, "charts change with the page"
    page.reload()
    page.wait_for_selector("html[data-ready]", state="attached")
    assert page.evaluate(look) == [other, changed]


def test_no_text_of_a_user_is_html(opened, tmp_path):
    report = report_with(6, name=HOSTILE, problem=HOSTILE)
    report = replace(report, rows=[replace(row, name=f"{HOSTILE} {row.name}", schedule=HOSTILE) for row in report.rows])
    page = opened(report)
    for id_ in ("parts-chart", "memory-chart", "accuracy-chart"):
        page.locator(f"#{id_}").scroll_into_view_if_needed()
        page.wait_for_selector(f"#{id_} .plot-container")
    assert page.evaluate("window.broken") is None
    assert page.locator("img, main b, h1 *, svg a").count() == 0
    assert "<b>bold</b>" in page.inner_text("h1")
    assert page.title().startswith("<")
    assert str(tmp_path) not in (tmp_path / "report.html").read_text()


def test_a_saved_plan_is_the_plan(of_eight):
    report, page = of_eight
    page.select_option("#plan", str(report.details[0].row))
    with page.expect_download() as caught:
        page.click("#save")
    assert caught.value.suggested_filename == "plan.json"
    with open(caught.value.path()) as file:
        assert json.load(file) == json.loads(report.details[0].plan)


def test_a_thousand_plans_are_all_there(opened):
    """How long it takes is measured by tests/benchmarks/report.py."""
    page = opened(report_with(1000))
    assert len(numbers(page)) == 1000
    page.fill("#filter", "gpipe pp=2")
    assert 0 < len(numbers(page)) < 1000
    page.locator("#accuracy-chart").scroll_into_view_if_needed()
    page.wait_for_selector("#accuracy-chart .plot-container")
    assert page.locator("#accuracy-chart .trace.scatter").first.locator(".point").count() == 999
