"""Environment variables that a rank sets for CUDA, NCCL and torch's allocator, unless the user has set them."""

import os
from collections.abc import MutableMapping

DEFAULTS = {
    # Hardware queues. With few of them, a message that waits for its peer holds up the compute queued behind it.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Loading a kernel at its first use synchronises the device, in the middle of the first iteration's messages.
    "CUDA_MODULE_LOADING": "EAGER",
    # NCCL makes all connections of a group at its first collective, not at the first that takes another algorithm.
    "NCCL_RUNTIME_CONNECT": "0",
}
# The allocator joins and splits the memory that it holds, so tensors of many sizes leave fewer gaps. torch reads both
# variables, of which the second has the older name.
ALLOCATOR_SETTINGS = "expandable_segments:True"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def set_gpu_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what is not set yet. CUDA and NCCL read these when they start: call it before."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = ALLOCATOR_SETTINGS
