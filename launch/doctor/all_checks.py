"""All checks of `auto3d doctor` in their order, on this machine and on nodes of SLURM.

Each checks something that trials need, and says how to fix it if it is at fault.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from auto3d.words import counted
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

CPU_RANKS = 4  # most ranks on a CPU: they share its cores, so more ranks would show nothing more
SKEW_WARNING_S, SKEW_ERROR_S = 1.0, 30.0
SAME = ("python", "torch")  # packages whose version must be equal on all nodes


def all_checks(
    recipe: LoadedRecipe, *, devices: bool, wait_s: float, announce: Callable[[str], None]
) -> Iterator[Check]:
    """Yields each result as soon as it is known; raises RecipeError if the recipe's trials could never be submitted.

    With ``devices``, the devices of the trials also exchange messages and train, which takes minutes. ``wait_s`` is how
    long the SLURM job may wait in the queue. ``announce`` is called with a line of text when a long step begins.
    """
    check_launch(recipe)
    here = this_machine()
    yield _versions(here)
    yield _devices(recipe, here)
    yield gpu_check("gpus", here, needed=device(recipe.values) == "cuda")
    yield variable_check("variables", here)
    yield _backends(recipe)
    yield _mpi()
    announce("checking an all-reduce on this machine")
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
    finding = ", ".join(f"{name} {version or 'not installed'}" for name, version in here.versions.items())
    if missing:
        return Check(Verdict.ERROR, "versions", finding, f"install {' and '.join(missing)}; `make setup` does so")
    return Check(Verdict.OK, "versions", finding)


def _devices(recipe: LoadedRecipe, here: Machine) -> Check:
    wanted, finding = recipe.values.cluster.devices_per_node, f"{here.host}: {here.devices}"
    if here.gpus and not here.usable_gpus:
        advice = "install a torch whose CUDA the driver supports; see also CUDA_VISIBLE_DEVICES"
        return Check(Verdict.WARNING, "devices", f"{finding}; torch can use no GPU", advice)
    if device(recipe.values) == "cuda" and here.usable_gpus < wanted and not on_slurm(recipe):
        advice = "set cluster.devices_per_node to at most the number of GPUs, or set cluster.device=cpu"
        return Check(Verdict.ERROR, "devices", f"{finding}; cluster.devices_per_node is {wanted} with cuda", advice)
    return Check(Verdict.OK, "devices", finding)


def _backends(recipe: LoadedRecipe) -> Check:
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    finding = ", ".join(f"{name} {'available' if known else 'not in this torch'}" for name, known in available.items())
    needed = "nccl" if device(recipe.values) == "cuda" else "gloo"
    if available[needed]:
        return Check(Verdict.OK, "backends", finding)
    advice = f"install a torch with {needed}, which cluster.device={recipe.values.cluster.device} needs"
    return Check(Verdict.ERROR, "backends", finding, advice)


def _mpi() -> Check:
    library, reason = mpi_library()
    if library:
        return Check(Verdict.OK, "mpi", library)
    advice = "only mpirun needs MPI: load the cluster's, or install mpich from PyPI; see slurm/train-mpirun.sbatch"
    return Check(Verdict.WARNING, "mpi", reason, advice)


def _local_all_reduce(recipe: LoadedRecipe, here: Machine) -> AllReduce:
    """The all-reduce of two processes here, on GPUs if the recipe uses them and this machine has any.

    A login node often has none.
    """
    if device(recipe.values) == "cuda" and here.usable_gpus:
        return all_reduce(min(2, here.usable_gpus), device="cuda")
    return all_reduce(2, device="cpu")


def _local_devices(recipe: LoadedRecipe, here: Machine, announce: Callable[[str], None]) -> Iterator[Check]:
    """The probes of this machine's devices, with one rank per device."""
    kind, wanted = device(recipe.values), recipe.values.cluster.devices_per_node
    ranks = min(wanted, here.usable_gpus if kind == "cuda" else CPU_RANKS)
    if not ranks:
        return  # the line "devices" says that there are none
    report = probe_devices(ranks, device=kind, node_of=lambda run: None, announce=announce)
    yield from device_checks("here", report, interfaces=_interface_advice([here]))


def _all_reduce(where: str, result: AllReduce, machines: list[Machine]) -> Iterator[Check]:
    ranks = f"{result.ranks} ranks with {result.backend}"
    if not result.met:
        yield Check(
            Verdict.ERROR, f"rendezvous {where}", result.error or "the ranks did not meet", _interface_advice(machines)
        )
        return
    yield Check(Verdict.OK, f"rendezvous {where}", f"{ranks} met")
    if result.error:
        yield Check(Verdict.ERROR, f"all-reduce {where}", result.error, _interface_advice(machines))
    elif not result.correct:
        advice = "a device computes wrongly or an adapter corrupts data: exclude its node with launch.exclude"
        yield Check(Verdict.ERROR, f"all-reduce {where}", f"{ranks} got wrong sums", advice)
    else:
        best = max(rate.bus_gbit_per_s for rate in result.rates)
        text = f"all sums are correct; bus bandwidth up to {best:.2f} Gbit/s"
        yield Check(Verdict.OK, f"all-reduce {where}", text, rates=result.rates)


def _interface_advice(machines: list[Machine]) -> str:
    """What to try if ranks cannot reach each other."""
    known = "; ".join(f"{machine.host} has {', '.join(machine.interfaces)}" for machine in machines)
    chosen = {f"{n} is {machine.variables[n]}" for machine in machines for n in INTERFACES if n in machine.variables}
    if chosen:
        return f"{' and '.join(sorted(chosen))}, and {known}: set it to an interface that all have, or unset it"
    return f"{known}: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the right interface; see slurm/network.sh"


# SLURM


def _slurm(recipe: LoadedRecipe) -> Check:
    wanted, reason = recipe.values.launch.executor, why_no_slurm()
    if wanted == "local":
        return Check(Verdict.OK, "slurm", "not needed: launch.executor is local")
    if wanted != "slurm" and in_a_job():
        return Check(Verdict.OK, "slurm", "trials run in this SLURM job; launch.executor=slurm submits them as jobs")
    if reason and wanted == "slurm":
        advice = "run auto3d where sinfo answers, or with launch.executor=local"
        return Check(Verdict.ERROR, "slurm", reason, advice)
    if reason:
        installed = shutil.which("sinfo") is not None
        advice = "see `scontrol ping`; with launch.executor=slurm, trials never run here instead" if installed else ""
        verdict = Verdict.WARNING if installed else Verdict.OK
        return Check(verdict, "slurm", f"{reason}; trials run on this machine", advice)
    return Check(Verdict.OK, "slurm", f"sinfo answers; partitions: {', '.join(_partition_texts(partitions()))}")


def _partition_texts(nodes_of: dict[str, int]) -> list[str]:
    return [f"{name} ({counted(nodes, 'node')})" for name, nodes in nodes_of.items()]


def _accounting() -> Check:
    reason = why_no_accounting()
    if not reason:
        return Check(Verdict.OK, "accounting", "sacct answers")
    advice = (
        "sweeps still run, by squeue alone, but squeue forgets a job some minutes after its end: a driver that was "
        "stopped for longer starts the trial again; ask the cluster's administrators for slurmdbd"
    )
    return Check(Verdict.WARNING, "accounting", reason, advice)


def _nodes(
    recipe: LoadedRecipe, here: Machine, devices: bool, wait_s: float, announce: Callable[[str], None]
) -> Iterator[Check]:
    """The checks of a SLURM job on two nodes, or on one if the partition has no more."""
    known = partitions()
    name = recipe.values.launch.partition or next(iter(known))
    if name not in known:
        advice = f"set launch.partition to one of {', '.join(_partition_texts(known))}"
        yield Check(Verdict.ERROR, "partition", f"SLURM has no partition {name!r}", advice)
        return
    try:
        probe = run_probe(recipe, nodes=min(2, known[name]), devices=devices, wait_s=wait_s, announce=announce)
    except SlurmError as error:
        advice = "correct the setting that sbatch names: launch.account, launch.partition, …; `auto3d keys` lists them"
        yield Check(Verdict.ERROR, "probe job", f"sbatch refused it: {error}", advice)
        return
    if not probe.complete:
        yield _lost_job(probe, wait_s)
        return
    reports = [probe.reports[node] for node in sorted(probe.reports)]
    hosts = " and ".join(report.machine.host for report in reports)
    yield Check(
        Verdict.OK, "probe job", f"job {probe.job_id} ran on {hosts}, after {probe.queued_s:.0f} s in the queue"
    )
    yield _shared_folder(probe, reports)
    yield _versions_on_nodes(here, reports)
    yield _devices_on_nodes(recipe, reports)
    machines = [report.machine for report in reports]
    for machine in machines:
        yield gpu_check(f"gpus of {machine.host}", machine, needed=device(recipe.values) == "cuda")
        yield variable_check(f"variables of {machine.host}", machine)
    yield same_libraries(machines)
    yield from (_clock(report) for report in reports if report.answer)
    problem = next((report.all_reduce.error for report in reports if report.all_reduce.error), "")
    reduced = replace(reports[0].all_reduce, error=problem)
    where = f"of {hosts}" if len(reports) > 1 else f"on {hosts}"
    yield from _all_reduce(where, reduced, machines)
    device_reports = [report.devices for report in reports if report.devices is not None]
    if device_reports:
        for check in device_checks(where, merge_reports(device_reports), interfaces=_interface_advice(machines)):
            problem = problem or (check.found if check.verdict is Verdict.ERROR else "")
            yield check
    if all(report.answer for report in reports) and not problem:
        shutil.rmtree(probe.folder, ignore_errors=True)  # there is no fault that its logs could explain


def _lost_job(probe: ProbeJob, wait_s: float) -> Check:
    """The likeliest reason why a job did not report."""
    finding = f"job {probe.job_id} {probe.problem}"
    if probe.queued_s is None:
        advice = f"wait longer with --wait {2 * wait_s:g}, or share nodes with other jobs with launch.exclusive=false"
        return Check(Verdict.ERROR, "probe job", f"{finding}; it was cancelled", advice)
    logs = probe.logs()
    if not probe.greeted and not logs:
        advice = f"run auto3d in a folder that all nodes see, such as home or scratch, unlike {probe.folder}"
        return Check(Verdict.ERROR, "shared folder", f"{finding}, and this machine sees no file of its nodes", advice)
    errors = [file.read_text(errors="replace") for file in logs if file.suffix == ".err"]
    lines = [line for text in errors for line in text.splitlines() if line.strip()]
    last_error = f"; its last error: {lines[-1]}" if lines else ""
    advice = f"see launch.setup, launch.container and the job's output in {probe.folder}"
    return Check(Verdict.ERROR, "probe job", f"{finding}{last_error}", advice)


def _shared_folder(probe: ProbeJob, reports: list[NodeReport]) -> Check:
    blind = [report.machine.host for report in reports if report.answer is None or report.answer.token != probe.token]
    if blind:
        finding = f"{probe.folder}: {' and '.join(blind)} did not see the files that this machine wrote there"
        return Check(
            Verdict.ERROR, "shared folder", finding, "run auto3d in a folder that all nodes see and can write to"
        )
    slowest = max(report.received - report.sent for report in reports)
    finding = f"{Path.cwd()}: files took up to {slowest:.2f} s from a node to this machine and back"
    return Check(Verdict.OK, "shared folder", finding)


def _versions_on_nodes(here: Machine, reports: list[NodeReport]) -> Check:
    all_machines = [here, *(report.machine for report in reports)]
    names = [name for name in here.versions if len({machine.versions.get(name) for machine in all_machines}) > 1]
    if not names:
        return Check(Verdict.OK, "versions on nodes", "the same as on this machine")
    versions = [
        f"{machine.host} has {', '.join(f'{name} {machine.versions.get(name)}' for name in names)}"
        for machine in all_machines
    ]
    between = any(len({machine.versions.get(name) for machine in all_machines[1:]}) > 1 for name in SAME)
    advice = "use one environment or container everywhere: launch.setup, launch.container, or the shared .venv"
    return Check(Verdict.ERROR if between else Verdict.WARNING, "versions on nodes", "; ".join(versions), advice)


def _devices_on_nodes(recipe: LoadedRecipe, reports: list[NodeReport]) -> Check:
    finding = "; ".join(f"{report.machine.host}: {report.machine.devices}" for report in reports)
    wanted = recipe.values.cluster.devices_per_node
    lacking = [report.machine.host for report in reports if report.machine.usable_gpus < wanted]
    if device(recipe.values) == "cuda" and lacking:
        finding = f"{finding}; torch can use fewer than {wanted} on {' and '.join(lacking)}"
        advice = "see cluster.devices_per_node, launch.gpus_per_node, launch.gres and the node's driver"
        return Check(Verdict.ERROR, "devices on nodes", finding, advice)
    return Check(Verdict.OK, "devices on nodes", finding)


def _clock(report: NodeReport) -> Check:
    return clock(report.machine.host, *report.skew_s)


def clock(host: str, least_s: float, most_s: float) -> Check:
    """The check of a clock that is between ``least_s`` and ``most_s`` ahead of this machine's clock.

    The verdict is the best that these bounds allow.
    """
    certain = 0.0 if least_s <= 0 <= most_s else min(abs(least_s), abs(most_s))
    finding = f"{(least_s + most_s) / 2:+.2f} s ± {(most_s - least_s) / 2:.2f} s from this machine's clock"
    title = f"clock of {host}"
    advice = "set the clocks by NTP (chrony): times in logs and files of this node cannot be compared"
    if certain <= SKEW_WARNING_S:
        return Check(Verdict.OK, title, finding)
    return Check(Verdict.ERROR if certain > SKEW_ERROR_S else Verdict.WARNING, title, finding, advice)
