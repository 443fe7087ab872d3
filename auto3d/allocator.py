"""What a CPU's allocator does with memory that is freed."""

import ctypes

_C_LIBRARY = ctypes.CDLL(None)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)


def return_freed_memory() -> None:
    """Give back to the kernel what was freed; else glibc keeps it, and the process stays as large as it ever was."""
    if hasattr(_C_LIBRARY, "malloc_trim"):
        _C_LIBRARY.malloc_trim(0)


def keep_freed_memory() -> None:
    """Have glibc keep what is freed from now on, for the next micro-batch.

    By default it gives the kernel what each backward frees at the top of the heap, and takes it again at the next
    forward, page by page: some percent of an iteration.
    """
    if hasattr(_C_LIBRARY, "mallopt"):
        _C_LIBRARY.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        _C_LIBRARY.mallopt(_M_MMAP_THRESHOLD, 2**25)  # its largest; larger tensors have memory of their own
