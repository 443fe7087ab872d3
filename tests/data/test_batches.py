"""Batches do not depend on the micro-batch size, and text comes from real files."""

import numpy as np
import pytest
import torch

from auto3d.data import Batches, DataError, DataSettings, InputField
from auto3d.data.sources.text import read_corpus, standard_library
from tests.models import FEATURES, TEXT


@pytest.mark.parametrize("settings", [TEXT, FEATURES])
def test_samples_do_not_depend_on_the_micro_batch_size(settings):
    names = tuple(settings.inputs)

    def batch(micro_batch_size: int, iteration: int) -> dict[str, torch.Tensor]:
        batches = Batches(settings, seed=4, global_batch=12, micro_batch_size=micro_batch_size)
        micro_batches = [batches.micro_batch(iteration, index, names) for index in range(12 // micro_batch_size)]
        return {name: torch.cat([inputs[name] for inputs in micro_batches]) for name in names}

    whole = batch(12, 3)
    for micro_batch_size in (1, 2, 3, 4, 6):
        for name in names:
            assert torch.equal(batch(micro_batch_size, 3)[name], whole[name])
    assert not torch.equal(batch(12, 4)[names[0]], whole[names[0]])


def test_an_input_does_not_depend_on_which_others_are_made():
    batches = Batches(FEATURES, seed=4, global_batch=4, micro_batch_size=4)
    both = batches.micro_batch(0, 0, ("features", "label"))
    assert torch.equal(batches.micro_batch(0, 0, ("label",))["label"], both["label"])
    assert batches.micro_batch(0, 0, ()) == {}


def test_tokens_are_consecutive_bytes_of_the_files(tmp_path):
    text = bytes(range(200))
    (tmp_path / "a.txt").write_bytes(text)
    inputs = {"now": InputField(kind="tokens"), "later": InputField(kind="next-tokens")}
    settings = DataSettings(
        source="text", files=(str(tmp_path / "a.txt"),), sequence_length=16, vocabulary_size=256, inputs=inputs
    )
    batch = Batches(settings, seed=1, global_batch=64, micro_batch_size=64).micro_batch(0, 0, ("now", "later"))
    assert torch.equal(batch["now"][:, 1:], batch["now"][:, :-1] + 1)
    assert torch.equal(batch["later"], batch["now"] + 1)
    assert len(set(batch["now"][:, 0].tolist())) > 20


def test_the_default_corpus_is_python_source():
    corpus = read_corpus((), 100)
    assert len(corpus) > 5_000_000
    assert b"def __init__(self" in corpus.tobytes()
    paths = standard_library()
    assert paths == sorted(set(paths), key=paths.index)
    assert not any("site-packages" in path.parts or "test" in path.parts for path in paths)


def test_missing_and_too_short_data_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(DataError, match="3 bytes in 1 file; one sample needs 33"):
        read_corpus((str(tmp_path / "short.txt"),), 33)
    with pytest.raises(DataError, match="No such file"):
        read_corpus((str(tmp_path / "none.txt"),), 33)


def test_synthetic_tokens_fill_the_vocabulary():
    settings = DataSettings(
        source="synthetic", files=(), sequence_length=500, vocabulary_size=7, inputs={"x": InputField(kind="tokens")}
    )
    tokens = Batches(settings, seed=1, global_batch=4, micro_batch_size=4).micro_batch(0, 0, ("x",))["x"]
    assert set(np.unique(tokens.numpy())) == set(range(7))


def test_kinds_that_need_no_corpus():
    inputs = {
        "image": InputField(kind="normal", shape=(3, 4)),
        "label": InputField(kind="integers", shape=(5,), low=-2, high=3, prefix=-100, prefix_length=2),
        "ones": InputField(kind="constant", shape=(6,)),
        "half": InputField(kind="constant", shape=(2, 2), value=0.5),
        "yes": InputField(kind="constant", value=True),
        "hidden": InputField(kind="mask", shape=(2, 5), count=4),
    }
    settings = DataSettings(source="text", files=("none",), sequence_length=8, vocabulary_size=256, inputs=inputs)
    batch = Batches(settings, seed=1, global_batch=64, micro_batch_size=64).micro_batch(0, 0, inputs)
    for name, spec in settings.input_specs().items():
        assert (batch[name].dtype, batch[name].shape) == (spec.dtype, (64, *spec.shape)), name
    assert set(batch["label"][:, :2].flatten().tolist()) == {-100}
    assert set(batch["label"][:, 2:].flatten().tolist()) == {-2, -1, 0, 1, 2}
    assert torch.equal(batch["ones"], torch.ones(64, 6, dtype=torch.int64))
    assert torch.equal(batch["half"], torch.full((64, 2, 2), 0.5))
    assert batch["yes"].all()
    assert (batch["hidden"].sum((1, 2)) == 4).all()
    assert len({tuple(sample.flatten().tolist()) for sample in batch["hidden"]}) > 30, "true at random positions"


def test_a_prefix_replaces_the_first_tokens_of_its_input_only():
    inputs = {
        "input_ids": InputField(kind="tokens", prefix=299, prefix_length=3),
        "labels": InputField(kind="tokens", prefix=-100, prefix_length=5),
        "plain": InputField(kind="tokens"),
    }
    settings = DataSettings(source="text", files=(), sequence_length=16, vocabulary_size=256, inputs=inputs)
    batch = Batches(settings, seed=1, global_batch=4, micro_batch_size=4).micro_batch(0, 0, inputs)
    assert (batch["input_ids"][:, :3] == 299).all()
    assert (batch["labels"][:, :5] == -100).all()
    assert torch.equal(batch["input_ids"][:, 3:], batch["plain"][:, 3:])
    assert torch.equal(batch["labels"][:, 5:], batch["plain"][:, 5:])
    assert batch["plain"].max() < 256
