"""Predictors on textbook inputs: a rule of thumb, and the closed forms of AMP and Chimera as their papers print them.

All take the time of compute from FLOPs at a fixed fraction of the peak. They need no measurement and know no runtime.
"""

from collections.abc import Callable, Sequence
from math import log2

from launch.yardstick.case import Case, case_of
from launch.yardstick.predictors import Predicted, PredictionRequest

EFFICIENCY = 0.45  # fraction of the peak: between the 40 and 50 % that well-tuned trainings of large models reach
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
ADAM = 12  # bytes of a parameter's float32 master weight and of Adam's two moments


def rule_of_thumb(case: Case) -> Predicted:
    """6 N D FLOPs at 45 % of the peak, 8 N D under full recomputation, times 1 + (pp − 1) / (chunks × micro-batches)
    for the bubble, plus a ring all-reduce of the gradients; no tensor-parallel collectives."""
    tokens = case.global_batch * case.sizes.sequence
    passes = 8 if case.recompute == "full" else 6
    compute = passes * case.sizes.parameters * tokens / (case.tp * case.dp * case.pp * EFFICIENCY * case.peak_flops)
    bubble = (case.pp - 1) / (case.chunks * case.micro_batches)
    return Predicted(compute * (1 + bubble) + _ring_s(case), (_memory(case),))


def amp(case: Case) -> Predicted:
    """AMP (Li et al. 2022), section 4.3, equations 1 to 4, with equal stages: (M − 1) times a stage, then each stage
    and message once, then the ring all-reduce. A stage includes its tensor-parallel all-reduces: two of the activations
    in the forward of a layer and two in its backward. β is 1."""
    stage = 3 * _forward_s(case) + _recompute_s(case) + _tensor_s(case)
    messages = 2 * (case.pp - 1) * _message_bytes(case) / _message_link(case)[0]
    return Predicted((case.micro_batches - 1) * stage + case.pp * stage + messages + _ring_s(case), (_memory(case),))


def chimera(case: Case) -> Predicted:
    """Chimera (Li and Hoefler 2021), section 3.4, equation 1, for 1F1B: the critical path has M + pp − 1 forwards
    and as many backwards; a backward takes two forwards, or three with recomputation; each pays α + β L for a message.
    The all-reduce by Rabenseifner's algorithm does not overlap, as 1F1B leaves no free region on the first stage. The
    paper has no tensor parallelism; here it only divides the compute."""
    forward = _forward_s(case)
    backward = 2 * forward + _recompute_s(case)
    bandwidth, latency = _message_link(case)
    message = latency + _message_bytes(case) / bandwidth if case.pp > 1 else 0.0
    sync = _ring_s(case) + 2 * log2(case.dp) * case.link(case.tp * case.dp)[1]
    passes = case.micro_batches + case.pp - 1
    return Predicted(passes * (forward + backward + 2 * message) + sync, (_memory(case),))


def textbook(
    form: Callable[[Case], Predicted],
) -> Callable[[PredictionRequest, Callable[[str], None]], Sequence[Predicted]]:
    """A predictor that applies ``form`` to the Case of each run."""
    return lambda asked, tell: [form(case_of(asked.measured, asked.recipe, run)) for run in asked.runs]


def _forward_s(case: Case) -> float:
    """Seconds of the forward of one micro-batch through one stage: a third of the model FLOPs."""
    flops = case.micro_batch_size * case.sizes.flops_per_sample / 3 / (case.pp * case.tp)
    return flops / (EFFICIENCY * case.peak_flops)


def _recompute_s(case: Case) -> float:
    return _forward_s(case) if case.recompute == "full" else 0.0


def _message_bytes(case: Case) -> float:
    return case.micro_batch_size * case.sizes.sequence * case.sizes.hidden * BYTES[case.precision]


def _message_link(case: Case) -> tuple[float, float]:
    return case.link(case.tp * case.dp * 2)


def _tensor_s(case: Case) -> float:
    """Seconds of the tensor-parallel ring all-reduces of one micro-batch on one stage: four for each layer."""
    all_reduce_s = 2 * (case.tp - 1) / case.tp * _message_bytes(case) / case.link(case.tp)[0]
    return 4 * case.sizes.layers / case.pp * all_reduce_s


def _ring_s(case: Case) -> float:
    """Seconds of a ring all-reduce of the gradients of one stage among its data-parallel ranks."""
    size = case.sizes.parameters / (case.tp * case.pp) * BYTES[case.sync_precision]
    return 2 * (case.dp - 1) / case.dp * size / case.link(case.tp * case.dp)[0]


def _memory(case: Case) -> float:
    """Peak bytes of the first stage.

    A parameter takes 2 bytes for its weight, the bytes of its gradient and 12 for Adam and the master weight, which
    ZeRO-1 divides by dp. A layer keeps s b h (34 + 5 a s / h) bytes for each micro-batch in flight, of which there are
    pp (Korthikanti et al. 2022); without the attention weights if attention is fused; 2 s b h under full recomputation.
    """
    sizes = case.sizes
    state = BYTES[case.precision] + BYTES[case.sync_precision] + (ADAM / case.dp if case.zero else ADAM)
    token = case.micro_batch_size * sizes.sequence * sizes.hidden
    weights = 0.0 if case.fused_attention else 5 * sizes.heads * sizes.sequence / sizes.hidden
    layer = 2.0 * token if case.recompute == "full" else token * (34 + weights) / case.tp
    in_flight = min(case.pp, case.micro_batches)
    return state * sizes.parameters / (case.tp * case.pp) + layer * sizes.layers / case.pp * in_flight
