"""A tokenizer from a folder, without network and without code from the folder."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auto3d.data.interface import DataError
from auto3d.data.kept import identity_of

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class Tokenizer:
    """Makes the tokens of documents; ``length`` is the most tokens of a padded document, None if they are packed."""

    tokenizer: Any
    length: int | None
    end: int  # token after each packed document
    pad: int  # token that fills a padded document
    size: int  # above every token

    def documents(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text.

        A packed text has none but its own and the end token after them; a padded text is as the tokenizer makes it for
        a model, with special tokens. A text without tokens has an empty list.
        """
        if self.length is None:
            token_ids = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
            return [[*tokens, self.end] if tokens else [] for tokens in token_ids]
        limits = {"truncation": True, "max_length": self.length}
        padded: list[list[int]] = self.tokenizer(list(texts), return_attention_mask=False, **limits)["input_ids"]
        return padded


def open_tokenizer(folder: str, length: int | None) -> Tokenizer:
    """The tokenizer of ``folder``. Raises DataError if there is none, or if it lacks a token that is needed."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # unset, it warns when a rank is forked afterwards
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise DataError(f"tokenizer: found {folder!r}, which is not a folder; save_pretrained of a tokenizer makes one")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each tokenizer's class fails in its own way
        raise DataError(f"tokenizer: {folder}: not readable: {' '.join(str(error).split())[:200]}") from None
    tokenizer.truncation_side = "right"
    tokenizer.model_max_length = 1 << 60  # a document may be longer than the model's sequence: it is cut afterwards
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    if length is None and end is None:
        raise DataError(f"tokenizer: {folder} has no end token (eos_token), which packed documents need between them")
    if pad is None:
        pad = end
    if length is not None and pad is None:
        raise DataError(f"tokenizer: {folder} has neither a pad token nor an end token, which fill short samples")
    return Tokenizer(
        tokenizer,
        length,
        end=-1 if end is None else end,
        pad=pad,
        size=max(tokenizer.get_vocab().values(), default=0) + 1,
    )


def tokenizer_identity(folder: str) -> list[tuple[str, int, int]]:
    """The files of a tokenizer's folder, which may also be a model's folder, without its weights."""
    if not Path(folder).is_dir():
        return []
    files = sorted(str(file) for file in Path(folder).iterdir() if file.is_file() and file.suffix not in _WEIGHTS)
    return identity_of(files)
