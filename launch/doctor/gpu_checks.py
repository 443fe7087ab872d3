"""The lines of `auto3d doctor` about GPUs, and about what their ranks did under --devices."""

from collections.abc import Iterator, Sequence

from launch.doctor.device_probe import DeviceReport, ExchangeRun
from launch.doctor.exchange_probe import patterns
from launch.doctor.link_probe import CorruptedError, Links, PairRate
from launch.doctor.machine import Machine
from launch.doctor.report import Check, Verdict, size_text

SLOW_PAIR = 4.0  # A pair this many times slower than the fastest of its kind is reported.
_SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "it makes the host wait for each kernel",
    "NCCL_P2P_DISABLE": "it sends messages between GPUs of a node through the host's memory",
}
_OF_WAITS = ("waited", "waiting", "connection", "did not meet", "not done")  # words of errors about waiting
_TURNED_OFF = ("", "0")


def gpu_check(what: str, machine: Machine, *, needed: bool) -> Check:
    """Driver, CUDA, NCCL and state of the GPUs of one machine; ``needed``: trials run on them."""
    built = f"torch has {f'CUDA {machine.cuda}' if machine.cuda else 'no CUDA'}"
    built += f" and {f'NCCL {machine.nccl}' if machine.nccl else 'no NCCL'}"
    if not machine.gpus:
        return Check(Verdict.OK, what, f"none that nvidia-smi lists; {built}")
    found = [f"driver {machine.drivers}", built]
    capabilities = dict.fromkeys(gpu.capability for gpu in machine.gpus if gpu.capability)
    if capabilities:
        found.append(f"compute capability {' and '.join(capabilities)}")
    modes = dict.fromkeys(gpu.mig.lower() for gpu in machine.gpus if gpu.mig)
    if modes:
        found.append(f"MIG {' and '.join(modes)}")
    errors = {number: gpu.ecc_errors for number, gpu in enumerate(machine.gpus) if gpu.ecc_errors}
    faulty = [f"GPU {number} has {count}" for number, count in errors.items() if count != "0"]
    if errors:
        found.append(f"uncorrected ECC errors: {', '.join(faulty) or '0'}")
    told = ", ".join(found)
    if faulty:
        advice = f"leave {machine.host} out, by launch.exclude, and have `nvidia-smi -q -d ECC` looked at there"
        return Check(Verdict.WARNING, what, told, advice)
    if needed and "enabled" in modes:
        advice = "NCCL connects no two MIG devices of one GPU: ask for whole GPUs, or give each rank a GPU of its own"
        return Check(Verdict.WARNING, what, told, advice)
    return Check(Verdict.OK, what, told)


def same_libraries(machines: Sequence[Machine]) -> Check:
    """Whether ``machines`` that exchange messages have the same NCCL, CUDA of torch, and driver."""
    what = "drivers and NCCL on nodes"
    kinds = {
        "NCCL": [one.nccl or "none" for one in machines],
        "CUDA of torch": [one.cuda or "none" for one in machines],
        "driver": [one.drivers or "none" for one in machines],
    }
    differing = [kind for kind, versions in kinds.items() if len(set(versions)) > 1]
    if not differing:
        return Check(Verdict.OK, what, "the same on all" if any(one.gpus for one in machines) else "no node has a GPU")
    found = "; ".join(
        f"{machine.host} has {', '.join(f'{kind} {kinds[kind][number]}' for kind in differing)}"
        for number, machine in enumerate(machines)
    )
    if differing == ["driver"]:
        advice = "have the drivers made the same, or take nodes that have the same, by launch.constraint"
        return Check(Verdict.WARNING, what, found, advice)
    advice = "use one environment or container everywhere: launch.setup, launch.container, or the shared .venv"
    return Check(Verdict.ERROR, what, found, advice)


def variable_check(what: str, machine: Machine) -> Check:
    """The variables that decide on devices and connections."""
    found = "; ".join(f"{name}={value}" for name, value in machine.variables.items())
    slowing = [name for name in _SLOWING if machine.variables.get(name, "") not in _TURNED_OFF]
    if slowing:
        advice = "; ".join(f"unset {name}, for {_SLOWING[name]}" for name in slowing)
        return Check(Verdict.WARNING, what, found, advice)
    return Check(Verdict.OK, what, found or "none is set that decides on devices or connections")


def device_checks(where: str, report: DeviceReport, *, interfaces: str) -> Iterator[Check]:
    """What the ranks of all devices did; ``interfaces`` is the advice where they do not reach each other."""
    yield _links(where, report, interfaces)
    if report.links_error:
        return
    yield from (_exchange(where, report, run, interfaces) for run in report.exchanges)
    yield _parity(where, report, interfaces)
    if report.training:
        yield _memory(where, report)


def _links(where: str, report: DeviceReport, interfaces: str) -> Check:
    what = f"messages {where}"
    if report.links_error:
        return Check(Verdict.ERROR, what, report.links_error, _advice(report, report.links_error, interfaces))
    assert report.links is not None
    rates = report.links.rates
    if not rates:
        return Check(Verdict.OK, what, "not measured: there is 1 device")
    found = "all arrived as they were sent; " + ", ".join(
        f"{max(rate.one_way_gbit_per_s for rate in same):.2f} Gbit/s one way {place}"
        for place, same in (
            ("inside a node", [rate for rate in rates if not rate.between_nodes]),
            ("between nodes", [rate for rate in rates if rate.between_nodes]),
        )
        if same
    )
    found += _peer_access(report.links)
    slow = _slow_pairs(rates) if report.device == "cuda" else ""  # CPU ranks share cores, and differ anyway.
    if slow:
        advice = (
            "see `nvidia-smi topo -m` and, between nodes, the adapters and NCCL_IB_HCA: these pairs do not use the "
            "link that the others use"
        )
        return Check(Verdict.WARNING, what, f"{found}; {slow}", advice, links=rates)
    return Check(Verdict.OK, what, found, links=rates)


def _exchange(where: str, report: DeviceReport, run: ExchangeRun, interfaces: str) -> Check:
    what = f"exchange {where}{run}"
    if run.error:
        advice = _advice(report, run.error, interfaces)
        passing = [other.connections for other in report.exchanges if not other.error]
        if passing:
            advice = f"set CUDA_DEVICE_MAX_CONNECTIONS={passing[-1]}, with which it passes; {advice}"
        return Check(Verdict.ERROR, what, run.error, advice)
    assert run.result is not None
    schedules = ", ".join(map(str, patterns(report.ranks)))
    found = f"{schedules}: {run.result.tensors} tensors came to rank 0 as they were sent, "
    return Check(Verdict.OK, what, f"{found}in {run.result.seconds:.1f} s")


def _peer_access(links: Links) -> str:
    known = [one for one in links.neighbours if one.peer_access is not None]
    without = [f"ranks {one.ranks[0]} and {one.ranks[1]} of {one.host}" for one in known if not one.peer_access]
    if without:
        return f"; no peer access, so through the host's memory: {', '.join(without)}"
    return "; peer access between all neighbours of a node" if known else ""


def _slow_pairs(rates: Sequence[PairRate]) -> str:
    """The pairs that are much slower than the fastest of their kind, at the largest size that all of it have."""
    told = []
    for between_nodes in (False, True):
        same = [rate for rate in rates if rate.between_nodes == between_nodes]
        pairs = {rate.ranks for rate in same}
        sizes = [{rate.size_bytes for rate in same if rate.ranks == pair} for pair in pairs]
        size = max(set.intersection(*sizes), default=0) if sizes else 0
        largest = [rate for rate in same if rate.size_bytes == size]
        best = max((rate.one_way_gbit_per_s for rate in largest), default=0.0)
        told += [
            f"messages of {size_text(size)} from rank {rate.ranks[0]} to {rate.ranks[1]} only reach "
            f"{rate.one_way_gbit_per_s:.2f} Gbit/s"
            for rate in largest
            if rate.one_way_gbit_per_s * SLOW_PAIR < best
        ]
    return ", ".join(told)


def _parity(where: str, report: DeviceReport, interfaces: str) -> Check:
    what = f"training {where}"
    if report.training_error:
        return Check(Verdict.ERROR, what, report.training_error, _advice(report, report.training_error, interfaces))
    differing = [f"rank {one.rank} on {one.host}: {one.difference}" for one in report.training if one.difference]
    if differing:
        others = f"; so do {len(differing) - 1} more ranks" if len(differing) > 1 else ""
        advice = (
            "a device or library computes otherwise than plain PyTorch beside it: try another node (launch.exclude), "
            "unset NVIDIA_TF32_OVERRIDE, and report it with --report"
        )
        return Check(Verdict.ERROR, what, f"{differing[0]} from plain PyTorch{others}", advice)
    found = f"a small model under {report.layout} gives the losses, gradients and weights of plain PyTorch"
    return Check(Verdict.OK, what, found)


def _memory(where: str, report: DeviceReport) -> Check:
    shares = [one.used_bytes / one.predicted_bytes for one in report.training]
    found = f"that training used {min(shares):.2f} to {max(shares):.2f} times the memory that was predicted"
    return Check(Verdict.OK, f"memory {where}", found, memory=report.training)


def _advice(report: DeviceReport, error: str, interfaces: str) -> str:
    """What to do about an ``error`` of ranks, by what it is likely to come from."""
    if CorruptedError.__name__ in error:
        return (
            "a device, a link or an adapter changes what it carries: leave its node out, by launch.exclude, and see "
            "`nvidia-smi -q -d ECC` and `nvidia-smi nvlink -e` there"
        )
    if "out of memory" in error:
        return "see in nvidia-smi who else uses the device; launch.exclusive keeps others away"
    if not any(words in error for words in _OF_WAITS):
        return "this is no fault of the network: report it, with the file of --report"
    if report.device != "cuda":
        return interfaces
    variables = "NCCL_DEBUG=INFO, and NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 to see which link it is"
    return f"call it again with {variables}; {interfaces}"
