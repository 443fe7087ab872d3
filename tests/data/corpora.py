"""Small texts, and a tokenizer that is trained on the standard library's source code."""

import json
from functools import cache
from pathlib import Path

from auto3d.data.sources.text import standard_library

SIZE = 300  # tokens of the tokenizer


@cache
def documents(count: int = 60) -> tuple[str, ...]:
    """Texts of very unequal length; one is empty."""
    file = next(file for file in standard_library() if file.name == "argparse.py")
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    texts = ["\n".join(lines[number * 3 : number * 3 + 1 + number % 7]) for number in range(count)]
    return (*texts[:5], "", *texts[6:])


@cache
def _trained(end: str | None):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=SIZE, special_tokens=["<end>", "<pad>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(documents(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token="<pad>" if end else None)


def save_tokenizer(folder: Path, end: str | None = "<end>"):
    """A tokenizer in ``folder``; without an end token it has no pad token either."""
    tokenizer = _trained(end)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_json(file: Path, rows: list[dict]) -> str:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)
