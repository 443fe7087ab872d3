"""Options of embeddings: gradients of all rows instead of sparse ones; rows that shorten themselves are refused."""

from functools import partial

import pytest
import torch
from torch import nn

from auto3d.capture.errors import CaptureError
from tests.capture.one_stage import assert_equal_to_eager

WORDS = {"words": torch.tensor([[1, 1, 3], [0, 4, 3]])}


class Words(nn.Module):
    def __init__(self, kind: type[nn.Module], options: dict) -> None:
        super().__init__()
        self.embed, self.head = kind(5, 4, **options), nn.Linear(4, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(words)).square().mean()


@pytest.mark.parametrize("options", [{"sparse": True}, {"scale_grad_by_freq": True}, {"padding_idx": 1}], ids=str)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_are_those_of_eager_mode(kind, options):
    assert_equal_to_eager(partial(Words, kind, options), WORDS)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_that_shorten_themselves_are_refused(kind):
    with pytest.raises(CaptureError, match=r"an embedding with max_norm shortens .* line \d+, .*; leave max_norm out"):
        assert_equal_to_eager(partial(Words, kind, {"max_norm": 1.0}), WORDS)
