"""How other training systems spend time beside the operators of a model, by name, as their source code has it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SystemTimes:
    """The defaults describe this project's runtime."""

    partition: str = "blocks"  # partition method of a plan that names none
    accumulated_bytes: float = 0.0
    """Bytes per parameter that a pass of its own reads and writes to add the gradients of one micro-batch to their
    buffers."""
    reduce_shards: bool = True
    """Under ZeRO-1 a reduce-scatter gives a rank the summed gradients of its own shard. False: an all-reduce gives it
    all of them."""
    sync_in_backward: bool = False
    """Without ZeRO-1, the sum of gradients begins inside the last backward, as in torch's DistributedDataParallel."""
    whole_update_bytes: float = 0.0
    """Bytes per parameter that an update moves for all parameters of a rank, also those of other ranks' shards."""
    attention_moved: tuple[float, float] | None = None
    """Bytes per attention weight that the forward and the backward of an attention move between its matrix products
    where its softmax is several kernels; None: not counted, as it is one kernel."""
    loss_moved: tuple[float, float] | None = None
    """Bytes per logit that the forward and the backward of the cross-entropy move; None: one kernel each."""


OWN = SystemTimes()

NANOTRON_TIMES = SystemTimes(
    # src/nanotron/optim/gradient_accumulator.py: after a backward, FP32GradientAccumulator.backward adds each 2-byte
    # gradient to a 4-byte buffer. src/nanotron/trainer.py, training_step: with ZeRO-1, sync_gradients_across_dp
    # all-reduces these buffers after the last backward; without, DistributedDataParallel reduces them inside it.
    # clip_grad_norm then reads all gradients and scales them, and zero_grad clears them: 4 + 8 + 4 bytes.
    # src/nanotron/parallel/tensor_parallel/functional.py, _ShardedCrossEntropy: kernels over float32 logits. Forward:
    # the cast (2 + 4), the maximum (4), the difference (8), the exponential (8), the sum (4), the division (8).
    # Backward: the product (8), the cast (6).
    partition="weight-shares",
    accumulated_bytes=10.0,
    reduce_shards=False,
    sync_in_backward=True,
    whole_update_bytes=16.0,
    loss_moved=(38.0, 14.0),
)

MEGATRON_TIMES = SystemTimes(
    # megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication: the product that
    # computes the gradient of a weight adds it to main_grad, a float32 buffer that it reads and writes.
    # megatron/core/tensor_parallel/cross_entropy.py: the same kernels as in nanotron's loss, which is a copy of it.
    accumulated_bytes=8.0,
    loss_moved=(38.0, 14.0),
)

MEGATRON_TE_TIMES = SystemTimes(accumulated_bytes=8.0)  # with Transformer Engine's cross-entropy, which is one kernel

DEEPSPEED_TIMES = SystemTimes(
    # Megatron-DeepSpeed where Megatron's fused softmax is not built. megatron/model/transformer.py, CoreAttention:
    # torch.baddbmm writes the scores (2 bytes), torch.bmm reads the weights (2). megatron/model/fused_softmax.py,
    # forward_torch_softmax: the cast to float32 (2 + 4), the scale (8), masked_fill_ with its mask (8 + 1), the softmax
    # (8), the cast back (4 + 2). Backward: the gradient of the weights and the weights for that of the values (2 + 2),
    # the casts (6 each), the softmax, which reads its result too (12), masked_fill (9), the scale (8), and two products
    # that read the gradient of the scores (4). Dropout is not counted: the models of published runs have none.
    attention_moved=(41.0, 49.0),
)
