"""Scripts for transformers' Trainer before and after: the same samples, losses, metrics and weights."""

import difflib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers

from auto3d import Trainer
from auto3d.errors import InputError
from tests.soak import soak
from tests.trainer.scripts import EXAMPLES, free_port, run_script

TIMES = ("runtime", "per_second")  # figures that differ from run to run


def pair(name):
    return EXAMPLES / f"{name}_before.py", EXAMPLES / f"{name}_after.py"


@pytest.mark.parametrize("name", ["causal_lm", "classification", "lora"])
def test_three_lines_are_changed_or_added(name):
    before, after = (file.read_text().splitlines() for file in pair(name))
    changed = list(difflib.ndiff(before, after))
    assert sum(line[0] == "+" for line in changed) == 3, "\n".join(changed)
    assert sum(line[0] == "-" for line in changed) == 2, "\n".join(changed)


def test_another_trainer_is_not_given_in_place_of_one_with_a_pipeline():
    import auto3d.transformers as ours

    assert (ours.Trainer, ours.set_seed) == (Trainer, transformers.set_seed)
    for name in ("Seq2SeqTrainer", "Seq2SeqTrainingArguments"):
        with pytest.raises(InputError, match=f"{name} trains in one process only; use Train"):
            getattr(ours, name)
    with pytest.raises(ModuleNotFoundError, match="not a package"):  # not a second copy of all that is in it
        import auto3d.transformers.trainer  # noqa: F401


# The other tests train on the script of the causal LM.
@pytest.mark.parametrize("name", ["lora", *soak("causal_lm", "classification")])
def test_the_pipeline_trains_as_one_process(name, processes, tmp_path):
    before, after = pair(name)
    for folder in ("one", "four"):
        (tmp_path / folder).mkdir()
    (one,) = processes.run(1, run_script, before, tmp_path / "one", None)
    ranks = processes.run(4, run_script, after, tmp_path / "four", free_port())
    assert [rank["process_zero"] for rank in ranks] == [True, False, False, False]
    for rank in ranks:
        assert (rank["step"], rank["best"]) == (one["step"], one["best"])
        assert len(rank["log"]) == len(one["log"])
        for here, there in zip(rank["log"], one["log"], strict=True):
            assert here.keys() == there.keys()
            for key in here:
                if not key.endswith(TIMES):
                    assert here[key] == pytest.approx(there[key], rel=1e-4), (key, here)
        for key, value in one["weights"].items():
            assert np.abs(rank["weights"][key] - value).max() <= 1e-4 * np.abs(value).max() + 1e-6, key
    assert one["step"] >= 20
    written = {path.name for path in (tmp_path / "one").glob("*/*") if path.is_file()}
    assert written == {path.name for path in (tmp_path / "four").glob("*/*") if path.is_file()}


@pytest.mark.soak
def test_a_training_goes_on_under_another_plan(processes, tmp_path):
    """Six steps at dp2·pp2, with a checkpoint after the third, from which a chimera of four stages goes on."""
    text = pair("causal_lm")[1].read_text().replace('save_strategy="no"', "save_steps=3").replace("=20", "=6")
    first, then = tmp_path / "first.py", tmp_path / "then.py"
    first.write_text(text)
    text = text.replace("dp=2, pp=2", 'pp=4, schedule="chimera"').replace(
        "accumulation_steps=2", "accumulation_steps=4"
    )
    then.write_text(text.replace("trainer.train()", 'trainer.train(resume_from_checkpoint="causal_lm/checkpoint-3")'))
    whole = processes.run(4, run_script, first, tmp_path, free_port())[0]["log"]
    resumed = processes.run(4, run_script, then, tmp_path, free_port())[0]["log"]
    assert [entry["loss"] for entry in resumed[:-1]] == pytest.approx([entry["loss"] for entry in whole[:-1]], rel=1e-5)


def launch(*command, folder: Path, processes: int):
    script = pair("causal_lm")[1].read_text().replace("dp=2, pp=2", f"pp={processes}").replace("=20", "=2")
    (folder / "script.py").write_text(script)
    environment = {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1", "PATH": str(Path(sys.executable).parent)}
    environment |= {"HF_HUB_OFFLINE": "1", "TMPDIR": str(folder / "temporary")}
    (folder / "temporary").mkdir()
    return subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, env=environment)


# tests/launch/commands/test_commands.py joins the processes of mpirun.
MPIRUN = ("mpirun", "-n", "2", sys.executable)


@pytest.mark.parametrize("launcher", [("torchrun", "--nproc-per-node=2"), *soak((MPIRUN,))])
def test_a_launcher_starts_the_script(launcher, tmp_path):
    name, *rest = launcher
    done = launch(Path(sys.executable).parent / name, *rest, "script.py", folder=tmp_path, processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("train_loss") == 2, "rank 0 alone logs the metrics, and prints them once more"
    assert (tmp_path / "causal_lm" / "model.safetensors").is_file()


@pytest.mark.soak
def test_too_few_processes_are_one_line_and_exit_code_2(tmp_path):
    done = launch(sys.executable, "script.py", folder=tmp_path, processes=4)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("auto3d:")]
    assert lines == done.stderr.splitlines()[-1:]
    assert "Traceback" not in done.stderr
    assert "needs 4 processes" in lines[0]
    assert "torchrun --nproc-per-node=4 script.py" in lines[0]
    assert not list((tmp_path / "temporary").glob("auto3d*"))
