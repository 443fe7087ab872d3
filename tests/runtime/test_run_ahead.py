"""How far a process runs ahead of its device. The test decides when the device's operations end."""

import weakref
from collections.abc import Iterator
from threading import Thread

import pytest
import torch

from auto3d.runtime import run_ahead as run_ahead_module
from auto3d.runtime.activity import BEFORE_TRAINING, THIS_RANK, ActivityBoard
from auto3d.runtime.run_ahead import OPERATIONS_AHEAD, RunAhead
from auto3d.runtime.waiting import WaitTimeoutError

GPU = torch.device("cuda", 0)


class FakeWork:
    """Work of an NCCL group: waiting for it does not block the process."""

    def __init__(self) -> None:
        self.waited_for = False

    def wait(self) -> None:
        self.waited_for = True


class FakeEvent:
    def __init__(self) -> None:
        self.done = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.done


@pytest.fixture
def events(monkeypatch) -> Iterator[list[FakeEvent]]:
    """The events that are recorded: behind each wait of an operation, and at its end."""
    made: list[FakeEvent] = []

    def make() -> FakeEvent:
        made.append(FakeEvent())
        return made[-1]

    monkeypatch.setattr(run_ahead_module.torch.cuda, "Event", make)
    monkeypatch.setattr(THIS_RANK, "rank", 0)
    monkeypatch.setattr(THIS_RANK, "timeout_s", 30.0)
    board = ActivityBoard(1)
    monkeypatch.setattr(THIS_RANK, "_board", board)
    monkeypatch.setattr(THIS_RANK, "_phase", BEFORE_TRAINING)  # restored afterwards: ranks forked later inherit it
    return made


def queue(ahead: RunAhead, at: str, *waits: tuple[FakeWork, str]) -> None:
    ahead.begin(at)
    for work, what in waits:
        ahead.wait(work, what)
    ahead.end()


def test_the_process_queues_a_bounded_number_of_operations(events):
    ahead = RunAhead(GPU)
    for number in range(OPERATIONS_AHEAD + 1):
        queue(ahead, f"at F{number}")
    going_on = Thread(target=queue, args=(ahead, "at the next"))
    going_on.start()
    going_on.join(0.2)
    assert going_on.is_alive()
    assert len(events) == OPERATIONS_AHEAD + 1
    events[0].done = True
    going_on.join(30)
    assert not going_on.is_alive()
    assert len(events) == OPERATIONS_AHEAD + 2


def test_an_operation_that_does_not_end_is_reported_with_the_message_that_it_lacks(events, monkeypatch):
    """Not with the message that the process would wait for next, because its device has not got that far."""
    monkeypatch.setattr(THIS_RANK, "timeout_s", 0.2)
    ahead = RunAhead(GPU)
    there, lacking, later = FakeWork(), FakeWork(), FakeWork()
    queue(ahead, "in iteration 1 at F0", (there, "the first"), (lacking, "activations for F0@1 from stage 0"))
    queue(ahead, "in iteration 1 at F1", (later, "activations for F1@1 from stage 0"))
    assert lacking.waited_for, "the device's queue waits for it"
    events[0].done = True  # the first has arrived
    with pytest.raises(WaitTimeoutError) as caught:
        ahead.catch_up()
    assert "in iteration 1 at F0, waited 0.2 s for activations for F0@1 from stage 0" in str(caught.value)


def test_a_device_that_computes_for_ever_is_reported_as_such(events, monkeypatch):
    monkeypatch.setattr(THIS_RANK, "timeout_s", 0.2)
    ahead = RunAhead(GPU)
    queue(ahead, "in iteration 1 at B0")
    with pytest.raises(WaitTimeoutError, match=r"in iteration 1 at B0, waited 0\.2 s for its device to compute"):
        ahead.catch_up()


def test_time_in_the_queue_does_not_count(events, monkeypatch):
    """A message's deadline counts from the end of the preceding operation, not from the posting of its receive."""
    now = [0.0]
    monkeypatch.setattr("auto3d.runtime.waiting.monotonic", lambda: now[0])
    monkeypatch.setattr("auto3d.runtime.waiting.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(THIS_RANK, "timeout_s", 1.0)
    ahead = RunAhead(GPU)
    queue(ahead, "at F0", (FakeWork(), "the first message"))
    queue(ahead, "at F1", (FakeWork(), "the second message"))
    for event, time_s in zip(events, (0.9, 0.9, 1.8, 1.8), strict=True):
        monkeypatch.setattr(event, "query", lambda time_s=time_s: now[0] >= time_s)
    monkeypatch.setattr(FakeEvent, "query", lambda event: now[0] >= 1.8)
    ahead.catch_up()
    assert now[0] >= 1.8


def test_what_has_been_waited_for_is_let_go(events):
    """A Work of NCCL owns the tensors of its result, which are larger than all else under sequence parallelism."""
    ahead = RunAhead(GPU)
    work = FakeWork()
    held = weakref.ref(work)
    queue(ahead, "at F0", (work, "a sum"))
    del work
    assert held() is None
