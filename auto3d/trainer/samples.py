"""A user's dataset and collator as TrainingData: the samples that transformers' Trainer takes in one process.

Every rank knows the order of the samples; it loads and collates only micro-batches that its stages read or compare.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from auto3d.capture.export import InputSpec
from auto3d.capture.graph import Graph
from auto3d.capture.loss_terms import LossTerms, loss_terms
from auto3d.capture.model import CapturedModel
from auto3d.data import BatchSlice
from auto3d.data.fingerprint import fingerprints
from auto3d.data.interface import IGNORED, Incomplete, Lengths, Reading, naming
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.samples.batch_targets import check_filled, check_statistics
from auto3d.runtime.samples.incomplete_batch import why_not
from auto3d.runtime.samples.sizes import why_not_sized
from auto3d.runtime.settings import SUMMED_ITEMS, TrainingSettings
from auto3d.trainer.ahead import Ahead
from auto3d.trainer.draws import EvaluationDraws, TrainingDraws, draw_seed_of_workers
from auto3d.trainer.generators import LOCK, PROCESS, Generators, States
from auto3d.trainer.item_fingerprint import item_fingerprints
from auto3d.trainer.padding import Padding
from auto3d.trainer.stream import Stream, numbers_in
from auto3d.trainer.workers import Workers


class SampleOrder(Protocol):
    """Which samples are trained when; a stream's are numbered as they come."""

    def of(self, iteration: int) -> Sequence[int]:
        """Positions in the dataset of the samples of ``iteration``."""

    def place(self, iteration: int) -> tuple[int, int]:
        """(epoch, number in it) of ``iteration``."""


def samples_of(batches: BatchSampler) -> int:
    """Samples of an epoch. They are not drawn: a sampler of the user's may have a state, which that would change."""
    samples, size = len(batches.sampler), batches.batch_size  # type: ignore[arg-type]
    return samples - samples % size if batches.drop_last else samples


class TrainOrder:
    """The order in which one process of transformers trains: epoch by epoch, by the sampler of its data loader.

    The last iteration of an epoch has the samples that remain, which may be fewer than a global batch. A thread that
    reads ahead asks too, so an epoch is kept until the next but one begins: a sampler with a state of its own draws
    another order each time. So a training that resumes in an epoch draws those before it, too.

    A sampler that draws from torch's own generator begins at ``state`` of it, which all ranks have. Where collators and
    datasets draw too, it goes on from where ``draws`` are.
    """

    def __init__(self, loader: Any, *, global_batch: int, iterations_per_epoch: int, state: torch.Tensor) -> None:
        self._loader, self._state = loader, state
        self._global_batch, self.iterations_per_epoch = global_batch, iterations_per_epoch
        self._epochs: dict[int, list[int]] = {}  # the last two that were drawn
        self._drawn = 0  # epochs that were drawn
        self._after: dict[int, States] = {}  # epoch -> states after its order was drawn
        self.draws: TrainingDraws | None = None
        self._begun = [(0, 0)]  # (iteration, epoch that it begins): epochs follow each other from there

    def begin(self, epoch: int, iteration: int) -> None:
        """Let ``iteration`` be the first of ``epoch``, because a callback has ended the one before it early."""
        self._begun.append((iteration, epoch))

    def place(self, iteration: int) -> tuple[int, int]:
        """(epoch, number in it) of ``iteration``."""
        first, epoch = next(begun for begun in reversed(self._begun) if begun[0] <= iteration)
        later, place = divmod(iteration - first, self.iterations_per_epoch)
        return epoch + later, place

    def of(self, iteration: int) -> Sequence[int]:
        epoch, place = self.place(iteration)
        if (samples := self._epochs.get(epoch)) is None:
            with LOCK:
                if epoch not in self._epochs:
                    for earlier in range(min(epoch if self._is_seeded else self._drawn, epoch), epoch):
                        self._draw(earlier, None)
                    is_on = self.draws is not None and self.draws.is_on and not self.is_alone
                    self._draw(epoch, self.draws.before_epoch(iteration - place) if is_on else None)  # type: ignore[union-attr]
                samples = self._epochs[epoch]
        return samples[place * self._global_batch : (place + 1) * self._global_batch]

    def _draw(self, epoch: int, states: States | None) -> None:
        """Draw the order of ``epoch`` from the generators that torch's DataLoader has, as much as it does.

        It is drawn from ``states`` on; None: from where torch's own generator was left by the order before.
        """
        with self._generator() if states is None else PROCESS.at(states):
            if hasattr(self._loader, "set_epoch"):
                self._loader.set_epoch(epoch)
            draw_seed_of_workers(self._generator_of_loader)
            # A plain DataLoader without workers does not ask for the end, before which a sampler may draw once more.
            batches = len(self._loader.batch_sampler) if self._reads_none_ahead else None
            drawn = [sample for batch in islice(self._loader.batch_sampler, batches) for sample in batch]
            if not self.is_alone:
                self._after[epoch] = PROCESS.states(states)
        self._epochs = {number: self._epochs[number] for number in self._epochs if number == epoch - 1}
        self._epochs[epoch], self._drawn = drawn, epoch + 1

    def after(self, iteration: int, states: States) -> States:
        """The states after the order of the epoch that begins with ``iteration`` was drawn, from ``states`` on."""
        if self.is_alone:
            with PROCESS.at(states):
                if self._generator_of_loader is None:
                    draw_seed_of_workers()
                return PROCESS.states(states)
        self.of(iteration)
        return replace(self._after[self.place(iteration)[0]], own=states.own)

    def note_evaluation(self) -> None:
        """Draw what the iterator of an evaluation draws in one process."""
        with LOCK, self._generator():
            draw_seed_of_workers()

    @contextmanager
    def _generator(self) -> Iterator[None]:
        """Inside, torch's own generator goes on from where the order left it."""
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self._state)
        try:
            yield
        finally:
            self._state = torch.default_generator.get_state()
            torch.default_generator.set_state(before)

    @property
    def _generator_of_loader(self) -> torch.Generator | None:
        return getattr(self._loader, "generator", None)

    @property
    def _reads_none_ahead(self) -> bool:
        loader = self._loader
        return isinstance(loader, DataLoader) and not isinstance(loader, DataLoaderShard) and not loader.num_workers

    @property
    def _is_seeded(self) -> bool:
        return isinstance(getattr(self._loader.batch_sampler, "sampler", None), SeedableRandomSampler)

    @property
    def is_alone(self) -> bool:
        """Whether its sampler draws nothing from the generators of the process."""
        sampler = getattr(self._loader.batch_sampler, "sampler", None)
        return type(sampler) in (SeedableRandomSampler, SequentialSampler)

    @property
    def is_known(self) -> bool:
        """Whether all ranks draw the same later epochs where they have drawn the same first one."""
        sampler = getattr(self._loader.batch_sampler, "sampler", None)
        own = getattr(sampler, "generator", None) is not None and not isinstance(sampler, SeedableRandomSampler)
        return type(sampler) in _SAMPLERS and not own


_CONSTANT = (bool, int, float, str, type(None))
_SAMPLERS = (SeedableRandomSampler, RandomSampler, SequentialSampler, WeightedRandomSampler, LengthGroupedSampler)


@dataclass
class LookedAt:
    """What is known of data that were looked at."""

    draws: bool = False  # whether a generator had another state after a batch was read
    constants: dict[str, Any] | None = None  # values of a batch that are no tensors; None: no batch was made yet


@dataclass(frozen=True)
class InOrder:
    """The ``samples`` of a dataset from number ``first`` to the last, as evaluations take them.

    ``positions`` has their positions in the dataset, where an evaluation groups them; None: they are in its order.
    """

    samples: int
    global_batch: int
    first: int = 0
    positions: Sequence[int] | None = None

    def of(self, iteration: int) -> Sequence[int]:
        begin = self.number(iteration)
        return self.between(begin, begin + self.global_batch)

    def place(self, iteration: int) -> tuple[int, int]:
        """(epoch, number in it) of ``iteration``."""
        return 0, iteration

    def number(self, iteration: int) -> int:
        """The number of the first sample of ``iteration``."""
        return self.first + iteration * self.global_batch

    def between(self, begin: int, end: int) -> Sequence[int]:
        """The positions of the samples of these numbers."""
        end = min(self.samples, end)
        return range(begin, end) if self.positions is None else self.positions[begin:end]


@dataclass(frozen=True, kw_only=True)
class CollatedData:
    """The samples of ``dataset`` in ``order``, as micro-batches that ``collate`` makes of lists of samples."""

    dataset: Any
    collate: Callable[[list[Any]], Any]
    order: SampleOrder | InOrder
    padding: Padding | None = None
    seed: int = 0  # seed of collators and datasets that draw random numbers
    label_names: tuple[str, ...] = ("labels",)  # inputs whose entries are ignored where they are IGNORED
    returns_loss: bool = False  # whether the model has a loss of samples without labels, unless a batch says otherwise
    shapes: Mapping[str, InputSpec] = field(default_factory=dict)  # inputs that every batch must have; empty: any
    first_item: int | None = None
    """The place of a sample's labels from which transformers counts them as items, 0 or 1; None: they do not count."""
    limits: Mapping[str, int] = field(default_factory=dict)  # whole numbers of an input are from 0 to below its limit
    missing: int = 0  # samples that the last global batch of an epoch lacks
    incomplete: Incomplete | None = None  # the batches that are not filled with samples that do not count
    sample_lengths: np.ndarray | None = None  # [samples of the dataset], where they differ
    captured_lengths: tuple[int, ...] = ()  # shorter than the length of ``padding``, to which micro-batches are padded
    lengths: Lengths | None = None  # the micro-batches of these lengths
    generators: Generators = field(default_factory=Generators)  # from which they may draw
    found: LookedAt = field(default_factory=LookedAt)
    draws: TrainingDraws | EvaluationDraws | None = None  # None: what a batch draws follows from its place
    workers: Workers | None = None  # worker processes that the script asks for
    ahead: Ahead | None = None  # batches that ``workers`` read; None: this process reads

    def with_shapes(self) -> "CollatedData":
        """The same data, all of whose batches must have the inputs and shapes of its first samples."""
        samples = self.order.of(0)[:2]
        batch = self._looked_at(samples)
        before = self.numbers()
        self._looked_at(samples)  # the first call may have made a generator
        for name, value in self.numbers().items():
            if value != before.get(name):
                raise InputError(
                    f"{name}: it changes as a batch is read; ranks read batches beside each other, so what a sample is "
                    "must follow from its position: take the epoch or the step from a callback"
                )
        shapes = {name: InputSpec(shape=tuple(value.shape[1:]), dtype=value.dtype) for name, value in batch.items()}
        check_shapes(batch, shapes, samples=len(samples))
        return replace(self, shapes=shapes)

    def numbers(self) -> dict[str, float]:
        """The numbers that the dataset and the collator hold as attributes."""
        collate = getattr(self.collate, "data_collator", self.collate)  # transformers may have wrapped the user's
        holders = {"data_collator": getattr(collate, "__self__", collate)}
        if not isinstance(self.dataset, Stream):  # whose reads may change them
            holders["train_dataset or eval_dataset"] = self.dataset
        return {
            f"{who}: {name}": value for who, holder in holders.items() for name, value in numbers_in(holder).items()
        }

    def check(self, samples: Sequence[int]) -> None:
        """Raise InputError if a batch of ``samples`` cannot be trained."""
        check_shapes(self._looked_at(samples), self.shapes, samples=len(samples))

    def _looked_at(self, samples: Sequence[int]) -> dict[str, torch.Tensor]:
        """A batch of ``samples``, of which is noted whether anything was drawn for it."""
        with self.generators.seeded() as begin:
            begin(self.seed, 0, 0)
            before = self.generators.states().to_json()
            batch = self.padded(self.collate_now(samples))
            self.found.draws = self.found.draws or before != self.generators.states().to_json()
        return batch

    @property
    def may_ignore_targets(self) -> bool:
        """Whether labels may be IGNORED; labels of a regression may not."""
        return any(not self.shapes[name].dtype.is_floating_point for name in self.label_names if name in self.shapes)

    @property
    def constants(self) -> Mapping[str, Any]:
        """What is no tensor in a batch, and the same in all: arguments of the model's call, by name."""
        return self.found.constants or {}

    @property
    def has_labels(self) -> bool:
        """Whether its samples have all labels."""
        return bool(self.label_names) and all(name in self.shapes for name in self.label_names)

    @property
    def has_loss(self) -> bool:
        """Whether transformers takes a loss of its samples in an evaluation."""
        asked = self.constants.get("return_loss")
        return self.has_labels or (not self.label_names and bool(self.returns_loss if asked is None else asked))

    @property
    def lacks_labels(self) -> bool:
        """Whether its samples have no labels at all."""
        return self.shapes.keys().isdisjoint(self.label_names)

    def check_fill(self, missing: int, terms: LossTerms | None = None, trained: Graph | None = None) -> None:
        """Raise InputError if a batch that lacks ``missing`` samples cannot be filled with ones that do not count.

        With ``terms`` it also does where one of these terms of the loss would count them all the same, and with
        ``trained`` where this Graph normalises by the statistics of a batch.
        """
        because = f"train_dataset or eval_dataset: a batch lacks {missing} samples"
        if missing and trained is not None:
            check_statistics(trained, f"{because}, which others would fill", "set dataloader_drop_last=True")
        if missing and terms is not None:
            check_filled(terms, because)
        if missing and not self.may_ignore_targets:
            raise InputError(
                f"{because}, and without labels that are whole numbers it cannot be filled with samples that do not "
                "count; leave out the samples that remain"
            )

    def of_plan(self, captured: CapturedModel, plan: Plan, settings: TrainingSettings) -> "CollatedData":
        """The same data, whose incomplete batches run as they are if what fills them would count.

        Raises InputError if neither can be.
        """
        return self._of_lengths(captured, plan, settings)._of_missing(captured, plan, settings)

    def _of_lengths(self, captured: CapturedModel, plan: Plan, settings: TrainingSettings) -> "CollatedData":
        """The same data, whose micro-batches of shorter samples run at ``captured_lengths`` if the plan can do so."""
        if not self.captured_lengths:
            return self
        inputs = {length: self._inputs_of(length) for length in self.captured_lengths}
        if settings.loss_mean == SUMMED_ITEMS or plan.tp > 1:
            return replace(self, captured_lengths=())
        for length in self.captured_lengths:
            other = partial(captured.for_inputs, inputs[length])
            if why_not_sized(captured, other, plan, settings, f"samples of {length} tokens"):
                return replace(self, captured_lengths=())
        return replace(self, lengths=Lengths(inputs, partial(self.length_of, size=plan.micro_batch_size)))

    def _inputs_of(self, length: int) -> dict[str, InputSpec]:
        """The inputs of a sample that is padded to ``length``."""
        assert self.padding is not None
        return self.padding.shapes_at(length, self.shapes)

    def length_of(self, iteration: int, index: int, *, size: int) -> int | None:
        """The length, of ``captured_lengths``, of micro-batch ``index`` of the global batch, of ``size`` samples; None:
        the length of ``padding``. A micro-batch that lacks samples has this one too."""
        samples = self.order.of(iteration)[index * size : (index + 1) * size]
        if self.sample_lengths is None or len(samples) < size:
            return None
        longest = self.sample_lengths[np.asarray(samples)].max()
        return next((length for length in self.captured_lengths if longest <= length), None)

    def _of_missing(self, captured: CapturedModel, plan: Plan, settings: TrainingSettings) -> "CollatedData":
        if not self.missing:
            return self
        terms = LossTerms() if settings.loss_mean == SUMMED_ITEMS else loss_terms(captured.exported)
        counted = self.why_filler_counts(self.missing, terms, captured.graph)
        if not counted:
            return self
        short = plan.micro_batch_size - self.missing % plan.micro_batch_size
        if reason := why_not(captured, plan, settings, short):
            raise InputError(f"{counted} (it cannot run as it is: {reason})")
        return replace(self, incomplete=Incomplete(short, lambda iteration: len(self.order.of(iteration))))

    def why_filler_counts(self, missing: int, terms: LossTerms, trained: Graph | None = None) -> str:
        """Why ``missing`` samples cannot be filled in, as the error of ``check_fill`` says it; empty if they can."""
        try:
            self.check_fill(missing, terms, trained)
        except InputError as error:
            return str(error)
        return ""

    read_once = True  # a collator may draw from a generator of its own
    is_by_position = False

    @property
    def is_read_anew(self) -> bool:
        return self.draws is not None

    def begins_epoch(self, iteration: int) -> bool:
        return not isinstance(self.order, InOrder) and self.order.place(iteration)[1] == 0

    def reads(self, names: Collection[str]) -> bool:
        return bool(names)

    def micro_batches(self, part: BatchSlice) -> "CollatedBatches":
        return CollatedBatches(self, part)

    def collated(self, samples: Sequence[int], seed: Sequence[int]) -> dict[str, torch.Tensor]:
        """A batch of ``samples``, by name; ``seed`` decides the random numbers that are drawn for it.

        Any two processes get the same batch, whatever they have loaded before.
        """
        return self.read(samples, seed, fingerprints=False)[0]

    def read(
        self, samples: Sequence[int], seed: Sequence[int], *, fingerprints: bool, length: int | None = None
    ) -> tuple[dict[str, torch.Tensor], np.ndarray | None]:
        """``collated(samples, seed)``, and if wanted the ``fingerprints(samples, seed)``.

        ``length`` is one of ``captured_lengths``; None: the length of ``padding``.
        """
        with self.generators.seeded() as begin:
            begin(self.seed, *seed)
            items = self._fetched(samples)
            of_items = item_fingerprints(items) if fingerprints else None
            batch = self._collated(items)
        return self.padded(batch, length), of_items

    def collate_now(self, samples: Sequence[int]) -> dict[str, torch.Tensor]:
        """A batch of ``samples`` as the collator makes it, in whichever states the generators are."""
        return self._collated(self._fetched(samples))

    def _fetched(self, samples: Sequence[int]) -> list[Any]:
        # A collator may take keys out of samples, which another read meets again.
        return [dict(sample) if type(sample) is dict else sample for sample in _fetch(self.dataset, samples)]

    def _collated(self, items: list[Any]) -> dict[str, torch.Tensor]:
        tensors, constants = dict[str, torch.Tensor](), dict[str, Any]()
        for name, value in self.collate(items).items():
            if isinstance(value, torch.Tensor):
                tensors[name] = value
                self._check_limit(name, value)
            elif isinstance(value, _CONSTANT):
                constants[name] = value
            else:
                raise InputError(
                    f"data_collator: {name} is a {type(value).__name__}; an input must be a tensor, or a number, a "
                    "text or None that is the same in all batches: what else is the same for all batches, give the "
                    "model in a compute_loss of your Trainer"
                )
        if self.found.constants is None:
            self.found.constants = constants
        check_constants(constants, self.found.constants, "in the first batch it was")
        return tensors

    def padded(self, batch: dict[str, torch.Tensor], length: int | None = None) -> dict[str, torch.Tensor]:
        """``batch`` padded to ``length``; None: to the length of ``padding``."""
        padding = self.padding if length is None or self.padding is None else replace(self.padding, length=length)
        return padding(batch) if padding is not None else batch

    def length_at(self, iteration: int, index: int) -> int | None:
        """The length, of ``captured_lengths``, of micro-batch ``index`` of the global batch; None: the length of
        ``padding``."""
        return None if self.lengths is None else self.lengths.of(iteration, index)

    def fingerprints(self, samples: Sequence[int], seed: Sequence[int]) -> np.ndarray | None:
        """Fingerprints of the samples before they are collated; None if they hold what has none."""
        with self.generators.seeded() as begin:
            begin(self.seed, *seed)
            return item_fingerprints(_fetch(self.dataset, samples))

    def _check_limit(self, name: str, value: torch.Tensor) -> None:
        limit = self.limits.get(name)
        if limit is None or value.dtype.is_floating_point or value.dtype == torch.bool:
            return
        ignored = value == IGNORED if name in self.label_names else torch.zeros_like(value, dtype=torch.bool)
        wrong = value[((value < 0) | (value >= limit)) & ~ignored]
        if len(wrong):
            raise InputError(
                f"{name}: found {int(wrong[0])}; the model takes whole numbers from 0 to {limit - 1}"
                + (f", and {IGNORED} for what is ignored" if name in self.label_names else "")
            )


class CollatedBatches:
    """Makes the micro-batches of one rank."""

    def __init__(self, data: CollatedData, part: BatchSlice) -> None:
        self._data, self._part = data, part

    def read(self, iteration: int, index: int, names: Collection[str]) -> Reading:
        """The inputs called ``names`` of micro-batch ``index`` of the global batch, each [samples, *shape]."""
        data, part = self._data, self._part
        if not (names or part.read_once):
            return Reading()
        if not names:
            return Reading(fingerprints=self.fingerprints(iteration, index))
        whole, of_items = self._whole(iteration, index)
        own = self._of_replica(whole, part.replica)
        if of_items is None and part.is_compared and not (part.read_once and data.is_read_anew):
            of_items = fingerprints(bytes_of(own))
        return Reading(
            inputs={name: own[name] for name in names},
            fingerprints=of_items,
            items=None if data.first_item is None else int(items_of(whole, data.first_item)),
        )

    def fingerprints(self, iteration: int, index: int, replica: int | None = None) -> np.ndarray:
        """The fingerprints of what ``replica``, None: this one, reads of micro-batch ``index``; if one rank reads for
        all stages, of what each rank can read by itself."""
        data, part = self._data, self._part
        if not part.read_once:
            whole, _ = self._whole(iteration, index)
        else:
            samples, draw = self._draw(iteration, index)
            if (of_items := data.fingerprints(*draw)) is not None:
                return of_items
            batch, _ = data.read(*draw, fingerprints=False, length=data.length_at(iteration, index))
            whole = {name: self._filled(name, value, len(samples)) for name, value in batch.items()}
        return fingerprints(bytes_of(self._of_replica(whole, part.replica if replica is None else replica)))

    def _draw(self, iteration: int, index: int) -> tuple[Sequence[int], tuple[Sequence[int], Sequence[int]]]:
        """The samples of a micro-batch, and the arguments of CollatedData.collated for it: where it has none, a sample
        that does not count."""
        of_iteration, size = self._data.order.of(iteration), self._part.micro_batch_size
        samples = of_iteration[index * size : (index + 1) * size]
        return samples, (samples or of_iteration[:1], [iteration, index])

    def _whole(self, iteration: int, index: int) -> tuple[dict[str, torch.Tensor], np.ndarray | None]:
        """A micro-batch of all replicas, and the fingerprints of its samples before they are collated, if it made
        any."""
        data, part = self._data, self._part
        (samples, draw), length = self._draw(iteration, index), data.length_at(iteration, index)
        is_own = index in part.micro_batches
        if data.ahead is not None and samples and (is_own or data.draws is not None):
            batch, of_items = data.ahead.read(data, part, iteration, index)
        elif data.draws is None or not samples:
            batch, of_items = data.read(*draw, fingerprints=part.read_once and part.is_compared, length=length)
        else:
            first = index * part.micro_batch_size
            number = data.order.number(iteration) + first if isinstance(data.order, InOrder) else 0
            drawn = data.draws.read((iteration, index), range(number, number + len(samples)))
            batch, of_items = data.padded(drawn, length), None
        shapes = data.shapes if data.lengths is None or length is None else data.lengths.inputs[length]
        check_shapes(batch, shapes, samples=len(samples) or 1)
        return {name: self._filled(name, value, len(samples)) for name, value in batch.items()}, of_items

    def _of_replica(self, whole: Mapping[str, torch.Tensor], replica: int) -> dict[str, torch.Tensor]:
        """The samples of a replica of a stage."""
        share = self._part.micro_batch_size // self._part.replicas  # an incomplete batch not filled has no replicas
        return {name: value[replica * share : (replica + 1) * share] for name, value in whole.items()}

    def _filled(self, name: str, value: torch.Tensor, samples: int) -> torch.Tensor:
        """``value`` of ``samples`` samples as a whole micro-batch: its last is repeated, but with ignored labels."""
        size = self._part.micro_batch_size
        if samples == size or self._data.incomplete is not None:
            return value
        filler = value[-1:].expand(size - samples, *value.shape[1:])
        if name in (*self._data.label_names, "shift_labels"):
            filler = torch.full_like(filler, IGNORED)
        return torch.cat([value[:samples], filler])


def items_of(batch: Mapping[str, torch.Tensor], first: int) -> torch.Tensor:
    """The number of targets in ``batch`` as transformers counts them, from place ``first`` of each sample's labels."""
    labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][..., first:]
    return (labels != IGNORED).sum()


def bytes_of(batch: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """[samples, bytes] by name; numpy lacks some of torch's types."""
    return {name: value.contiguous().reshape(len(value), -1).view(torch.uint8).numpy() for name, value in batch.items()}


def check_shapes(batch: Mapping[str, torch.Tensor], shapes: Mapping[str, InputSpec], *, samples: int) -> None:
    """Raise InputError unless ``batch`` has the inputs ``shapes`` of this many samples."""
    if shapes and batch.keys() != shapes.keys():
        raise InputError(
            f"data_collator: it made {', '.join(batch)}; the first batch had {', '.join(shapes)}; all batches must "
            "have the same inputs"
        )
    for name, spec in shapes.items():
        shape, wanted = tuple(batch[name].shape), (samples, *spec.shape)
        if shape[:1] != (samples,) and shape[1:] == wanted[1:]:
            raise InputError(
                f"data_collator: it made {name} with {shape[0]} rows of {samples} samples; a pipeline needs one for "
                "each: leave out of the dataset what the collator drops"
            )
        if shape != wanted or batch[name].dtype != spec.dtype:
            advice = "if samples differ in length, give TrainingArguments.sequence_length"
            raise InputError(
                f"data_collator: {name} has shape {list(shape)} and type {batch[name].dtype}; the first batch says "
                f"{list(wanted)} and {spec.dtype}; "
                f"{'let all samples have one size' if spec.dtype.is_floating_point else advice}"
            )


def check_constants(constants: Mapping[str, Any], before: Mapping[str, Any], whose: str) -> None:
    """Raise InputError unless both are equal; ``whose`` says in it what is known of those ``before``."""
    for name in {**before, **constants}:
        value, wanted = (repr(arguments[name]) if name in arguments else "none" for arguments in (constants, before))
        if value != wanted:
            raise InputError(
                f"data_collator: {name} is {value}, and {whose} {wanted}: what is no tensor is an argument of the "
                "model's call, which is captured once; let it be the same in all batches, or a tensor with an entry "
                "for each sample"
            )


def _fetch(dataset: Any, samples: Sequence[int]) -> list[Any]:
    """The samples at these positions, as torch's DataLoader fetches them."""
    if getattr(dataset, "__getitems__", None):
        with naming(f"samples {', '.join(map(str, samples))} of the dataset"):
            fetched: list[Any] = dataset.__getitems__(list(samples))
        return fetched
    read = []
    for sample in samples:
        with naming(f"sample {sample} of the dataset"):
            read.append(dataset[sample])
    return read
