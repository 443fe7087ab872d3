"""Environment variables that a rank sets for CUDA, NCCL and torch's allocator unless the user has set them."""

import os
from collections.abc import MutableMapping

DEFAULTS = {
    # Hardware queues. If there are few, a message that waits for its peer blocks the compute queued behind it.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Lazy loading synchronises the device at each kernel's first use, amid the first iteration's messages.
    "CUDA_MODULE_LOADING": "EAGER",
    # NCCL makes all connections of a group at its first collective, not when a collective needs another algorithm.
    "NCCL_RUNTIME_CONNECT": "0",
}
# Expandable segments reduce fragmentation by tensors of many sizes. torch reads both variables; the second has the
# older name.
ALLOCATOR_SETTINGS = "expandable_segments:True"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def set_gpu_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that are not set yet. CUDA and NCCL read them when they start, so call this before."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = ALLOCATOR_SETTINGS
