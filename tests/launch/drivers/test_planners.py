"""search.planners: a sweep also runs the plan that each planner finds alone."""

import json

import pytest

from launch.recipe.load import load
from launch.store import trials

PLANNERS = ["chimera", "rannc", "amp", "megatron", "annealing"]
SPACE = [
    *("search.dp=auto", "search.tp=[1]", "search.pp=auto", "search.micro_batch_size=[1,2]", "search.schedule=[1f1b]"),
    *("search.max_trials=1", "measure.warmup_iterations=1", "measure.iterations=1", "prediction.profile=none"),
    *("cluster.accelerator=RTX3090-24GB", "cluster.device=cpu"),
]


@pytest.fixture
def rows(folder, auto3d):
    """Runs a sweep with planners, and gives the records of its table."""

    def sweep(*planners: str, space: list[str] = SPACE) -> list[dict]:
        auto3d("sweep", "small.yaml", *space, f"search.planners=[{','.join(planners)}]")
        return json.loads(auto3d("table", "small.yaml", "--json").out)

    return sweep


def finished(folder) -> dict[str, str]:
    files = (folder / "runs/small/trials").glob("*/measurement.json")
    return {file.parent.name: json.loads(file.read_text())["finished"] for file in files}


def test_each_planner_has_a_row_with_its_own_plan(folder, rows, auto3d):
    found = rows(*PLANNERS)
    assert [one["status"] for one in found] == ["ok"] * len(found)
    planned = {name: one for one in found for name in one["planner"].split(", ") if name}
    assert sorted(planned) == sorted(PLANNERS)
    assert all(one["predicted_s"] and one["iteration_s"] for one in found)
    for name in PLANNERS:
        alone = json.loads(auto3d("plan", "small.yaml", *SPACE, f"search.algorithm={name}", "--json").out)
        best = alone["candidates"][0]
        for axis in ("dp", "tp", "pp", "micro_batch_size"):
            assert planned[name]["plan"][axis] == best[axis], (name, axis)
    auto3d("report", "small.yaml")
    assert all(name in (folder / "tables/small/report.html").read_text() for name in ("1f1b", "chimera"))
    ran = finished(folder)
    assert rows(*PLANNERS) == found
    assert finished(folder) == ran, "what has ended does not run again"


def test_a_planner_without_a_plan_is_named_with_the_reason(folder, auto3d):
    one_stage = ["search.pp=[1]" if "search.pp" in override else override for override in SPACE]
    said = auto3d("sweep", "small.yaml", *one_stage, "search.planners=[chimera,megatron]")
    assert "search.planners: chimera has no plan: " in said.err
    assert "chimera makes no plan of this search space: it takes none of its 2 candidates" in said.err
    (row, *others) = json.loads(auto3d("table", "small.yaml", "--json").out)
    assert "megatron" in {one["planner"] for one in (row, *others)}


def test_what_has_no_effect_is_said(folder, auto3d):
    said = auto3d("sweep", "own.yaml", "search.algorithm=chimera", "search.trials=3", "search.micro_batch_size=[2]").err
    assert "search.trials has no effect on `auto3d sweep`" in said
    assert "to run its own plan too: search.planners=[chimera]" in said
    assert "plan.pp has no effect on `auto3d plan`" in auto3d("plan", "own.yaml", "plan.pp=1").err
    assert "no effect" not in auto3d("plan", "own.yaml").err, "a recipe has keys for all commands"
    assert (
        "search.max_trials has no effect on `auto3d tune`"
        in auto3d("tune", "own.yaml", "search.max_trials=3", "search.trials=1", "prediction.profile=none").err
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["search.rannc_blocks=4"], "only search.algorithm=rannc reads it"),
        (["search.rannc_blocks=4", "search.algorithm=rannc-any-depth"], ""),
        (["search.amp_cooling=0.9", "search.planners=[amp]"], "only search.algorithm=amp reads it"),
        (["search.amp_mesh=[4,1]"], "only a placement of AMP, such as search.placement=[horizontal], reads it"),
        (["search.amp_mesh=[2,1]", "search.placement=[vertical]", "cluster.devices_per_node=2"], ""),
    ],
)
def test_keys_of_planners_have_no_effect_on_others(folder, auto3d, overrides, said):
    lines = [line for line in auto3d("plan", "own.yaml", *overrides).err.splitlines() if "reads it" in line]
    key = overrides[0].split("=")[0]
    assert lines == ([f"{key} has no effect: {said}"] if said else [])


def test_stages_are_cut_between_as_many_subgraphs_as_the_recipe_says(folder, auto3d):
    """Two subgraphs give two stages, and no four."""
    space = [override for override in SPACE if "search.pp" not in override]
    two = json.loads(auto3d("plan", "small.yaml", *space, "search.pp=[2]", "search.subgraphs=2", "--json").out)
    assert two["candidates"][0]["pp"] == 2
    assert json.loads(auto3d("plan", "small.yaml", *space, "search.pp=[4]", "--json").out)["candidates"]
    said = auto3d("plan", "small.yaml", *space, "search.pp=[4]", "search.subgraphs=2", code=2).err
    assert "4 stages or more, but the model has 2 subgraphs; each stage needs one" in said
    said = auto3d("plan", "small.yaml", *space, "search.pp=[2]", "search.subgraphs=99", code=2).err
    assert "99 subgraphs, but this model divides into at least 1 and at most " in said


def test_a_mesh_of_another_number_of_devices_is_refused(folder, auto3d):
    said = auto3d("plan", "own.yaml", "search.amp_mesh=[3,3]", code=2).err
    assert "search.amp_mesh: found [3, 3]; it takes [rows, columns], rows × columns = " in said


def test_sweeps_from_before_there_were_keys_of_planners_are_the_same_sweeps(folder, monkeypatch):
    """With its default, such a key is no part of what tells one sweep from another; with another value it is."""
    monkeypatch.setattr(trials, "_digest", lambda content: content)
    changed = {
        "planners": "[amp]",
        "subgraphs": "2",
        "rannc_blocks": "8",
        "rannc_smallest_micro_batch": "2",
        "amp_mesh": "[2,2]",
        "amp_cooling": "0.9",
    }
    assert not changed.keys() & trials.settings_digest(load("own.yaml"))[1].keys()
    for key, value in changed.items():
        assert key in trials.settings_digest(load("own.yaml", [f"search.{key}={value}"]))[1]
