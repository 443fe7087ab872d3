"""Stage-level partitioning (RaNNC, section III-C): algorithm 1 for stages and replicas, algorithm 2 for the rest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, lcm

import numpy as np

from auto3d.partition.methods.rannc.atomic import Subcomponent
from auto3d.partition.methods.rannc.candidates import candidate_names
from auto3d.partition.methods.rannc.operation_profile import OperationProfiles
from auto3d.partition.methods.rannc.runs import RunCosts, Runs
from auto3d.partition.request import StageSeconds
from auto3d.partition.stage import PartitionError
from auto3d.words import counted


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Costs of each run of blocks as a stage: arrays of [replicas - 1, first block, last block].

    Infinite where there is no such run, or where it cannot have this number of replicas.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    memory_bytes: np.ndarray

    def fitting(self, memory_bytes: float) -> "Choices":
        """The same choices, but infinite where they do not fit a device."""
        fits = self.memory_bytes <= memory_bytes
        return Choices(
            forward_s=np.where(fits, self.forward_s, inf),
            backward_s=np.where(fits, self.backward_s, inf),
            memory_bytes=np.where(fits, self.memory_bytes, inf),
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One stage: blocks ``first`` to ``last`` inclusive, on ``replicas`` devices with a slice of the samples each."""

    first: int
    last: int
    replicas: int


def form_stages(choices: Choices, stages: int, devices: int) -> tuple[Run, ...] | None:
    """Algorithm 1: the stages and replicas with the least (longest forward + longest backward); None if none fit.

    This corrects three errors of the published algorithm:

    - For each (stages, blocks, devices) it keeps only the best sum of longest forward and longest backward. But the
      best solution need not contain the best partial solution: with partial solutions of (1, 5) and (4, 1) and a next
      stage of (1, 5), the first gives 6, and the second, which is the better partial solution, gives 9. Here the
      longest backward alone is minimised, exactly, under a cap on forward times, and the cap is lowered until nothing
      improves. (In 44 of 400 random cases with 6 to 9 blocks the published algorithm is worse, by up to 7 %.)
    - It begins with V = 0 for zero stages of any blocks on any devices, so a solution could leave blocks out. Only zero
      blocks on zero devices may have V = 0.
    - d_min assumes that if d devices are not possible, fewer are not either, for this and all later numbers of blocks.
      But more devices than samples are not possible where fewer are.
    """
    least = longest(choices.forward_s, stages, devices)[stages][-1, devices]
    best, runs, cap = inf, None, inf
    while least < inf:
        backward_s = np.where(choices.forward_s <= cap, choices.backward_s, inf)
        slowest_backward = longest(backward_s, stages, devices)[stages][-1, devices]
        if least + slowest_backward >= best:  # infinite if no stages respect the cap
            break
        forward_s = np.where(backward_s <= slowest_backward, choices.forward_s, inf)
        reached = longest(forward_s, stages, devices)
        slowest_forward = reached[stages][-1, devices]
        if slowest_forward + slowest_backward < best:
            best, runs = slowest_forward + slowest_backward, _trace(forward_s, reached, stages, devices)
        cap = np.nextafter(slowest_forward, -inf)
    return runs


def longest(cost: np.ndarray, stages: int, devices: int) -> list[np.ndarray]:
    """Entry s, by [blocks, devices]: the least longest cost of s stages of the first blocks on that many devices.

    This is the recurrence of section III-C, in one step for all (b', b, d') of one number of replicas.
    """
    blocks = cost.shape[-1]
    start = np.full((blocks + 1, devices + 1), inf)
    start[0, 0] = -inf
    reached = [start]
    for _ in range(stages):
        before, after = reached[-1], np.full_like(start, inf)
        for replicas in range(1, devices + 1):
            worst = np.maximum(before[:-1, None, : devices + 1 - replicas], cost[replicas - 1][:, :, None])
            after[1:, replicas:] = np.minimum(after[1:, replicas:], worst.min(axis=0))
        reached.append(after)
    return reached


def _trace(cost: np.ndarray, reached: list[np.ndarray], stages: int, devices: int) -> tuple[Run, ...]:
    """Stages whose longest cost is the cost in ``reached``."""
    runs: list[Run] = []
    last, free = cost.shape[-1] - 1, devices
    for stage in range(stages, 0, -1):
        allowed = reached[stage][last + 1, free]
        replicas, first = next(
            (replicas, first)
            for replicas in range(1, free + 1)
            for first in range(last + 1)
            if max(reached[stage - 1][first, free - replicas], cost[replicas - 1, first, last]) <= allowed
        )
        runs.append(Run(first, last, replicas))
        last, free = first - 1, free - replicas
    return tuple(reversed(runs))


@dataclass(frozen=True, kw_only=True)
class StageForm:
    """The result of algorithm 2: the stages of one pipeline, and the number of pipelines that run in parallel."""

    runs: tuple[Run, ...]
    pipelines: int
    micro_batches: int
    samples: tuple[int, ...]  # per stage, samples of a micro-batch in each replica
    forward_s: tuple[float, ...]  # per stage, forward of one micro-batch, including its message
    backward_s: tuple[float, ...]  # per stage, backward, including recomputation and its message
    memory_bytes: tuple[float, ...]  # per stage, memory of each of its devices

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration: all forwards flow through the pipeline, then all backwards (figure 1 of the paper).

        As in the paper, the gradient syncs of replicas and the optimizer are left out.
        """
        more = self.micro_batches - 1
        return sum(sum(times) + more * max(times) for times in (self.forward_s, self.backward_s))


class StageSearch:
    """Algorithm 2: the fewest nodes per pipeline, then the fewest stages, then the best number of micro-batches.

    The best number has the shortest iteration. The paper's objective is the time of one micro-batch, by which more
    micro-batches would always win.

    In the paper a pipeline has n = 1, 2, 4 ... nodes and more than D(n - 1) stages, where D is the number of devices of
    a node. So on 4 nodes of 8 devices it never tries 17 to 24 stages, and a pipeline on 4 of 6 nodes leaves two idle.
    Here n is every divisor of the number of nodes, and the number of stages goes on from where the divisor before
    ended; for 1 and 2 nodes that is the same.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[Subcomponent]],
        profiles: OperationProfiles,
        *,
        nodes: int,
        devices_per_node: int,
        global_batch: int,
        equal_slices: bool = False,
        stage_seconds: StageSeconds | None = None,
    ) -> None:
        self.runs, self.profiles = Runs(profiles.graph, blocks, profiles.costs), profiles
        self.nodes, self.devices_per_node, self.global_batch = nodes, devices_per_node, global_batch
        self.equal_slices = equal_slices
        self.candidates = self.runs.blocks * (self.runs.blocks + 1) // 2
        self._stage_seconds = stage_seconds or (lambda name, samples: None)
        named = candidate_names(profiles.graph, blocks).items() if stage_seconds else ()
        self._measured = {run: name for run, name in named if self._stage_seconds(name, profiles.smallest)}
        self._costs: dict[int, RunCosts] = {}

    @property
    def measured_candidates(self) -> int:
        """How many runs of blocks have measured times."""
        return len(self._measured)

    def search(self, *, any_depth: bool = False) -> StageForm | None:
        """The best stages; None if nothing fits.

        With ``any_depth``, unlike in the paper, the fastest of all numbers of nodes and stages.
        """
        best: StageForm | None = None
        limit = self.profiles.costs.memory_bytes
        fewest = 1
        for devices, pipelines in self._pipelines():
            most = min(devices, self.runs.blocks)
            options = {}
            for micro_batches in self._micro_batches(pipelines):
                choices = self._choices(devices, pipelines, micro_batches, checkpointing=True).fitting(limit)
                options[micro_batches] = choices, longest(choices.forward_s, most, devices)
            for stages in range(fewest, most + 1):
                forms = []
                for micro_batches, (choices, reached) in options.items():
                    if stages == 1:
                        choices = self._choices(devices, pipelines, micro_batches, checkpointing=False).fitting(limit)
                    elif reached[stages][-1, devices] == inf:
                        continue
                    runs = form_stages(choices, stages, devices)
                    if runs is not None:
                        places = [(run.replicas - 1, run.first, run.last) for run in runs]
                        forms.append(
                            StageForm(
                                runs=runs,
                                pipelines=pipelines,
                                micro_batches=micro_batches,
                                samples=tuple(self._samples(pipelines * micro_batches, run.replicas) for run in runs),
                                forward_s=tuple(float(choices.forward_s[place]) for place in places),
                                backward_s=tuple(float(choices.backward_s[place]) for place in places),
                                memory_bytes=tuple(float(choices.memory_bytes[place]) for place in places),
                            )
                        )
                if forms:
                    best = min([*forms, best] if best else forms, key=lambda form: form.iteration_s)
                    if not any_depth:
                        return best
            fewest = 1 if any_depth else most + 1
        return best

    def _pipelines(self) -> Iterator[tuple[int, int]]:
        """Pairs (devices of one pipeline, number of pipelines), the fewest devices first."""
        for nodes in range(1, self.nodes + 1):
            if self.nodes % nodes == 0:
                yield nodes * self.devices_per_node, self.nodes // nodes

    def _micro_batches(self, pipelines: int) -> Iterator[int]:
        micro_batches = 1
        while micro_batches * pipelines * self.profiles.smallest <= self.global_batch:
            yield micro_batches
            micro_batches *= 2

    def _choices(self, devices: int, pipelines: int, micro_batches: int, *, checkpointing: bool) -> Choices:
        """The choices for these numbers, with gradient checkpointing unless there is a single stage (section IV-A).

        Each replica runs a slice of a micro-batch's samples. If they do not divide evenly, the paper rounds down. But
        then some replica has one sample more in some micro-batch, and all others wait for it, so times and memory here
        are for the number rounded up. The model must be able to run with the number rounded down. With
        ``equal_slices``, the samples must divide evenly.

        A forward also takes the host's time for a micro-batch, which a recomputation does not take again. Where
        messages cost compute, both ends of each message pay for it in every pass.

        A device holds its weights with gradients and optimizer state, the activations that autograd keeps of one
        micro-batch, and the stage's inputs of all micro-batches, since every forward precedes the first backward. The
        paper leaves these inputs out: it profiles one micro-batch. A single stage runs one micro-batch after the other.
        """
        slices = pipelines * micro_batches
        shape = (devices, self.runs.blocks, self.runs.blocks)
        forward_s, backward_s, memory_bytes = np.full(shape, inf), np.full(shape, inf), np.full(shape, inf)
        run = np.triu_indices(self.runs.blocks)
        for replicas in range(1, min(devices, self.global_batch // (slices * self.profiles.smallest)) + 1):
            if self.equal_slices and self.global_batch % (slices * replicas):
                continue
            costs = self._costs_of(self._samples(slices, replicas))
            again = costs.forward_s if checkpointing else 0.0
            held = micro_batches if checkpointing else 1
            forward = costs.forward_s + self.profiles.costs.micro_batch_s + costs.handling_s + costs.send_s
            forward_s[replicas - 1][run] = forward[run]
            backward_s[replicas - 1][run] = (again + costs.backward_s + costs.handling_s + costs.send_back_s)[run]
            memory_bytes[replicas - 1][run] = (costs.state_bytes + costs.saved_bytes + held * costs.received_bytes)[run]
        return Choices(forward_s=forward_s, backward_s=backward_s, memory_bytes=memory_bytes)

    def _samples(self, slices: int, replicas: int) -> int:
        """Samples of a replica's largest slice of a micro-batch; ``slices`` micro-batches make the global batch."""
        return -(-self.global_batch // (slices * replicas))

    def _costs_of(self, samples: int) -> RunCosts:
        if samples not in self._costs:
            costs = self.runs.at(self.profiles.at(samples))
            for run, name in self._measured.items():
                if seconds := self._stage_seconds(name, samples):
                    costs.forward_s[run], costs.backward_s[run] = seconds
            self._costs[samples] = costs
        return self._costs[samples]

    def refusal(self) -> PartitionError:
        """The error that says why nothing fits, and what would."""
        total = self.nodes * self.devices_per_node
        least = (inf, 0, 0)  # bytes, stages, micro-batches
        for devices, pipelines in self._pipelines():
            most = min(devices, self.runs.blocks)
            for micro_batches in self._micro_batches(pipelines):
                for stages, checkpointing in ((range(1, 2), False), (range(2, most + 1), True)):
                    choices = self._choices(devices, pipelines, micro_batches, checkpointing=checkpointing)
                    reached = longest(choices.memory_bytes, stages[-1], devices) if stages else []
                    least = min(least, *((reached[s][-1, devices], s, micro_batches) for s in stages), least)
        if least[0] == inf:
            most = min(total, self.runs.blocks)
            few, many = total // most, -(-total // most)
            if self.equal_slices:
                problem, enough = (
                    "do not divide equally among",
                    f"a multiple of {lcm(few, many) * self.profiles.smallest}",
                )
            else:
                problem, enough = "are too few for", f"{many * self.profiles.smallest}"
            return PartitionError(
                f"global_batch: {self.global_batch} samples {problem} {counted(total, 'device')} and "
                f"{counted(self.runs.blocks, 'block')}; {enough} would be enough"
            )
        have, need = self.profiles.costs.memory_bytes / 2**20, ceil(10 * least[0] / 2**20) / 10
        return PartitionError(
            f"no stages fit {counted(total, 'device')} of {have:,.1f} MiB with a batch of {self.global_batch}; "
            f"the least that is enough is {need:,} MiB, with stages = {least[1]}, micro-batches = {least[2]}",
            kind="memory",
        )
