"""The probes of `auto3d doctor --devices` with real processes: healthy devices pass, and injected faults are named."""

import multiprocessing
import os
import random
import signal
from dataclasses import replace

import pytest
import torch.distributed as dist

from auto3d.runtime.messages.exchange import Exchange
from auto3d.runtime.messages.gradient_sync import GradientSync
from auto3d.schedule.operation import Kind
from launch.doctor import device_probe, exchange_probe, link_probe, training_probe
from launch.doctor.device_probe import DeviceReport, merge_reports, probe_devices
from launch.doctor.gpu_checks import device_checks
from launch.doctor.link_probe import Links, Neighbours, PairRate
from launch.doctor.node_probe import REPORT, answer_file, probe_node, read_file, report_file
from launch.doctor.report import Verdict
from launch.doctor.training_probe import TrainedRank
from tests.soak import soak


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(link_probe.SIZES, "cpu", (2**12, 2**16))
    monkeypatch.setattr(link_probe, "MEASURE_S", 0.001)
    monkeypatch.setitem(training_probe.SIZES, "cpu", training_probe.ModelSize(2, 16, 2, 8, 2))


def probe(ranks: int) -> DeviceReport:
    return probe_devices(ranks, device="cpu", node_of=lambda run: None, announce=lambda line: None)


def checks(report: DeviceReport) -> dict[str, Verdict]:
    return {check.what: check.verdict for check in device_checks("here", report, interfaces="look at the interfaces")}


@pytest.mark.parametrize("ranks", [1, *soak(3), 4])
def test_healthy_devices(ranks):
    announced = []
    report = probe_devices(ranks, device="cpu", node_of=lambda run: None, announce=announced.append)
    assert set(checks(report).values()) == {Verdict.OK}
    assert [run.result.tensors > 0 for run in report.exchanges] == [True] * (ranks > 1)
    pairs = [rate.ranks for rate in report.links.rates if rate.size_bytes == 2**16]
    assert pairs == [(rank, rank + 1) for rank in range(ranks - 1)]
    assert all(min(rate.one_way_gbit_per_s, rate.both_ways_gbit_per_s) > 0 for rate in report.links.rates)
    assert [one.rank for one in report.training] == list(range(ranks))
    assert all(one.predicted_bytes > 0 for one in report.training)
    assert report.layout == {1: "dp=1 pp=1", 3: "dp=1 pp=3", 4: "dp=2 pp=2"}[ranks]
    assert any("training a small model" in line for line in announced)


def test_a_message_that_arrives_with_other_contents_names_both_ranks(monkeypatch):
    real = dist.isend

    def corrupting(tensor, *args, **kwargs):
        if dist.get_rank() == 2:
            tensor[-1] += 1
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "isend", corrupting)
    report = probe(3)
    assert report.links_error.startswith("rank 1: CorruptedError: a message of 4096 bytes from rank 2 on ")
    assert checks(report) == {"messages here": Verdict.ERROR}


def test_a_silent_rank_is_named_with_the_ranks_that_wait_for_it(monkeypatch):
    real = link_probe._Pair._exchange

    def silent(self, *args, **kwargs):
        if self.rank == 1:
            signal.pause()
        real(self, *args, **kwargs)

    monkeypatch.setattr(link_probe._Pair, "_exchange", silent)
    monkeypatch.setattr(device_probe, "WAIT_S", 3.0)
    error = probe(2).links_error
    assert error.startswith("rank 1 on ")
    assert "in the measurement of messages, was not done after" in error
    assert "waited 3 s for messages of 4096 bytes between it and rank 1 on " in error


def test_the_schedules_that_the_probe_runs():
    assert [str(pattern) for pattern in exchange_probe.patterns(3)] == ["1f1b dp=1 pp=3", "interleaved-1f1b dp=1 pp=3"]
    assert [str(pattern) for pattern in exchange_probe.patterns(4)][2:] == ["chimera dp=1 pp=4", "1f1b dp=2 pp=2"]


def exchange(connections: int | None = None) -> device_probe.ExchangeRun:
    return device_probe._exchange(2, "cpu", connections, None, lambda line: None)


def test_a_deadlock_names_the_ranks_and_what_they_wait_for(monkeypatch):
    real = exchange_probe.lower

    def backward_first(schedule, transfers, shared):
        first, *others = real(schedule, transfers, shared)
        steps = sorted(first.steps, key=lambda step: step.operation.kind is not Kind.BACKWARD)
        begins = tuple(beginning for step in first.steps for beginning in step.begins)
        steps = [replace(step, begins=() if number else begins) for number, step in enumerate(steps)]
        return replace(first, steps=tuple(steps)), *others

    monkeypatch.setattr(exchange_probe, "lower", backward_first)
    monkeypatch.setattr(device_probe, "WAIT_S", 3.0)
    error = exchange().error
    assert error.startswith("in 1f1b dp=1 pp=2: rank ")
    assert "in iteration 1 at B0@0 of stage 0, waited 3 s for gradients for B0@0 from stage 1 (rank 1 on " in error
    assert "in iteration 1 at F0@1 of stage 1, waited 3 s for activations for F0@1 from stage 0 (rank 0 on " in error


def test_a_rank_that_is_silent_in_a_schedule_is_named(monkeypatch):
    real = exchange_probe._FakeComputation.backward

    def silent(self, micro_batch, gradients, **options):
        if self._stage.index == 1 and micro_batch == 2:
            signal.pause()
        return real(self, micro_batch, gradients, **options)

    monkeypatch.setattr(exchange_probe._FakeComputation, "backward", silent)
    monkeypatch.setattr(device_probe, "WAIT_S", 3.0)
    error = exchange().error
    assert error.startswith("in 1f1b dp=1 pp=2: rank 1 on ")
    assert "in iteration 1 at B2@1 of stage 1, was not done after" in error
    assert "waited 3 s for gradients for B2@0 from stage 1" in error


def test_a_tensor_that_arrives_with_other_contents_is_named(monkeypatch):
    real = Exchange.send

    def corrupting(self, message, tensors):
        if (message.source, message.micro_batch) == (0, 1):
            tensors[1][-1] += 1
        real(self, message, tensors)

    monkeypatch.setattr(Exchange, "send", corrupting)
    size = exchange_probe.SIZES["cpu"][1]
    assert exchange().error == (
        f"in 1f1b dp=1 pp=2: rank 1: CorruptedError: the activations of {size} bytes from stage 0 to 1, micro-batch 1, "
        "pipe 0, arrived with other contents in iteration 1"
    )


def test_a_wrong_sum_is_reported(monkeypatch):
    monkeypatch.setattr(exchange_probe, "patterns", lambda ranks: [exchange_probe.Pattern("chimera", 1, 2, 2)])
    real = GradientSync.begin

    def forgetful(self, stages):
        real(self, stages)
        for begun, _ in self._sums:
            for work in begun.works:
                work.wait()
        for buffer in self._buffers.values():
            buffer[-1] = 0

    monkeypatch.setattr(GradientSync, "begin", forgetful)
    assert "CorruptedError: the gradients of all ranks were summed to the norm " in exchange().error


def test_the_number_of_connections_is_set_in_the_ranks_only(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "5")
    monkeypatch.setattr(exchange_probe, "_run", lambda *rest: int(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]))
    number = len(exchange_probe.patterns(2))
    assert [exchange(n).result.tensors for n in (1, 32, None)] == [number, 32 * number, 5 * number]
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "5"
    run = device_probe.ExchangeRun(1, None, "it waited")
    (_, check, *_) = device_checks("here", replace(GOOD, exchanges=[run]), interfaces="name the interface")
    assert (check.verdict, check.line) == (
        Verdict.ERROR,
        "exchange here with 1 connection: it waited. What to do: run it again with NCCL_DEBUG=INFO, and with "
        "NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 to find the faulty link; name the interface",
    )


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("rank 1: CorruptedError: a message arrived with other contents", "nvidia-smi nvlink -e"),
        ("rank 1 (n1) ran out of memory in F0", "who else uses the device"),
        ("rank 1: ValueError: a bug", "report a bug with the file of --report"),
        ("rank 1 on n1 waited 30 s for activations", "NCCL_DEBUG=INFO"),
    ],
)
def test_each_kind_of_fault_has_its_own_advice(error, advice):
    runs = [
        device_probe.ExchangeRun(1, None, error),
        device_probe.ExchangeRun(32, exchange_probe.ExchangeResult(9, 1.0)),
    ]
    (_, check, *_) = device_checks("here", replace(GOOD, exchanges=runs), interfaces="name the interface")
    assert advice in check.advice
    assert check.advice.startswith("set CUDA_DEVICE_MAX_CONNECTIONS=32, which passes; ")


def test_a_training_that_differs_from_plain_pytorch_is_reported(monkeypatch):
    real = Exchange.send

    def corrupting(self, message, tensors):
        if dist.get_rank() == 1:  # the gradients that the last stage sends back
            tensors = [tensor * 1.001 for tensor in tensors]
        real(self, message, tensors)

    monkeypatch.setattr(Exchange, "send", corrupting)
    report = probe(2)
    (check,) = [one for one in device_checks("here", report, interfaces="") if one.what == "training here"]
    assert check.verdict is Verdict.ERROR
    assert check.found.startswith("rank 0 on ")
    assert "the gradient" in check.found
    assert check.found.endswith("from plain PyTorch; 1 more rank differs"), "all ranks have the same norm"
    assert "launch.exclude" in check.advice


def test_a_failure_in_the_training_is_reported_in_one_line(monkeypatch):
    def failing(*args):
        raise ValueError("a fault of the device")

    monkeypatch.setattr(training_probe, "plain_training", failing)
    report = probe(2)
    assert report.training_error.endswith("ValueError: a fault of the device")
    assert report.training_error.startswith("rank ")
    assert checks(report)["training here"] is Verdict.ERROR


RATES = [PairRate((lower, lower + 1), lower == 1, 2**24, 5, 100.0, 90.0) for lower in range(4)]
GOOD = DeviceReport(
    5,
    "cuda",
    links=Links(RATES, [Neighbours((0, 1), "n1", True), Neighbours((2, 3), "n2", True)]),
    layout="dp=1 pp=5",
    training=[TrainedRank(rank, "n1", 100, 150, "") for rank in range(5)],
)


def test_a_pair_of_ranks_that_is_slower_than_the_others_is_reported():
    def messages(report: DeviceReport):
        return next(device_checks("of n1 and n2", report, interfaces=""))

    assert messages(GOOD).verdict is Verdict.OK
    assert "100.00 Gbit/s one way inside a node, 100.00 Gbit/s one way between nodes" in messages(GOOD).found
    assert messages(GOOD).found.endswith("peer access between all neighbours of a node")
    slow = replace(RATES[2], one_way_gbit_per_s=20.0)
    check = messages(replace(GOOD, links=Links([*RATES[:2], slow, RATES[3]], [Neighbours((2, 3), "n2", False)])))
    assert check.verdict is Verdict.WARNING
    assert "messages of 16 MiB from rank 2 to 3 reach only 20.00 Gbit/s" in check.found
    assert "without peer access, through the host's memory: ranks 2 and 3 of n2" in check.found
    assert "nvidia-smi topo -m" in check.advice
    between = replace(RATES[1], one_way_gbit_per_s=20.0)
    assert messages(replace(GOOD, links=Links([RATES[0], between, *RATES[2:]], []))).verdict is Verdict.OK, (
        "one pair has no other to compare with"
    )


def test_the_error_of_any_node_counts():
    bad = replace(GOOD, training=[], training_error="rank 4 on n2 waited")
    assert merge_reports([GOOD, bad]).training_error == "rank 4 on n2 waited"
    assert merge_reports([GOOD, GOOD]) == GOOD


@pytest.mark.soak
def test_two_tasks_of_a_job_probe_their_devices_together(tmp_path, monkeypatch):
    """As on two nodes: each task forks its own ranks, and all ranks meet again for each probe."""
    monkeypatch.setattr("launch.doctor.all_reduce_probe.SIZES", (2**12,))
    job = {
        "SUBMITIT_EXECUTOR": "slurm",
        "SLURM_JOB_ID": str(random.randrange(10**6)),
        "SLURM_JOB_NODELIST": "localhost",
    }
    job |= {"SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_LOCALID": "0", "GLOO_SOCKET_IFNAME": "lo"}

    def task(number: int) -> None:
        os.environ.update(job, SLURM_PROCID=str(number), SLURM_NODEID=str(number))
        answer_file(tmp_path, number).write_text('{"token": "t", "seen": 0}')
        probe_node(str(tmp_path), devices=2, device="cpu", thorough=True)

    context = multiprocessing.get_context("fork")
    tasks = [context.Process(target=task, args=(number,)) for number in range(2)]
    for one in tasks:
        one.start()
    for one in tasks:
        one.join(120)
    reports = [read_file(report_file(tmp_path, number), REPORT) for number in range(2)]
    assert [report.all_reduce.error for report in reports] == ["", ""]
    whole = merge_reports([report.devices for report in reports])
    assert set(checks(whole).values()) == {Verdict.OK}
    assert [one.rank for one in whole.training] == [0, 1, 2, 3]
