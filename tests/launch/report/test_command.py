"""`auto3d report` after a sweep, after a tune, and where nothing ran."""

import json
import re
import sys
from pathlib import Path

import pytest

from launch.console import tables
from launch.recipe.load import load
from launch.store.trials import Command, last_command, measurement_of, write_command

SPACE = "search.micro_batch_size=[2,4]"


def content(file: Path) -> dict:
    """What the page in ``file`` was given."""
    text = file.read_text()
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', text)
    assert found
    return json.loads(found[1])


def details(file: Path) -> list[dict]:
    return [json.loads(text) for text in re.findall(r'id="detail-\d+">(.*?)</script>', file.read_text())]


def test_where_nothing_ran_it_is_the_search_and_says_so(folder, auto3d):
    printed = auto3d("report", "own.yaml", SPACE).out
    file = folder / "tables/own/report.html"
    assert printed.startswith("written: tables/own/report.html, 2 plans, 0 of them measured\nNothing on this page was")
    page = content(file)
    searched = json.loads(auto3d("plan", "own.yaml", SPACE, "--json").out)
    assert page["verb"] == "plan"
    assert "auto3d sweep own.yaml" in page["remarks"][0]
    assert [row["status"] for row in page["rows"]] == ["predicted"] * 2
    wanted = [(one["predicted_s"], one["peak_bytes"]) for one in searched["candidates"]]
    found = [(row["predicted_s"], row["predicted_peak"]) for row in page["rows"]]
    assert [one for pair in found for one in pair] == pytest.approx([one for pair in wanted for one in pair], rel=1e-5)
    assert sum(one["count"] for one in page["refused"]) == sum(one["count"] for one in searched["infeasible"])
    estimate = searched["candidates"][0]["estimate"]
    del estimate["seconds"], estimate["memory"]
    assert details(file)[0]["parts"] == pytest.approx(estimate, rel=1e-5)


def test_after_a_sweep_its_measurements_stand_beside_predictions(folder, auto3d):
    auto3d("sweep", "own.yaml", SPACE)
    page = _reported(auto3d, folder)
    measured = tables.rows(tables.results_of(load("own.yaml")))
    assert page["verb"] == "sweep"
    assert "auto3d profile own.yaml" in page["remarks"][0], "nothing is known about the speed of this machine"
    assert [row["error"] for row in page["rows"]] == [None, None]
    assert [row["measured_s"] for row in page["rows"]] == pytest.approx(
        [one["iteration_s"] for one in measured], rel=1e-5
    )
    assert [row["measured_peak"] for row in page["rows"]] == pytest.approx(
        [one["peak_bytes"] for one in measured], rel=1e-5
    )
    assert page["measured"].startswith("Measured, not predicted: mine:make, global batch 8; median of")
    assert [json.loads(one["plan"]) for one in details(folder / "tables/own/report.html")] == [
        json.loads(json.dumps(one["plan"])) for one in measured
    ]
    commands = [one["command"] for one in page["commands"]]
    assert commands[0] == f"auto3d sweep own.yaml '{SPACE}'"
    assert commands[-1] == f"auto3d train own.yaml '{SPACE}' --plan plan.json"

    mine = (folder / "mine.py").read_text()
    (folder / "mine.py").write_text(mine.replace("torch.relu(self.a(x))", "torch.relu(torch.tanh(self.a(x)))"))
    sys.modules.pop("mine", None)  # another process would import it anew
    changed = _reported(auto3d, folder)
    assert [row["predicted_s"] for row in changed["rows"]] == [None, None], "these plans cut another model"
    assert changed["remarks"][0] == "2 plans without a prediction: the model has changed since the trial."
    assert [row["measured_s"] for row in changed["rows"]] == [row["measured_s"] for row in page["rows"]]

    (folder / "mine.py").write_text(mine)
    sys.modules.pop("mine", None)
    page = _reported(auto3d, folder, "training.global_batch=16")
    assert page["verb"] == "plan"
    assert "its last sweep had other settings" in page["remarks"][0]


@pytest.mark.soak
def test_after_a_tune_that_was_interrupted_the_plans_that_were_not_tried_are_there_too(folder, auto3d):
    space = [SPACE, "search.trials=2", "prediction.profile=none"]
    ranked = json.loads(auto3d("plan", "own.yaml", *space, "--json").out)["candidates"]
    auto3d("tune", "own.yaml", *space)
    recipe = load("own.yaml", space)
    first = last_command(recipe).trials[0]
    write_command(recipe, Command("tune", [], trials=[first]))  # the tune writes this before its second trial
    page = _reported(auto3d, folder)
    assert page["verb"] == "tune"
    assert [(row["status"], row["trials"]) for row in page["rows"]] == [("ok", 1), ("predicted", 0)]
    assert page["rows"][0]["measured_s"] == pytest.approx(measurement_of(recipe, first).median_s, rel=1e-5)
    assert [row["predicted_s"] for row in page["rows"]] == pytest.approx(
        [one["predicted_s"] for one in ranked], rel=1e-5
    )
    assert [row["partition"] for row in page["rows"]] == ["uniform"] * 2
    assert page["commands"][0]["command"].startswith("auto3d tune own.yaml ")
    assert _reported(auto3d, folder, SPACE, "training.optimizer=sgd")["verb"] == "plan", "other trials than these"


def test_no_folder_of_this_machine_is_in_the_page(folder, auto3d):
    own = folder / "its own <b>&'.yaml"
    own.write_text((folder / "own.yaml").read_text())
    (folder / "read.txt").write_text("text")
    auto3d("report", str(own), SPACE, f"data.files=[{folder}/read.txt]")
    file = folder / f"tables/{own.stem}/report.html"
    assert str(folder) not in file.read_text()
    assert str(Path.home()) not in file.read_text()
    assert content(file)["recipe"] == own.stem
    assert "<b>&'" not in file.read_text().partition("<script")[0]
    command = content(file)["commands"][0]["command"]
    assert command == f"""auto3d plan 'its own <b>&'"'"'.yaml' '{SPACE}' 'data.files=[…/read.txt]'"""


def test_a_file_that_cannot_be_written_is_one_line(folder, auto3d):
    error = auto3d("report", "own.yaml", SPACE, "--output", "absent/report.html", code=2).err
    assert error.splitlines()[-1] == "auto3d: absent/report.html: cannot be written: No such file or directory"


def _reported(auto3d, folder: Path, *overrides: str) -> dict:
    auto3d("report", "own.yaml", *overrides)
    return content(folder / "tables/own/report.html")
