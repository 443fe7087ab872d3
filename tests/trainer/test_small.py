"""What a script may do beside the examples, at pp2 against one process; and what is refused before training starts."""

import subprocess
import sys
from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.utils._pytree import tree_flatten
from transformers import AutoModelForCausalLM

from auto3d import Trainer, TrainingArguments
from auto3d.errors import InputError
from auto3d.trainer.together import ENDED, TOGETHER
from tests.soak import soak
from tests.trainer import small
from tests.trainer.scripts import EXAMPLES, begin, free_port

TOLERANCE = 0.02  # relative difference of losses in low precision


def losses(trainer, **named):
    trainer.train(**named)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def several(world, folder, port):
    """The losses of several trainings, by name."""
    begin(world, folder, port)
    found = {"float32": losses(small.trainer()), "fp16": losses(small.trainer(fp16=True))}
    found["bf16"] = losses(small.trainer(bf16=True))
    found["masked"] = losses(small.masked(sequence_length=16))
    with torch.device("meta"):
        model = small.llama()
    trainer = small.trainer(model)
    found["meta"] = losses(trainer)
    trainer.save_model("saved")
    tokens = torch.tensor(small.rows()[:8])
    found["saved"] = [AutoModelForCausalLM.from_pretrained("saved")(input_ids=tokens, labels=tokens).loss.item()]
    callbacks = [small.EndsOnTheLastRank()] if world.rank == world.size - 1 else []
    ended = small.trainer(eval_dataset=small.with_labels(small.rows(8)), callbacks=callbacks)
    found["ended"] = losses(ended)
    found["evaluated"] = [entry["step"] for entry in ended.state.log_history if "eval_loss" in entry]
    return found


def test_a_pipeline_trains_as_one_process_does(processes, tmp_path):
    (tmp_path / "one").mkdir()
    (one,) = processes.run(1, several, tmp_path / "one", None)
    (tmp_path / "two").mkdir()
    two, other = processes.run(2, several, tmp_path / "two", free_port())
    assert two == other
    assert two.keys() == one.keys()
    for name, expected in one.items():
        assert two[name] == pytest.approx(expected, rel=1e-4), name
    for name in ("fp16", "bf16"):
        assert two[name] != two["float32"]
        assert two[name] == pytest.approx(two["float32"], rel=TOLERANCE)
    assert len(two["ended"]) == 2, "one rank's callback ends the training of all"
    assert two["evaluated"] == [1]


def losses_of_models(world, folder, port, make=None, names=tuple(small.MODELS), **degrees):
    begin(world, folder, port, ours=make is None, **degrees)
    accumulated = 2 // degrees.get("dp", 1)
    trainers = small.trainers(make, names, gradient_accumulation_steps=accumulated)
    return {name: [losses(trainer), evaluations(trainer)] for name, trainer in trainers}


def evaluations(trainer):
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def of_transformers(*arguments, **options):
    return small.trainer(*arguments, **{"classes": (transformers.Trainer, transformers.TrainingArguments)} | options)


COUNTED = ("a count of all labels", "a sum", "experts")  # losses that are sums over all ranks, in three ways
KINDS_OF_MODELS = ("a teacher", "a last batch in part", "a batch without labels", "pruned", "ends beyond the text")


@pytest.mark.parametrize(
    ("degrees", "names"),
    [
        ({"pp": 2}, KINDS_OF_MODELS),
        ({"dp": 2}, COUNTED[2:]),
        *soak(({"pp": 2}, tuple(small.MODELS)), *(({axis: 2, "pp": 2}, COUNTED) for axis in ("dp", "tp"))),
    ],
    ids=str,
)
def test_losses_are_those_of_one_transformers_process(degrees, names, processes, tmp_path):
    (one,) = processes.run(1, losses_of_models, tmp_path, None, of_transformers, names)
    for each in processes.run(
        prod(degrees.values()), partial(losses_of_models, names=names, **degrees), tmp_path, free_port()
    ):
        for name, expected in one.items():
            for found, wanted in zip(each[name], expected, strict=True):
                assert found == pytest.approx(wanted, rel=1e-5), name


def own_losses(world, folder, port, *classes, names=tuple(small.OWN_LOSSES), **degrees):
    begin(world, folder, port, ours=not classes, **degrees)
    found = {}
    for name in names:
        accumulated = 4 // degrees.get("dp", 1)
        trainer = small.with_own_loss(name, *classes, gradient_accumulation_steps=accumulated)
        trainer.train()
        keys = ("loss", "grad_norm", "eval_loss", "eval_mean")
        found[name] = [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]
    return found


SUMS = ("weights of samples", "a function", "smoothed tokens")
KINDS_OF_LOSSES = ("weights of classes", "divided by items", "a mean of experts")


@pytest.mark.parametrize(
    ("degrees", "names"),
    [
        ({"pp": 2}, KINDS_OF_LOSSES),
        ({"dp": 2}, SUMS[1:2]),
        *soak(({"pp": 2}, tuple(small.OWN_LOSSES))),
        *soak(*(({axis: 2}, SUMS) for axis in ("dp", "tp"))),
        *soak(
            *(({"pp": 2, "schedule": name}, SUMS[1:]) for name in ("chimera", "dualpipe-v", "early-recompute", "zb-h1"))
        ),
        *soak(({"dp": 2, "pp": 2, "shard_optimizer": True}, tuple(small.OWN_LOSSES))),
    ],
    ids=str,
)
def test_a_loss_of_the_script_is_that_of_one_transformers_process(degrees, names, processes, tmp_path):
    classes = transformers.Trainer, transformers.TrainingArguments
    (one,) = processes.run(1, partial(own_losses, names=names), tmp_path, None, *classes)
    size = 4 if "dp" in degrees and "pp" in degrees else 2
    for two in processes.run(size, partial(own_losses, names=names, **degrees), tmp_path, free_port()):
        for name, expected in one.items():
            assert two[name][0] == pytest.approx(expected[0], rel=2e-5), name
            assert two[name] == pytest.approx(expected, rel=TOLERANCE if "bfloat16" in name else 1e-4), name


def logs_of_ways(world, folder, port, *classes, names=()):
    """What a Trainer logs in each of the ways with ``names``, or in all."""
    begin(world, folder, port, ours=not classes)
    make = of_transformers if classes else small.trainer
    found = {}
    for name, trainer in small.ways(make, *classes or (Trainer, TrainingArguments)):
        if names and name not in names:
            continue
        trainer.train()
        keys = ("loss", "grad_norm", "eval_loss", "eval_seen", "norm", "epoch")
        found[name] = [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]
    return found


@pytest.mark.parametrize("names", [("a hook", "metrics"), *soak(((),))], ids=str)
def test_ways_to_write_a_script_give_the_logs_of_one_transformers_process(names, processes, tmp_path):
    classes = transformers.Trainer, transformers.TrainingArguments
    (one,) = processes.run(1, partial(logs_of_ways, names=names), tmp_path, None, *classes)
    assert len(one) >= max(len(names), 2)
    for two in processes.run(2, partial(logs_of_ways, names=names), tmp_path, free_port()):
        for name, expected in one.items():
            tolerance = TOLERANCE if name == "bfloat16" else 1e-4
            assert two[name] == pytest.approx(expected, rel=tolerance), name


def built_by_rank(world, folder, port):
    """The loss of a training whose model each rank builds at random, and the error of data that each rank draws."""
    begin(world, folder, port)
    torch.manual_seed(world.rank)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small.SIZES))
    trainer = small.trainer(model)
    trainer.train()
    drawn = small.with_labels(small.rows(9)[world.rank :])
    with pytest.raises(InputError) as caught:
        small.trainer(eval_dataset=drawn, eval_strategy="epoch").train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], str(caught.value)


def test_ranks_train_the_weights_of_rank_0_and_must_read_the_same_data(processes, tmp_path):
    (expected,) = processes.run(1, of_rank_0_alone, tmp_path, None)
    for losses, error in processes.run(2, built_by_rank, tmp_path, free_port()):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert error.startswith("eval_dataset: ranks ")
        assert "have 9 and 8 samples" in error or "have 8 and 9 samples" in error


def of_rank_0_alone(world, folder, port):
    begin(world, folder, port)
    torch.manual_seed(0)
    trainer = small.trainer(transformers.LlamaForCausalLM(transformers.LlamaConfig(**small.SIZES)))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def losses_of_sampled(world, folder, port, *classes):
    begin(world, folder, port, ours=not classes)
    return losses(small.sampled(*classes or (Trainer, TrainingArguments)))


def test_a_sampler_of_the_users_with_a_state(processes, tmp_path):
    classes = transformers.Trainer, transformers.TrainingArguments
    (one,) = processes.run(1, losses_of_sampled, tmp_path, None, *classes)
    for two in processes.run(2, losses_of_sampled, tmp_path, free_port()):
        assert two == pytest.approx(one, rel=1e-5)


def followed(world, folder, port):
    begin(world, folder, port)
    callback = small.Follows()
    options = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    small.trainer(eval_dataset=small.with_labels(small.rows(8)), callbacks=[callback], **options).train()
    return callback.rates, callback.losses, {name: value.numpy() for name, value in callback.average.items()}


def test_callbacks_see_the_weights_and_the_rate_of_each_step(processes, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    (one,) = processes.run(1, followed, tmp_path / "one", None)
    ranks = processes.run(2, followed, tmp_path / "two", free_port())
    for rank, (rates, losses, average) in enumerate(ranks):
        assert rates == one[0]
        assert all(scheduled == taken for scheduled, taken in rates)
        assert len(losses) == (0 if rank else 2)
        for (evaluated, saved), (expected, _) in zip(losses, one[1], strict=False):
            assert saved == pytest.approx(evaluated, rel=1e-5), "the folder holds the weights that were evaluated"
            assert evaluated == pytest.approx(expected, rel=1e-4)
        for name, value in one[2].items():
            assert average[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def metrics_under_masks(world, folder, port):
    begin(world, folder, port)
    return [small.evaluated_under_masks(name) for name in ("own", "system")]  # test_draws.py draws by torch's generator


def test_metrics_get_the_labels_of_the_masks_that_the_model_has_seen(processes, tmp_path):
    for found in processes.run(2, metrics_under_masks, tmp_path, free_port()):
        for metrics in found:  # each sample has as many targets, so the means of batches are the mean of all
            assert metrics["eval_of_predictions"] == pytest.approx(metrics["eval_loss"], rel=1e-5)


def collated_batches(world, folder, port):
    begin(world, folder, port)
    calls = []

    def collate(samples):
        calls.append(len(samples))
        return {name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels")}

    class Begins(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            calls.clear()  # those of the checks before the training

    small.trainer(collator=collate, callbacks=[Begins()]).train()
    return len(calls)


def test_one_rank_collates_each_batch_once(processes, tmp_path):
    assert processes.run(2, collated_batches, tmp_path, free_port()) == [3 * 2, 0]  # steps and micro-batches


def predictions(world, folder, port, *classes, names=tuple(small.PREDICTING)):
    """What predict() returns of small.PREDICTING, with and without labels, and preprocessed, as flat lists."""
    begin(world, folder, port, ours=not classes)
    options = {"classes": classes} if classes else {}
    data = small.with_labels(small.rows(10))
    unlabelled = [{"input_ids": each["input_ids"]} for each in data]
    found = {}
    for name in names:
        for preprocess in (small.first_of, None):
            trainer = small.predicting(name, preprocess, **options)
            found[name, preprocess is not None] = tree_flatten(trainer.predict(data).predictions)
        if "encoder" not in name:  # an encoder-decoder needs labels, or ids of its decoder
            found[name, "then unlabelled"] = tree_flatten(trainer.predict(unlabelled).predictions)
            fresh = small.predicting(name, None, **options)
            found[name, "unlabelled"] = tree_flatten(fresh.predict(unlabelled).predictions)
            found[name, "then labelled"] = tree_flatten(fresh.predict(data).predictions)
            found[name, "evaluated"] = [fresh.evaluate(data)["eval_loss"]], None
            if name == "a tuple":  # the other drops values
                found[name, "trained"] = losses(fresh), None
        elif not classes:
            with pytest.raises(
                InputError, match="the samples have no labels, and what the model is to compute depends on that"
            ):
                trainer.predict(unlabelled)
    return found


@pytest.mark.parametrize("names", [("a tuple", "a frozen model"), *soak((tuple(small.PREDICTING),))], ids=str)
def test_predictions_are_those_of_transformers(names, processes, tmp_path):
    classes = (transformers.Trainer, transformers.TrainingArguments)
    (one,) = processes.run(1, partial(predictions, names=names), tmp_path, None, *classes)
    for found in processes.run(2, partial(predictions, names=names), tmp_path, free_port()):
        assert found.keys() == one.keys()
        for name, (expected, form) in one.items():
            assert found[name][1] == form, name
            for here, there in zip(found[name][0], expected, strict=True):
                assert here == pytest.approx(there, rel=1e-4, abs=1e-5), name


class Staged(torch.utils.data.Dataset):
    """Samples that are others in another stage, as in a curriculum."""

    def __init__(self):
        self.rows, self.stage = small.with_labels(small.rows()), 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        tokens = (self.rows[place]["input_ids"] + self.stage) % 64
        return {"input_ids": tokens, "labels": tokens}


class Advances(transformers.TrainerCallback):
    """Goes on to the next stage in an event."""

    def __init__(self, event, data):
        self.data = data
        setattr(self, event, self.advance)

    def advance(self, args, state, control, **_):
        self.data.stage += 7


def in_stages(world, folder, port, *classes):
    begin(world, folder, port, ours=not classes)
    options, data = {"classes": classes} if classes else {}, Staged()
    found = losses(small.trainer(data=data, callbacks=[Advances("on_epoch_begin", data)], max_steps=12, **options))
    if classes:
        return found, ""
    with pytest.raises(InputError) as caught:
        small.trainer(data=data, callbacks=[Advances("on_step_end", data)]).train()
    return found, str(caught.value)


def test_data_that_a_callback_changes(processes, tmp_path):
    """At the start of an epoch as in transformers, which in its middle has read ahead."""
    ((one, _),) = processes.run(1, in_stages, tmp_path, None, transformers.Trainer, transformers.TrainingArguments)
    for found, line in processes.run(2, in_stages, tmp_path, free_port()):
        assert found == pytest.approx(one, rel=1e-4)
        assert line.startswith("Trainer: train_dataset or eval_dataset: stage was changed in the middle of an epoch")


class GoesOn(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        state.max_steps = 5


def more_steps(world, folder, port):
    begin(world, folder, port)
    with pytest.raises(InputError) as caught:
        small.trainer(max_steps=3, callbacks=[GoesOn()]).train()
    return str(caught.value)


def test_more_steps_than_were_asked_for_are_refused(processes, tmp_path):
    for line in processes.run(2, more_steps, tmp_path, free_port()):
        assert line.startswith("Trainer: a callback lets the training go on after its last step, 3")


class ByBatch:
    """Metrics that add up what they get of each batch, and say so at the last."""

    def __init__(self):
        self.seen = []

    def __call__(self, given, compute_result):
        assert isinstance(given.predictions, torch.Tensor)
        self.seen.append((len(given.label_ids), float(given.predictions.double().square().sum())))
        return (
            {"batches": [size for size, _ in self.seen], "sum": sum(each for _, each in self.seen)}
            if compute_result
            else {}
        )


def of_inputs(given):
    return {"inputs": given.inputs.sum(axis=1).tolist(), "predictions": given.predictions.shape}


def of_every_name(given):
    return {"b": 1.0, "eval_a": 2.0, "loss": 3.0}


def of_losses(given):
    assert given.losses.dtype == "float32"
    return {"losses": given.losses.tolist()}


def metrics_of_batches_and_inputs(world, folder, port, *classes):
    begin(world, folder, port, ours=not classes)
    options = {"classes": classes} if classes else {}
    options |= {"eval_dataset": small.with_labels(small.rows(10)), "per_device_eval_batch_size": 4}
    found = [
        small.trainer(**options | further).evaluate()
        for further in (
            {"metrics": ByBatch(), "batch_eval_metrics": True},
            {"metrics": of_inputs, "include_for_metrics": ["inputs"]},
            {"metrics": of_losses, "include_for_metrics": ["loss"]},
            {"metrics": of_losses, "include_for_metrics": ["loss"], "per_device_eval_batch_size": 3},
            {"metrics": of_every_name},
        )
    ]
    return found


def test_metrics_get_batches_inputs_or_losses_as_in_transformers(processes, tmp_path):
    classes = (transformers.Trainer, transformers.TrainingArguments)
    (one,) = processes.run(1, metrics_of_batches_and_inputs, tmp_path, None, *classes)
    for found in processes.run(2, metrics_of_batches_and_inputs, tmp_path, free_port()):
        for here, there in zip(found, one, strict=True):
            names = [name for name in there if not name.endswith(("runtime", "per_second", "_time"))]
            assert [name for name in here if name in names] == names, "in the same order"
            for name in names:
                assert here[name] == pytest.approx(there[name], rel=1e-4), name


def changed(world, folder, port, make=None):
    """Losses where the script changes the model between the calls of the Trainer."""
    begin(world, folder, port, ours=make is None)
    samples = small.with_labels(small.rows(8))
    trainer = (make or small.trainer)(small.llama(), eval_dataset=samples)
    model, found = trainer.model, []

    def evaluate():
        found.append(trainer.evaluate()["eval_loss"])

    trainer.train()
    pipeline = trainer._pipeline.training if make is None else None
    evaluate()
    assert make is not None or trainer._pipeline.training is pipeline, "nothing has changed, so it goes on"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    evaluate()
    trainer.save_model("saved")
    found.append(small.loss_of(type(model).from_pretrained("saved")))
    trainer.train()
    evaluate()
    model.model.requires_grad_(False)
    trainer.train()
    evaluate()
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()
    evaluate()
    model.model.norm.variance_epsilon = 0.5
    trainer.train()
    evaluate()
    model.lm_head = torch.nn.Linear(model.config.hidden_size, 64, bias=False)
    torch.nn.init.eye_(model.lm_head.weight)
    evaluate()
    model.lm_head.weight.data = torch.zeros_like(model.lm_head.weight)
    evaluate()
    trainer = (make or small.trainer)(small.llama(), eval_dataset=samples, callbacks=[small.Interrupts()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    evaluate()
    trainer.train()
    evaluate()
    return found


def test_what_a_script_changes_between_calls_is_as_in_one_transformers_process(processes, tmp_path):
    (one,) = processes.run(1, changed, tmp_path, None, of_transformers)
    for two in processes.run(2, changed, tmp_path, free_port()):
        assert two == pytest.approx(one, rel=1e-5)


def trained_live(world, folder, port, make=None, names=tuple(small.LIVE), **degrees):
    begin(world, folder, port, ours=make is None, **degrees)
    accumulated = 4 // degrees.get("dp", 1)
    found = {}
    for name in names:
        trainer = small.live(make or small.trainer, name, gradient_accumulation_steps=accumulated)
        if name == "thaws" and "shard_optimizer" in degrees:
            with pytest.raises(InputError, match=r"^shard_optimizer: .* was trained for another number of"):
                trainer.train()
            continue
        trainer.train()
        keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
        numbers = [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]
        found[name] = numbers, {key: value.detach().numpy() for key, value in trainer.model.named_parameters()}
    return found


@pytest.mark.parametrize(
    "degrees",
    [
        {"pp": 2, "names": ("doubles", "thaws")},
        *soak({"pp": 2}, {"tp": 2}, {"dp": 2, "shard_optimizer": True}, {"dp": 2, "pp": 2}),
    ],
    ids=str,
)
def test_what_a_callback_changes_holds_as_in_one_transformers_process(degrees, processes, tmp_path):
    names = degrees.get("names", tuple(small.LIVE))
    (one,) = processes.run(1, partial(trained_live, names=names), tmp_path, None, of_transformers)
    assert len({tuple(numbers) for numbers, _ in one.values()}) == len(one), "each callback changes the training"
    ranks = prod(value for key, value in degrees.items() if key in ("dp", "tp", "pp"))
    for each in processes.run(ranks, partial(trained_live, **degrees), tmp_path, free_port()):
        assert len(each) == len(one) - ("shard_optimizer" in degrees)
        for name, (numbers, weights) in each.items():
            assert numbers == pytest.approx(one[name][0], rel=1e-4), name
            for key, value in weights.items():
                assert value == pytest.approx(one[name][1][key], rel=1e-3, abs=2e-5), (name, key)


def frozen_and_resumed(world, folder, port, *classes, **degrees):
    """The losses of a training that freezes and thaws, and of what goes on from its fourth step, by the callback."""
    begin(world, folder, port, ours=not classes, **degrees)
    options = {"gradient_accumulation_steps": 4 // degrees.get("dp", 1), "max_steps": 7, "weight_decay": 0.1}
    found = {}
    for callback in (small.Pauses, small.Warms):

        def made(callback=callback, **more):
            model = small.llama()
            model.model.layers.requires_grad_(callback is not small.Warms)
            kinds = classes or (Trainer, TrainingArguments)
            return small.trainer(model, callbacks=[callback()], classes=kinds, **options, **more)

        whole = losses(made(save_strategy="steps", save_steps=3))
        found[callback.__name__] = whole, losses(made(), resume_from_checkpoint="out/checkpoint-3")
    return found


@pytest.mark.parametrize("degrees", [{"pp": 2}, *soak({"tp": 2}, {"dp": 2, "pp": 2})], ids=str)
def test_what_an_optimizer_has_learnt_of_frozen_parameters_is_part_of_a_checkpoint(degrees, processes, tmp_path):
    """Also where a callback changes what is trained before the first step that follows."""
    classes = small.OfAllParameters, transformers.TrainingArguments
    (one,) = processes.run(1, frozen_and_resumed, tmp_path, None, *classes)
    for found in processes.run(prod(degrees.values()), partial(frozen_and_resumed, **degrees), tmp_path, free_port()):
        for name, (whole, resumed) in one.items():
            assert resumed == whole
            assert len(whole) == 7
            for each in found[name]:
                assert each == pytest.approx(whole, rel=1e-4), name


def resumed_at_another_rate(world, folder, port):
    """Losses and rates of steps 5 and 6: of a whole training, and of one that goes on from step 4."""
    begin(world, folder, port)
    whole = small.live(small.trainer, "slows", save_strategy="steps", save_steps=4)
    whole.train()
    resumed = small.live(small.trainer, "slows")
    resumed.train(resume_from_checkpoint="out/checkpoint-4")
    entries = [[entry for entry in one.state.log_history if "loss" in entry][-2:] for one in (whole, resumed)]
    return [[(entry["loss"], entry["learning_rate"]) for entry in each] for each in entries]


def test_a_rate_that_a_callback_has_set_is_part_of_a_checkpoint(processes, tmp_path):
    for whole, resumed in processes.run(2, resumed_at_another_rate, tmp_path, free_port()):
        assert resumed == whole


def best_at_the_end(world, folder, port):
    begin(world, folder, port)
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    trainer = small.trainer(eval_dataset=small.with_labels(small.rows(8)), load_best_model_at_end=True, **options)
    trainer.train()
    return trainer.state.best_model_checkpoint, evaluations(trainer)[-1], trainer.evaluate()["eval_loss"]


def test_the_best_model_may_be_that_of_the_last_step(processes, tmp_path):
    for best, last, loaded in processes.run(2, best_at_the_end, tmp_path, free_port()):
        assert best.endswith("checkpoint-4")
        assert loaded == last


def changed_on_one_rank(world, folder, port):
    begin(world, folder, port)
    trainer = small.trainer(eval_dataset=small.with_labels(small.rows(8)))
    trainer.train()
    if not world.rank:
        torch.nn.init.zeros_(trainer.model.lm_head.weight)
    with pytest.raises(InputError) as caught:
        trainer.evaluate()
    return str(caught.value)


def test_a_change_on_one_rank_alone_is_refused(processes, tmp_path):
    for error in processes.run(2, changed_on_one_rank, tmp_path, free_port()):
        assert "other values of lm_head.weight since the training" in error


def call_alone(world, folder, port):
    """The errors of a call that rank 0 makes, where rank 1 goes on, ends, or calls something else."""
    begin(world, folder, port)
    trainer = small.trainer(eval_dataset=small.with_labels(small.rows(8)))
    trainer.train()
    errors = []
    for other in ("goes on with step 9", ENDED):
        if world.rank:
            TOGETHER.mark(other)
        else:
            with pytest.raises(InputError) as caught:
                trainer.save_model("saved")
            errors.append(str(caught.value))
        dist.barrier()
    with pytest.raises(InputError) as caught:
        trainer.evaluate() if world.rank else trainer.save_model("saved")
    return [*errors, str(caught.value)]


def test_a_call_of_one_rank_alone_is_refused_at_once(processes, tmp_path):
    zero, one = processes.run(2, call_alone, tmp_path, free_port())
    for found, does in zip(zero, ("goes on with step 9", ENDED, "calls Trainer.evaluate"), strict=True):
        assert found.startswith(f"Trainer.save_model: rank 0 calls it, and rank 1 {does}; all ranks must call it")
    assert one[0].startswith("Trainer.evaluate: rank 1 calls it, and rank 0 calls Trainer.save_model; all ranks must")


def cannot_write(world, folder, port):
    """The error of a model for which there is no place, and what the ranks do together after it."""
    begin(world, folder, port)
    (folder / "file").touch()
    trainer = small.trainer()
    with pytest.raises((OSError, RuntimeError)) as caught:
        trainer.save_model("file/saved")
    trainer.save_model("saved")
    return str(caught.value)


def test_a_model_that_rank_0_cannot_write_is_an_error_on_all_ranks(processes, tmp_path):
    zero, one = processes.run(2, cannot_write, tmp_path, free_port())
    assert zero.endswith("'file/saved'")
    assert one == f"rank 0 failed to write the model: NotADirectoryError: {zero}"


class EndsAtOnce(transformers.TrainerCallback):
    """Calls ``end`` in mid-training, and keeps what that says."""

    trainer = None
    line = ""

    def on_step_end(self, args, state, control, **_):
        with pytest.raises(InputError) as caught:
            self.trainer.end()
        self.line = str(caught.value)


def ended(world, folder, port):
    """What a Trainer says to its end in mid-training, and to a call after its end."""
    begin(world, folder, port)
    callback = EndsAtOnce()
    callback.trainer = small.trainer(callbacks=[callback], max_steps=2)
    assert len(losses(callback.trainer)) == 2
    callback.trainer.end()
    with pytest.raises(InputError) as caught:
        callback.trainer.save_model("saved")
    return callback.line, str(caught.value)


def test_the_end_is_refused_in_mid_training_and_closes_the_connections_after_it(processes, tmp_path):
    for early, late in processes.run(2, ended, tmp_path, free_port()):
        assert early.startswith("Trainer.end: refused while it trains")
        assert late.startswith(
            "Trainer.save_model: the connections between the ranks are closed, as Trainer.end() does"
        )


def trained_again(world, folder, port):
    """The losses of two trainings of one Trainer with other data, and what the script draws after each."""
    begin(world, folder, port)
    torch.manual_seed(0)
    model = small.gpt2()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.1  # its stages draw
    made = small.trainer(model)
    torch.manual_seed(7)
    made.train()
    drawn = [torch.rand(1).item()]
    made.train_dataset = small.with_labels(small.rows(24)[::-1])
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry], [*drawn, torch.rand(1).item()]


def test_what_stages_draw_leaves_the_scripts_generator_alone(processes, tmp_path):
    """The order of a second training follows from torch's seed, as in one process."""
    (tmp_path / "one").mkdir()
    ((losses_of_one, drawn_by_one),) = processes.run(1, trained_again, tmp_path / "one", None)
    (tmp_path / "two").mkdir()
    for found, drawn in processes.run(2, trained_again, tmp_path / "two", free_port()):
        assert found == pytest.approx(losses_of_one, rel=1e-4)
        assert drawn == drawn_by_one


def lines_of_faults(world, folder, port, names):
    begin(world, folder, port)
    lines = {}
    for name in names:
        make, _ = small.FAULTS[name]
        with pytest.raises(InputError) as caught:
            make().train()
        lines[name] = str(caught.value)
    return lines


@pytest.mark.parametrize("part", range(3))  # each is waited for as one task of the processes
def test_faults_are_found_before_training_starts(part, processes, tmp_path):
    names = [*small.FAULTS][part::3]
    for lines in processes.run(2, lines_of_faults, tmp_path, free_port(), names):
        for name in names:
            assert small.FAULTS[name][1] in lines[name]
            assert "\n" not in lines[name]


def of_real_script(name, folder):
    torchrun = Path(sys.executable).parent / "torchrun"
    environment = {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1", "PATH": str(torchrun.parent)}
    return subprocess.run(
        [torchrun, "--nproc-per-node=2", f"--master-port={free_port()}", "-m", "tests.trainer.small", name],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment | {"HF_HUB_OFFLINE": "1"},
    )


@pytest.mark.soak
@pytest.mark.parametrize("name", small.FAULTS)
def test_a_fault_is_one_line_and_exit_code_2_of_a_real_script(name, tmp_path):
    done = of_real_script(name, tmp_path)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "auto3d: " in line]
    assert len(lines) in (1, 2), done.stderr  # the second is rank 1's, if rank 0 was slow to end
    assert all(small.FAULTS[name][1] in line for line in lines)
    assert "exitcode  : 2" in done.stderr, done.stderr
    assert "{'loss'" not in done.stdout or name in small.FOUND_IN_TRAINING


@pytest.mark.parametrize("name", ["a rank raises", *soak("metrics fail")])
def test_an_error_on_one_rank_is_the_only_traceback_of_a_real_script(name, tmp_path):
    _, of_script, rank = small.ENDINGS[name]
    error = of_real_script(name, tmp_path).stderr
    assert f"[rank{rank}]: {of_script}" in error
    of_ranks, _, _ = error.partition("torch.distributed.elastic.multiprocessing.errors.ChildFailedError")
    assert not [line for line in of_ranks.splitlines() if line.startswith(f"[rank{1 - rank}]: Traceback")], error
    lines = [line for line in of_ranks.splitlines() if line.startswith("auto3d: ")]
    assert len(lines) <= 1, "that of the other rank, if torchrun was slow to end it"
    assert all("the error of the rank that ended says why" in line for line in lines)
