"""Recipe -> the settings from which the engine makes the model's inputs."""

from auto3d.data import DataError, DataSettings, InputField
from launch.recipe.data_schema import RANDOM, InputRecipe
from launch.recipe.load import data_files
from launch.recipe.schema import Recipe


def data_settings(recipe: Recipe) -> DataSettings:
    """The settings of the recipe's data, whose files are not read. Raises DataError if keys contradict each other."""
    data = recipe.data
    try:
        return DataSettings(
            source=data.source,
            files=tuple(data_files(recipe)),
            sequence_length=data.sequence_length,
            vocabulary_size=data.vocabulary_size,
            tokenizer=data.tokenizer,
            text=data.text,
            packing=data.packing,
            shuffle=data.shuffle,
            last_batch=data.last_batch,
            arguments=data.arguments,
            inputs={name: _field(field) for name, field in data.inputs.items()} or _default_inputs(recipe),
        )
    except DataError as error:
        raise DataError(f"data.{error}") from None


def _field(field: InputRecipe) -> InputField:
    values = {**vars(field), "shape": tuple(field.shape), "column": field.column or "", "dtype_name": field.dtype}
    del values["dtype"]
    return InputField(**values)


def _default_inputs(recipe: Recipe) -> dict[str, InputField]:
    """The inputs of a language model; none where the data has no tokens."""
    data = recipe.data
    if data.source in RANDOM:
        return {"input_ids": InputField(kind="tokens"), "labels": InputField(kind="tokens")}
    if data.source != "tokens" and data.tokenizer is None:
        return {}
    mask = {"attention_mask": InputField(kind="attention-mask")} if data.packing == "padded" else {}
    return {"input_ids": InputField(kind="tokens"), **mask, "labels": InputField(kind="labels")}


def tokens_per_sample(recipe: Recipe) -> int:
    """Tokens of one sample; 0 if the model reads none, or if measured layers stand for it, which have no inputs."""
    if recipe.model.layers is not None:
        return 0
    has_tokens = any(field.kind == "tokens" for field in data_settings(recipe).inputs.values())
    return recipe.data.sequence_length if has_tokens else 0
