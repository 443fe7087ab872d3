"""Datasets that are streams, under pipelines: the samples, epochs and logs of one transformers process."""

from contextlib import redirect_stdout
from io import StringIO
from math import prod

import datasets
import pytest
import torch
import torch.distributed as dist
import transformers

from auto3d.errors import InputError
from tests.soak import soak
from tests.trainer import small
from tests.trainer.scripts import begin, free_port


class Stream(torch.utils.data.IterableDataset):
    """Samples that are others in another epoch, and in another stage, which a callback sets."""

    def __init__(self, samples=24):
        self.samples, self.epoch, self.stage = samples, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in range(self.samples):
            yield self.sample(number)

    def sample(self, number):
        tokens = (torch.arange(number, number + 16) + 7 * self.epoch + self.stage) % 64
        return {"input_ids": tokens, "labels": tokens}


class Draws(Stream):
    def sample(self, number):
        tokens = torch.randint(64, (16,))
        return {"input_ids": tokens, "labels": tokens}


class OfRank(Stream):
    def sample(self, number):
        return super().sample(number + 1 if number == 11 and dist.get_rank() else number)


class Shrinks(Stream):
    def sample(self, number):
        return {name: tokens[: 16 - number] for name, tokens in super().sample(number).items()}


class Fails(Stream):
    def sample(self, number):
        if number == 19:
            raise ValueError("no such file")
        return super().sample(number)


class Counts(Stream):
    read = 0

    def sample(self, number):
        self.read += 1
        return super().sample(number)


class Sized(Stream):
    def __len__(self):
        return self.samples


class Events(transformers.TrainerCallback):
    """Notes epochs; ends them after some steps, or goes on to the next stage in an event, if it is to."""

    def __init__(self, *, ends_after=0, stage_of=None, event="on_epoch_begin"):
        self.seen, self.ends_after = [], ends_after
        if stage_of is not None:
            setattr(self, event, lambda args, state, control, **_: self.advance(stage_of, state))

    def advance(self, stream, state):
        stream.stage += 5
        self.seen.append(("stage", state.global_step))

    def on_epoch_begin(self, args, state, control, **_):
        self.seen.append(("begin", state.global_step))

    def on_epoch_end(self, args, state, control, **_):
        self.seen.append(("end", state.global_step))

    def on_step_end(self, args, state, control, **_):
        if self.ends_after and state.global_step % self.ends_after == 0:
            control.should_epoch_stop = True


def trainer(stream, classes=(), events=None, *, dp=1, **arguments):
    options = {"classes": classes} if classes else {}
    defaults = {"max_steps": 8, "gradient_accumulation_steps": 4 // dp}
    return small.trainer(data=stream, callbacks=[events or Events()], **defaults | options | arguments)


def shuffled():
    rows = [{name: row[name].tolist() for name in row} for row in small.with_labels(small.rows(24))]
    return datasets.Dataset.from_list(rows).to_iterable_dataset(2).shuffle(seed=3, buffer_size=7)


def logs(world, folder, port, *classes, **degrees):
    begin(world, folder, port, ours=not classes, **degrees)
    dp, found = degrees.get("dp", 1), {}

    def add(name, stream, events, **arguments):
        made = trainer(stream, classes, events, dp=dp, **arguments)
        made.train()
        keys = ("loss", "eval_loss", "eval_long_loss", "grad_norm", "epoch")
        entries = [[entry[key] for key in keys if key in entry] for entry in made.state.log_history]
        found[name] = entries, events.seen

    add("epochs", Counts(), Events())
    add("ended by a callback", Stream(), Events(ends_after=2))
    staged = Stream()
    add("stages", staged, Events(stage_of=staged))
    evaluated = {"eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 2}
    add("evaluated", shuffled(), Events(), eval_dataset={"short": Stream(5), "long": Sized(12)}, **evaluated)
    return found


CLASSES = transformers.Trainer, transformers.TrainingArguments


@pytest.mark.parametrize("degrees", [{"pp": 2}, *soak({"dp": 2, "pp": 2}, {"tp": 2})], ids=str)
def test_a_stream_is_read_as_in_one_process(degrees, processes, tmp_path):
    (one,) = processes.run(1, logs, tmp_path, None, *CLASSES)
    assert len(one["epochs"][1]) == 6, "three epochs"
    for found in processes.run(prod(degrees.values()), in_degrees, tmp_path, free_port(), degrees):
        for name, (entries, events) in one.items():
            assert found[name][1] == events, name
            for here, there in zip(found[name][0], entries, strict=True):
                assert here == pytest.approx(there, rel=1e-4), name


def in_degrees(world, folder, port, degrees):
    return logs(world, folder, port, **degrees)


def resumed(world, folder, port):
    """Losses of a training, and of one that resumes in its second epoch; and those of what a stream draws."""
    begin(world, folder, port)
    whole, again = trainer(Stream(), save_strategy="steps", save_steps=5), trainer(Stream())
    whole.train()
    again.train(resume_from_checkpoint="out/checkpoint-5")
    drawn = trainer(Draws())
    drawn.train()
    return [
        [entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (whole, again, drawn)
    ], again.state.log_history[-1]["epoch"]


def test_a_resumed_training_goes_on_in_its_epoch_and_what_is_drawn_follows_from_the_seed(processes, tmp_path):
    for losses, epoch in processes.run(2, resumed, tmp_path, free_port()):
        whole, again, drawn = losses
        assert again == pytest.approx(whole, rel=1e-5)
        assert epoch == pytest.approx(2 + 2 / 8)
        assert len(set(drawn)) == len(drawn)


def lines(world, folder, port):
    """What is said of streams that are wrong, by name."""
    begin(world, folder, port)
    changed = Stream()
    wrong = {
        "few": lambda: trainer(Stream(5)),
        "sized": lambda: trainer(Sized()),
        "steps": lambda: trainer(Stream(), max_steps=-1),
        "workers": lambda: trainer(Stream(), dataloader_num_workers=2),
        "stage": lambda: trainer(changed, events=Events(stage_of=changed, event="on_step_end")),
        "rank": lambda: trainer(OfRank()),
        "lengths": lambda: trainer(Shrinks()),
    }
    found = {}
    for name, make in wrong.items():
        with pytest.raises(InputError) as caught:
            make().train()
        found[name] = str(caught.value)
    with pytest.raises(ValueError, match="no such file"):
        trainer(Fails()).train()
    return found


def test_what_cannot_be_read_alike_is_refused_in_one_line(processes, tmp_path):
    for found in processes.run(2, lines, tmp_path, free_port()):
        assert found["few"].startswith("train_dataset: its stream has fewer samples than a global batch of 8")
        assert found["sized"].startswith("train_dataset: an IterableDataset with a length")
        assert found["steps"].startswith("TrainingArguments.max_steps: train_dataset is a stream")
        assert found["lengths"].startswith("train_dataset: its stream begins with samples of 9 to 16 tokens")
        assert found["workers"].startswith("TrainingArguments.dataloader_num_workers: found 2")
        assert found["stage"].startswith("Trainer: train_dataset: stage was changed in the middle of an epoch")
        assert found["rank"].startswith(
            "iteration 2: ranks 0 and 1 have read different data for sample 3 of the global batch"
        )


def left_out(world, folder, port):
    begin(world, folder, port)
    made = trainer(Stream(27), max_steps=5)
    with redirect_stdout(StringIO()) as printed:
        made.train()
    return printed.getvalue(), [entry["epoch"] for entry in made.state.log_history if "loss" in entry]


def test_the_last_samples_of_a_stream_are_left_out_with_a_line(processes, tmp_path):
    (printed, epochs), (of_other, _) = processes.run(2, left_out, tmp_path, free_port())
    assert epochs == pytest.approx([1 / 5, 2 / 5, 3 / 5, 1 + 1 / 5, 1 + 2 / 5])
    assert "auto3d: train_dataset: the stream ended, and its last samples, 3 of the 8 of a global batch" in printed
    assert "auto3d: " not in of_other
