"""Overrides have the same effect in any order, or are refused in one line."""

from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.recipe.load import RecipeError, load
from launch.recipe.overrides import KeyPath, read_path, replaced, write_path
from launch.recipe.schema import Recipe
from launch.recipe.shipped import RECIPES

BASE = """
model: gpt2-tiny
cluster: laptop
data: {sequence_length: 64, inputs: {input_ids: {kind: tokens}, labels: {kind: tokens}}}
training: {seed: 3, betas: [0.9, 0.99]}
search: {dp: [1, 2]}
plan: {pp: 2}
"""
NAMES = {"model": ["gpt2-tiny", "gpt2-xl"], "cluster": ["laptop", "a100-80g", "p3-mixed"]}
FOLDERS = {"model": "models", "cluster": "clusters"}
VALUES: dict[str, list[Any]] = {
    "cluster.nodes": [1, 2, 7, 0],  # 0 is refused
    "cluster.devices_per_node": [1, 4],
    "cluster.memory_gib": [3.5, None],
    "cluster.inside.gbit_per_s": [7.0, "much"],
    "cluster.inside.lanes": [2],
    "cluster.outside.latency_us": [4.5],
    "cluster.more[0].nodes": [1, 3],  # only p3-mixed has this list
    "cluster.more[0].inside.lanes": [1],
    "cluster.more[1].nodes": [2],
    "model.config.n_layer": [2, 24],
    "model.config.layer_types": [["full", "sliding"]],
    "model.config.id2label": [{0: "cat"}],
    "model.config.text_config.hidden_size": [32],
    "model.config.text_config.num_layers": [2],
    "model.factory": ["a:b", None],
    "data.sequence_length": [16, 32],
    "data.inputs.labels.kind": ["next-tokens", "nxt"],
    "data.inputs.pixels.kind": ["normal"],
    "data.inputs.pixels.shape": [[3, 4]],
    "training.seed": [1, 2],
    "training.betas[0]": [0.5],
    "training.betas[1]": [0.25, 2],
    "training.betas[2]": [0.75],
    "search.dp": [[1], "auto"],
    "plan.dp": [2],
    "plan.schedule": ["gpipe"],
    "launch.additional_parameters.licenses": ["matlab"],
}  # fmt: skip


@st.composite
def assignments(draw) -> tuple[dict[str, str], dict[KeyPath, Any]]:
    """Names of files by group, and values by path."""
    names = {group: draw(st.sampled_from(choices)) for group, choices in NAMES.items() if draw(st.booleans())}
    keys = draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=6))
    return names, {read_path(key): draw(st.sampled_from(VALUES[key])) for key in keys}


@st.composite
def written(draw) -> tuple[dict[str, str], dict[KeyPath, Any], list[str]]:
    """The same, and the overrides that set them: each value alone or several in one mapping, in any order."""
    names, values = draw(assignments())
    overrides = [f"{group}={name}" for group, name in names.items()]
    together: dict[KeyPath, dict[str, Any]] = {}
    for path, value in values.items():
        names_first = next((place for place, part in enumerate(path) if isinstance(part, int)), len(path) - 1)
        length = draw(st.integers(1, names_first)) if names_first and not any(isinstance(p, int) for p in path) else 0
        if not length or draw(st.booleans()):
            overrides.append(f"{write_path(path)}={as_text(value)}")
            continue
        holder = together.setdefault(path[:length], {})
        for name in path[length:-1]:
            holder = holder.setdefault(name, {})
        holder[path[-1]] = value
    overrides += [f"{write_path(path)}={as_text(value)}" for path, value in together.items()]
    return names, values, draw(st.permutations(overrides))


def as_text(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()


def in_a_file(names: dict[str, str], values: dict[KeyPath, Any], file: Path) -> Recipe | None:
    """The recipe whose file holds all of these values; None if it is refused or a list lacks an item."""
    raw = yaml.safe_load(BASE)
    for group, folder in FOLDERS.items():
        raw[group] = yaml.safe_load((RECIPES / folder / f"{names.get(group, raw[group])}.yaml").read_text())
    for path, value in values.items():
        holder = raw
        for part, following in pairwise(path):
            if isinstance(following, int) and len(holder.get(part, [])) <= following:
                return None
            holder = holder[part] if isinstance(part, int) else holder.setdefault(part, {})
        holder[path[-1]] = deepcopy(value)
    file.write_text(yaml.safe_dump(raw))
    try:
        return load(str(file)).values
    except RecipeError:
        return None


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written())
def test_overrides_are_as_if_written_in_the_file(tmp_path, case):
    names, values, overrides = case
    (tmp_path / "base.yaml").write_text(BASE)
    expected = in_a_file(names, values, tmp_path / "whole.yaml")
    if expected is not None:
        assert load(str(tmp_path / "base.yaml"), overrides).values == expected
        return
    with pytest.raises(RecipeError) as refused:
        load(str(tmp_path / "base.yaml"), overrides)
    assert "\n" not in str(refused.value)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(["cluster=a100-80g", "cluster.nodes=2", "model=gpt2-xl", "model.config.n_layer=24"]))
def test_a_file_comes_before_its_keys(tmp_path, overrides):
    (tmp_path / "base.yaml").write_text(BASE)
    values = load(str(tmp_path / "base.yaml"), overrides).values
    assert (values.cluster.accelerator, values.cluster.nodes) == ("A100-80GB", 2)
    assert (values.model.config["n_embd"], values.model.config["n_layer"]) == (1600, 24)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["training.seed=1", "training.seed=2"], ["command line: training.seed: given twice, as ", "; give it once"]),
        (["cluster=laptop", "cluster=a100-80g"], ["cluster: given twice, as ", "'laptop'", "'a100-80g'"]),
        (["cluster={nodes: 2}", "cluster.nodes=3"], ["cluster.nodes: given twice"]),
        (["training.betas=[0.9, 0.8]", "training.betas[0]=0.8"], ["training.betas[0]: training.betas=[0.9, 0.8] sets"]),
        (["training=4", "training.seed=3"], ["training"]),
        (["plan=null", "plan.dp=2"], ["plan.dp: plan=None sets the same key"]),
        (["training.betas[2]=0.5"], ["training.betas[2]: there is no such item; training.betas has 2 items"]),
        (["training.seed[0]=1"], ["training.seed[0]", "training.seed is not a list"]),
        (["training.betas[0]=much"], ["command line: training.betas[0]", "'much'", "list of numbers"]),
        (["trainng.betas[0]=1"], ["trainng", "did you mean training"]),
        (["cluster[0]=1"], ["cluster[0]", "no such item"]),
        (["training.=1"], ["training.=1: not an override"]),
        (["model.config={}"], ["model.config: found {}", "at least one"]),
        (["cluster.inside={gbit_per_s: 3, lane: 2}"], ["cluster.inside.lane", "did you mean lanes"]),
    ],
)
def test_what_cannot_be_is_refused_in_either_order(tmp_path, overrides, words):
    (tmp_path / "base.yaml").write_text(BASE)
    for order in (overrides, overrides[::-1]):
        with pytest.raises(RecipeError) as refused:
            load(str(tmp_path / "base.yaml"), order)
        assert "\n" not in str(refused.value)
        for word in words:
            assert word in str(refused.value)


def test_the_same_twice_is_once(tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)
    overrides = ["cluster=a100-80g", "training.seed=5", "cluster=a100-80g", "training={seed: 5}"]
    assert load(str(tmp_path / "base.yaml"), overrides).values.training.seed == 5


def test_messages_name_where_a_value_came_from(tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)
    loaded = load(str(tmp_path / "base.yaml"), ["cluster=p3-mixed", "cluster.more[0].nodes=2", "training.betas[0]=0.5"])
    for key, where in {
        "cluster": "command line",
        "cluster.nodes": "p3-mixed.yaml",
        "cluster.more[0].nodes": "command line",
        "cluster.more[0].accelerator": "p3-mixed.yaml",
        "model.config.n_layer": "gpt2-tiny.yaml",
        "training.betas": "command line",
        "training.seed": "base.yaml",
    }.items():
        assert str(loaded.error(key, "wrong")).split(f": {key}: ")[0].endswith(where), key


def test_commands_and_rows_replace_keys():
    """Printed commands and rows of `auto3d predict` replace keys in this way."""
    user = ["plan={recompute: full, dp: 2}", "cluster=laptop", "training.seed=4"]
    assert replaced(user, ["plan.recompute=0.5"]) == ["plan.dp=2", *user[1:], "plan.recompute=0.5"]
    assert replaced(user, ["cluster.nodes=2"]) == [*user, "cluster.nodes=2"]
    loaded = load("tiny", user)
    assert loaded.changed(["plan.recompute=0.5", "training.seed=7"]).values.plan.dp == 2
    assert loaded.command("train", "plan.recompute=0.5", "--fresh").endswith("seed=4 plan.recompute=0.5 --fresh")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "training.parameter_groups=[{dimensions: 2}, {optimizr: sgd}]",
            "[1].optimizr: unknown; did you mean optimizer?",
        ),
        ("training.parameter_groups=[{dimensions: two}]", "[0].dimensions: found 'two'; it takes a whole number"),
        ("training.parameter_groups=[{learning_rate: -1}]", "[0].learning_rate: found -1.0; it takes a number of at"),
        ("training.parameter_groups=[sgd]", "[0]: found 'sgd'; it takes a list of groups"),
        ("training.parameter_groups=[{optimizer: lion}]", "[0].optimizer: found 'lion'; it takes adamw"),
        (
            "training.parameter_groups=[{optimizer_arguments: {eps: 1}}]",
            "[0].optimizer_arguments: belongs to training.",
        ),
        ("cluster.more=[{nodes: 1}, {inside: {gbit_per_s: fast}}]", "[1].inside.gbit_per_s: found 'fast'"),
    ],
)
def test_what_is_wrong_in_an_item_of_a_list_is_named_with_its_number(tmp_path, override, told):
    (tmp_path / "base.yaml").write_text(BASE)
    with pytest.raises(RecipeError) as refused:
        load(str(tmp_path / "base.yaml"), [override])
    assert override.partition("=")[0] + told in str(refused.value)
    assert "\n" not in str(refused.value)
