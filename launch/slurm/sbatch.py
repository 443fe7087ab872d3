"""The sbatch script of a recipe's trials, which submitit writes, and checks that the recipe's values survive in it."""

import math
import re
import shlex
import sys
from inspect import signature
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import _make_sbatch_string

from auto3d.errors import InputError
from auto3d.plan import Plan
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import device, trial_limit_s
from launch.slurm.warning import WARNING

MARGIN_S = 120.0  # added to a trial's own time-out, for imports and capture
TRAINING_S = 3600.0
EARLY_S = 60.0  # SLURM may send its signals this much early
CORES_PER_GPU = 4  # for the rank's threads: Python, autograd, data, NCCL. Some nodes have no more per GPU
LONGEST_VALUE = 1000  # characters; sbatch accepts a few thousand
# sbatch drops backslashes from #SBATCH lines and ends them at a newline, even inside quotes.
_UNQUOTABLE = re.compile(r"[\x00-\x1f\x7f\\]")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")

_TEXTS = (
    *("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "gpus_per_node", "gres"),
    *("mem", "mail_user", "mail_type"),
)
_SHELL_WORDS = ("container_image", "container_python")
_OWN_KEY = {name.replace("_", "-"): name for name in (*_TEXTS, "exclusive")} | {
    "time": "time_limit_s",
    "cpus-per-task": "cpus_per_node",
}
_OURS = (
    *("array", "error", "job-name", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "requeue", "signal"),
    *("chdir", "wrap", "parsable", "test-only", "wait", "input", "export", "export-file", "no-requeue", "hold"),
    *("clusters", "quiet"),  # with these, our commands would ask another cluster, or not read the job's id
)
_SUBMITIT = frozenset(signature(_make_sbatch_string).parameters)  # the options for which submitit has parameters


def check_launch(recipe: LoadedRecipe) -> None:
    """Raise RecipeError, with one line, for a value that would not reach SLURM as it is in the recipe."""
    launch = recipe.values.launch
    for name in _TEXTS:
        _check_text(recipe, f"launch.{name}", getattr(launch, name))
    for name, value in launch.additional_parameters.items():
        where, option = f"launch.additional_parameters.{name}", str(name).replace("_", "-")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", option):
            raise recipe.error(where, "not an option of sbatch: its name has lower-case letters, digits and dashes")
        if option in _OWN_KEY:
            raise recipe.error(where, f"has its own key: use launch.{_OWN_KEY[option]}")
        if option in _OURS:
            raise recipe.error(where, "is set by auto3d: leave it out")
        if value is False:
            raise recipe.error(where, "found False; leave the option out, or set it to true or to its value")
        _check_text(recipe, where, None if value is True else str(value))
    for name in _SHELL_WORDS:
        _check_words(recipe, f"launch.{name}", getattr(launch, name))
    for name in ("srun_args", "setup", "teardown", "container_mounts"):
        for line in getattr(launch, name):
            _check_words(recipe, f"launch.{name}", line)
    if launch.gpus_per_node is not None and launch.gres is not None:
        raise recipe.error("launch.gres", "found together with launch.gpus_per_node; set one of them")
    if (launch.container == "none") != (launch.container_image is None):
        problem = "a container needs container_image, and container_image needs container: apptainer or pyxis"
        raise recipe.error("launch.container", problem)
    kinds = {kind.devices_per_node for kind in (recipe.values.cluster, *recipe.values.cluster.more)}
    if len(kinds) > 1:
        problem = f"found devices_per_node {sorted(kinds)}; the nodes of a job must have equal numbers of devices"
        raise recipe.error("cluster.more", problem)


def _check_text(recipe: LoadedRecipe, where: str, value: str | None) -> None:
    """Check the value of an option, which sbatch reads from a comment line."""
    if value is None:
        return
    if not value or _UNQUOTABLE.search(value):
        raise recipe.error(where, f"found {value!r}; SLURM accepts one line of text without backslashes")
    if len(value) > LONGEST_VALUE:
        raise recipe.error(where, f"found {len(value)} characters; at most {LONGEST_VALUE} are accepted")


def _check_words(recipe: LoadedRecipe, where: str, value: str | None) -> None:
    """Check a value that the shell reads: a quoted word, or a command of setup or teardown."""
    if value is not None and _CONTROL.search(value):
        raise recipe.error(where, f"found {value!r}; one line of text is accepted")


def check_folder(folder: Path) -> None:
    """Raise InputError if SLURM would change ``folder`` in the names of a job's log files."""
    if _UNQUOTABLE.search(str(folder)) or "%" in str(folder):
        raise InputError(f"{str(folder)!r}: SLURM cannot write to a folder with a backslash, newline or % in its name")


def parameters(recipe: LoadedRecipe, *, nodes: int, name: str, training: bool) -> dict[str, Any]:
    """Parameters for submitit's SlurmExecutor of a run on ``nodes`` nodes: one task per node, which forks its ranks.

    Raises RecipeError for a ``training`` that SLURM would warn of its time limit as soon as it starts.
    """
    values, launch = recipe.values, recipe.values.launch
    gpus = device(values) == "cuda"
    rank_cores = max(CORES_PER_GPU, values.training.threads_per_rank) if gpus else values.training.threads_per_rank
    cpus = launch.cpus_per_node or values.cluster.devices_per_node * rank_cores
    limit_s = launch.time_limit_s or (TRAINING_S if training else trial_limit_s(values) + MARGIN_S)
    options = {key: getattr(launch, key) for key in _TEXTS if getattr(launch, key) is not None}
    if gpus and launch.gres is None:
        options.setdefault("gpus_per_node", values.cluster.devices_per_node)
    if training and launch.warning_s + EARLY_S >= limit_s:
        problem = f"found {launch.warning_s:g}; it must be below {limit_s - EARLY_S:g} for a job of {limit_s:g} s"
        raise recipe.error("launch.warning_s", f"{problem}, since SLURM may warn a minute early")
    # The signal that submitit chooses by default would end a job that is preempted before its handler is installed, and
    # SLURM requeues only jobs that it ends itself.
    warning_s = math.ceil(launch.warning_s) if training else 1
    additional = {"requeue": True, "signal": f"{WARNING.name.removeprefix('SIG')}@{warning_s}"}
    if gpus:  # fill one node after the other, and the cores of one socket before the next socket's
        additional["distribution"] = "block:block"
    additional |= {name.replace("_", "-"): options.pop(name) for name in sorted(options.keys() - _SUBMITIT)}
    additional |= {str(key).replace("_", "-"): value for key, value in launch.additional_parameters.items()}
    # When the task of one node dies, all tasks end. Since SLURM 22.05 srun does not inherit --cpus-per-task.
    srun = ["--kill-on-bad-exit=1", f"--cpus-per-task={cpus}", *_pyxis(recipe), *launch.srun_args]
    return options | {
        "job_name": name,
        "nodes": nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": cpus,
        "time": math.ceil(limit_s / 60),
        "array_parallelism": launch.array_throttle,
        "additional_parameters": additional,
        "srun_args": srun,
        "wckey": None,  # submitit's is "submitit", which a cluster that enforces such keys refuses
        **({"exclusive": True} if launch.exclusive else {}),
        **({"setup": list(launch.setup)} if launch.setup else {}),
        **({"teardown": list(launch.teardown)} if launch.teardown else {}),
    }


def python(recipe: LoadedRecipe) -> str:
    """The shell words that start Python on a node, inside the container if there is one."""
    launch = recipe.values.launch
    if launch.container == "none":
        return shlex.quote(sys.executable)
    if launch.container == "pyxis":
        return shlex.quote(launch.container_python)
    gpus = ["--nv"] if device(recipe.values) == "cuda" else []
    mounts = [word for mount in launch.container_mounts for word in ("--bind", mount)]
    assert launch.container_image is not None  # check_launch
    words = ["apptainer", "exec", *gpus, *mounts, launch.container_image, launch.container_python]
    return shlex.join(words)


def _pyxis(recipe: LoadedRecipe) -> list[str]:
    launch = recipe.values.launch
    if launch.container != "pyxis":
        return []
    here = str(Path.cwd())
    mounts = ",".join([f"{here}:{here}", *launch.container_mounts])
    return [
        f"--container-image={launch.container_image}",
        f"--container-mounts={mounts}",
        f"--container-workdir={here}",
    ]


def text(recipe: LoadedRecipe, folder: Path, *, nodes: int, name: str, trials: int, training: bool) -> str:
    """Exactly the script that submitit gives to sbatch for ``trials`` trials, or one training; needs no cluster."""
    command = f"{python(recipe)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    array: dict[str, Any] = {"map_count": trials} if trials > 1 else {}
    return _make_sbatch_string(
        command, folder, **parameters(recipe, nodes=nodes, name=name, training=training), **array
    )


def nodes_needed(recipe: LoadedRecipe, plan: Plan) -> int:
    """The number of nodes that ``plan`` fills, at the recipe's devices per node."""
    return -(-plan.ranks // recipe.values.cluster.devices_per_node)
