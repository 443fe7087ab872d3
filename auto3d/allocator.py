"""Settings of glibc's allocator: whether it returns freed memory to the kernel."""

import ctypes

_C_LIBRARY = ctypes.CDLL(None)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)


def return_freed_memory() -> None:
    """Return freed memory to the kernel. Otherwise glibc keeps it, and the process stays as large as at its peak."""
    if hasattr(_C_LIBRARY, "malloc_trim"):
        _C_LIBRARY.malloc_trim(0)


def keep_freed_memory() -> None:
    """Make glibc keep memory that is freed from now on, for the next micro-batch.

    By default glibc returns to the kernel what each backward frees at the top of the heap, and the next forward faults
    it in again page by page, which takes a few percent of an iteration.
    """
    if hasattr(_C_LIBRARY, "mallopt"):
        _C_LIBRARY.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        _C_LIBRARY.mallopt(_M_MMAP_THRESHOLD, 2**25)  # glibc's maximum; larger tensors are mapped
