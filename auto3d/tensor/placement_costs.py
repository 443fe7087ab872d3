"""The cost of placements, in bytes that each rank sends for one sample; other costs count as so many bytes."""

from dataclasses import dataclass

from torch import fx

from auto3d.capture.model import CapturedModel
from auto3d.conversions import CONVERSION_BETWEEN, Collective, Conversion
from auto3d.share import Share
from auto3d.tensor.operations import ProgramOperation, analysed, has_gradient
from auto3d.tensor.rules.call import Way
from auto3d.tensor_placement import PlacementKind, Split, TensorPlacement

_LATENCY_BYTES = 2.0**13  # a collective costs each sample as much as so many bytes, however small it is
_WHOLE_FLOP = 1.0  # cost of one FLOP of a product that every rank computes, in bytes: it is split if it can be
_WHOLE_PRODUCT = 2.0**22  # extra cost, in bytes, of a product whose weight is whole, however small the weight
_WHOLE_TABLE = 16.0  # cost of one byte of a table that is whole, in bytes: with its gradient and its optimizer state
_HELD = {  # cost of one byte of a value: of equal ways, the way that saves memory, then Megatron-LM's
    PlacementKind.SPLIT: 0.0,
    PlacementKind.WHOLE: 2e-6,
    PlacementKind.COPIED: 3e-6,  # the most but one: a copy comes right before the product
    PlacementKind.PARTIAL: 4e-6,  # the most: a reduce comes right behind the product
}


@dataclass(frozen=True, slots=True)
class Operand:
    """All about an operand that its conversions depend on."""

    bytes: int  # per sample
    dims: int
    gradient: bool
    is_state: bool
    is_weight: bool  # weight of a product: a slice of a whole weight will not do, since each rank would hold the whole
    is_written: bool  # in place, so an operation must get the state itself, never a converted copy
    is_pinned: bool  # to the Split that follows, or to none
    pinned: Split | None


class PlacementCosts:
    """The costs of placements of ``captured`` on ranks that have ``share`` of it."""

    def __init__(self, captured: CapturedModel, share: Share) -> None:
        exported = captured.exported
        self._share, self._shards = share, share.tp
        # Copied state is summed once per iteration. With few micro-batches, that costs as much as a sum in each pass.
        self._sync = 1e-3 if share.sequence_parallel else 1.0
        self._samples = exported.micro_batch_size
        self._of_samples = analysed(captured).of_samples
        self._flops = {node.name: node.flops for node in captured.graph.nodes}

    def of_copied_state(self, operand: Operand) -> float:
        """The sum of the gradients of ``operand``, of which each rank has a copy."""
        return self._sync * self.of_all_reduce(operand)

    def of_reduction(self, operand: Operand) -> float:
        """The reduction of ``operand``, of which each rank has a partial value."""
        return self.of_all_reduce(operand) + _LATENCY_BYTES

    def of_conversion(self, operand: Operand, source: TensorPlacement, target: TensorPlacement) -> float | None:
        """One conversion of ``operand``, forward and backward; None if there is none from ``source`` to ``target``."""
        conversion = CONVERSION_BETWEEN.get((source.kind, target.kind))
        if conversion is None or (conversion.name == "reduce_scatter" and not self._is_sequence(operand, target)):
            return None
        if target.kind is PlacementKind.PARTIAL and not operand.gradient:
            return None
        return self._of_collectives(conversion, operand)

    def _is_sequence(self, operand: Operand, target: TensorPlacement) -> bool:
        """Whether ``target`` splits [samples, sequence, width] along its sequence, under sequence parallelism."""
        along_sequence = target.split is not None and target.split.dim == 1
        return self._share.sequence_parallel and operand.dims == 3 and along_sequence

    def _of_collectives(self, conversion: Conversion, operand: Operand) -> float:
        whole = self.of_all_reduce(operand)
        cost = _HELD[conversion.target] * operand.bytes
        for collective in (conversion.forward, conversion.backward if operand.gradient else None):
            if collective is Collective.ALL_REDUCE:
                cost += whole + _LATENCY_BYTES
            elif collective is not None:  # half of an all-reduce; a sequence is split in spite of the latency
                cost += whole / 2 + _LATENCY_BYTES * (0.4 if self._share.sequence_parallel else 1)
        return cost

    def _per_sample(self, node: fx.Node, amount: int) -> int:
        """``amount`` of ``node`` for one sample, so that decisions do not depend on the micro-batch size.

        A value that is computed from inputs has its samples, unless it combines them, as the loss does.
        """
        has_samples = node in self._of_samples and amount % self._samples == 0
        return amount // self._samples if has_samples else amount

    def bytes(self, node: fx.Node) -> int:
        """Bytes of the value of ``node`` for one sample."""
        return self._per_sample(node, node.meta["val"].nbytes)

    def flops(self, operation: ProgramOperation) -> int:
        """Forward FLOPs of ``operation`` for one sample."""
        node = operation.call.node
        return self._per_sample(node, self._flops.get(node.name, 0))

    def of_all_reduce(self, operand: Operand) -> float:
        """Bytes that each rank sends in an all-reduce of ``operand``, by a ring."""
        return 2 * (self._shards - 1) / self._shards * operand.bytes

    def of_way(self, operation: ProgramOperation, way: Way) -> float:
        """One way to run ``operation``, without conversions: what its results hold, and products of whole weights."""
        call, whole_share = operation.call, 1 - 1 / self._shards
        cost = 0.0
        for node in call.result_nodes:
            cost += _HELD[way.gives[call.number_of(node)].kind] * whole_share * self.bytes(node)
        if way in operation.rule.special and call.operator == "cross_entropy_loss":
            logits, labels = call.operands[:2]
            count = self._per_sample(labels, labels.meta["val"].numel())
            cost += 6 * whole_share * count * logits.meta["val"].element_size()
        if operation.rule.product and any(has_gradient(node) for node in call.result_nodes):
            weights = [number for number, operand in enumerate(call.operands) if operand in operation.weights]
            is_split = any(need.split is not None for need in way.needs)
            if not is_split or any(way.needs[number].kind is not PlacementKind.SPLIT for number in weights):
                flops = self.flops(operation)
                table = sum(float(call.operands[number].meta["val"].nbytes) for number in weights)
                if flops:
                    cost += whole_share * (_WHOLE_FLOP * flops + (_WHOLE_PRODUCT if weights else 0))
                else:
                    cost += whole_share * _WHOLE_TABLE * table
        return cost
