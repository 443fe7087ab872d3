"""Worker processes of torch's DataLoader, which read the batches of a rank ahead.

Worker ``i % n`` reads batch ``i`` of an epoch or an evaluation. Its generators begin at a seed that the main process
draws where the epoch begins, and at the worker's number (torch.utils.data.dataloader, _MultiProcessingDataLoaderIter;
torch.utils.data._utils.worker, _worker_loop).
"""

import re
import signal
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from multiprocessing.connection import wait
from time import monotonic
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import signal_handling
from transformers.trainer_utils import seed_worker

from auto3d.errors import InputError

SLOW_S = 60.0  # time after which a line says that a worker still reads

Task = tuple[Sequence[int], dict[str, Any]]
"""The positions of a batch's samples in the dataset, and how they are read."""


@dataclass(frozen=True)
class Workers:
    """The worker processes that a script asks for."""

    count: int
    prefetch_factor: int | None = None  # batches that each reads ahead; None: as many as torch's DataLoader does
    init: Callable[[int], None] | None = None  # called with the number of each worker, in it
    persistent: bool = False

    @classmethod
    def of(cls, loader: Any) -> "Workers | None":
        """The workers of ``loader``, a DataLoader; None if it has none."""
        if not loader.num_workers:
            return None
        context = loader.multiprocessing_context
        if context is not None and context.get_start_method() != "fork":
            raise InputError(
                f"TrainingArguments.dataloader_multiprocessing_context: found {context.get_start_method()!r}; workers "
                "take the dataset as it is in this process: use 'fork', or leave it out"
            )
        init = loader.worker_init_fn
        if isinstance(init, partial) and init.func is seed_worker:  # by the rank, which one process does not have
            init = partial(seed_worker, num_workers=loader.num_workers, rank=0)
        return cls(loader.num_workers, loader.prefetch_factor, init, loader.persistent_workers)


def check_persistent(workers: Workers, *, draws: bool) -> None:
    """Raise InputError if workers that live on draw on in the next epoch; ``draws`` says whether anything is drawn."""
    if workers.persistent and draws:
        raise InputError(
            "TrainingArguments.dataloader_persistent_workers: found True, and the dataset, the collator or the sampler "
            "draws random numbers: such workers draw on from epoch to epoch, which a pipeline does not follow; leave "
            "it out"
        )


class ReadAhead(Iterator[Any]):
    """What ``read`` gives of ``tasks``, one after the other, from ``workers`` that have a copy of ``dataset`` each.

    The seed of the workers is drawn from ``generator``; None: from torch's own. ``tell`` gets a line where a worker is
    slow. Raises InputError in one line where a worker raises anything, or ends.
    """

    def __init__(
        self,
        dataset: Any,
        read: Callable[..., Any],
        tasks: Iterable[Task],
        workers: Workers,
        tell: Callable[[str], None],
        generator: torch.Generator | None = None,
    ) -> None:
        self._pending: deque[tuple[int, Task]] = deque()  # (number, task), from the one that comes next
        self._count, self._tell = workers.count, tell
        self._waiting_since: float | None = None
        self._told: float | None = None  # when the wait began of which a line was told last
        self._has_ended = threading.Event()
        loader = DataLoader(
            _Tasks(read),
            batch_size=None,
            sampler=self._noting(tasks),
            num_workers=workers.count,
            collate_fn=_as_it_is,
            prefetch_factor=workers.prefetch_factor,
            multiprocessing_context="fork",
            worker_init_fn=partial(_begin, dataset, workers.init),
            generator=generator,
        )
        others = {process.pid for process in active_children()}
        with _without_handler():
            self._iterator: Any = iter(loader)
        started = [process for process in active_children() if process.pid not in others]
        # "Process-1:3" is the third child of the first one.
        self._processes = sorted(started, key=lambda process: int(re.split("[-:]", process.name)[-1]))
        watch = partial(_watch, weakref.ref(self), self._has_ended)
        threading.Thread(target=watch, name="slow workers", daemon=True).start()

    def __next__(self) -> Any:
        self._waiting_since = monotonic()
        try:
            read = next(self._iterator)
        except StopIteration:
            raise
        except Exception as error:  # torch says so where a worker has ended, or worker_init_fn has raised
            line = self._why(error)
            self.end()
            raise InputError(line) from error
        finally:
            self._waiting_since = None
        self._pending.popleft()
        if isinstance(read, _Failure):
            self.end()
            raise InputError(read.line)
        return read

    def end(self) -> None:
        """End the workers."""
        self._has_ended.set()
        self._iterator = iter(())  # torch ends them, unless the traceback of an error still holds its iterator
        for process in self._processes:
            process.terminate()
            process.join()

    def _noting(self, tasks: Iterable[Task]) -> Iterator[Task]:
        for number, task in enumerate(tasks):
            self._pending.append((number, task))
            yield task

    def _next_read(self) -> str:
        """Which worker reads what comes next."""
        number, (samples, _) = self._pending[0]
        return f"worker {number % self._count} of {self._count} was to read {_named(samples)}"

    def _why(self, error: Exception) -> str:
        wait([process.sentinel for process in self._processes], timeout=1)  # a connection breaks before a worker ends
        for worker, process in enumerate(self._processes):
            if process.exitcode:
                how = f"exit code {process.exitcode}"
                if process.exitcode < 0:
                    how = f"signal {-process.exitcode} ({signal.Signals(-process.exitcode).name})"
                first = next((samples for number, (samples, _) in self._pending if number % self._count == worker), ())
                return (
                    f"TrainingArguments.dataloader_num_workers: worker {worker} of {self._count} (process id "
                    f"{process.pid}) has ended by {how}, at {_named(first)} or the next that it was to read: its "
                    "memory may not be enough (of the host, or of /dev/shm), or its code may have ended it"
                )
        what = (str(error).strip() or type(error).__name__).splitlines()[-1]
        return f"TrainingArguments.dataloader_num_workers: {what} ({self._next_read()})"

    def tell_if_slow(self) -> None:
        """Say so, once for each wait, if a worker is slow."""
        since = self._waiting_since
        if since is None or since == self._told or monotonic() - since < SLOW_S or not self._pending:
            return
        self._tell(f"the pipeline waits for data since {monotonic() - since:.0f} s: {self._next_read()}")
        self._told = since


class Passes:
    """Results by their numbers in a pass over the data, an epoch or an evaluation, each with workers of its own.

    A thread that reads ahead asks too. The results are kept of the numbers that were asked for last.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._has_ended = False
        self._key: Any = None
        self._reads: ReadAhead | None = None
        self._next = 0  # number of the result that ``_reads`` gives next
        self._kept: dict[int, Any] = {}

    def get(
        self, key: Any, number: int, start: Callable[[int], ReadAhead], *, keep: int, from_begin: bool = False
    ) -> Any:
        """Result ``number`` of the pass called ``key``. ``start`` begins to read at the number that it is given: the
        one that is asked for, or 0 if ``from_begin``. ``keep`` results before it are kept."""
        with self._lock:
            if self._has_ended:
                raise RuntimeError("the workers have ended")
            if key != self._key:
                self.forget()
                self._key = key
            if number in self._kept:
                return self._kept[number]
            is_far = not from_begin and number > self._next + keep
            if self._reads is None or number < self._next or is_far:
                if self._reads is not None:
                    self._reads.end()
                self._next = 0 if from_begin else number
                self._reads = start(self._next)
            while self._next <= number:
                self._kept[self._next] = next(self._reads)
                self._next += 1
            self._kept = {place: read for place, read in self._kept.items() if place >= number - keep}
            return self._kept[number]

    def forget(self) -> None:
        """End the workers and forget their results; the next call of ``get`` begins anew."""
        with self._lock:
            if self._reads is not None:
                self._reads.end()
            self._key, self._reads, self._kept = None, None, {}

    def end(self) -> None:
        """End the workers for good: a thread that still reads ahead starts no others."""
        with self._lock:
            self.forget()
            self._has_ended = True


@dataclass(frozen=True)
class _Failure:
    """Why a worker has not read."""

    line: str


@dataclass(frozen=True)
class _Tasks(Dataset[Any]):
    """Tasks as a dataset whose positions they are."""

    read: Callable[..., Any]

    def __getitem__(self, task: Task) -> Any:
        samples, options = task
        try:
            return self.read(samples, **options)
        except InputError as error:
            return _Failure(str(error))
        except Exception as error:  # the script's code can raise anything
            place = traceback.extract_tb(error.__traceback__)[-1]
            what = str(error).partition("\n")[0]
            info = get_worker_info()
            return _Failure(
                f"train_dataset, eval_dataset or data_collator: worker {0 if info is None else info.id} raised "
                f"{type(error).__name__}{f': {what}' if what else ''} in {place.filename}, line {place.lineno}; "
                f"{'; '.join(getattr(error, '__notes__', ())) or f'reading {_named(samples)} failed'}"
            )


def _watch(reads: "weakref.ref[ReadAhead]", has_ended: threading.Event) -> None:
    while not has_ended.wait(SLOW_S / 4) and (reader := reads()) is not None:
        reader.tell_if_slow()
        del reader


def _named(samples: Sequence[int]) -> str:
    some = ", ".join(map(str, samples[:8])) + ", …" * (len(samples) > 8)
    return f"{'sample' if len(samples) == 1 else 'samples'} {some} of the dataset"


def _as_it_is(read: Any) -> Any:
    return read


def _begin(dataset: Any, init: Callable[[int], None] | None, worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    object.__setattr__(info, "dataset", dataset)  # the script's, as in a DataLoader of its own
    if init is not None:
        init(worker)


@contextmanager
def _without_handler() -> Iterator[None]:
    """After it, torch has no handler of SIGCHLD: it would raise wherever this process is when a worker ends, in a
    message between ranks, say. Who waits for a worker finds out by itself, in 5 s."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if is_main:
            is_torchs = getattr(before, "__module__", None) == signal_handling.__name__
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if is_torchs or before is None else before)
