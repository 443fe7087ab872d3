"""Training and planning commands as a user runs them; tests/launch/drivers/test_sweep.py tests sweeps."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from shlex import join

import click
import pytest
import torch
from safetensors.torch import save_file

from auto3d.plan import Plan
from auto3d.runtime.verify.spec import SPEC
from launch.commands.group import VERBS, cli
from tests.launch.conftest import MINE
from tests.soak import soak

BIN = Path(sys.executable).parent
AUTO3D = [sys.executable, str(BIN / "auto3d")]


def run(folder: Path, *command: str, code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture
def trained(auto3d):
    """A function that trains with --json and returns the record, which is the only line of standard output."""

    def train(*arguments: str) -> dict:
        (line,) = auto3d("train", *arguments, "--json").out.splitlines()
        return json.loads(line)

    return train


# Training


TORCHRUN_C10D = [BIN / "torchrun", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node"]


@pytest.mark.parametrize(
    ("launcher", "module", "dp", "pp"),
    [([BIN / "mpirun", "-n"], AUTO3D, 1, 2), *soak((TORCHRUN_C10D, AUTO3D[1:], 2, 1))],
)
def test_training_is_the_same_however_its_processes_are_started(folder, trained, launcher, module, dp, pp):
    """auto3d itself, torchrun and mpirun give the same losses to the last bit."""
    arguments = ["own.yaml", f"plan.dp={dp}", f"plan.pp={pp}", "plan.micro_batch_size=2"]
    own = trained(*arguments)
    assert len(own["loss"]) == len(own["grad_norm"]) == len(own["iteration_s"]) == 2
    assert len(own["peak_bytes"]) == dp * pp
    assert min(own["peak_bytes"]) > 0
    assert len(own["predicted_bytes"]) == dp * pp
    assert own["used_bytes"] == own["reserved_bytes"] == [], "a CPU has one number"
    assert (own["plan"]["dp"], own["plan"]["pp"], own["plan"]["schedule"]) == (dp, pp, "1f1b")
    assert own["samples_per_s"] > 0

    command = [*map(str, launcher), str(dp * pp), *module]
    (line,) = run(folder, *command, "train", *arguments, "--json").stdout.splitlines()
    assert json.loads(line)["loss"] == own["loss"]
    assert json.loads(line)["grad_norm"] == own["grad_norm"]


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (TORCHRUN, "plan: it needs 2 ranks, one per device; the launcher started 3"),
        (TORCHRUN | {"RANK": "x"}, "RANK is 'x' in the environment; it must be a whole number"),
        ({"SLURM_STEP_NUM_TASKS": "-"}, "SLURM_STEP_NUM_TASKS is '-'"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(folder, auto3d, monkeypatch, environment, words):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert words in auto3d("train", "own.yaml", code=2).err


def test_the_plan_can_come_from_a_file_or_by_hand(folder, auto3d, trained):
    by_hand = trained("small.yaml")
    (folder / "plan.json").write_text(json.dumps(by_hand["plan"]))
    from_file = trained("small.yaml", "--plan", "plan.json")
    assert from_file["loss"] == by_hand["loss"]

    (folder / "stages.json").write_text(json.dumps(by_hand["plan"] | {"schedule": "interleaved-1f1b"}))
    (folder / "zigzag.json").write_text(json.dumps(by_hand["plan"] | {"schedule": "zigzag"}))
    (folder / "old.json").write_text(json.dumps(by_hand["plan"] | {"schedule": "pipedream-2bw"}))
    for overrides, plan, words in (
        (["model.config.n_layer=3"], "plan.json", "plan.json: graph: the plan was made for model"),
        (["plan.pp=1"], "plan.json", "plan: plan.pp=1 changes the recipe's plan, but --plan gives another"),
        (["training.global_batch=16"], "plan.json", "training.global_batch: found 16; plan.json was made for 8"),
        (["training.seed=3"], "plan.json", "training.seed: found 3; plan.json was made for 1"),
        (["cluster.devices_per_node=1"], "plan.json", "plan.json: needs 2 devices; the cluster has 1"),
        (
            [],
            "stages.json",
            "schedule: interleaved-1f1b has 2 devices, 4 stages and 4 micro-batches; the plan has 2, 2",
        ),
        ([], "zigzag.json", "zigzag.json: schedule: 'zigzag' is unknown"),
        ([], "old.json", "clip_norm: found 1; schedule pipedream-2bw needs 0"),
    ):
        refused = auto3d("train", "small.yaml", *overrides, "--plan", plan, code=2).err
        assert words in refused
        assert refused.count("\n") == 1


def test_the_programs_of_a_plan_are_checked_without_training(folder, auto3d, monkeypatch):
    lines = auto3d("train", "small.yaml", "--check").out.splitlines()
    assert lines == [f"holds: {says}" for says in SPEC]
    monkeypatch.setitem(SPEC, "nothing stands anywhere", lambda common: iter(["a stage"]))
    broken = auto3d("train", "small.yaml", "--check", code=1).out
    assert broken.endswith("broken at 1 place: nothing stands anywhere\n  a stage\n")
    assert json.loads(auto3d("train", "small.yaml", "--check", "--json", code=1).out)["nothing stands anywhere"]


def test_a_factory_and_weights_of_ones_own(folder, auto3d, trained):
    drawn = trained("own.yaml")
    shapes = {"a.weight": (16, 8), "a.bias": (16,), "b.weight": (3, 16), "b.bias": (3,)}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "zeros.safetensors")
    zeros = trained("own.yaml", "model.weights=zeros.safetensors")
    assert zeros["loss"][0] == pytest.approx(1.0986122886681098)  # ln 3, because all classes are equally likely
    assert drawn["loss"][0] != zeros["loss"][0]
    assert "a line of the user's own" in auto3d("train", "own.yaml", "--json").err, "what they print is no result"


def test_an_asynchronous_plan_trains_several_iterations_at_once(folder, auto3d, trained):
    arguments = ["own.yaml", "training.clip_norm=0", "training.iterations=5", "training.learning_rate=0"]
    expected = trained(*arguments)
    result = trained(*arguments, "plan.schedule=pipedream")
    assert result["loss"] == expected["loss"]
    assert result["grad_norm"] == [None] * 5
    assert len(result["iteration_s"]) == 5
    assert "iteration 5/5: loss" in auto3d("train", *arguments, "plan.schedule=pipedream").err


def test_json_has_null_where_a_number_is_none(folder, auto3d):
    change_model(folder, "(self.a(x))", "(self.a(x)) * 1e30 * 1e30")
    (line,) = auto3d("train", "own.yaml", "--json").out.splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["loss"][-1] is None


def change_model(folder: Path, old: str, new: str) -> None:
    text = (folder / "mine.py").read_text()
    assert old in text
    (folder / "mine.py").write_text(text.replace(old, new))


def test_what_a_rank_refuses_is_told_without_a_traceback(folder, auto3d):
    """Only building the stages shows that one stage's initial weights depend on those of another."""
    layer, larger = "nn.Linear(width, 3)\n", "self.more = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))\n"
    change_model(folder, layer, f"{layer}        {larger}        self.b.weight.data += self.a.weight.data.sum()\n")
    refused = auto3d("train", "own.yaml", "plan.micro_batch_size=2", code=2)
    assert "b.weight: the module computes its initial value from a.weight, a parameter of another stage" in refused.err
    assert "Traceback" not in refused.err


@pytest.mark.soak
def test_the_loss_falls_on_real_text(folder, trained):
    """In 30 iterations of the shipped recipe with 2 layers, the loss falls from about ln(256) = 5.5 to below 3.5."""
    result = trained("tiny", "training.iterations=30", "model.config.n_layer=2")
    assert 5.0 < result["loss"][0] < 5.8
    assert result["loss"][-1] < 3.5


# Planning


def planned(auto3d, *overrides: str) -> dict:
    return json.loads(auto3d("plan", "own.yaml", *overrides, "--json").out)


def test_asynchronous_schedules_are_tried_where_they_are_named(folder, auto3d):
    def schedules(*overrides: str) -> dict[str, str]:
        found = planned(auto3d, "search.micro_batch_size=[2]", *overrides)
        reasons = {one["schedule"]: one["reason"] for one in found["infeasible"]}
        return {one["schedule"]: "" for one in found["candidates"]} | reasons

    assert not any("pipedream" in name for name in schedules("search.schedule=auto"))
    named = "search.schedule=[1f1b,pipedream,pipedream-2bw]"
    assert set(schedules(named, "training.clip_norm=0").values()) == {""}
    reasons = schedules(named)
    assert reasons.pop("1f1b") == ""
    assert all(reason.startswith("clip_norm: ") for reason in reasons.values())


def test_plan_ranks_candidates_and_counts_those_that_cannot_be(folder, auto3d):
    arguments = ["search.dp=auto", "search.pp=auto", "search.tp=[1,2]", "search.allow_idle_devices=false"]
    arguments += ["search.micro_batch_size=[1,2,3]", "search.schedule=[gpipe,1f1b]"]
    found = planned(auto3d, *arguments)
    kept = found["candidates"]
    assert {(one["dp"], one["tp"], one["pp"]) for one in kept} == {(2, 1, 2), (4, 1, 1), (1, 2, 2), (2, 2, 1)}
    times = [one["predicted_s"] for one in kept]
    assert times == sorted(times)
    assert {one["problem"] for one in kept} == {""}
    best = kept[0]
    parts = ("compute_s", "host_s", "bubble_s", "tensor_s", "message_s", "sync_s", "update_s")
    assert sum(best["estimate"][part] for part in parts) == pytest.approx(best["predicted_s"])
    counts = {one["reason"]: one["count"] for one in found["infeasible"]}
    assert sum("global_batch: 8 does not divide" in reason for reason in counts) == 1
    assert not any("devices" in reason for reason in counts), "such degrees are no part of the space"
    assert not (folder / "runs").exists(), "it trains nothing"

    shown = auto3d("plan", "own.yaml", *arguments).out
    assert "why the best is best" in shown
    assert "exhaustive search of" in shown


def test_plan_says_where_the_host_binds(folder, auto3d):
    """Two small products on an H100 wait for their launches half of the time."""
    gpu = ["cluster.accelerator=H100-80GB", "cluster.device=cuda", "search.pp=[1]"]
    shown = auto3d("plan", "own.yaml", *gpu).out
    (share,) = re.findall(r"^the host binds: its device waits for launches .* in (\d+)% of plan 1", shown, re.MULTILINE)
    best = planned(auto3d, *gpu)["candidates"][0]
    assert int(share) == round(100 * best["estimate"]["host_s"] / best["predicted_s"]) >= 5


def test_plan_certifies_an_order(folder, auto3d):
    order = str(folder / "order.json")
    auto3d("schedule", "zb-h1", "--stages", "2", "--micro-batches", "4", "--save", order)
    space = [f"search.schedule=[1f1b,'synthesized:file={order}']", "search.pp=[2]", "search.dp=[1]"]
    space += ["search.tp=[1]", "search.micro_batch_size=[2]", "search.allow_idle_devices=true"]
    kept = {one["schedule"][:4]: one for one in planned(auto3d, *space)["candidates"]}
    assert kept["1f1b"]["certificate"] is None
    certificate = kept["synt"]["certificate"]
    assert certificate["makespan"] == kept["synt"]["predicted_s"] >= certificate["lower_bound"] > 0
    assert certificate["gap"] == pytest.approx(certificate["makespan"] / certificate["lower_bound"] - 1, abs=1e-8)
    shown = auto3d("plan", "own.yaml", *space).out
    assert "\norder of plan 1: " in shown
    assert "best possible: no order takes less than " in shown


def test_a_space_without_a_plan_is_refused(folder, auto3d):
    refused = auto3d("sweep", "own.yaml", "search.micro_batch_size=[3]", code=2).err
    assert "search: its only candidate cannot run: global_batch: 8 does not divide" in refused
    fine = auto3d("plan", "own.yaml", "training.global_batch=9", "search.micro_batch_size=[3]")
    assert "1 simulated" in fine.out, "the recipe's own plan does not divide 9, but a search does not read it"


def test_a_micro_batch_size_at_which_the_model_fails_is_pruned(folder, auto3d):
    one_is_too_few = MINE.replace("self.a(x)", "nn.functional.batch_norm(self.a(x), None, None, training=True)")
    (folder / "mine.py").write_text(one_is_too_few)
    found = planned(auto3d, "search.micro_batch_size=[1,2]")
    assert [candidate["micro_batch_size"] for candidate in found["candidates"]] == [2]
    refused = auto3d("plan", "own.yaml", "search.micro_batch_size=[1]", code=2).err
    for message in (found["infeasible"][0]["reason"], refused):
        assert "Net cannot be captured at micro-batch size 1: Expected more than 1 value per channel" in message
        assert "mine.py, line 11" in message


# All commands


def test_help_and_version(folder, auto3d):
    assert "Commands:" in auto3d().out
    assert auto3d("--version").out.startswith("auto3d 0.")


def test_every_command_begins_its_help_with_its_line_in_the_list():
    files = {file.stem for file in (Path(__file__).parents[3] / "launch/commands").glob("*.py")}
    assert set(VERBS) <= files
    assert list(VERBS) == sorted(VERBS)
    for verb, line in VERBS.items():
        command = cli.get_command(click.Context(cli), verb)
        assert command.name == verb
        assert command.help.splitlines()[0] == line


def test_keys_are_plain_lines_where_no_one_looks(folder, auto3d):
    lines = auto3d("keys").out.splitlines()
    assert all(line.count("\t") == 3 for line in lines)
    assert "training.learning_rate_schedule" in [line.split("\t")[0] for line in lines]


def test_a_file_that_cannot_be_read_or_written_is_told_in_one_line(folder, auto3d):
    assert "File name too long" in auto3d("plan", "x" * 5000, code=2).err
    (folder / "runs").write_text("")
    message = auto3d("sweep", "own.yaml", code=2).err.replace("a line of the user's own\n", "")
    assert message == "auto3d: runs: File exists\n"


def test_a_reader_that_goes_away_is_no_error(folder):
    done = run(folder, "bash", "-c", f"set -o pipefail; {join(AUTO3D)} keys | head -c 10")
    assert done.stderr == ""
    closed = run(folder, "bash", "-c", f"{join(AUTO3D)} keys >&-")
    assert closed.stderr == ""


def test_a_terminal_of_few_letters_is_no_error(folder):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [*AUTO3D, "schedule", "gpipe", "--stages", "2", "--micro-batches", "2"]
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    assert b"(devices ? makespan)" in done.stdout


def test_the_way_in_imports_nothing_slow():
    """An interrupt during the slow imports, which come later, must also print one line."""
    code = "import launch.main, sys; assert not {'torch', 'click', 'rich', 'omegaconf'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_plan_of_json_is_a_plan(folder, auto3d):
    kept = planned(auto3d)["candidates"][0]
    assert Plan.from_json(json.dumps(kept["plan"])).pp == 2


EXPERTS = """
model:
  architecture: {architecture}
  config: {{vocab_size: 256, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
    intermediate_size: 32, num_local_experts: 4, num_experts_per_tok: 2, quantization_config: {{quant_method: mxfp4}}}}
data: {{source: synthetic, sequence_length: 16}}
cluster: h100
training: {{precision: bfloat16}}
"""


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "GptOssForCausalLM"])
def test_the_capture_of_experts_in_bfloat16_prints_nothing_of_torch(tmp_path, architecture):
    (tmp_path / "experts.yaml").write_text(EXPERTS.format(architecture=architecture))
    done = run(tmp_path, *AUTO3D, "capture", "experts.yaml", "--fresh")
    assert done.stderr == ""
    assert done.stdout.endswith(
        "\nmodel.config.quantization_config is ignored: it describes stored weights, and training quantizes none\n"
    )
