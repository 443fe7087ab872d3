"""Recipe -> the settings from which the engine makes the model's inputs."""

from auto3d.data import DataSettings, InputField
from launch.recipe.load import data_files
from launch.recipe.schema import Recipe


def data_settings(recipe: Recipe) -> DataSettings:
    inputs = {
        name: InputField(**{**vars(field), "shape": tuple(field.shape)}) for name, field in recipe.data.inputs.items()
    }
    return DataSettings(
        source=recipe.data.source,
        files=tuple(data_files(recipe)),
        sequence_length=recipe.data.sequence_length,
        vocabulary_size=recipe.data.vocabulary_size,
        inputs=inputs or {"input_ids": InputField(kind="tokens"), "labels": InputField(kind="tokens")},
    )


def tokens_per_sample(recipe: Recipe) -> int:
    """Tokens of one sample; 0 if the model reads none, or if measured layers stand for it, which have no inputs."""
    if recipe.model.layers is not None:
        return 0
    has_tokens = any(field.kind == "tokens" for field in data_settings(recipe).inputs.values())
    return recipe.data.sequence_length if has_tokens else 0
