"""Inputs that a thread prefetches, for a device that copies as late as it is allowed to."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from auto3d.data import Batches, DataError, DataSettings, InputField, Reading
from auto3d.runtime.samples.loading import PREFETCHED, Loader, Need, is_compared, needs_of
from auto3d.runtime.samples.neighbours import Neighbour
from auto3d.schedule import build_schedule
from auto3d.schedule.lowering import lower

TOKENS = DataSettings(
    source="synthetic",
    files=(),
    sequence_length=4,
    vocabulary_size=1000,
    inputs={"ids": InputField(kind="tokens"), "noise": InputField(kind="normal", shape=(3,))},
)


class LateCopy:
    """Reads its source only when someone waits for it, or when the test ends."""

    def __init__(self, source: Mapping[str, torch.Tensor]) -> None:
        self._source = source
        self.copies = {name: torch.full_like(tensor, -1) for name, tensor in source.items()}
        self._lock, self._done = threading.Lock(), False

    def synchronize(self) -> None:
        with self._lock:
            if not self._done:
                for name, tensor in self._source.items():
                    self.copies[name].copy_(tensor)
            self._done = True


class LateMemory:
    def __init__(self) -> None:
        self.pinned: list[torch.Tensor] = []
        self.queued: list[LateCopy] = []

    def begin_thread(self) -> None:
        pass

    def empty_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.pinned.append(torch.empty(shape, dtype=dtype))
        return self.pinned[-1]

    def queue_copy(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], LateCopy]:
        self.queued.append(LateCopy(tensors))
        return self.queued[-1].copies, self.queued[-1]


def batches() -> Batches:
    return Batches(TOKENS, seed=3, global_batch=16, micro_batch_size=4)


def needs(iteration: int, micro_batches: int = 4) -> list[Need]:
    """The needs of a rank with the first and the last stage."""
    return [Need(iteration, index, (name,)) for index in range(micro_batches) for name in ("ids", "noise")]


def take(loader: Loader, wanted: list[Need]) -> list[dict[str, torch.Tensor]]:
    return [loader.read(need.iteration, need.index, need.names).inputs for need in wanted]


def assert_inputs(wanted: list[Need], found: list[dict[str, torch.Tensor]], memory: LateMemory) -> None:
    for copy in memory.queued:
        copy.synchronize()
    for need, tensors in zip(wanted, found, strict=True):
        right = batches().micro_batch(need.iteration, need.index, need.names)
        assert tensors.keys() == right.keys()
        for name, tensor in right.items():
            assert torch.equal(tensors[name], tensor), need


def test_every_copy_has_the_inputs_of_its_micro_batch():
    """Over equal consecutive programs, and a different one: the last program of a training is shorter."""
    memory = LateMemory()
    loader, wanted, found = Loader(batches(), memory), [], []
    for program in ([*needs(5), *needs(6)], [*needs(7), *needs(8)], needs(9, micro_batches=2), needs(2)):
        loader.start(program, iterations=len({need.iteration for need in program}))
        found += take(loader, program)
        wanted += program
    assert_inputs(wanted, found, memory)


def test_the_inputs_of_an_equal_next_program_are_prefetched():
    made = threading.Event()

    class Watched(Batches):
        def read(self, iteration, index, names):
            if iteration == 6:
                made.set()
            return super().read(iteration, index, names)

    memory = LateMemory()
    loader = Loader(Watched(TOKENS, seed=3, global_batch=16, micro_batch_size=4), memory)
    loader.start(needs(5), iterations=1)
    take(loader, needs(5))
    assert made.wait(timeout=20), "before the next program begins"
    loader.start(needs(6), iterations=1)
    take(loader, needs(6))
    assert len(memory.pinned) == 2 * PREFETCHED, "all programs use the same memory"


class Growing:
    """Micro-batches of 2 samples, each one token longer than the one before."""

    def read(self, iteration: int, index: int, names: tuple[str, ...]) -> Reading:
        first = 100 * iteration + 10 * index
        return Reading(inputs={"ids": torch.arange(first, first + 2 * (index + 1)).view(2, index + 1)})


def test_micro_batches_of_other_lengths_share_the_memory_of_the_largest():
    memory = LateMemory()
    loader = Loader(Growing(), memory, {"ids": (2, 4)})
    program = [Need(iteration, index, ("ids",)) for iteration in range(3) for index in range(4)]
    loader.start(program, iterations=3)
    found = take(loader, program)
    for copy in memory.queued:
        copy.synchronize()
    for need, tensors in zip(program, found, strict=True):
        assert torch.equal(tensors["ids"], Growing().read(need.iteration, need.index, ("ids",)).inputs["ids"]), need
    assert [tuple(each.shape) for each in memory.pinned] == [(2, 4)] * PREFETCHED


class Changing:
    """Data of one number, which may change."""

    def __init__(self) -> None:
        self.value, self.reads = 0, 0

    def read(self, iteration: int, index: int, names: tuple[str, ...]) -> Reading:
        self.reads += 1
        return Reading(inputs={name: torch.tensor([self.value]) for name in names})


def test_what_was_read_ahead_is_forgotten_where_the_data_change():
    data, memory = Changing(), LateMemory()
    loader = Loader(data, memory)
    for program, forgets in ((needs(5), False), (needs(6), True)):
        if forgets:
            deadline = time.monotonic() + 30
            while data.reads < 8 + PREFETCHED and time.monotonic() < deadline:
                time.sleep(0.01)
            assert data.reads > 8, "the next program has been read ahead"
            data.value = 1
            loader.end()
        loader.start(program, iterations=1)
        found = take(loader, program)
    for copy in memory.queued:
        copy.synchronize()
    assert {int(tensor) for inputs in found for tensor in inputs.values()} == {1}


def test_what_a_neighbour_reads_is_read_where_it_is_compared():
    """A thread reads it after this rank's micro-batch at the same place; it takes none of the memory that is pinned."""
    memory = LateMemory()
    loader, wanted, found, read = Loader(batches(), memory), [], [], []
    program = lower(build_schedule("1f1b", devices=1, micro_batches=2), ())[0]

    def compares(need: Need) -> bool:
        return not need.names and need.index % 2 == need.iteration % 3

    for iteration in range(5, 20):
        program_needs = needs_of(
            program,
            {(0, 0): ("ids",)},
            first_iteration=iteration,
            first_micro_batch=0,
            micro_batches=2,
            neighbour=Neighbour(stage=0, first=2, replica=0),
        )
        assert [(need.index, need.names) for need in program_needs] == [(0, ("ids",)), (2, ()), (1, ("ids",)), (3, ())]
        loader.start(program_needs, 1, compares)
        for need in program_needs:
            if need.names:
                found.append(loader.read(need.iteration, need.index, need.names).inputs)
                wanted.append(need)
            elif compares(need):
                numbers = loader.fingerprints(need.iteration, need.index, 0)
                assert numbers is not None
                assert (numbers == batches().read(need.iteration, need.index, ("ids",)).fingerprints).all()
                read.append((need.iteration, need.index))
    assert read == [(each, 2 + each % 3) for each in range(5, 20) if each % 3 < 2]
    assert_inputs(wanted, found, memory)
    assert len(memory.pinned) == PREFETCHED


def test_fingerprints_that_take_another_reading_are_made_where_they_are_compared():
    class Anew(Batches):
        def read(self, iteration, index, names):
            return replace(super().read(iteration, index, names), fingerprints=None)

    for memory in (None, LateMemory()):
        loader = Loader(Anew(TOKENS, seed=3, global_batch=16, micro_batch_size=4), memory)
        program = [Need(0, index, ("ids",)) for index in range(4)]
        loader.start(program, 1, lambda need: need.index == 2)
        made = [loader.read(0, need.index, need.names, compared=need.index == 2).fingerprints for need in program]
        assert [each is not None for each in made] == [False, False, True, False]
        assert (made[2] == batches().read(0, 2, ("ids",)).fingerprints).all()


def test_ranks_compare_what_one_reads_for_others_in_the_first_iterations_and_now_and_then():
    assert [each for each in range(5, 36) if is_compared(each, 5)] == [5, 6, 7, 8, 16, 32]


def test_an_error_is_raised_unchanged_when_its_micro_batch_is_needed():
    error = DataError("files: no.txt: No such file or directory")

    class Broken(Batches):
        def read(self, iteration, index, names):
            if index == 2:
                raise error
            return super().read(iteration, index, names)

    loader = Loader(Broken(TOKENS, seed=3, global_batch=16, micro_batch_size=4), LateMemory())
    loader.start(needs(0), iterations=1)
    take(loader, needs(0, micro_batches=2))
    with pytest.raises(DataError) as caught:
        take(loader, needs(0)[4:])
    assert caught.value is error


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "inputs"]


def test_the_thread_ends_with_its_loader():
    gc.collect()
    before = threads()
    loader = Loader(batches(), LateMemory())
    loader.start(needs(0), iterations=1)
    take(loader, needs(0)[:3])
    (thread,) = [thread for thread in threads() if thread not in before]
    del loader
    gc.collect()
    thread.join(timeout=20)
    assert not thread.is_alive()


class Slow(Batches):
    """A micro-batch of it is computed by torch, which takes a while."""

    def read(self, iteration, index, names):
        for _ in range(100):
            torch.ones(500, 500) @ torch.ones(500, 500)
        return super().read(iteration, index, names)


def keep_a_loader() -> None:
    """Its thread is in a call of torch when this returns."""
    global kept
    kept = Loader(Slow(TOKENS, seed=3, global_batch=16, micro_batch_size=4), LateMemory())
    kept.start(needs(0), iterations=1)
    take(kept, needs(0)[:3])


def test_a_process_ends_well_while_its_thread_is_busy():
    code = "from tests.runtime.samples import test_loading; test_loading.keep_a_loader()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_cpu_uses_no_thread():
    loader, before = Loader(batches(), None), threads()
    loader.start(needs(0), iterations=1)
    assert_inputs(needs(0), take(loader, needs(0)), LateMemory())
    assert threads() == before
