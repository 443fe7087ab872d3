"""How long the page of `auto3d report` takes to load with 1,000 trials; with ``--picture``, the picture of a page.

    python -m tests.benchmarks.report
    python -m tests.benchmarks.report --picture tables/gpt175b/report.html docs/report.png

It loads the page five times in headless Chromium (apt-get install chromium) and prints the median of the time from
opening the file until the table and the first timeline are drawn. The goal is 2 seconds.
"""

import argparse
import io
import tempfile
from pathlib import Path
from statistics import median

from PIL import Image

from launch.report.release import Target
from tests.launch.report.pages import browser, report_with, write
from tests.targets import end

PLANS = 1000
LOADS = 5
GOAL_S = 2.0
READY = "html[data-ready]"


def load_times() -> list[float]:
    """Seconds of each load, by the browser's own clock."""
    times = []
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        address = write(report_with(PLANS), Path(folder) / "report.html")
        for _ in range(LOADS):
            page = chromium.new_page(viewport={"width": 1280, "height": 900})
            page.goto(address, wait_until="commit")
            page.wait_for_selector(READY, state="attached")
            times.append(page.evaluate("performance.now()") / 1000)
            page.close()
    return times


def picture(source: Path, target: Path) -> None:
    """A picture of the first screens of the page ``source``, with few colours, so that it is small."""
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": 1180, "height": 2240}, color_scheme="light")
        page.goto(source.resolve().as_uri())
        page.wait_for_selector(READY, state="attached")
        page.wait_for_selector("#timeline .plot-container")
        taken = Image.open(io.BytesIO(page.screenshot()))
    taken.convert("RGB").quantize(colors=200, dither=Image.Dither.NONE).save(target, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", nargs=2, type=Path, metavar=("PAGE", "PNG"))
    if arguments := parser.parse_args().picture:
        picture(*arguments)
        return
    times = load_times()
    print(f"{PLANS:,} trials load in {median(times):.2f} s (median of {LOADS}; {min(times):.2f} to {max(times):.2f} s)")
    end([Target(what=f"page of {PLANS:,} trials, loaded and drawn", found=median(times), wish=GOAL_S, unit=" s")])


if __name__ == "__main__":
    main()
