"""`auto3d paper --run`: the rows of a paper's item, measured where the recipe says, beside their predictions."""

import csv
import json
import re
import shlex
from pathlib import Path

import pytest

from auto3d.errors import InputError
from auto3d.runtime.measurement import Measurement
from launch.commands.consoles import err
from launch.console.progress import sweep_progress
from launch.drivers.sweep import Retry
from launch.executors.warm import WarmProcess
from launch.papers.item import predicted_parts, read_item
from launch.papers.rows import RowMaker
from launch.recipe.settings import cluster

ITEM = """
paper: a test
place: figure 0
title: Two schedules
parts:
  - how: simulated
    title: Samples per second by size
    quantity: samples_per_s
    base:
      model: {factory: 'mine:make'}
      data: {source: synthetic, inputs: {x: {kind: normal, shape: [8]}, y: {kind: integers, high: 3}}}
      training: {global_batch: 8, check_capture: false}
      cluster: {devices_per_node: 2}
      search: {dp: [1], tp: [1], pp: [2], micro_batch_size: [2, 4], recompute: [none], trials: 1}
      measure: {warmup_iterations: 1, iterations: 2}
      launch: {executor: local}
    axes: [{few: {training.global_batch: 8}, many: {training.global_batch: 16}}]
    systems:
      gpipe: {search.schedule: [gpipe]}
      same: {search.schedule: [gpipe]}
      f1b: {search.schedule: [1f1b]}
      huge: {search.schedule: [gpipe], model.arguments.width: 100000, cluster.memory_gib: 0.001}
    printed: {gpipe: {few: 1.0, many: 2.0}}
    claims:
      - {says: f1b over gpipe, system: f1b, against: gpipe, form: ratio, paper: 1.0}
      - {says: of many, system: f1b, against: gpipe, form: ratio, settings: [many], paper: 1.0}
      - {says: huge fails, system: huge, form: fails, paper: [few, many]}
  - how: measured
    title: Here
    quantity: iteration_s
    base: own
    axes: [{one: {}}]
    systems: {any: {}}
"""


@pytest.fixture
def item(folder) -> Path:
    file = folder / "two.yaml"
    file.write_text(ITEM)
    return file


def rows(folder: Path, how: str) -> dict[tuple[str, str], float]:
    with (folder / "tables/papers/two.csv").open(newline="") as lines:
        found = [row for row in csv.DictReader(lines) if row["how"] == how and row["quantity"] == "samples_per_s"]
    return {(row["setting"], row["system"]): float(row["ours"]) for row in found if row["ours"]}


def trials(folder: Path) -> dict[str, str]:
    """The trials that have run, with the times at which they ended."""
    files = (folder / "runs/paper-two/trials").glob("*/measurement.json")
    return {file.parent.name: json.loads(file.read_text())["finished"] for file in files}


def test_the_rows_of_an_item_are_measured_as_one_sweep(folder, item, auto3d):
    auto3d("paper", "two.yaml", "--run")
    named = {(setting, system) for setting in ("few", "many") for system in ("gpipe", "same", "f1b")}
    measured = rows(folder, "measured here")
    assert measured.keys() == rows(folder, "simulated").keys() == named
    ran = trials(folder)
    assert len(ran) == 4, "two rows with the same plan share its trial"
    rates = {}
    for name in ran:
        one = Measurement.from_json((folder / f"runs/paper-two/trials/{name}/measurement.json").read_bytes())
        rates[one.plan.global_batch, one.plan.schedule] = one.plan.global_batch / one.median_s
    for (setting, system), rate in measured.items():
        which = {"few": 8, "many": 16}[setting], "1f1b" if system == "f1b" else "gpipe"
        assert rate == pytest.approx(rates[which], rel=1e-4)
    for setting in ("few", "many"):
        assert measured[setting, "gpipe"] == measured[setting, "same"]
    page = (folder / "tables/papers/two.md").read_text()
    assert "gpipe, measured here" in page
    assert "(paper 1.0)" in page
    assert "Not measured:" in page.split("huge", 1)[1]
    with (folder / "tables/papers/two-claims.csv").open(newline="") as lines:
        claims = {row["claim"]: row for row in csv.DictReader(lines)}
    ratio = measured["many", "f1b"] / measured["many", "gpipe"]
    assert claims["of many"]["measured here"] == f"{ratio:.3g}"
    assert claims["huge fails"]["verdict here"] == "reproduced"
    assert "f1b over gpipe" in (folder / "tables/papers/README.md").read_text()

    said = auto3d("status", "paper-two")
    assert "4 ok" in said.out
    assert "==> ok <==" in auto3d("logs", "paper-two", next(iter(ran))).out
    auto3d("resume", "paper-two")
    auto3d("paper", "two.yaml", "--run")
    assert trials(folder) == ran, "what has ended does not run again"


def test_a_grid_is_cut_by_labels_and_changed_by_overrides(folder, item, auto3d):
    auto3d("paper", "two.yaml", "--run", "--only", "many", "--only", "gpipe", "training.global_batch=12")
    assert rows(folder, "measured here").keys() == {("many", "gpipe")}
    (trial,) = trials(folder)
    assert json.loads((folder / f"runs/paper-two/trials/{trial}/plan.json").read_text())["global_batch"] == 12
    auto3d("paper", "two.yaml", "--only", "f1b", "search.micro_batch_size=[4]")
    assert rows(folder, "simulated").keys() == {("few", "f1b"), ("many", "f1b")}
    page = (folder / "tables/papers/two.md").read_text()
    assert "Again: `auto3d paper two.yaml 'search.micro_batch_size=[4]' --only f1b`" in page
    assert "on the figures of the paper's cluster" in page, "no override is about the cluster"
    assert not rows(folder, "measured here")
    assert not (folder / "results").exists(), "what a user has changed does not replace the shipped pages"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["two.yaml", "--run", "--only", "mny"], "--only: found 'mny'; it takes few, many, gpipe, same, f1b, huge"),
        (["two.yaml", "--dry-run"], "--dry-run belongs to --run"),
        (["two.yaml", "cluster.nods=2"], "cluster.nods: unknown; did you mean nodes?"),
        (["rannc-coarsening", "--run"], "no part of it is predicted for a cluster"),
        (["three.yaml"], "there is no 'three.yaml'; it takes the path of a .yaml file, or amp-placement"),
        (["two.yaml", "--run", "cluster.nodes=3"], "cluster.nodes"),
    ],
)
def test_bad_input_gets_one_line(folder, item, auto3d, arguments, words):
    said = auto3d("paper", *arguments, code=2).err
    assert words in said
    assert "Traceback" not in said


def test_a_row_keeps_its_number_of_devices_on_another_cluster(folder, item):
    maker = maker_of(item, "cluster.devices_per_node=1")
    (part,) = predicted_parts(read_item(item), []).parts
    assert cluster(maker.recipe(part, part.overrides(("few",), "f1b"))).devices == 1, "the user says so"
    (folder / "recipes" / "clusters").mkdir(parents=True)
    (folder / "recipes" / "clusters" / "single.yaml").write_text("devices_per_node: 1")
    (folder / "recipes" / "clusters" / "three.yaml").write_text("devices_per_node: 3")
    of_two = maker_of(item, "cluster=single").recipe(part, part.overrides(("few",), "f1b"))
    assert [node.devices for node in cluster(of_two).nodes] == [1, 1]
    with pytest.raises(InputError, match="the item has 2 devices here, and a node of this cluster 3; say how many"):
        maker_of(item, "cluster=three").recipe(part, part.overrides(("few",), "f1b"))


def test_a_system_that_is_a_planner_is_measured_under_its_own_plan(folder, item):
    planner = "{search.algorithm: rannc, search.trials: 9}"
    item.write_text(ITEM.replace("{search.schedule: [1f1b]}", planner))
    (part,) = predicted_parts(read_item(item), ["few", "f1b"]).parts
    (trial,) = maker_of(item).left([part], Retry.NONE)
    assert trial.recipe.values.search.planners == ["rannc"]
    assert trial.plan.stages[0].replicas == 2, "RaNNC has one stage on both devices"


def test_claims_of_settings_that_are_cut_away_are_left_out(item):
    claims = [claim.says for claim in predicted_parts(read_item(item), ["few"]).parts[0].claims]
    assert claims == ["f1b over gpipe"], "not that huge fails in both"


def maker_of(item: Path, *overrides: str) -> RowMaker:
    with sweep_progress(err) as watcher:
        return RowMaker("two", item, watcher, overrides)


def test_nothing_measured_is_a_failure(folder, item, auto3d):
    said = auto3d("paper", "two.yaml", "--run", "--only", "huge", code=1).err
    assert "no trial succeeded" in said


def test_a_dry_run_prints_one_array_for_all_rows(folder, item, auto3d):
    printed = auto3d("paper", "two.yaml", "--run", "--dry-run").out
    assert printed.count("#SBATCH --array=0-3%") == 1
    assert not (folder / "runs").exists()


def test_what_would_help_a_row_is_a_command_of_its_item(folder, item, auto3d):
    """A row needs two machines: the message names commands on the item, since no recipe has the name of its runs."""
    said = auto3d("paper", "two.yaml", "--run", "--only", "gpipe", "cluster.nodes=2", code=2).err
    predict, measure = re.findall(r"`(auto3d [^`]*)`", said)
    assert predict == "auto3d paper two.yaml cluster.nodes=2"
    assert measure == "auto3d paper two.yaml cluster.nodes=2 launch.executor=slurm --run"
    assert "paper-two" not in said.replace("runs/paper-two", "")
    auto3d(*shlex.split(predict)[1:], "--only", "gpipe", "--only", "few")
    said = auto3d(*shlex.split(measure)[1:], "--detach", "--only", "gpipe", "--only", "few", code=2).err
    assert "SLURM" in said, "it is a command, which needs SLURM"


def test_commands_on_a_row_are_those_of_its_item(folder, item):
    maker = maker_of(item, "training.global_batch=12")
    row = maker.store(predicted_parts(read_item(item), []).parts)
    assert row.command("sweep", "--retry") == f"auto3d paper {item} training.global_batch=12 --run --retry"
    assert row.command("plan", "training.global_batch=24") == f"auto3d paper {item} training.global_batch=24"
    assert row.follow_up("resume") == "auto3d resume paper-two"


def test_rows_that_differ_in_their_plans_alone_are_forked_from_one_process(folder, auto3d, monkeypatch):
    text = ITEM[: ITEM.index("  - how: simulated")] + ITEM[ITEM.index("  - how: measured") :]
    base = ITEM[ITEM.index("    base:") : ITEM.index("    axes:")]
    text = text.replace("    base: own\n", base).replace(
        "axes: [{one: {}}]", "axes: [{few: {}, longer: {measure.iterations: 3}}]"
    )
    text = text.replace("systems: {any: {}}", "systems: {a: {search.schedule: [gpipe]}, b: {search.schedule: [1f1b]}}")
    (folder / "two.yaml").write_text(text)
    starts = []
    start = WarmProcess._start
    monkeypatch.setattr(WarmProcess, "_start", lambda self, call: (starts.append(call.name), start(self, call))[1])
    auto3d("paper", "two.yaml")
    assert len(trials(folder)) == 8  # two micro-batch sizes each
    assert len(starts) == 2
    with (folder / "results/papers/two.csv").open(newline="") as lines:
        found = {(row["setting"], row["system"]) for row in csv.DictReader(lines) if row["quantity"] == "iteration_s"}
    assert found == {(setting, system) for setting in ("few", "longer") for system in ("a", "b")}
