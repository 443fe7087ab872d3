"""Every command of README, and of the pages that it sends to, runs as a reader would run it, page by page.

What takes long here runs at a smaller size, as INSTEAD says; with AUTO3D_WHOLE set, as `make release` does, it runs as
it is written. What is not run at all is reported with its reason.
"""

import csv
import os
import re
from pathlib import Path

import pytest

from tests.promises.running import PROGRAMS, ROOT, run

WHOLE = "AUTO3D_WHOLE" in os.environ
README = (ROOT / "README.md").read_text()
OF_WHEEL = ("README.md", "docs/commands.md")  # their commands run from the wheel, in a folder of a user's
PAGES = list(dict.fromkeys([*OF_WHEEL, *re.findall(r"\]\((docs/\w+\.md)\)", README)]))
COMMAND = re.compile(r"^    ((?:auto3d|torchrun|make|sbatch|python) .*)$", re.MULTILINE)
NAMES = {  # placeholder of a page -> a name that a reader may give
    "RECIPE": "tiny",
    "--candidates FILE.csv [--out FILE.csv]": "--candidates rows.csv --out predicted.csv",
    "--measurements FILE.csv": "--measurements m.csv",
    "[--plan FILE] [--svg FILE.svg] [--json]": "--svg memory.svg --json",
    ".venv/bin/auto3d": "PROGRAMS/auto3d",
    "results/release": f"'{ROOT}/results/release'",
}
SHORT = "measure.warmup_iterations=1 measure.iterations=1 training.global_batch=8"
HERE = f"search.micro_batch_size=[2] launch.executor=local {SHORT}"
TWO = f"search.dp=[1] search.pp=[1,2] search.tp=[1] search.schedule=[1f1b] {HERE}"
ONE = TWO.replace("[1,2]", "[2]")
UNCOMPARED = "training.check_capture=false"  # other commands compare the same captures
TWICE = "training.iterations=2 training.global_batch=8 launch.executor=local"
FEW = f"{TWICE} {UNCOMPARED}"
SAVED = f"training.checkpoint_every=1 {FEW}"
FIT = "auto3d calibrate RECIPE --measurements m.csv --folds 2 --parameter launch_s --parameter matrix_efficiency"
DOCTOR = "auto3d doctor tiny --devices --report doctor.md cluster.devices_per_node=2"
INSTEAD = {  # command -> a smaller one of the same kind
    "auto3d tune tiny": f"auto3d tune tiny {ONE} search.trials=1 prediction.profile=none",
    "auto3d sweep tiny": f"auto3d sweep tiny {TWO}",
    "auto3d sweep tiny search.micro_batch_size=[1,2]": f"auto3d sweep tiny {TWO}",
    "auto3d sweep tiny 'search.tp=[1,2]' search.sequence_parallel=auto": (
        f"auto3d sweep tiny search.dp=[1] search.tp=[2] search.pp=[1] search.sequence_parallel=[true] {HERE} "
        f"{UNCOMPARED}"
    ),
    "auto3d sweep tiny 'search.engine=[auto3d,ddp,fsdp]'": (
        f"auto3d sweep tiny search.dp=[2] search.tp=[1] search.pp=[1] 'search.engine=[auto3d,ddp]' {HERE}"
    ),
    "auto3d recompute tiny": f"auto3d recompute tiny search.subgraphs=2 {SHORT} {UNCOMPARED}",
    "auto3d calibrate RECIPE --measurements m.csv": FIT,
    "auto3d calibrate RECIPE --measurements FILE.csv": FIT,
    "auto3d sweep emulated": (
        f"auto3d sweep emulated 'search.schedule=[1f1b]' search.pp=[2] cluster.devices_per_node=2 {SHORT}"
    ),
    "auto3d train tiny training.checkpoint_every=20": f"auto3d train tiny {SAVED}",
    "auto3d export tiny exported": f"auto3d export tiny exported {SAVED}",
    "auto3d train tiny --fresh --trace": f"auto3d train tiny --fresh --trace {FEW}",
    "auto3d train tiny plan.dp=2 plan.pp=2": f"auto3d train tiny plan.dp=2 plan.pp=2 {TWICE}",
    "torchrun --nproc-per-node=4 .venv/bin/auto3d train tiny plan.dp=2 plan.pp=2": (
        "torchrun --nproc-per-node=2 .venv/bin/auto3d train tiny plan.pp=2 training.iterations=2 "
        f"training.global_batch=8 {UNCOMPARED}"
    ),
    "auto3d train tiny training.checkpoint_every=100": f"auto3d train tiny {SAVED}",
    "auto3d train tiny training.checkpoint_every=100 plan.pp=4": (f"auto3d train tiny {SAVED} plan.pp=4"),
    "auto3d export tiny out training.checkpoint_every=100": f"auto3d export tiny out {SAVED} plan.pp=4",
    "auto3d train tiny training.optimizer=muon training.learning_rate=1e-3": (
        f"auto3d train tiny training.optimizer=muon training.learning_rate=1e-3 {FEW}"
    ),
    "auto3d train tiny training.optimizer=schedulefree:AdamWScheduleFree training.learning_rate_schedule=constant": (
        "auto3d train tiny training.optimizer=schedulefree:AdamWScheduleFree training.learning_rate_schedule=constant "
        f"{FEW}"
    ),
    "auto3d train tiny training.optimizer=prodigyopt:Prodigy training.learning_rate=1": (
        f"auto3d train tiny training.optimizer=prodigyopt:Prodigy training.learning_rate=1 plan.pp=2 {FEW}"
    ),
    "auto3d profile tiny": "auto3d profile tiny cluster.devices_per_node=1",
    "auto3d profile RECIPE": "auto3d profile tiny cluster.devices_per_node=1",
    "auto3d doctor tiny": DOCTOR,  # --devices adds checks to those without it
    "auto3d doctor tiny --devices --report doctor.md": DOCTOR,
    "auto3d plan gpt20b --all": "auto3d plan tiny --all",
    "auto3d plan gpt20b search.simulations=2000": "auto3d plan tiny search.simulations=5",
    "auto3d paper merak-fig10a": "auto3d paper chimera-table3",
    "auto3d paper merak-fig10a cluster=h100 cluster.nodes=8": (
        "auto3d paper merak-fig10a cluster=h100 cluster.nodes=1 model.config.n_layer=8 search.pp=[4]"
    ),
    "auto3d plan tiny 'search.schedule=[1f1b, interleaved-1f1b, zb-v, synthesized]'": (
        "auto3d plan tiny search.dp=[1] search.tp=[1] search.pp=[2] search.micro_batch_size=[2] "
        "'search.schedule=[1f1b, synthesized]' search.order_seconds=1"
    ),
    "auto3d tune tiny 'search.schedule=[1f1b, synthesized]' search.order_seconds=20": (
        "auto3d tune tiny search.dp=[1] search.tp=[1] search.pp=[2] 'search.schedule=[1f1b, synthesized]' "
        f"search.order_seconds=1 search.trials=1 prediction.profile=none {HERE}"
    ),
    "auto3d yardstick": "auto3d yardstick --set megatron-sc21 --predictor chimera",
    "auto3d yardstick --set h100-llama --predictor textbook": "auto3d yardstick --set zero-bubble --predictor textbook",
    'auto3d yardstick --predictor auto3d-simulated --program "python examples/yardstick_predictor.py"': (
        "auto3d yardstick --set megatron-sc21 --predictor textbook "
        f"--program \"python '{ROOT}/examples/yardstick_predictor.py'\""
    ),
    "auto3d yardstick --out results/published": (
        "auto3d yardstick --set megatron-sc21 --predictor textbook --out results/published"
    ),
    "auto3d sweep RECIPE --dry-run": "auto3d sweep tiny launch.executor=slurm --dry-run",
}
ELSEWHERE = {  # a command, or how it begins -> what tries it instead
    "auto3d plan gpt20b": "test_recipes.py",
    "make sweep RECIPE=tiny": "the part `clone` of make release, and each row of its table here at a smaller size",
    "make test": ".ci/run",
    "make plan RECIPE=gpt20b": "test_recipes.py, without make",
    "make sweep RECIPE=gpt20b EXECUTOR=slurm": "test_recipes.py as a dry run; it needs 64 GPUs",
    "make report": "the line above it, without make",
    "make papers": "the part `papers` of make release; test_papers.py makes some items",
    "make alternatives": "the part `alternatives` of make release",
    "auto3d paper merak-fig7 --run": "test_measured.py, and tests/slurm: it names a cluster of the reader's",
    "make cluster-": ".ci/run",
    "sbatch ": "tests/slurm",
    "auto3d sweep tiny launch.executor=slurm": "tests/slurm, and test_wheel.py where a cluster answers",
    "auto3d train tiny launch.executor=slurm": "tests/slurm",
    "auto3d doctor [RECIPE]": "tests/slurm: it names a partition and an account of the reader's",
    "auto3d sweep RECIPE --test-only": "tests/slurm",
    "auto3d sweep RECIPE --detach": "tests/launch/commands/test_verbs.py",
    "auto3d status RECIPE": "tests/launch/commands/test_verbs.py",
    "auto3d logs RECIPE": "tests/launch/commands/test_verbs.py",
    "auto3d cancel RECIPE": "tests/launch/commands/test_verbs.py",
    "auto3d resume RECIPE": "tests/launch/commands/test_verbs.py",
    "auto3d train RECIPE --detach": "tests/launch/commands/test_verbs.py",
    "auto3d export tiny out --checkpoint": "tests/launch/model/test_export.py: it names a checkpoint of the reader's",
    "auto3d sweep peers": "the part `peers` of make release",
    "auto3d table RECIPE --baseline 'pp=4": "tests/launch/console/test_tables.py: its rows differ in placement",
    "auto3d train tiny plan.pp=2 plan.schedule=synthesized": "tests/distributed/test_synthesized.py: it names an order",
    "auto3d schedule synthesize problem.yaml": "tests/synthesis/test_synthesize.py: it names a problem",
    "torchrun --nproc-per-node=4 example.py": "tests/test_python_api.py, which runs the program of the page",
    "torchrun --nproc-per-node=4 script.py": "tests/trainer/test_examples.py, which runs the scripts in examples/",
}
BEFORE = {"docs/cost.md": (f"auto3d sweep tiny {TWO}",)}  # page -> commands that its reader has run
PLACEHOLDER = re.compile(r"\[--?\w|\b[A-Z]{4,}\b|…")


def commands(page: str) -> list[str]:
    """The commands of ``page`` in order, each once, without comments."""
    found = (line.split(" #")[0].strip() for line in COMMAND.findall((ROOT / page).read_text()))
    return list(dict.fromkeys(found))


def tried_elsewhere(command: str) -> str:
    """What tries ``command`` instead; nothing if it is tried here."""
    if command in INSTEAD and not WHOLE:
        return ""
    return next((what for begin, what in ELSEWHERE.items() if command.startswith(begin)), "")


def runnable(command: str) -> str:
    """``command``, or the smaller one, with names of a reader's."""
    if not WHOLE or PLACEHOLDER.search(command):
        command = INSTEAD.get(command, command)
    for name, value in NAMES.items():
        command = command.replace(name, value)
    return command


def own_commands(page: str) -> list[str]:
    """What runs of the commands of ``page`` that no page before it has."""
    before = {runnable(command) for earlier in PAGES[: PAGES.index(page)] for command in commands(earlier)}
    found = dict.fromkeys(runnable(command) for command in commands(page) if not tried_elsewhere(command))
    return [command for command in found if command not in before]


def put_files(folder: Path) -> None:
    """The files of their own that readers of the pages have."""
    keys = ("micro_batch_size", "tp", "dp", "pp")
    with (ROOT / "results/tiny/table.csv").open() as table:
        measured = [",".join([*(row[key] for key in keys), row["iteration_s"]]) for row in csv.DictReader(table)]
    (folder / "rows.csv").write_text("micro_batch_size,tp,dp,pp\n2,1,2,1\n4,1,1,2\n")
    enough = [*measured, *measured][:20]  # for a fit
    (folder / "m.csv").write_text("\n".join([f"{','.join(keys)},measured_s", *enough]))


@pytest.mark.timeout(7200 if WHOLE else 1800)  # each command has a limit of its own; this is for all of a page
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_in_order(page: str, tmp_path: Path, request: pytest.FixtureRequest):
    """Those of README and docs/commands.md run from the wheel, in a folder of a user's; the others from the clone."""
    programs = request.getfixturevalue("wheel") if page in OF_WHEEL else PROGRAMS
    folder = tmp_path / "own folder"
    folder.mkdir()
    put_files(folder)
    for command in (*BEFORE.get(page, ()), *own_commands(page)):
        run(command, folder, programs=programs, timeout_s=1800 if WHOLE else 120)


@pytest.mark.parametrize(
    ("page", "command"), [(page, command) for page in PAGES for command in commands(page) if tried_elsewhere(command)]
)
def test_what_is_not_run_here_is_said(page: str, command: str):
    pytest.skip(f"{page}: {command}: see {tried_elsewhere(command)}")


def test_every_entry_stands_for_a_command_of_a_page():
    every = [command for page in PAGES for command in commands(page)]
    assert len(every) > 60
    assert not [entry for entry in INSTEAD if entry not in every]
    assert not [entry for entry in ELSEWHERE if not any(command.startswith(entry) for command in every)]
    places = {part for what in ELSEWHERE.values() for part in re.findall(r"tests/[\w/]+(?:\.py)?", what)}
    assert not [place for place in places if not (ROOT / place).exists()]


def test_the_recipe_of_the_readme_is_planned_and_refused_without_its_gpus(tmp_path: Path):
    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yaml").write_text(block)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("Call me Ishmael. " * 100)
    assert "why the best is best" in run("auto3d plan mine", tmp_path)
    refused = run("auto3d sweep mine launch.executor=local", tmp_path, code=2)
    assert len(refused.strip().splitlines()) <= 4
    assert "GPU" in refused or "cuda" in refused
