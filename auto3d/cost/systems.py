"""How other training systems hold bytes: one ``System`` for each, every field with the source that shows it.

What a Plan decides (degrees, ZeRO-1, sequence parallelism, recomputation) is not repeated here, nor what a recipe says
about precisions.
"""

from dataclasses import dataclass, replace

from auto3d.cost.system_times import (
    DEEPSPEED_TIMES,
    MEGATRON_CORE_TIMES,
    MEGATRON_TE_TIMES,
    MEGATRON_TIMES,
    NANOTRON_TIMES,
    NOTHING,
    SystemTimes,
)


@dataclass(frozen=True, kw_only=True)
class System:
    """What a system keeps from the forward to the backward, and what it holds beside weights, gradients and state.

    Bytes "per logit" are per sample, token and class of the loss's cross-entropy.
    """

    fused_norms: bool = True
    """A norm saves its input and its statistics alone, whatever the operations that the model writes it in."""
    fused_activations: bool = True
    """An activation saves its inputs alone, also if it is gated or if the model writes it in several operations."""
    fused_attention: bool = True
    """Attention saves queries, keys, values, its result and a float32 log-sum-exp. False: the matrix of attention
    weights too and, with dropout, its mask and its result (Korthikanti et al. 2022, equation 1)."""
    attention_buffer: bool = False
    """Without a fused kernel, the product of queries and keys has a buffer for its other operand, which stays."""
    keeps_gathered: bool = False
    """Under sequence parallelism the gathered input of a product stays until the backward. False: the backward gathers
    it again."""
    packed_attention: bool = False
    """Queries stay as a view of the packed queries, keys and values, so keys and values are held twice."""
    loss_saved: float = 4.0  # bytes per logit from the forward of the loss to its backward
    loss_working: float = 4.0  # bytes per logit that come on top while the loss runs
    gradient_copies: float = 0.0  # bytes per parameter of gradients beside the accumulated gradients
    gradient_placeholders: bool = False
    """The backward of a product returns an unused gradient in the weights' precision: one buffer for each shape, which
    stays. The buffer of the product before the loss is allocated when that product runs."""
    times: SystemTimes = NOTHING


MEGATRON = System(
    # megatron/core/fusions: fused_layer_norm, fused_bias_swiglu and fused_bias_gelu save their inputs.
    # megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication: saves the sharded input,
    # and its backward gathers again. Its kernel adds the gradient of a weight to main_grad in float32.
    # megatron/core/tensor_parallel/cross_entropy.py: a float32 copy of the logits becomes their softmax in place. The
    # logits are there before, their gradient after it.
    # megatron/model/transformer.py, CoreAttention: matmul_input_buffer, from the global memory buffer.
    attention_buffer=True,
    loss_saved=4.0,
    loss_working=2.0,
    times=MEGATRON_TIMES,
)
MEGATRON_TE = System(
    # Megatron-LM with Transformer Engine 2 and its cross-entropy (--cross-entropy-loss-fusion):
    # transformer_engine/pytorch/triton/cross_entropy.py overwrites the logits with their gradient;
    # transformer_engine/pytorch/module/base.py, get_dummy_wgrad: one buffer for each shape of weights, never freed;
    # megatron/core/tensor_parallel/layers.py allocates the buffer of the head in each backward.
    loss_saved=2.0,
    loss_working=0.0,
    gradient_placeholders=True,
    times=MEGATRON_TE_TIMES,
)
MEGATRON_CORE = replace(MEGATRON_TE, times=MEGATRON_CORE_TIMES)  # the same kernels, with its overlaps switched on
NANOTRON = System(
    # src/nanotron/models/llama.py: TritonRMSNorm is one kernel; GLUActivation is two (silu, then a product); queries
    # are a view of the packed projection, and keys with values are copied for the rotary embedding.
    # src/nanotron/parallel/tensor_parallel/functional.py: column_linear saves what it gathered, unless
    # tp_recompute_allgather is set. _ShardedCrossEntropy saves a float32 softmax; the logits and their float32 copy are
    # held by its callers.
    # src/nanotron/optim/gradient_accumulator.py, FP32GradientAccumulator: a backward leaves the gradients of all
    # weights in low precision before they are added to the float32 buffers.
    fused_activations=False,
    keeps_gathered=True,
    packed_attention=True,
    loss_saved=4.0,
    loss_working=6.0,
    gradient_copies=2.0,
    times=NANOTRON_TIMES,
)
DEEPSPEED = System(
    # Megatron-DeepSpeed: the kernels of Megatron-LM in 2021, without FlashAttention. The loss makes the logits
    # contiguous and casts them (megatron/model/gpt_model.py, CrossEntropy); the softmax is made from a copy of these
    # (megatron/core/tensor_parallel/cross_entropy.py).
    fused_attention=False,
    attention_buffer=True,
    loss_saved=4.0,
    loss_working=8.0,
    times=DEEPSPEED_TIMES,
)
TORCH = System(
    # transformers' modules: every operation saves what autograd keeps of it; the loss casts the logits to float32
    # (transformers/loss/loss_utils.py) and saves their log-softmax.
    fused_norms=False,
    fused_activations=False,
    keeps_gathered=True,
    loss_saved=4.0,
    loss_working=6.0,
)

SYSTEMS = {
    "megatron": MEGATRON,
    "megatron-te": MEGATRON_TE,
    "megatron-core": MEGATRON_CORE,
    "nanotron": NANOTRON,
    "deepspeed": DEEPSPEED,
    "torch": TORCH,
}
