"""Samples of many lengths, which a collator pads to the longest of a batch: the numbers of one transformers process."""

from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from transformers import BertConfig, BertForTokenClassification, DataCollatorForTokenClassification

from auto3d.capture.export import InputSpec
from auto3d.errors import InputError
from auto3d.trainer.checks import needs_mask
from auto3d.trainer.lengths import MOST, lengths_of, lengths_to_capture
from auto3d.trainer.padding import Padding, padding_of
from auto3d.trainer.predictions import concatenated
from auto3d.trainer.samples import CollatedData, InOrder
from auto3d.trainer.widths import Widths, lengthened
from tests.soak import soak
from tests.trainer import small
from tests.trainer.scripts import begin, free_port


def tagged(lengths, seed=0):
    """Tokens and a tag of each."""
    random = np.random.default_rng(seed)
    texts = [random.integers(3, 64, length).tolist() for length in lengths]
    return [{"input_ids": text, "labels": [token % 3 for token in text]} for text in texts]


class Texts(torch.utils.data.Dataset):
    """Nothing is known of a sample before it is read."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, place):
        return dict(self.samples[place])


LENGTHS = {  # of the samples that are trained, evaluated and predicted
    "many": (
        np.random.default_rng(1).permutation([*range(4, 16)] * 3 + [28, 31]).tolist(),  # an epoch ends in part
        [7, 33, 12, 5, 9, 21],
        [8, 3, 40, 11],
    ),
    "longer in evaluation": ([10] * 16, [13] * 6, [13] * 4),
}
CAPTURED = {"many": (8, 16), "longer in evaluation": (10,)}  # beside that of the longest


def trained(world, folder, port, kind, *classes, **degrees):
    """Losses, norms and evaluations; then the predictions for samples that are longer still, their labels and their
    loss, and the lengths to which the pipeline has padded beside that of the longest sample."""
    begin(world, folder, port, ours=not classes, **degrees)
    lengths, evaluated, predicted = LENGTHS[kind]
    tokens = small.tokenizer()
    transformers.set_seed(0)
    model = BertForTokenClassification(BertConfig(**small.SIZES, **small.UNDROPPED, num_labels=3))
    options = {"classes": classes} if classes else {}
    made = small.trainer(
        model,
        Texts(tagged(lengths)),
        collator=DataCollatorForTokenClassification(tokens),
        processing_class=tokens,
        eval_dataset=tagged(evaluated, 1),
        eval_strategy="steps",
        eval_steps=6,
        max_steps=6,
        per_device_eval_batch_size=2,
        train_sampling_strategy="group_by_length",
        gradient_accumulation_steps=4 // degrees.get("dp", 1),
        **options,
    )
    made.train()
    captured = () if classes else made._pipeline.captured_lengths
    keys = ("loss", "grad_norm", "eval_loss")
    logged = [entry[key] for entry in made.state.log_history for key in keys if key in entry]
    found = made.predict(tagged(predicted, 2))
    return logged, found.predictions, found.label_ids, found.metrics["test_loss"], captured


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("degrees", [{"pp": 2}, *soak({"dp": 2, "pp": 2})], ids=str)
def test_samples_of_many_lengths_train_as_in_one_process(degrees, kind, processes, tmp_path):
    classes = transformers.Trainer, transformers.TrainingArguments
    ((logged, predictions, labels, loss, _),) = processes.run(1, trained, tmp_path, None, kind, *classes)
    size = 2 * degrees.get("dp", 1)
    for found, predicted, labels_here, loss_here, captured in processes.run(
        size, partial(trained, **degrees), tmp_path, free_port(), kind
    ):
        assert captured == CAPTURED[kind], "micro-batches whose samples are short run at their own length"
        assert found == pytest.approx(logged, rel=1e-4)
        np.testing.assert_allclose(predicted, predictions, rtol=1e-3, atol=1e-4)  # also what fills shorter batches
        assert labels_here.tolist() == labels.tolist()
        assert loss_here == pytest.approx(loss, rel=1e-4)


def unmasked(samples):
    """A batch as many scripts pad it, without a mask."""
    padded = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    texts = [torch.tensor(each["input_ids"]) for each in samples]
    return {"input_ids": padded(texts), "labels": padded(texts, padding_value=-100)}


def trained_without_mask(world, folder, port, *classes):
    """Losses, norms and evaluations of a causal model, and its predictions."""
    begin(world, folder, port, ours=not classes)
    lengths, evaluated, predicted = LENGTHS["many"]
    made = small.trainer(
        data=[{"input_ids": each["input_ids"]} for each in tagged(lengths)],
        collator=unmasked,
        eval_dataset=tagged(evaluated, 1),
        max_steps=6,
        **small.AT_THE_END,
        **({"classes": classes} if classes else {}),
    )
    made.train()
    keys = ("loss", "grad_norm", "eval_loss")
    logged = [entry[key] for entry in made.state.log_history for key in keys if key in entry]
    return logged, made.predict([{"input_ids": each["input_ids"]} for each in tagged(predicted, 2)]).predictions


def test_a_causal_model_needs_no_mask_of_padding_behind_its_tokens(processes, tmp_path):
    classes = transformers.Trainer, transformers.TrainingArguments
    ((logged, predictions),) = processes.run(1, trained_without_mask, tmp_path, None, *classes)
    for found, predicted in processes.run(2, trained_without_mask, tmp_path, free_port()):
        assert found == pytest.approx(logged, rel=1e-4)
        np.testing.assert_allclose(predicted, predictions, rtol=1e-3, atol=1e-4)


class Pooled(small.InTuples):
    """Adds to each place what ``over`` makes of all of them, by a gate that is closed at first."""

    def __init__(self, over):
        super().__init__()
        self.over, self.gate = over, torch.nn.Parameter(torch.zeros(()))

    def forward(self, input_ids, labels=None):
        hidden = self.embedding(input_ids)
        hidden = hidden + self.gate * self.over(hidden)
        predicted = self.head(torch.relu(self.body(hidden)))
        return torch.nn.functional.cross_entropy(predicted.flatten(0, 1), labels.flatten()), predicted


def before(hidden):
    return hidden.cumsum(1)


def after(hidden):
    return hidden.sum(1, keepdim=True) - hidden.cumsum(1)


class BeforeWithNorm(Pooled):
    def __init__(self):
        super().__init__(before)
        self.norm = torch.nn.BatchNorm1d(4)


@pytest.mark.parametrize(
    ("model", "needs"),
    [
        (small.llama, False),
        (small.both_ways, True),
        (lambda: Pooled(before), False),
        (lambda: Pooled(after), True),
        (BeforeWithNorm, True),
        (lambda: small.llama().to("meta"), True),
    ],
)
def test_padding_counts_unless_only_earlier_tokens_are_attended_to(model, needs):
    def loss_of(model, batch, *, return_outputs):
        assert return_outputs
        outputs = model(**batch)
        return (outputs[0], outputs) if isinstance(outputs, tuple) else (outputs.loss, outputs)

    data = CollatedData(dataset=tagged([5, 9, 7, 6]), collate=unmasked, order=InOrder(4, 4))
    model, state = model(), torch.get_rng_state()
    padding = padding_of(12, model, None)
    assert needs_mask(model, loss_of, data, padding) is needs
    assert torch.equal(torch.get_rng_state(), state)
    assert needs_mask(model, loss_of, data, replace(padding, left=True)), "places would be shifted"
    assert needs_mask(model, loss_of, replace(data, dataset=tagged([12] * 4)), padding), "none is padded"
    assert needs_mask(model, lambda *_, **__: 1 / 0, data, padding), "its loss cannot be tried"


def tokens_at(lengths, captured):
    return sum(min(each for each in captured if each >= length) for length in lengths)


def test_micro_batches_are_padded_to_the_few_lengths_with_fewest_tokens():
    random = np.random.default_rng(0)
    for _ in range(100):
        longest = int(random.integers(9, 60))
        lengths = random.integers(1, longest + 1, random.integers(1, 12))
        found = lengths_to_capture(lengths, longest)
        if len({*lengths}) == 1:
            assert found == tuple(sorted({lengths[0], longest})), "samples that are equally long are not padded"
            continue
        possible = sorted({min(-(-int(each) // 8) * 8, longest) for each in lengths} - {longest})
        all_of_them = [*lengths, longest]
        fewest = [
            min(tokens_at(all_of_them, (*each, longest)) for each in combinations(possible, count))
            for count in range(min(MOST, len(possible) + 1))
        ]
        wanted = next((n for n in range(len(fewest) - 1) if fewest[n + 1] > 0.9 * fewest[n]), len(fewest) - 1)
        assert len(found) == wanted + 1
        assert tokens_at(all_of_them, found) == fewest[wanted]


def of(dataset, collate):
    return CollatedData(dataset=dataset, collate=collate, order=InOrder(0, 1))


PADDING = Padding(length=0, values={"input_ids": 0, "attention_mask": 0, "labels": -100}, decoder={})


def padded(samples, most=100):
    length = min(most, max(len(each["input_ids"]) for each in samples))
    rows = [each["input_ids"][:length] for each in samples]
    return {"input_ids": torch.tensor([row + [0] * (length - len(row)) for row in rows])}


@pytest.mark.parametrize("kind", [list, Texts, Dataset.from_list], ids=["list", "own", "datasets"])
@pytest.mark.parametrize("most", [100, 9])
def test_lengths_are_those_that_the_collator_makes(kind, most):
    data = of(kind(tagged([4, 9, 2, 17])), partial(padded, most=most))
    assert lengths_of(data, PADDING).tolist() == [min(each, most) for each in (4, 9, 2, 17)]


def test_no_lengths_are_known_of_samples_without_a_sequence():
    images = [{"pixels": torch.zeros(3, 4, 4)}] * 3
    assert (
        lengths_of(of(images, lambda samples: {"pixels": torch.stack([each["pixels"] for each in samples])}), PADDING)
        is None
    )


def test_a_batch_without_the_input_whose_length_is_said_is_refused():
    with pytest.raises(InputError, match="data_collator makes no input_ids, whose length it says"):
        PADDING({"tokens": torch.zeros(2, 4)})


class Cropped(Texts):
    def __getitem__(self, place):
        tokens = super().__getitem__(place)["input_ids"]
        return {"input_ids": tokens[: np.random.randint(2, len(tokens))]}


def test_lengths_that_are_drawn_are_refused():
    with pytest.raises(InputError, match="how many tokens sample 0 has is drawn at random"):
        lengths_of(of(Cropped(tagged([40] * 4)), padded), PADDING)


class Broken(Texts):
    def __getitem__(self, place):
        if place == 3:
            raise OSError("no such file")
        return super().__getitem__(place)


def test_a_sample_that_cannot_be_read_is_named_where_others_differ_in_length():
    with pytest.raises(InputError, match="sample 3 cannot be read or collated by itself"):
        lengths_of(of(Broken(tagged([4, 4, 9, 4])), padded), PADDING)
    assert lengths_of(of(Broken(tagged([4, 4, 4, 4])), padded), PADDING) is None


@pytest.mark.parametrize("kind", [list, Dataset.from_list])
@pytest.mark.parametrize("nothing", [None, []], ids=str)
def test_a_sample_without_tokens_is_named(kind, nothing):
    samples = tagged([4, 4, 4, 4])
    samples[2] = {"input_ids": nothing, "labels": nothing}
    with pytest.raises(InputError, match="sample 2 has no tokens as its input_ids"):
        lengths_of(of(kind(samples), transformers.default_data_collator), PADDING)


def test_a_collator_that_does_not_pad_is_named_with_the_samples():
    def collate(samples):
        return {"input_ids": torch.stack([torch.tensor(each["input_ids"]) for each in samples])}

    with pytest.raises(InputError, match="data_collator: it makes no batch of samples 2 and 1, which are not equally"):
        lengths_of(of(tagged([4, 9, 2]), collate), PADDING)


def test_a_collator_that_drops_a_sample_is_named():
    def collate(samples):
        return {"input_ids": torch.tensor([each["input_ids"] for each in samples if each is not None])}

    data = CollatedData(dataset=[*tagged([4] * 3), None], collate=collate, order=InOrder(4, 2)).with_shapes()
    with pytest.raises(InputError, match="made input_ids with 1 rows of 2 samples; a pipeline needs one for each"):
        data.check([2, 3])


class Sequences(torch.nn.Module):
    """Scores of a decoder's tokens and of the encoder's, and one number of each sample."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 8)

    def forward(self, input_ids, attention_mask, labels):
        encoded, decoded = self.embed(input_ids), self.embed(labels.clamp(min=0))
        return {"loss": decoded.mean(), "logits": decoded, "states": (encoded, encoded.mean(1))}


def test_outputs_are_as_long_as_the_input_that_they_follow():
    padding = Padding(length=16, values={"input_ids": 0, "attention_mask": 0, "labels": -100}, decoder={"labels": -100})
    inputs = dict.fromkeys(("input_ids", "attention_mask", "labels"), InputSpec(shape=(16,), dtype=torch.int64))
    found = lengthened(Sequences, inputs, padding, device="cpu")
    assert found == {"logits": True, "labels": True, "states.0": False, "input_ids": False, "attention_mask": False}


def test_shorter_batches_are_filled_behind_their_predictions():
    widths = Widths(batches=[(2, 1), (3, 2)], of_decoder={"logits": True, "states": False}, left=True)
    value = torch.arange(8.0).view(2, 4)
    assert widths.cut("logits", value, 0).tolist() == [[0.0], [4.0]]
    states = [widths.cut("states", value, number) for number in range(2)]
    assert concatenated(states).tolist() == [[2.0, 3.0, -100.0], [6.0, 7.0, -100.0], [1.0, 2.0, 3.0], [5.0, 6.0, 7.0]]
    assert widths.cut("other", value, 0) is value
