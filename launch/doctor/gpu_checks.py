"""The result lines of `auto3d doctor` about GPUs and about the probes of --devices."""

from collections.abc import Iterator, Sequence

from auto3d.words import counted
from launch.doctor.device_probe import DeviceReport, ExchangeRun
from launch.doctor.exchange_probe import patterns
from launch.doctor.link_probe import CorruptedError, Links, PairRate
from launch.doctor.machine import Machine
from launch.doctor.report import Check, Verdict, size_text

SLOW_PAIR = 4.0  # how many times slower than the fastest pair of its kind a pair must be to be reported
_SLOW_SETTINGS = {
    "CUDA_LAUNCH_BLOCKING": "it makes the host wait for each kernel",
    "NCCL_P2P_DISABLE": "it sends messages between GPUs of a node through the host's memory",
}
_WAIT_WORDS = (
    "waited",
    "waiting",
    "connection",
    "did not meet",
    "not done",
)  # words that only errors about waits contain
# CUDA's release notes, "CUDA Toolkit and Minimum Required NVIDIA Driver Version for CUDA Minor Version Compatibility"
_LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}
_OTHER_TORCH = "set up another build of torch (docs/install.md): make setup TORCH='torch==… --index-url …'"
_TURNED_OFF = ("", "0")  # values that switch such a setting off


def gpu_check(title: str, machine: Machine, *, needed: bool) -> Check:
    """Driver, CUDA, NCCL and state of the GPUs of one machine; ``needed`` says whether trials run on them."""
    built = f"torch has {f'CUDA {machine.cuda}' if machine.cuda else 'no CUDA'}"
    built += f" and {f'NCCL {machine.nccl}' if machine.nccl else 'no NCCL'}"
    if not machine.gpus:
        return Check(Verdict.OK, title, f"nvidia-smi lists none; {built}")
    findings = [f"driver {machine.drivers}", built]
    capabilities = dict.fromkeys(gpu.capability for gpu in machine.gpus if gpu.capability)
    if capabilities:
        findings.append(f"compute capability {' and '.join(capabilities)}")
    modes = dict.fromkeys(gpu.mig.lower() for gpu in machine.gpus if gpu.mig)
    if modes:
        findings.append(f"MIG {' and '.join(modes)}")
    errors = {number: gpu.ecc_errors for number, gpu in enumerate(machine.gpus) if gpu.ecc_errors}
    faulty = [f"GPU {number} has {count}" for number, count in errors.items() if count != "0"]
    if errors:
        findings.append(f"uncorrected ECC errors: {', '.join(faulty) or '0'}")
    summary = ", ".join(findings)
    if problem := _not_for_this_torch(machine):
        return Check(Verdict.ERROR if needed else Verdict.WARNING, title, f"{summary}; {problem}", _OTHER_TORCH)
    if faulty:
        advice = f"exclude {machine.host} with launch.exclude, and look at `nvidia-smi -q -d ECC` there"
        return Check(Verdict.WARNING, title, summary, advice)
    if needed and "enabled" in modes:
        advice = "NCCL cannot connect two MIG devices of one GPU: request whole GPUs, or one GPU per rank"
        return Check(Verdict.WARNING, title, summary, advice)
    return Check(Verdict.OK, title, summary)


def runs_on(architectures: Sequence[str], capability: str) -> bool:
    """Whether a torch that was built for ``architectures`` runs on a GPU of this compute capability, such as 8.6.

    Machine code runs on capabilities with the same first number that are not lower; code to compile on all that are
    not lower (CUDA's programming guide, "Binary compatibility" and "PTX compatibility").
    """
    first, second = map(int, capability.split("."))
    for name in architectures:
        kind, _, digits = name.rstrip("af").partition("_")
        built = int(digits[:-1]), int(digits[-1])
        if built <= (first, second) and (kind == "compute" or built[0] == first):
            return True
    return False


def _not_for_this_torch(machine: Machine) -> str:
    """Why this torch cannot use a GPU of ``machine``, by its compute capability or its driver; empty if it can."""
    for capability in dict.fromkeys(gpu.capability for gpu in machine.gpus if gpu.capability):
        if machine.architectures and not runs_on(machine.architectures, capability):
            return f"this torch has kernels for {', '.join(machine.architectures)}, and none for {capability}"
    cuda = machine.cuda.partition(".")[0]
    for driver in dict.fromkeys(gpu.driver for gpu in machine.gpus):
        number = driver.partition(".")[0]
        if cuda in _LEAST_DRIVER and number.isdecimal() and int(number) < _LEAST_DRIVER[cuda]:
            return f"CUDA {machine.cuda} needs a driver of {_LEAST_DRIVER[cuda]} or later"
    return ""


def same_libraries(machines: Sequence[Machine]) -> Check:
    """Whether all ``machines``, which exchange messages, have the same NCCL, CUDA of torch, and driver."""
    title = "drivers and NCCL on nodes"
    kinds = {
        "NCCL": [machine.nccl or "none" for machine in machines],
        "CUDA of torch": [machine.cuda or "none" for machine in machines],
        "driver": [machine.drivers or "none" for machine in machines],
    }
    differing = [kind for kind, versions in kinds.items() if len(set(versions)) > 1]
    if not differing:
        return Check(
            Verdict.OK, title, "the same on all" if any(machine.gpus for machine in machines) else "no node has a GPU"
        )
    finding = "; ".join(
        f"{machine.host} has {', '.join(f'{kind} {kinds[kind][number]}' for kind in differing)}"
        for number, machine in enumerate(machines)
    )
    if differing == ["driver"]:
        advice = "install the same driver on all nodes, or select nodes with equal drivers with launch.constraint"
        return Check(Verdict.WARNING, title, finding, advice)
    advice = "use one environment or container everywhere: launch.setup, launch.container, or the shared .venv"
    return Check(Verdict.ERROR, title, finding, advice)


def variable_check(title: str, machine: Machine) -> Check:
    """The environment variables that control devices and connections."""
    finding = "; ".join(f"{name}={value}" for name, value in machine.variables.items())
    slow = [name for name in _SLOW_SETTINGS if machine.variables.get(name, "") not in _TURNED_OFF]
    if slow:
        advice = "; ".join(f"unset {name}: {_SLOW_SETTINGS[name]}" for name in slow)
        return Check(Verdict.WARNING, title, finding, advice)
    return Check(Verdict.OK, title, finding or "none that controls devices or connections is set")


def device_checks(where: str, report: DeviceReport, *, interfaces: str) -> Iterator[Check]:
    """The lines about the probes of all devices; ``interfaces`` is the advice if ranks cannot reach each other."""
    yield _links(where, report, interfaces)
    if report.links_error:
        return
    yield from (_exchange(where, report, run, interfaces) for run in report.exchanges)
    yield _parity(where, report, interfaces)
    if report.training:
        yield _memory(where, report)


def _links(where: str, report: DeviceReport, interfaces: str) -> Check:
    title = f"messages {where}"
    if report.links_error:
        return Check(Verdict.ERROR, title, report.links_error, _advice(report, report.links_error, interfaces))
    assert report.links is not None
    rates = report.links.rates
    if not rates:
        return Check(Verdict.OK, title, "not measured, because there is only 1 device")
    finding = "all arrived unchanged; " + ", ".join(
        f"{max(rate.one_way_gbit_per_s for rate in same):.2f} Gbit/s one way {place}"
        for place, same in (
            ("inside a node", [rate for rate in rates if not rate.between_nodes]),
            ("between nodes", [rate for rate in rates if rate.between_nodes]),
        )
        if same
    )
    finding += _peer_access(report.links)
    slow = _slow_pairs(rates) if report.device == "cuda" else ""  # pairs of CPU ranks differ anyway: they share cores
    if slow:
        advice = (
            "these pairs do not use the link that the others use: see `nvidia-smi topo -m` and, between nodes, the "
            "network adapters and NCCL_IB_HCA"
        )
        return Check(Verdict.WARNING, title, f"{finding}; {slow}", advice, links=rates)
    return Check(Verdict.OK, title, finding, links=rates)


def _exchange(where: str, report: DeviceReport, run: ExchangeRun, interfaces: str) -> Check:
    title = f"exchange {where}{run}"
    if run.error:
        advice = _advice(report, run.error, interfaces)
        passing = [other.connections for other in report.exchanges if not other.error]
        if passing:
            advice = f"set CUDA_DEVICE_MAX_CONNECTIONS={passing[-1]}, which passes; {advice}"
        return Check(Verdict.ERROR, title, run.error, advice)
    assert run.result is not None
    schedules = ", ".join(map(str, patterns(report.ranks)))
    tensors = counted(run.result.tensors, "tensor")
    finding = f"{schedules}: {tensors} arrived at rank 0 unchanged in {run.result.seconds:.1f} s"
    return Check(Verdict.OK, title, finding)


def _peer_access(links: Links) -> str:
    known = [pair for pair in links.neighbours if pair.peer_access is not None]
    without = [f"ranks {pair.ranks[0]} and {pair.ranks[1]} of {pair.host}" for pair in known if not pair.peer_access]
    if without:
        return f"; without peer access, through the host's memory: {', '.join(without)}"
    return "; peer access between all neighbours of a node" if known else ""


def _slow_pairs(rates: Sequence[PairRate]) -> str:
    """The pairs that are much slower than the fastest pair of their kind, as text.

    The kinds are inside a node and between nodes; a kind is compared at the largest size that all its pairs have.
    """
    slow: list[str] = []
    for between_nodes in (False, True):
        same = [rate for rate in rates if rate.between_nodes == between_nodes]
        pairs = {rate.ranks for rate in same}
        sizes = [{rate.size_bytes for rate in same if rate.ranks == pair} for pair in pairs]
        size = max(set.intersection(*sizes), default=0) if sizes else 0
        largest = [rate for rate in same if rate.size_bytes == size]
        best = max((rate.one_way_gbit_per_s for rate in largest), default=0.0)
        slow += [
            f"messages of {size_text(size)} from rank {rate.ranks[0]} to {rate.ranks[1]} reach only "
            f"{rate.one_way_gbit_per_s:.2f} Gbit/s"
            for rate in largest
            if rate.one_way_gbit_per_s * SLOW_PAIR < best
        ]
    return ", ".join(slow)


def _parity(where: str, report: DeviceReport, interfaces: str) -> Check:
    title = f"training {where}"
    if report.training_error:
        return Check(Verdict.ERROR, title, report.training_error, _advice(report, report.training_error, interfaces))
    differing = [f"rank {rank.rank} on {rank.host}: {rank.difference}" for rank in report.training if rank.difference]
    if differing:
        more = len(differing) - 1
        others = f"; {counted(more, 'more rank differs', 'more ranks differ')}" if more else ""
        advice = (
            "a device or a library gives other results than plain PyTorch on the same device: try another node "
            "(launch.exclude), unset NVIDIA_TF32_OVERRIDE, and report a bug with the file of --report"
        )
        return Check(Verdict.ERROR, title, f"{differing[0]} from plain PyTorch{others}", advice)
    finding = f"a small model under {report.layout} gives the losses, gradients and weights of plain PyTorch"
    return Check(Verdict.OK, title, finding)


def _memory(where: str, report: DeviceReport) -> Check:
    ratios = [rank.used_bytes / rank.predicted_bytes for rank in report.training]
    finding = f"the training's peak is {min(ratios):.2f} to {max(ratios):.2f} times the predicted memory"
    return Check(Verdict.OK, f"memory {where}", finding, memory=report.training)


def _advice(report: DeviceReport, error: str, interfaces: str) -> str:
    """What to do about an ``error`` of ranks, by its likely cause."""
    if CorruptedError.__name__ in error:
        return (
            "a device, a link or an adapter corrupts data: exclude its node with launch.exclude, and look at "
            "`nvidia-smi -q -d ECC` and `nvidia-smi nvlink -e` there"
        )
    if "out of memory" in error:
        return "see in nvidia-smi who else uses the device; launch.exclusive keeps other users away"
    if not any(words in error for words in _WAIT_WORDS):
        return "this is not a network fault: report a bug with the file of --report"
    if report.device != "cuda":
        return interfaces
    variables = "NCCL_DEBUG=INFO, and with NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 to find the faulty link"
    return f"run it again with {variables}; {interfaces}"
