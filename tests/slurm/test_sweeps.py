"""Sweeps on a real cluster of four nodes: equal to those on one machine, whatever is killed, preempted or cancelled."""

import json
import os
import signal
import sys
import time
from collections import Counter
from contextlib import suppress

import pytest

from launch.store.manifest import Entry, Manifest, State
from tests.launch.papers.test_measured import ITEM
from tests.slurm.conftest import PROGRAM, REPOSITORY, wait_for
from tests.slurm.sweeps import LONG, OWN, SAVED_S, Sweeps, end, ranks_on, statuses
from tests.slurm.test_dev_cluster import pids

SMALL_GPT = [  # overrides of gpt20b: one rank per node, and a model that a core trains in milliseconds
    *("model.config.n_layer=4", "model.config.n_embd=64", "model.config.n_head=4", "model.config.n_positions=64"),
    *("model.config.vocab_size=256", "data.vocabulary_size=256", "data.sequence_length=64"),
    *("cluster.nodes=4", "cluster.devices_per_node=1", "cluster.device=cpu", "training.global_batch=16"),
    *("search.tp=[1]", "search.pp=[4]", "search.micro_batch_size=[2]", "search.recompute=[full]"),
    *("measure.iterations=2", "measure.warmup_iterations=1", "launch.trial_timeout_s=240"),
    "training.check_capture=false",
]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def sweeps(cluster, emptied_folder):
    return Sweeps(cluster, emptied_folder)


# Results


# tests/slurm/test_training.py trains on two nodes as on this machine, to the last bit of the weights, and
# tests/slurm/test_train_templates.py under a plan with both degrees.
@pytest.mark.soak
@pytest.mark.parametrize(("dp", "pp"), [("[2]", "[2]"), ("[1,2]", "[1,2]")])
def test_losses_on_one_two_and_four_nodes_are_those_of_this_machine(sweeps, dp, pp):
    space = [f"search.dp={dp}", f"search.pp={pp}", "search.micro_batch_size=[2]", "training.threads_per_rank=1"]
    space += ["measure.iterations=2", "measure.warmup_iterations=1"]

    def losses(*where: str) -> dict[tuple[int, int], list]:
        sweeps.auto3d("sweep", *space, *where)
        folders = sweeps.folder / "runs" / "own"
        names = json.loads((folders / "sweep.json").read_text())["trials"]
        found = [json.loads((folders / "trials" / name / "measurement.json").read_text()) for name in names]
        assert [one["status"] for one in found] == ["ok"] * len(json.loads(dp)) * len(json.loads(pp))
        return {(one["plan"]["dp"], one["plan"]["pp"]): [one["loss"], one["grad_norm"]] for one in found}

    here = ["launch.executor=local", "cluster.nodes=1", "cluster.devices_per_node=4"]
    assert losses("launch.executor=slurm") == losses(*here)


@pytest.mark.soak
def test_a_scaled_down_gpt20b_trains_on_four_nodes(sweeps):
    """Both schedules of the recipe, with its own recomputation and partition, as four stages on four nodes."""
    (sweeps.folder / "recipes").symlink_to(REPOSITORY / "recipes")
    sweeps.auto3d("sweep", *SMALL_GPT, "launch.executor=slurm", recipe="gpt20b")
    rows = sweeps.rows("gpt20b")
    assert {row["schedule"] for row in rows} == {"1f1b", "shifted-critical-path"}
    assert [row["status"] for row in rows] == ["ok", "ok"]
    trials = sorted((sweeps.folder / "runs" / "gpt20b" / "trials").glob("*/measurement.json"))
    losses = [json.loads(file.read_text())["loss"] for file in trials]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5), "of the same samples and weights"


@pytest.mark.soak
def test_tune_tries_plans_on_nodes_and_says_that_its_predictions_rest_on_a_guess(sweeps):
    told = end(sweeps.start("tune", "search.trials=1", "search.micro_batch_size=[2,4]", "measure.iterations=2"))
    assert "no profile: trials run on SLURM, and predictions rest on a guess; to measure a node: srun -N1 " in told
    assert "to train under the fastest plan" in told
    assert not (sweeps.folder / "profiles").exists()
    assert sweeps.starts() == [1]


SPACE_OF_13 = [
    *("training.global_batch=64", "search.micro_batch_size=[1,2,4,8,16,32,64]", "search.pp=[1,2]"),
    *("search.schedule=[1f1b,gpipe]", "search.max_trials=13", "cluster.devices_per_node=2"),
    *("search.recompute=[none,full]", "cluster.nodes=1", "launch.exclusive=false", "measure.iterations=1"),
]


def trials_per_array(sweeps: Sweeps) -> list[int]:
    jobs = Counter(entry.job.split("_")[0] for entry in sweeps.entries() if entry.state is State.SUBMITTED)
    return sorted(jobs.values())


def test_what_is_submitted_is_what_a_dry_run_prints_in_arrays_of_at_most_11(sweeps):
    hostile = """it's "quoted" $(touch ran) `touch ran`; touch ran # | > ran"""
    (sweeps.folder / "own.yaml").write_text(
        OWN.replace("executor: slurm,", f"executor: slurm, additional_parameters: {json.dumps({'comment': hostile})},")
    )
    told = sweeps.auto3d("sweep", *SPACE_OF_13, "--dry-run")
    assert "to start at" in sweeps.auto3d("sweep", "--test-only")
    sweeps.auto3d("sweep", *SPACE_OF_13, "--detach", "launch.additional_parameters.begin=now+1hour")
    scripts = list((sweeps.folder / "runs" / "own" / "jobs").glob("*/*_submission.sh"))
    begin = "#SBATCH --begin=now+1hour\n"
    assert len(scripts) == 2
    for script in scripts:
        assert begin in script.read_text()
        assert script.read_text().replace(begin, "").rstrip() in told
        for private in (sweeps.folder / "runs" / "own", script.parent.parent, script.parent):
            assert private.stat().st_mode & 0o077 == 0, private
    assert trials_per_array(sweeps) == [2, 11]
    queued = sweeps.cluster.run("squeue", "--noheader", "--array", "--states=PENDING", "--format=%F").split()
    assert sorted(Counter(queued).values()) == [2, 11]
    job = sweeps.job().split("_")[0]
    assert sweeps.cluster.run("squeue", "--noheader", f"--jobs={job}", "--format=%k").splitlines()[0] == hostile
    assert "cancelled 13 jobs" in sweeps.auto3d("cancel")
    assert not (sweeps.folder / "ran").exists()


@pytest.mark.soak
def test_13_trials_of_two_arrays_run_once_each(sweeps):
    sweeps.auto3d("sweep", *SPACE_OF_13)
    assert trials_per_array(sweeps) == [2, 11]
    assert statuses(sweeps) == ["ok"] * 13
    assert sweeps.starts() == [1] * 13


@pytest.mark.soak
def test_two_sweeps_at_once_share_their_trials(sweeps):
    space = ["search.micro_batch_size=[2,4]", "measure.iterations=100"]
    both = [sweeps.start("sweep", *space) for _ in range(2)]
    outputs = [end(one) for one in both]
    assert statuses(sweeps) == ["ok"] * 2
    assert sweeps.starts() == [1] * 2, "none ran twice"
    assert sum(output.count("submitted 2 trials") for output in outputs) == 1


# Faults


def test_a_killed_rank_and_scancel_are_told_and_resume_runs_their_trials_again(sweeps):
    sweep = sweeps.start("sweep", *LONG, "search.micro_batch_size=[2,4]")
    node = sweeps.running_on(0)[1]
    os.kill(ranks_on(node)[0], signal.SIGKILL)
    sweeps.running_on(1)
    sweeps.cluster.run("scancel", sweeps.jobs()[1])
    output = end(sweep, code=1)
    assert f"rank 1 on {node}" in output
    assert "was killed by SIGKILL" in output
    assert "ended as CANCELLED and left no measurement" in output
    assert statuses(sweeps) == ["failed"] * 2
    sweeps.auto3d("resume")
    assert statuses(sweeps) == ["ok"] * 2
    assert sweeps.starts() == [2, 2]
    assert "(not run again)" not in sweeps.auto3d("resume")
    assert sweeps.starts() == [2, 2], "what is done is not run again"


@pytest.mark.soak
def test_a_killed_driver_loses_nothing(sweeps):
    sweep = sweeps.start("sweep", *LONG)
    sweeps.running_on()
    sweep.kill()
    sweep.wait()
    assert "1 running" in sweeps.auto3d("status")
    assert "ok" in sweeps.auto3d("resume")
    assert statuses(sweeps) == ["ok"]
    assert sweeps.starts() == [1], "the job that ran was followed"


def test_a_job_of_a_driver_that_died_while_it_submitted_is_found(sweeps):
    sweeps.auto3d("sweep", "--detach", *LONG)
    file = sweeps.folder / "runs" / "own" / "manifest.jsonl"
    asked, _ = file.read_text().splitlines(keepends=True)
    file.write_text(asked + '{"trial": "dp1')  # as if it had died when SLURM had the job
    sweeps.auto3d("resume")
    assert statuses(sweeps) == ["ok"]
    assert sweeps.starts() == [1]


@pytest.mark.soak
def test_a_preempted_trial_that_slurm_does_not_requeue_is_submitted_again(sweeps):
    sweep = sweeps.start("sweep", "measure.iterations=1000000", "launch.nodelist=n1,n2")
    nodes = sweeps.running_on()
    job = sweeps.job()
    sweeps.cluster.run("scontrol", "update", f"JobId={job}", "Requeue=0")
    partition = ["scontrol", "update", "PartitionName=low"]
    sweeps.cluster.run(*partition, "State=INACTIVE")  # it takes no jobs
    try:
        sweeps.cluster.run("srun", "--partition=high", "--exclusive", f"--nodelist={','.join(nodes)}", "true")
        wait_for("it to be refused", lambda: sweeps.entries()[-1].state is State.REFUSED, timeout_s=60)
    finally:
        sweeps.cluster.run(*partition, "State=UP")
    wait_for("another job of the trial", lambda: sweeps.job() != job, timeout_s=60)
    running = ["squeue", "--noheader", "--states=RUNNING", f"--jobs={sweeps.job()}"]
    wait_for("that job to run", lambda: sweeps.cluster.run(*running), timeout_s=60)
    assert sweeps.starts() == [2]
    sweep.send_signal(signal.SIGINT)
    output = end(sweep, code=130)
    assert f"job {job} was lost and cannot be submitted again yet: sbatch refused" in output
    assert f"job {job} ended as PREEMPTED; submitted again: job {sweeps.job()}" in output


@pytest.mark.soak
def test_a_node_that_dies_sends_its_trial_to_others(sweeps):
    sweep = sweeps.start("sweep", "measure.iterations=20000")
    nodes = sweeps.running_on()
    job = sweeps.job()
    for pid in [*pids(nodes[1], "slurmd"), *pids(nodes[1], "slurmstepd"), *pids(nodes[1], "python")]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    try:
        shown = ["scontrol", "show", "job", job]
        wait_for("the job to be requeued", lambda: "Restarts=1" in sweeps.cluster.run(*shown), timeout_s=200)
        sweeps.cluster.run("scancel", job)
        output = end(sweep, code=1)
        assert statuses(sweeps) == ["failed"]
        assert "ended as CANCELLED" in output, "not as the death of the node had it"
    finally:
        sweeps.cluster.run(*PROGRAM, "up", timeout_s=120)


@pytest.mark.soak
def test_without_accounting_squeue_tells(sweeps):
    try:
        for pid in pids("control", "slurmdbd"):
            os.kill(pid, signal.SIGKILL)
        sweep = sweeps.start("sweep", *LONG)
        sweeps.running_on()
        sweeps.cluster.run("scancel", sweeps.job())
        assert "ended as CANCELLED" in end(sweep, code=1)
        sweeps.auto3d("resume")
        assert statuses(sweeps) == ["ok"]
    finally:
        sweeps.cluster.run(*PROGRAM, "up", timeout_s=120)


@pytest.mark.soak
def test_a_restarted_controller_is_no_end(sweeps):
    sweep = sweeps.start("sweep", "measure.iterations=4000")
    sweeps.running_on()
    time.sleep(SAVED_S)
    try:
        for pid in pids("control", "slurmctld"):
            os.kill(pid, signal.SIGKILL)
        refused = sweeps.auto3d("sweep", "search.micro_batch_size=[2]", code=2)
        assert "SLURM cannot be used: sinfo " in refused
    finally:
        sweeps.cluster.run(*PROGRAM, "up", timeout_s=120)
    end(sweep)
    assert statuses(sweeps) == ["ok"]
    assert sweeps.starts() == [1]


def test_resume_cancels_what_is_queued_although_it_ended_and_nothing_else(sweeps):
    sweeps.auto3d("sweep")
    job, called = sweeps.job(), sweeps.entries()[-1].submission
    sweeps.cluster.run("scontrol", "requeuehold", job)
    held = ["sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap", "true"]
    other = sweeps.cluster.run(*held).strip()
    # A trial whose job had, on a cluster that is no more, the number that this one has now.
    Manifest(sweeps.folder / "runs" / "own" / "manifest.jsonl").append(
        [Entry(trial="dp1-elsewhere", state=State.ENDED, job=other, submission=called, told="ok")]
    )
    assert sorted(sweeps.cluster.run("squeue", "--noheader", "--format=%i").split()) == sorted([job, other])
    sweeps.auto3d("resume")
    assert sweeps.cluster.run("squeue", "--noheader", "--format=%i").split() == [other]
    assert sweeps.starts() == [1, 0]


def test_a_job_that_waits_too_long_is_cancelled(sweeps):
    everything = ["--partition=high", "--exclusive", "--nodes=4", "--output=/dev/null", "--wrap", "sleep 600"]
    sweeps.cluster.run("sbatch", *everything)
    wait_for("no node to be idle", lambda: "idle" not in sweeps.cluster.node_states().values(), timeout_s=30)
    output = sweeps.auto3d("sweep", "launch.queue_timeout_s=3", code=1)
    assert output.count(f"job {sweeps.job().split('_')[0]} is pending; SLURM's reason: ") == 1
    assert f"job {sweeps.job()} was pending for 3 s (" in output
    assert not sweeps.cluster.run("squeue", "--noheader", "--partition=low")
    assert statuses(sweeps) == ["timeout"]


# Verbs


def test_status_logs_and_cancel(sweeps):
    output = sweeps.auto3d("sweep", "--detach", "measure.iterations=100000")
    for verb in ("status own.yaml --watch", "logs own.yaml TRIAL -f", "cancel own.yaml", "resume own.yaml"):
        assert f"auto3d {verb}" in output
    sweeps.running_on()
    assert "1 running" in sweeps.auto3d("status")
    logs = sweeps.start("logs", "pp2-mb4", "-f")
    wait_for("the logs", lambda: "Starting with JobEnvironment" in logs.stdout.readline(), timeout_s=30)
    refused = sweeps.auto3d("logs", "pp3", code=2)
    assert "trial: no trial is called 'pp3'; started trials: dp1-tp1-pp2-mb4" in refused
    assert "cancelled 1 job of SLURM: dp1" in sweeps.auto3d("cancel", "pp2")
    end(logs)
    assert "1 cancelled" in sweeps.auto3d("status", "--watch")


# Limits on jobs


@pytest.fixture
def allow_jobs(cluster):
    """Tells SLURM how many submitted jobs this user may have."""

    def limit(number: int) -> None:
        cluster.run("sacctmgr", "--immediate", "modify", "user", "root", "set", f"MaxSubmitJobs={number}")

    yield limit
    limit(-1)


@pytest.fixture
def two_jobs(allow_jobs):
    allow_jobs(2)


ON_ONE_DEVICE = [
    *("training.global_batch=16", "search.pp=[1]", "cluster.nodes=1", "cluster.devices_per_node=1"),
    *("measure.iterations=1", "measure.warmup_iterations=1"),
]
SPACE_OF_3 = [*ON_ONE_DEVICE, "search.micro_batch_size=[4,8,16]"]
SPACE_OF_5 = [*ON_ONE_DEVICE, "search.micro_batch_size=[1,2,4,8,16]"]


def most_at_once(entries: list[Entry]) -> int:
    """The largest number of trials that were submitted and had not ended."""
    live, most = set(), 0
    for entry in entries:
        if entry.state is State.SUBMITTED:
            live.add(entry.trial)
        elif entry.state is State.ENDED:
            live.discard(entry.trial)
        most = max(most, len(live))
    return most


def test_a_driver_as_a_job_submits_what_a_limit_on_jobs_leaves_over_as_jobs_end(sweeps, allow_jobs):
    allow_jobs(3)  # the driver's and two of its trials'
    (sweeps.folder / ".venv").symlink_to(sys.prefix)
    script = REPOSITORY / "slurm" / "sweep.sbatch"
    command = ["sbatch", "--parsable", str(script), "own.yaml", *SPACE_OF_3]
    job = sweeps.cluster.run(*command, cwd=sweeps.folder).strip()
    left = ["squeue", "--noheader", f"--name=auto3d-sweep,{job}"]
    wait_for("the driver to end", lambda: not sweeps.cluster.run(*left), timeout_s=280)
    told = (sweeps.folder / f"auto3d-sweep-{job}.out").read_text()
    assert "to train under the fastest plan" in told
    assert statuses(sweeps) == ["ok"] * 3
    assert sweeps.starts() == [1] * 3
    assert most_at_once(sweeps.entries()) == 2
    assert told.count("AssocMaxSubmitJobLimit") == 1, told
    assert "will be submitted as jobs end" in told


@pytest.mark.soak
def test_what_a_limit_on_jobs_leaves_over_is_submitted_as_jobs_end_time_and_again(sweeps, two_jobs):
    end(sweeps.start("sweep", *SPACE_OF_5))
    assert statuses(sweeps) == ["ok"] * 5
    assert sweeps.starts() == [1] * 5
    assert most_at_once(sweeps.entries()) == 2


@pytest.mark.soak
def test_a_recipe_may_say_how_many_of_its_trials_are_submitted_at_once(sweeps):
    told = end(sweeps.start("sweep", *SPACE_OF_5, "launch.max_submitted=3"))
    assert "2 trials will be submitted as jobs end: launch.max_submitted is 3" in told
    assert sweeps.starts() == [1] * 5
    assert most_at_once(sweeps.entries()) == 3


@pytest.mark.soak
def test_a_cancelled_sweep_submits_nothing_more(sweeps, two_jobs):
    process = sweeps.start("sweep", *(one for one in SPACE_OF_5 if "iterations" not in one), *LONG)
    listed = ["squeue", "--noheader", "--array", "--states=RUNNING", "--format=%i"]
    wait_for("two jobs to run", lambda: len(sweeps.cluster.run(*listed).split()) == 2, timeout_s=200)
    assert "cancelled 2 jobs" in sweeps.auto3d("cancel")
    told = end(process, code=1)
    assert "3 trials will not be submitted, since all were cancelled" in told
    assert sorted(sweeps.starts()) == [0, 0, 0, 1, 1]


@pytest.mark.soak
def test_failed_trials_are_retried_in_portions_too(sweeps, two_jobs):
    """An attempt that SLURM refuses has removed the measurement of the trials that it would have started."""
    end(sweeps.start("sweep", *SPACE_OF_5, "launch.setup=[exit 3]"), code=1)
    assert statuses(sweeps) == ["failed"] * 5
    end(sweeps.start("sweep", *SPACE_OF_5, "--retry"))
    assert statuses(sweeps) == ["ok"] * 5
    assert sweeps.starts() == [2] * 5


def test_a_limit_that_allows_no_job_is_an_error_of_one_line(sweeps, allow_jobs):
    allow_jobs(0)
    told = end(sweeps.start("sweep", *SPACE_OF_5), code=2)
    assert told.count("Job violates accounting/QOS policy") == 1, told
    assert "Traceback" not in told


@pytest.mark.soak
def test_the_rows_of_a_papers_item_are_one_array_of_jobs(sweeps):
    """Two of the item's rows have the same plan, and a third fits into no device."""
    (sweeps.folder / "two.yaml").write_text(ITEM.replace("executor: local", "executor: slurm"))
    on_nodes = ["cluster.nodes=2", "cluster.devices_per_node=1", "--only", "few"]
    sweeps.auto3d("paper", "--run", *on_nodes, "--detach", recipe="two.yaml")
    sweeps.auto3d("resume", recipe="paper-two")
    manifest = Manifest(sweeps.folder / "runs" / "paper-two" / "manifest.jsonl").entries()
    jobs = [entry.job for entry in manifest if entry.state is State.SUBMITTED]
    assert len(jobs) == 2
    assert len({job.split("_")[0] for job in jobs}) == 1
    claims = (sweeps.folder / "tables" / "papers" / "two-claims.csv").read_text()
    assert "f1b over gpipe" in claims.splitlines()[-1]
    assert "measured here" in claims.splitlines()[0]
