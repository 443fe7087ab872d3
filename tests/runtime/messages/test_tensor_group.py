"""The operators of a tensor-parallel program among shards equal those of one process, gradients included."""

from itertools import product

import pytest
import torch
from torch import nn

from auto3d.capture.shard import Shard, joined
from auto3d.conversions import CONVERSIONS, Conversion
from auto3d.runtime.messages.even_split import even_split
from auto3d.runtime.messages.tensor_group import ConversionModule, VocabularyCrossEntropy, VocabularyEmbedding
from auto3d.runtime.verify.lockstep import Lockstep
from auto3d.tensor_placement import PlacementKind as Kind
from auto3d.tensor_placement import Split

SHARDS = (2, 3, 4)
SPLITS = [Split(0, (12,)), Split(1, (12,)), Split(1, (12, 24, 12)), Split(0, (10,)), Split(1, (7,)), Split(1, (1,))]


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_shards_make_up_the_whole_tensor(split, shards):
    shape = [5, 5]
    shape[split.dim] = split.size
    if len(split.blocks) > 1 and split.padding(shards):
        return
    whole = torch.randn(shape)
    cut = [Shard(split, number, shards) for number in range(shards)]
    parts = [each.of(whole) for each in cut]
    assert {part.shape for part in parts} == {cut[0].shape(shape)}
    assert torch.equal(joined(parts, split), whole)
    assert sum(part.count_nonzero() for part in parts) == whole.count_nonzero(), "padding is zero"
    again = torch.zeros(shape)
    for each, part in zip(cut, parts, strict=True):
        each.put_back(part, again)
    assert torch.equal(again, whole)


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize(
    "split", [Split(0, (12,)), Split(1, (12,)), Split(1, (12, 12)), Split(2, (24, 24, 24))], ids=str
)
def test_even_shards_are_those_that_go_run_by_run(split, shards):
    shape = [4, 5, 6, 7]
    shape[split.dim] = split.size
    whole = torch.randn(shape).transpose(0, 3).contiguous().transpose(0, 3)
    cut = [Shard(split, number, shards) for number in range(shards)]
    even = even_split(split, shards)
    parts = [even.of(whole, number) for number in range(shards)]
    assert all(part.is_contiguous() for part in parts)
    assert all(torch.equal(part, each.of(whole)) for part, each in zip(parts, cut, strict=True))
    stacked = even.stacked(whole)
    assert stacked.is_contiguous()
    assert stacked.data_ptr() != whole.data_ptr()
    assert torch.equal(stacked, torch.stack(parts))
    assert torch.equal(even.joined(stacked), joined(parts, split))
    assert even.joined(stacked).is_contiguous()
    again = torch.zeros_like(whole)
    for number, part in enumerate(parts):
        even.put_back(number, part, again)
    assert torch.equal(again, whole)


@pytest.mark.parametrize("split", [Split(0, (10,)), Split(1, (12, 24, 12)), Split(1, (1,))], ids=str)
def test_other_shards_go_run_by_run(split):
    assert even_split(split, 4) is None


def placed(kind: Kind, whole: torch.Tensor, split: Split | None, shard: int, shards: int) -> torch.Tensor:
    """What ``shard`` has of the value ``whole`` in this placement; partial sums are random."""
    if kind is Kind.SPLIT:
        return Shard(split, shard, shards).of(whole)
    if kind is Kind.PARTIAL:
        pieces = torch.randn((shards, *whole.shape), generator=torch.Generator().manual_seed(3))
        pieces[0] += whole - pieces.sum(0)
        return pieces[shard].clone()
    return whole.clone()


def assembled(kind: Kind, parts: list[torch.Tensor], split: Split | None) -> torch.Tensor:
    """The value of which the shards have ``parts``; those of a whole or copied value must be equal."""
    if kind is Kind.SPLIT:
        return joined(parts, split)
    if kind is Kind.PARTIAL:
        return torch.stack(parts).sum(0)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def assert_padding_is_zero(parts: tuple[torch.Tensor, ...], split: Split) -> None:
    whole = joined(parts, split)
    assert all(torch.equal(Shard(split, n, len(parts)).of(whole), part) for n, part in enumerate(parts))


# The placement of a value's gradient: that of a copied value is a partial sum, and the other way round.
OF_GRADIENT = {
    Kind.WHOLE: Kind.WHOLE,
    Kind.COPIED: Kind.PARTIAL,
    Kind.PARTIAL: Kind.COPIED,
    Kind.SPLIT: Kind.SPLIT,
}


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("conversion", CONVERSIONS.values(), ids=lambda one: one.name)
def test_a_conversion_keeps_the_value_and_its_gradient(conversion: Conversion, shards):
    """The identity in one process, whatever the placements are; and neither input is written to."""
    needs_split = Kind.SPLIT in (conversion.source, conversion.target)
    splits = [each for each in SPLITS if len(each.blocks) == 1 or not each.padding(shards)]
    for split in splits if needs_split else [None]:
        shape = [5, 5]
        if split is not None:
            shape[split.dim] = split.size
        value, gradient = torch.randn(shape), torch.randn(shape)

        def one(group, split=split, value=value, gradient=gradient):
            module = ConversionModule(conversion, split, group, "it")
            entering = placed(conversion.source, value, split, group.shard, shards).requires_grad_()
            before = entering.detach().clone()
            left = module(entering, shards, 0, [])
            arriving = placed(OF_GRADIENT[conversion.target], gradient, split, group.shard, shards)
            unchanged = arriving.clone()
            left.backward(arriving)
            assert torch.equal(entering, before)
            assert torch.equal(arriving, unchanged)
            assert left.is_contiguous()
            return left.detach(), entering.grad

        values, gradients = zip(*Lockstep(shards).run(one), strict=True)
        torch.testing.assert_close(assembled(conversion.target, list(values), split), value)
        torch.testing.assert_close(assembled(OF_GRADIENT[conversion.source], list(gradients), split), gradient)


@pytest.mark.parametrize(("shards", "size", "padding_idx"), [(2, 12, -1), (3, 10, 9), (4, 9, 0), (4, 3, 2)])
def test_vocabulary_embedding(shards, size, padding_idx):
    weight = torch.randn(size, 6, requires_grad=True)
    indices = torch.randint(0, size, (4, 5))
    gradient = torch.randn(4, 5, 6)
    expected = torch.ops.aten.embedding.default(weight, indices, padding_idx)
    expected.backward(gradient)
    split = Split(0, (size,))

    def one(group):
        mine = Shard(split, group.shard, shards).of(weight.detach()).requires_grad_()
        rows = VocabularyEmbedding(group)(mine, indices, padding_idx, size, shards)
        rows.backward(gradient)
        return rows.detach(), mine.grad

    rows, gradients = zip(*Lockstep(shards).run(one), strict=True)
    assert torch.equal(torch.stack(rows).sum(0), expected)
    assert torch.equal(joined(gradients, split), weight.grad)
    assert_padding_is_zero(gradients, split)


@pytest.mark.parametrize(("shards", "size"), [(2, 12), (3, 10), (4, 9), (4, 3)])
@pytest.mark.parametrize(("reduction", "smoothing"), product((0, 1, 2), (0.0, 0.1)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_vocabulary_cross_entropy(shards, size, reduction, smoothing, dtype):
    torch.manual_seed(size)
    logits = (30 * torch.randn(7, size)).to(dtype).requires_grad_()  # large enough for exponentials to overflow
    logits.data[3] += 1000
    labels = torch.randint(0, size, (7,))
    labels[2] = labels[5] = -100
    name = ("none", "mean", "sum")[reduction]
    # For bfloat16 torch rounds each logarithm; here only the results are rounded.
    exact = logits.double() if dtype is torch.bfloat16 else logits
    expected = nn.functional.cross_entropy(exact, labels, reduction=name, label_smoothing=smoothing)
    gradient = torch.randn(expected.shape).to(dtype)
    expected.backward(gradient)
    split = Split(1, (size,))

    def one(group):
        mine = Shard(split, group.shard, shards).of(logits.detach())
        if padding := mine.shape[1] - sum(length for _, _, length in Shard(split, group.shard, shards).runs()):
            mine[:, -padding:] = 1e9  # whatever a product with padded rows gives
        mine.requires_grad_()
        loss = VocabularyCrossEntropy(group, "it")(mine, labels, reduction, -100, smoothing, size, shards)
        loss.backward(gradient)
        return loss.detach(), mine.grad

    losses, gradients = zip(*Lockstep(shards).run(one), strict=True)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    close = {"rtol": 1e-6, "atol": 1e-6} if dtype is torch.float32 else {}
    if dtype is torch.bfloat16:
        close = {"rtol": 8e-3, "atol": 1e-6}
    torch.testing.assert_close(losses[0], expected.to(dtype), **close)
    torch.testing.assert_close(joined(gradients, split), logits.grad, **close)
    assert_padding_is_zero(gradients, split)


def test_no_label_counts():
    logits = torch.randn(3, 8, requires_grad=True)
    labels = torch.full((3,), -100)

    def one(group):
        mine = Shard(Split(1, (8,)), group.shard, 2).of(logits.detach())
        return VocabularyCrossEntropy(group, "it")(mine, labels, 1, -100, 0.0, 8, 2)

    assert all(loss.isnan() for loss in Lockstep(2).run(one)), "as in torch"


def test_shards_out_of_step_are_an_error():
    def one(group):
        group.all_reduce(torch.ones(1), "one" if group.shard else "another")()

    with pytest.raises(RuntimeError, match="shard 1 is at the all-reduce of one, and another one at the all-reduce"):
        Lockstep(2).run(one)
    with pytest.raises(RuntimeError, match="a shard ended without the all-reduce of it"):
        Lockstep(2).run(lambda group: group.shard or group.all_reduce(torch.ones(1), "it")())
