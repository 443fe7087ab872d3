"""The sets of published runs; one file each."""

from launch.yardstick.measured import MeasuredSet
from launch.yardstick.sets import (
    a100_node,
    b200_llama70b,
    gh200_opt350m,
    h100_llama,
    megatron_sc21,
    t4x16_gpt2,
    zero_bubble,
)

SETS: dict[str, MeasuredSet] = {
    each.SET.name: each.SET
    for each in (t4x16_gpt2, a100_node, megatron_sc21, zero_bubble, gh200_opt350m, h100_llama, b200_llama70b)
}
