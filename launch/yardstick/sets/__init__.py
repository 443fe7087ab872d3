"""The sets of published runs; a file per set."""

from launch.yardstick.measured import MeasuredSet
from launch.yardstick.sets import (
    a100_node,
    b200_llama70b,
    gh200_gptneo,
    gh200_opt350m,
    h100_gpt2,
    h100_llama,
    megatron_sc21,
    t4x16_gpt2,
    v100_megatron,
    zero_bubble,
)

SETS: dict[str, MeasuredSet] = {
    measured_set.name: measured_set
    for measured_set in (
        t4x16_gpt2.SET,
        a100_node.SET,
        megatron_sc21.SET,
        zero_bubble.SET,
        gh200_opt350m.WHOLE,
        gh200_opt350m.FROM_LAYERS,
        gh200_gptneo.SET,
        h100_llama.SET,
        h100_gpt2.SET,
        b200_llama70b.SET,
        v100_megatron.SET,
    )
}
