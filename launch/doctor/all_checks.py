"""`auto3d doctor`: check what trials need, on this machine and on nodes of SLURM, and say of each fault what to do."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from launch.doctor.all_reduce_probe import AllReduce, all_reduce
from launch.doctor.device_probe import merge_reports, probe_devices
from launch.doctor.gpu_checks import device_checks, gpu_check, same_libraries, variable_check
from launch.doctor.machine import INTERFACES, Machine, mpi_library, this_machine
from launch.doctor.node_probe import NodeReport
from launch.doctor.report import Check, Verdict
from launch.doctor.slurm_probe import ProbeJob, run_probe
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import device
from launch.slurm.client import SlurmError
from launch.slurm.executor import in_a_job, on_slurm, why_no_slurm
from launch.slurm.jobs import partitions, why_no_accounting
from launch.slurm.sbatch import check_launch

CPU_RANKS = 4  # on a CPU, where ranks share the cores, more would show no more
SKEW_WARNING_S, SKEW_ERROR_S = 1.0, 30.0
SAME = ("python", "torch")  # of which ranks that talk to each other must have the same version


def all_checks(
    recipe: LoadedRecipe, *, devices: bool, wait_s: float, announce: Callable[[str], None]
) -> Iterator[Check]:
    """Each as soon as it is known; raises RecipeError for a recipe whose trials could not be submitted at all.

    With ``devices``, the devices that trials would run on exchange messages and train, which takes minutes.
    """
    check_launch(recipe)
    here = this_machine()
    yield _versions(here)
    yield _devices(recipe, here)
    yield gpu_check("gpus", here, needed=device(recipe.values) == "cuda")
    yield variable_check("variables", here)
    yield _backends(recipe)
    yield _mpi()
    announce("two processes of this machine meet and sum")
    yield from _all_reduce("here", _local_all_reduce(recipe, here), [here])
    yield _slurm(recipe)
    if on_slurm(recipe) and not why_no_slurm():
        yield _accounting()
        yield from _nodes(recipe, here, devices, wait_s, announce)
    elif devices and not on_slurm(recipe):
        yield from _local_devices(recipe, here, announce)


# This machine


def _versions(here: Machine) -> Check:
    missing = [name for name, version in here.versions.items() if not version]
    found = ", ".join(f"{name} {version or 'not installed'}" for name, version in here.versions.items())
    if missing:
        return Check(Verdict.ERROR, "versions", found, f"install {' and '.join(missing)}, as `make setup` does")
    return Check(Verdict.OK, "versions", found)


def _devices(recipe: LoadedRecipe, here: Machine) -> Check:
    wanted, found = recipe.values.cluster.devices_per_node, f"{here.host}: {here.devices}"
    if here.gpus and not here.usable_gpus:
        advice = "install a torch with CUDA that the driver supports; see CUDA_VISIBLE_DEVICES"
        return Check(Verdict.WARNING, "devices", f"{found}, of which torch can use none", advice)
    if device(recipe.values) == "cuda" and here.usable_gpus < wanted and not on_slurm(recipe):
        advice = "give cluster.devices_per_node as many as there are, or cluster.device=cpu"
        return Check(Verdict.ERROR, "devices", f"{found}; cluster.devices_per_node is {wanted} with cuda", advice)
    return Check(Verdict.OK, "devices", found)


def _backends(recipe: LoadedRecipe) -> Check:
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    found = ", ".join(f"{name} {'is there' if known else 'is not in this torch'}" for name, known in there.items())
    needed = "nccl" if device(recipe.values) == "cuda" else "gloo"
    if there[needed]:
        return Check(Verdict.OK, "backends", found)
    advice = f"install a torch with {needed}, which cluster.device={recipe.values.cluster.device} needs"
    return Check(Verdict.ERROR, "backends", found, advice)


def _mpi() -> Check:
    library, reason = mpi_library()
    if library:
        return Check(Verdict.OK, "mpi", library)
    advice = "only mpirun needs it: load the cluster's MPI, or install mpich from PyPI; see slurm/train-mpirun.sbatch"
    return Check(Verdict.WARNING, "mpi", reason, advice)


def _local_all_reduce(recipe: LoadedRecipe, here: Machine) -> AllReduce:
    """Of two processes; on GPUs where the recipe wants them and this machine, which may be a login node, has some."""
    if device(recipe.values) == "cuda" and here.usable_gpus:
        return all_reduce(min(2, here.usable_gpus), device="cuda")
    return all_reduce(2, device="cpu")


def _local_devices(recipe: LoadedRecipe, here: Machine, announce: Callable[[str], None]) -> Iterator[Check]:
    """What the devices of this machine do, a rank each."""
    kind, wanted = device(recipe.values), recipe.values.cluster.devices_per_node
    ranks = min(wanted, here.usable_gpus if kind == "cuda" else CPU_RANKS)
    if not ranks:
        return  # the line of the devices says so
    report = probe_devices(ranks, device=kind, node_of=lambda run: None, announce=announce)
    yield from device_checks("here", report, interfaces=_of_interfaces([here]))


def _all_reduce(where: str, found: AllReduce, machines: list[Machine]) -> Iterator[Check]:
    ranks = f"{found.ranks} ranks with {found.backend}"
    if not found.met:
        yield Check(Verdict.ERROR, f"rendezvous {where}", found.error or "they did not meet", _of_interfaces(machines))
        return
    yield Check(Verdict.OK, f"rendezvous {where}", f"{ranks} met")
    if found.error:
        yield Check(Verdict.ERROR, f"all-reduce {where}", found.error, _of_interfaces(machines))
    elif not found.correct:
        advice = "a device or an adapter computes or transfers wrongly: leave its node out, by launch.exclude"
        yield Check(Verdict.ERROR, f"all-reduce {where}", f"{ranks} got wrong sums", advice)
    else:
        best = max(rate.bus_gbit_per_s for rate in found.rates)
        told = f"all sums are right; bus bandwidth up to {best:.2f} Gbit/s"
        yield Check(Verdict.OK, f"all-reduce {where}", told, rates=found.rates)


def _of_interfaces(machines: list[Machine]) -> str:
    """What to try where ranks do not reach each other."""
    known = "; ".join(f"{one.host} has {', '.join(one.interfaces)}" for one in machines)
    chosen = {f"{n} is {one.variables[n]}" for one in machines for n in INTERFACES if n in one.variables}
    if chosen:
        return f"{' and '.join(sorted(chosen))}, and {known}: name one that all have, or unset it"
    return f"{known}: name the right one in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; see slurm/network.sh"


# SLURM


def _slurm(recipe: LoadedRecipe) -> Check:
    wanted, reason = recipe.values.launch.executor, why_no_slurm()
    if wanted == "local":
        return Check(Verdict.OK, "slurm", "not asked: launch.executor is local")
    if wanted != "slurm" and in_a_job():
        return Check(Verdict.OK, "slurm", "this is a job, and trials run in it; launch.executor=slurm submits more")
    if reason and wanted == "slurm":
        advice = "call auto3d where sinfo answers, or with launch.executor=local"
        return Check(Verdict.ERROR, "slurm", reason, advice)
    if reason:
        installed = shutil.which("sinfo") is not None
        advice = "see `scontrol ping`; launch.executor=slurm refuses to run trials here instead" if installed else ""
        verdict = Verdict.WARNING if installed else Verdict.OK
        return Check(verdict, "slurm", f"{reason}; trials run on this machine", advice)
    return Check(Verdict.OK, "slurm", f"sinfo answers; partitions: {', '.join(_partition_texts(partitions()))}")


def _partition_texts(known: dict[str, int]) -> list[str]:
    return [f"{name} ({nodes} nodes)" for name, nodes in known.items()]


def _accounting() -> Check:
    reason = why_no_accounting()
    if not reason:
        return Check(Verdict.OK, "accounting", "sacct answers")
    advice = (
        "sweeps run all the same, by squeue alone, which forgets a job some minutes after its end: a driver that was "
        "away for longer starts its trial again; ask the cluster's administrators for slurmdbd"
    )
    return Check(Verdict.WARNING, "accounting", reason, advice)


def _nodes(
    recipe: LoadedRecipe, here: Machine, devices: bool, wait_s: float, announce: Callable[[str], None]
) -> Iterator[Check]:
    """What a job on two nodes finds; on one, where the partition has no more."""
    known = partitions()
    name = recipe.values.launch.partition or next(iter(known))
    if name not in known:
        advice = f"launch.partition takes one of {', '.join(_partition_texts(known))}"
        yield Check(Verdict.ERROR, "partition", f"there is no {name!r}", advice)
        return
    try:
        probe = run_probe(recipe, nodes=min(2, known[name]), devices=devices, wait_s=wait_s, announce=announce)
    except SlurmError as error:
        advice = "mend what sbatch names: launch.account, launch.partition, …; `auto3d keys` lists them"
        yield Check(Verdict.ERROR, "probe job", f"sbatch refused it: {error}", advice)
        return
    if not probe.whole:
        yield _lost(probe, wait_s)
        return
    reports = [probe.reports[node] for node in sorted(probe.reports)]
    hosts = " and ".join(report.machine.host for report in reports)
    yield Check(
        Verdict.OK, "probe job", f"job {probe.job_id} ran on {hosts}, after {probe.queued_s:.0f} s in the queue"
    )
    yield _shared_folder(probe, reports)
    yield _versions_there(here, reports)
    yield _devices_there(recipe, reports)
    machines = [report.machine for report in reports]
    for machine in machines:
        yield gpu_check(f"gpus of {machine.host}", machine, needed=device(recipe.values) == "cuda")
        yield variable_check(f"variables of {machine.host}", machine)
    yield same_libraries(machines)
    yield from (_clock(report) for report in reports if report.answer)
    problem = next((one.all_reduce.error for one in reports if one.all_reduce.error), "")
    found = replace(reports[0].all_reduce, error=problem)
    where = f"of {hosts}" if len(reports) > 1 else f"on {hosts}"
    yield from _all_reduce(where, found, machines)
    of_nodes = [report.devices for report in reports if report.devices is not None]
    if of_nodes:
        for check in device_checks(where, merge_reports(of_nodes), interfaces=_of_interfaces(machines)):
            problem = problem or (check.found if check.verdict is Verdict.ERROR else "")
            yield check
    if all(report.answer for report in reports) and not problem:
        shutil.rmtree(probe.folder, ignore_errors=True)  # nothing in it is left to explain


def _lost(probe: ProbeJob, wait_s: float) -> Check:
    """Of a job that did not report, the likeliest reason."""
    found = f"job {probe.job_id} {probe.problem}"
    if probe.queued_s is None:
        more = f"--wait {2 * wait_s:g} waits longer; launch.exclusive=false takes nodes that others use, too"
        return Check(Verdict.ERROR, "probe job", f"{found}; it was cancelled", more)
    logs = probe.logs()
    if not probe.greeted and not logs:
        advice = f"call auto3d in a folder that all nodes see, such as home or scratch; {probe.folder} is not such"
        return Check(Verdict.ERROR, "shared folder", f"{found}, and no file of its nodes is seen here", advice)
    errors = [file.read_text(errors="replace") for file in logs if file.suffix == ".err"]
    lines = [line for text in errors for line in text.splitlines() if line.strip()]
    said = f"; its last error: {lines[-1]}" if lines else ""
    advice = f"see launch.setup, launch.container and what it printed, in {probe.folder}"
    return Check(Verdict.ERROR, "probe job", f"{found}{said}", advice)


def _shared_folder(probe: ProbeJob, reports: list[NodeReport]) -> Check:
    deaf = [one.machine.host for one in reports if one.answer is None or one.answer.token != probe.token]
    if deaf:
        found = f"{probe.folder}: {' and '.join(deaf)} did not read there what this machine had written"
        return Check(Verdict.ERROR, "shared folder", found, "call auto3d in a folder that all nodes see and write to")
    slowest = max(one.received - one.sent for one in reports)
    place = Path.cwd()
    return Check(Verdict.OK, "shared folder", f"{place}: files went from nodes to here and back in {slowest:.2f} s")


def _versions_there(here: Machine, reports: list[NodeReport]) -> Check:
    all_machines = [here, *(report.machine for report in reports)]
    names = [name for name in here.versions if len({one.versions.get(name) for one in all_machines}) > 1]
    if not names:
        return Check(Verdict.OK, "versions on nodes", "as on this machine")
    told = [f"{one.host} has {', '.join(f'{name} {one.versions.get(name)}' for name in names)}" for one in all_machines]
    between = any(len({one.versions.get(name) for one in all_machines[1:]}) > 1 for name in SAME)
    advice = "use one environment or container everywhere: launch.setup, launch.container, or the shared .venv"
    return Check(Verdict.ERROR if between else Verdict.WARNING, "versions on nodes", "; ".join(told), advice)


def _devices_there(recipe: LoadedRecipe, reports: list[NodeReport]) -> Check:
    found = "; ".join(f"{report.machine.host}: {report.machine.devices}" for report in reports)
    wanted = recipe.values.cluster.devices_per_node
    lacking = [report.machine.host for report in reports if report.machine.usable_gpus < wanted]
    if device(recipe.values) == "cuda" and lacking:
        found = f"{found}; torch can use fewer than {wanted} on {' and '.join(lacking)}"
        advice = "see cluster.devices_per_node, launch.gpus_per_node or launch.gres, and the node's driver"
        return Check(Verdict.ERROR, "devices on nodes", found, advice)
    return Check(Verdict.OK, "devices on nodes", found)


def _clock(report: NodeReport) -> Check:
    return clock(report.machine.host, *report.skew_s)


def clock(host: str, least_s: float, most_s: float) -> Check:
    """Whether a clock that is ahead by something between the two is right enough, given the benefit of the doubt."""
    certain = 0.0 if least_s <= 0 <= most_s else min(abs(least_s), abs(most_s))
    found = f"it differs from that here by {(least_s + most_s) / 2:+.2f} s, give or take {(most_s - least_s) / 2:.2f} s"
    what = f"clock of {host}"
    advice = "have the clocks set by NTP (chrony): times in logs and files of this node cannot be compared"
    if certain <= SKEW_WARNING_S:
        return Check(Verdict.OK, what, found)
    return Check(Verdict.ERROR if certain > SKEW_ERROR_S else Verdict.WARNING, what, found, advice)
