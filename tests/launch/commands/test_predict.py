"""`auto3d predict` and `auto3d calibrate`: rows of a file in, seconds and bytes out; errors are one line."""

import csv
import json
from xml.etree import ElementTree

import pytest

from auto3d.cost.calibrate import BOUNDS
from auto3d.cost.memory.device import ENTRIES, in_gib
from launch.console.calibrate import WRITTEN
from launch.recipe.cluster_schema import FIGURES
from tests.launch.conftest import GPT2

CLUSTER = """
nodes: 2
devices_per_node: 4
device: cuda
accelerator: T4
outside: {gbit_per_s: 1, lanes: 1}
"""
LAYERS = """
model:
  layers: layers.csv
  layers_of: small
  layer_sizes:
    - {parameters: 1.0e+6, traffic: 1.0e+5, output: 1.0e+5, reductions: 1}
    - {count: 4, parameters: 3.0e+6, flops: 5.0e+9, products: 6, traffic: 1.0e+7, saved: 1.0e+6, output: 1.0e+5,
       reductions: 2}
cluster: mixed.yaml
prediction: {precision: float16, overlap: false}
training: {global_batch: 8}
"""
HEADER = "micro_batch_size,tp,dp,pp,partition_cuts,schedule,recompute,training.global_batch,measured_s\n"
ROWS = """1,1,1,1,,,,,0.5
1,1,4,2,"[0,3,5]",,,,
1,1,1,4,,gpipe,full,,
2,2,2,2,,interleaved-1f1b:chunks=2,,16,
"""


@pytest.fixture
def layered(folder):
    (folder / "mixed.yaml").write_text(CLUSTER)
    (folder / "layered.yaml").write_text(LAYERS)
    with (folder / "layers.csv").open("w") as lines:
        lines.write("model,device,tp,layer,forward_s_per_sample\n")
        for tp in (1, 2):
            for layer in range(5):
                lines.write(f"small,T4,{tp},{layer},{0.004 if layer else 0.0002}\n")
    (folder / "rows.csv").write_text(HEADER + ROWS)
    return folder


def test_every_row_is_predicted_and_kept(auto3d, layered):
    auto3d("predict", "layered.yaml", "--candidates", "rows.csv", "--out", "out.csv")
    with (layered / "rows.csv").open() as given, (layered / "out.csv").open() as made:
        before, after = list(csv.DictReader(given)), list(csv.DictReader(made))
    assert [{name: row[name] for name in one} for one, row in zip(before, after, strict=True)] == before
    assert all(float(row["predicted_s"]) > 0 and float(row["predicted_peak_bytes"]) > 0 for row in after)
    assert not any(row["problem"] for row in after)
    one, *_ = (float(row["predicted_s"]) for row in after)
    assert one >= 8 * 4 * 0.004  # eight micro-batches through four layers that were measured at 4 ms


def test_a_model_that_is_captured_takes_keys_of_its_configuration(auto3d, folder):
    (folder / "rows.csv").write_text(
        "micro_batch_size,tp,dp,pp,model.config.n_layer,recompute,sequence_parallel,model.config.n_embd\n"
        "1,1,1,2,2,,,\n1,1,1,2,4,,,\n1,1,1,2,4,full,,\n4,2,2,1,2,,,256\n4,2,2,1,2,,true,256\n4,2,2,1,2,,perhaps,\n"
    )
    result = auto3d("predict", "small.yaml", "--candidates", "rows.csv", "--json", "cluster.nodes=2")
    records = json.loads(result.out)
    shallow, deep, again, sharded, in_sequence, _ = (record["predicted_s"] for record in records)
    assert shallow < deep < again
    assert sharded > 0
    assert in_sequence > 0
    plain, split = (record["predicted_peak_bytes"] for record in records[3:5])
    assert split < plain, "sequence parallelism keeps fewer activations"
    assert records[-1]["problem"] == "line 7: sequence_parallel: found 'perhaps'; it takes false or true or 0 or 1"


def test_a_row_that_cannot_be_says_why_and_the_others_are_predicted(auto3d, layered):
    bad = [
        "3,1,1,1,,,,,",
        '1,1,1,2,"[0,9,5]",,,,',
        "1,1,2,8,,,,,",
        "x,1,1,1,,,,,",
        "1,1,1,1,,zigzag,,,",
        "1,4,1,1,,,,,",
        "1,1,,1,,,,,",
        "1,1,1,1,,,1.5,,",
    ]
    (layered / "rows.csv").write_text(HEADER + "\n".join(bad) + "\n" + ROWS)
    result = auto3d("predict", "layered.yaml", "--candidates", "rows.csv", "--json")
    records = json.loads(result.out)
    words = [
        "multiple of 1 × 3",
        "partition_cuts",
        "needs 16 devices",
        "'x'",
        "'zigzag'",
        "there are no times for T4 at tp 4",
        "dp: found ''; it takes a whole number",
        "recompute: found '1.5'; it takes none, full, auto, or a number from 0 to 1",
    ]
    for record, word in zip(records, words, strict=False):
        assert record["predicted_s"] is None
        assert word in record["problem"]
    assert all(record["predicted_s"] for record in records[len(bad) :])


def test_closed_forms_may_be_chosen(auto3d, layered):
    seconds = {}
    for method in ("simulated", "amp", "chimera"):
        result = auto3d("predict", "layered.yaml", "--candidates", "rows.csv", "--json", f"prediction.method={method}")
        seconds[method] = [record["predicted_s"] for record in json.loads(result.out)]
    assert seconds["simulated"][0] == pytest.approx(seconds["amp"][0]), "on one device they agree"
    assert seconds["chimera"][0] > seconds["simulated"][0], "its backward is twice the measured forward, launches too"
    assert seconds["amp"][1] < 0.9 * seconds["simulated"][1], "four pipelines share a link, which AMP does not count"


@pytest.mark.parametrize("method", ["amp", "chimera"])
def test_plan_ranks_by_the_method_that_predict_uses(auto3d, layered, method):
    space = [
        "search.tp=[1]",
        "search.placement=[megatron]",
        "search.schedule=[1f1b]",
        "search.partition=[blocks]",
        f"prediction.method={method}",
    ]
    best, *others = json.loads(auto3d("plan", "layered.yaml", *space, "--json").out)["candidates"]
    rows = [(one["micro_batch_size"], one["tp"], one["dp"], one["pp"]) for one in (best, *others)]
    text = "\n".join(",".join(map(str, row)) for row in rows)
    (layered / "rows.csv").write_text(f"micro_batch_size,tp,dp,pp\n{text}\n")
    predicted = auto3d("predict", "layered.yaml", "--candidates", "rows.csv", "--json", *space)
    found = [record["predicted_s"] for record in json.loads(predicted.out)]
    assert found == pytest.approx([one["predicted_s"] for one in (best, *others)])
    assert best["estimate"]["seconds"] == best["predicted_s"] == min(found)
    shown = auto3d("plan", "layered.yaml", *space).out
    assert f"times are predicted ({method}" in shown


def test_amp_is_the_papers_space_and_budget_unless_the_recipe_sets_another(auto3d, layered):
    """Its budgets are 500 strategies and 10 trials; tensor parallelism may cross nodes, and here has no times there."""
    for settings, looked_at, plans in ([], 500, 10), (["search.candidates=40", "search.trials=3"], 40, 3):
        found = json.loads(auto3d("plan", "layered.yaml", "search.algorithm=amp", *settings, "--json").out)
        assert found["algorithm"] == "amp"
        assert looked_at / 10 < found["looked_at"] + found["ruled_out"] <= looked_at
        records = found["candidates"]
        assert sum(one["plan"] is not None or bool(one["problem"]) for one in records) == min(plans, len(records))
        fixed = {(one["schedule"], one["partition"], one["replicas"]) for one in records}
        assert fixed == {("1f1b", "layer-assignment", "equal")}
        assert {one["placement"] for one in records} <= {"horizontal", "vertical"}
    assert any("no times for T4 at tp" in one["reason"] for one in found["infeasible"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.layers=absent.csv"], ["model.layers", "'absent.csv'", "recipes/published/data"]),
        (["model.layers_of=other"], ["model.layers_of", "'other'", "small"]),
        (["prediction.precision=bfloat16"], ["prediction.precision", "float32, float16"]),
        (["cluster.outside=null"], ["cluster", "node 0 has no link to the other nodes"]),
        (["cluster.outside.gbit_per_s=0"], ["cluster.outside.gbit_per_s", "found 0"]),
        (["cluster.accelerator=T5"], ["cluster.accelerator", "'T5'", "T4, V100-16GB"]),
    ],
)
def test_bad_recipes_for_prediction(auto3d, layered, overrides, words):
    result = auto3d("predict", "layered.yaml", "--candidates", "rows.csv", *overrides, code=2)
    assert result.err.count("\n") == 1
    assert all(word in result.err for word in words), result.err


def test_bad_files(auto3d, layered):
    (layered / "rows.csv").write_text("tp,dp\n1,1\n")
    result = auto3d("predict", "layered.yaml", "--candidates", "rows.csv", code=2)
    assert "rows.csv: lacks the column micro_batch_size" in result.err
    (layered / "rows.csv").write_text("micro_batch_size,tp,dp,pp\n1,1,1,1\n")
    result = auto3d("calibrate", "layered.yaml", "--measurements", "rows.csv", code=2)
    assert "measured_s or measured_ms" in result.err
    (layered / "rows.csv").write_text(HEADER + ROWS)
    result = auto3d("calibrate", "layered.yaml", "--measurements", "rows.csv", code=2)
    assert "the number of measured iterations is 1, too few" in result.err


def test_calibrate_finds_what_made_the_times(auto3d, layered):
    rows = [f"{size},1,{dp},{pp},,,,," for size in (1, 2, 4) for dp, pp in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4))]
    (layered / "rows.csv").write_text(HEADER.replace("measured_s", "note") + "\n".join(rows) + "\n")
    auto3d("predict", "layered.yaml", "--candidates", "rows.csv", "--out", "made.csv")
    made = (layered / "made.csv").read_text().replace("predicted_s", "measured_s")
    (layered / "made.csv").write_text(made)
    result = auto3d(
        "calibrate", "layered.yaml", "--measurements", "made.csv", "--parameter", "memory_efficiency", "--json"
    )
    found = json.loads(result.out)
    assert found["mean_error"] < 0.01
    assert found["parameters"]["memory_efficiency"] == pytest.approx(0.69, rel=0.02)


def test_every_parameter_that_can_be_fitted_is_printed_as_its_key():
    assert WRITTEN.keys() == BOUNDS.keys() | FIGURES.keys()


def test_the_memory_of_a_plan_with_its_witness_and_largest_tensors(auto3d, folder):
    degrees = ["plan.dp=1", "plan.pp=2", "plan.micro_batch_size=2"]
    found = json.loads(auto3d("predict", "small.yaml", "--memory", *degrees, "--svg", "drawn.svg", "--json").out)
    assert [one["device"] for one in found] == [0, 1]
    for one in found:
        assert one["peak_bytes"] == sum(one[entry] for entry in ENTRIES)
        assert one["optimizer"] == 2 * one["gradients"]  # AdamW, float32
        positions = 8 * 32 if one["device"] == 0 else 0  # those of the tokens, which the first stage computes once
        assert one["weights"] == one["gradients"] + positions
        largest = one["largest"]
        sizes = [each["bytes"] * each["count"] for each in largest]
        assert len(largest) == 10
        assert sizes == sorted(sizes, reverse=True)
        for kind in {each["kind"] for each in largest}:
            of_kind = sum(size for size, each in zip(sizes, largest, strict=True) if each["kind"] == kind)
            assert of_kind <= one[kind]
        assert one["at"].startswith(("F", "B"))
        assert one["operation"]
    drawn = ElementTree.parse(folder / "drawn.svg").getroot()
    assert {"P0", "P1"} <= {each.text for each in drawn.iter() if each.tag.endswith("text")}
    text = auto3d("predict", "small.yaml", "--memory", *degrees).out
    assert f"pipeline device 1: {in_gib(found[1]['peak_bytes'])} GiB" in text

    plan = json.loads(auto3d("train", "small.yaml", *degrees, "training.iterations=1", "--json").out)["plan"]
    (folder / "plan.json").write_text(json.dumps(plan))
    again = json.loads(auto3d("predict", "small.yaml", "--memory", "--plan", "plan.json", "--json").out)
    assert again == found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory"], "plan: the recipe has no plan; give --plan FILE"),
        ([], "give either --candidates FILE, or --memory"),
        (["--candidates", "small.yaml", "--svg", "drawn.svg"], "--plan and --svg are for --memory"),
        (["--memory", "--plan", "small.yaml"], "small.yaml: "),
    ],
)
def test_memory_is_refused_in_one_line(auto3d, folder, arguments, words):
    (folder / "bare.yaml").write_text(GPT2.partition("plan:")[0])
    refused = auto3d("predict", "bare.yaml", *arguments, code=2)
    assert words in refused.err
    assert refused.err.count("\n") == 1
