"""Messages between ranks may be used in any order, and every wait ends with an error that says why."""

import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist

from auto3d.capture.graph import Value
from auto3d.partition.stage import Transfer
from auto3d.runtime.messages.exchange import Exchange
from auto3d.runtime.process.world import join, leave
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.waiting import PeerLostError, WaitTimeoutError
from auto3d.schedule.operation import Kind, Operation
from auto3d.schedule.program import Message, Program, Step

TRANSFERS = [
    Transfer(value=Value("hidden", (4, 8), "float32", 4, True), source=0, target=1),
    Transfer(value=Value("mask", (4,), "bool", 1, False), source=0, target=1),
]
MESSAGES = tuple(Message(Kind.FORWARD, 0, 1, micro_batch) for micro_batch in range(6))


def make_exchange(world, timeout_s: float) -> Exchange:
    join(world, device=torch.device("cpu"), timeout_s=timeout_s)
    posts, sends = (MESSAGES, ()) if world.rank == 1 else ((), MESSAGES)
    program = Program(steps=(Step(Operation(Kind.FORWARD, world.rank, (0,)), posts, (), sends, ()),))
    exchange = Exchange(
        program,
        TRANSFERS,
        ranks_of=[[0], [1]],
        device_of={(0, 0): 0, (1, 0): 1},
        sample_dimensions={},
        device=torch.device("cpu"),
        run_ahead=RunAhead(torch.device("cpu")),
    )
    for message in posts:
        exchange.post(message)
    return exchange


def send_or_receive(world, order: list[int]) -> list:
    exchange = make_exchange(world, timeout_s=30)
    try:
        if world.rank == 0:
            for message in MESSAGES:
                value = float(message.micro_batch)
                exchange.send(message, [torch.full((4, 8), value), torch.tensor([True, False, True, value > 2])])
            exchange.end()
            return []
        return [[tensor.tolist() for tensor in exchange.receive(MESSAGES[index]).values()] for index in order]
    finally:
        leave()


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 0, 3, 1, 4, 2]])
def test_messages_arrive_whole_in_any_order_of_use(processes, order):
    _, received = processes.run(2, send_or_receive, order)
    for index, (hidden, mask) in zip(order, received, strict=True):
        assert hidden == [[float(index)] * 8] * 4
        assert mask == [True, False, True, index > 2]


def wait_for_silent_peer(world) -> str:
    exchange = make_exchange(world, timeout_s=1)
    try:
        if world.rank == 1:
            with pytest.raises(WaitTimeoutError) as caught:
                exchange.receive(MESSAGES[0])
            return str(caught.value)
        time.sleep(2)
        return ""
    finally:
        leave()


def test_a_silent_peer_is_named_after_the_timeout(processes):
    _, message = processes.run(2, wait_for_silent_peer)
    host = socket.gethostname()
    waited = f"waited 1 s for activations for F0@1 from stage 0 (rank 0 on {host})"
    assert message == f"rank 1 on {host}, before its first iteration, {waited}"


def wait_for_dying_peer(world) -> str:
    child = os.fork() if world.rank == 0 else None
    if child:  # the pool's process survives; its child is the rank that dies
        os.waitpid(child, 0)
        return ""
    exchange = make_exchange(world, timeout_s=60)
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        start = time.monotonic()
        with pytest.raises(PeerLostError) as caught:
            exchange.receive(MESSAGES[0])
        assert time.monotonic() - start < 10
        return str(caught.value)
    finally:
        leave()


def test_a_dead_peer_is_noticed_at_once(processes):
    _, message = processes.run(2, wait_for_dying_peer)
    waited = f"was waiting for activations for F0@1 from stage 0 (rank 0 on {socket.gethostname()})"
    assert f"{waited} when the connection broke (" in message


def exchange_between(world, counts: tuple[int, int]) -> dict[str, list]:
    """Send activations between two devices of ``counts`` ranks, and gradients back; returns what this rank received."""
    ranks_of = [list(range(counts[0])), list(range(counts[0], sum(counts)))]
    device = int(world.rank >= counts[0])
    replica, replicas = ranks_of[device].index(world.rank), counts[device]
    there, back = Message(Kind.FORWARD, 0, 1, 0), Message(Kind.BACKWARD, 1, 0, 0)
    sent = (back,) if device else (there,)
    posted = (there,) if device else (back,)
    step = Step(Operation(Kind.BACKWARD if device else Kind.FORWARD, device, (0,)), posted, (), sent, ())
    transfers = [
        Transfer(value=Value("hidden", (2, 12 // replicas, 3), "float32", 4, True), source=0, target=1),
        Transfer(value=Value("bias", (5,), "float32", 4, True), source=0, target=1),
        Transfer(value=Value("index", (12 // replicas,), "int64", 8, False), source=0, target=1),
    ]
    join(world, device=torch.device("cpu"), timeout_s=30)
    try:
        exchange = Exchange(
            Program(steps=(step,)),
            transfers,
            ranks_of=ranks_of,
            device_of={(0, 0): 0, (1, 0): 1},
            sample_dimensions={"hidden": 1, "index": 0},
            device=torch.device("cpu"),
            run_ahead=RunAhead(torch.device("cpu")),
        )
        exchange.post(*posted)
        hidden = torch.arange(72.0).view(2, 12, 3).chunk(replicas, 1)[replica].contiguous()
        if device == 0:
            exchange.send(
                there, [hidden, torch.full((5,), 7.0), torch.arange(12).chunk(replicas)[replica].contiguous()]
            )
            received = exchange.receive(back)
        else:
            received = exchange.receive(there)
            exchange.send(back, [-hidden, torch.full((5,), 2.0**replica)])
        exchange.end()
        return {name: tensor.tolist() for name, tensor in received.items()}
    finally:
        leave()


@pytest.mark.parametrize("counts", [(1, 3), (3, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_samples_are_split_again_and_gradients_of_copies_add_up(processes, counts):
    """The samples are not in the first dimension; the bias is the same on all ranks of the first device."""
    received = processes.run(sum(counts), exchange_between, counts)
    makers, users = received[: counts[0]], received[counts[0] :]
    hidden = torch.arange(72.0).view(2, 12, 3)
    for replica, got in enumerate(users):
        assert got["hidden"] == hidden.chunk(counts[1], 1)[replica].tolist()
        assert got["index"] == torch.arange(12).chunk(counts[1])[replica].tolist()
        assert got["bias"] == [7.0] * 5
    for replica, got in enumerate(makers):
        assert got["hidden"] == (-hidden).chunk(counts[0], 1)[replica].tolist()
        assert "index" not in got, "it has no gradient"
    gradients = sum(torch.tensor(got["bias"]) for got in makers if "bias" in got)
    assert gradients.tolist() == [float(sum(2**replica for replica in range(counts[1])))] * 5, "each counts once"


NCCL_TAKES = {"float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64"}  # of c10d's ncclDataType
TYPES = ("int16", "uint16", "uint32", "bool", "uint8", "bfloat16", "complex64", "int64")


def values_of_types() -> list[torch.Tensor]:
    return [torch.tensor([[0, 1], [2, 250]]).to(getattr(torch, name)) for name in TYPES]


def exchange_of_types(world) -> tuple[list, set[str]]:
    """What rank 1 receives, and the types that this rank hands to torch.distributed."""
    values = values_of_types()
    transfers = [Transfer(value=Value(f"of {name}", (2, 2), name, 2, False), source=0, target=1) for name in TYPES] + [
        Transfer(value=Value("number", (), "int16", 2, False), source=0, target=1)
    ]
    join(world, device=torch.device("cpu"), timeout_s=30)
    found, name = set(), ("isend", "irecv")[world.rank]
    original = getattr(dist, name)

    def noting(tensor, *arguments, **named):
        found.add(str(tensor.dtype).removeprefix("torch."))
        return original(tensor, *arguments, **named)

    setattr(dist, name, noting)
    try:
        message = Message(Kind.FORWARD, 0, 1, 0)
        posts, sends = ((), (message,)) if world.rank == 0 else ((message,), ())
        exchange = Exchange(
            Program(steps=(Step(Operation(Kind.FORWARD, world.rank, (0,)), posts, (), sends, ()),)),
            transfers,
            ranks_of=[[0], [1]],
            device_of={(0, 0): 0, (1, 0): 1},
            sample_dimensions={},
            device=torch.device("cpu"),
            run_ahead=RunAhead(torch.device("cpu")),
        )
        received: dict[str, torch.Tensor] = {}
        if world.rank == 0:
            exchange.send(message, [*values, torch.tensor(-300, dtype=torch.int16)])
        else:
            exchange.post(message)
            received = exchange.receive(message)
        exchange.end()
        return [(str(each.dtype), each.tolist()) for each in received.values()], found
    finally:
        setattr(dist, name, original)
        leave()


def test_values_of_types_that_nccl_does_not_take_are_sent_exactly(processes):
    (_, sent), (received, posted) = processes.run(2, exchange_of_types)
    expected = [(str(each.dtype), each.tolist()) for each in values_of_types()]
    assert received == [*expected, ("torch.int16", -300)]
    assert sent == posted
    assert sent <= NCCL_TAKES
