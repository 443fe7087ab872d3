"""How other training systems spend time beside the operators of a model, by name, as their source code has it."""

from dataclasses import dataclass

HOST = ("launch_s", "collective_launch_s", "crossing_launch_s", "operation_s", "micro_batch_s", "iteration_s")
"""Fields of SystemTimes that are fields of Accelerator, too: times of the host, which a system brings to a device."""


@dataclass(frozen=True, kw_only=True)
class SystemTimes:
    """The defaults add nothing to the operators."""

    partition: str = "blocks"  # partition method of a plan that names none
    accumulated_bytes: float = 0.0
    """Bytes per parameter that a pass of its own reads and writes to add the gradients of one micro-batch to their
    buffers."""
    reduce_shards: bool = True
    """Under ZeRO-1 a reduce-scatter gives a rank the summed gradients of its own shard. False: an all-reduce gives it
    all of them."""
    tied_apart: bool = True
    """Under ZeRO-1 each stage that holds a tied parameter sums its gradient, and then an all-reduce among the stages
    follows, as in Megatron-LM. False: one reduce-scatter among all holders, and one all-gather of the weight."""
    sync_in_backward: bool = False
    """Without ZeRO-1, the sum of gradients begins inside the last backward, as in torch's DistributedDataParallel."""
    whole_update_bytes: float = 0.0
    """Bytes per parameter that an update moves for all parameters of a rank, also in other ranks' shards."""
    attention_moved: tuple[float, float] | None = None
    """Bytes per attention weight that the forward and the backward of an attention move between its matrix products
    where its softmax is several kernels; None: not counted, since attention is a single kernel."""
    loss_moved: tuple[float, float] | None = None
    """Bytes per logit that the forward and the backward of the cross-entropy move; None: the forward is one kernel, and
    so is the backward."""
    eager_backward: float = 1.0
    """Where attention is several kernels: FLOP/s of the products of a backward, relative to a forward's."""
    hides_sharded_sums: bool = False
    """Under ZeRO-1, the last backward hides the reduce-scatter, and the first forward the all-gather, but for the
    parameters of a stage's first operation."""
    hides_collectives: bool = False
    """Tensor-parallel collectives are sent in pieces, one for each rank, while products compute on the others: the pass
    hides all but a piece."""
    launch_s: float | None = None
    """Time between the launches of two operations. None, here and below: the figure of the device's file."""
    collective_launch_s: float | None = None  # launch of a collective in a stage, for each other rank
    crossing_launch_s: float | None = None  # the same where pipeline messages cross nodes
    operation_s: float | None = None  # host time of each operation of the schedule, beside the launches inside it
    micro_batch_s: float | None = None  # host time for each pass of a micro-batch through a stage
    iteration_s: float | None = None  # fixed time of each iteration


NOTHING = SystemTimes()
OWN = SystemTimes(
    # This project's runtime: its executor's processor time for an operation, with messages and waits, on empty stages
    # under 1F1B on 2 ranks (results/runtime, 256 micro-batches, gloo on a CPU; on a GPU's host it was not measured).
    operation_s=154e-6,
    tied_apart=False,  # runtime/messages/gradient_sync.py
)

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
    # The host's figures of nanotron 0.5, which launches from Python, fitted to iterations of LLaMA 1.34B on one node of
    # H100 and, for pipelines that cross nodes, on two (h100_llama_trials.csv).
    launch_s=84.7e-6,
    collective_launch_s=7.2e-6,
    crossing_launch_s=350e-6,
    micro_batch_s=0.0,
    iteration_s=8e-3,
)

MEGATRON_TIMES = SystemTimes(
    # megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication: the product that
    # computes the gradient of a weight adds it to main_grad, a float32 buffer that it reads and writes.
    # megatron/core/tensor_parallel/cross_entropy.py: the same kernels as in nanotron's loss, which is a copy of it.
    accumulated_bytes=8.0,
    loss_moved=(38.0, 14.0),
    # The host's figures of Megatron-DeepSpeed on A100, which launches the kernels of Megatron-LM in 2021, without the
    # time of its pipeline engine for each micro-batch. Iterations under Megatron-LM itself, none of which was fitted,
    # are 7 % off with them (zero_bubble_a100_trials.csv).
    launch_s=85e-6,
    collective_launch_s=12.6e-6,
    micro_batch_s=0.0,
)

MEGATRON_TE_TIMES = SystemTimes(accumulated_bytes=8.0)  # with Transformer Engine's cross-entropy, which is one kernel

MEGATRON_CORE_TIMES = SystemTimes(
    # megatron/core/distributed/param_and_grad_buffer.py: with --overlap-grad-reduce a bucket's reduce-scatter or
    # all-reduce starts when its last gradient is there. megatron/core/optimizer/distrib_optimizer.py: with
    # --overlap-param-gather the forward waits for the parameters of its next layer alone.
    # transformer_engine/pytorch/module/base.py: with --tp-comm-overlap the collectives of a product are sent in as many
    # pieces as there are ranks.
    accumulated_bytes=8.0,
    sync_in_backward=True,
    hides_sharded_sums=True,
    hides_collectives=True,
)

DEEPSPEED_TIMES = SystemTimes(
    # Megatron-DeepSpeed where Megatron's fused softmax is not built. megatron/model/transformer.py, CoreAttention:
    # torch.baddbmm writes the scores (2 bytes), torch.bmm reads the weights (2). megatron/model/fused_softmax.py,
    # forward_torch_softmax: the cast to float32 (2 + 4), masked_fill_ (8), the softmax (8), the cast back (4 + 2); its
    # scale is None, as the product has it. Of these 32 bytes, 4 are counted with every attention that is not fused.
    # Backward, likewise: 8 of products, 6 of each cast, 12 of the softmax, 17 of masked_fill, which copies first: 49,
    # of which 6 are counted anyway. Dropout of weights is not counted: the models of published runs have none.
    # The measured layers of OPT-350M (gh200_opt350m_layers.csv, more samples at tp = 1: 0.866 and 2.70 ms for each, and
    # 1.92 and 2.57 ms of the head) confirm the forward: 35 bytes. Their backward takes 95 bytes, and its products reach
    # 0.27 of the forward's speed. The cause is not known. It grows with the samples and falls as 1 / tp, so it is
    # neither launches nor collectives; the head, whose products are most of it, takes 1.7 to 1.9 ms for each sample up
    # to four and 2.6 to 2.9 beyond, while its forward does not change so. GPT-Neo's runs were not used.
    attention_moved=(28.0, 89.0),
    eager_backward=0.27,
    loss_moved=(38.0, 14.0),  # megatron/core/tensor_parallel/cross_entropy.py, as Megatron-LM's
    # The host's figures of Megatron-DeepSpeed, fitted to the 960 iterations of vTrain on A100
    # (a100_single_node_iterations.csv): launches from Python, and DeepSpeed's pipeline engine for each micro-batch.
    launch_s=85e-6,
    collective_launch_s=12.6e-6,
    micro_batch_s=3.44e-3,
)
