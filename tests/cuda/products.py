"""Times matrix products and what moves memory on one GPU: python -m tests.cuda.products > results/cuda/products.csv

A row is a product of an m × k and a k × n matrix, as torch's linear layer and its backward make them (``layout``: which
of the two is transposed in memory, as cuBLAS sees row-major tensors), an attention, or an operation that only moves
memory. ``seconds`` is the median of several runs, of which each begins while the one before it still runs, so that no
launch is timed. The device's clock is what the device chose under that load.
"""

import csv
import sys
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

HIDDEN = (768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
VOCABULARIES = (30522, 32000, 50257, 50304, 51200, 128256)
SPLITS = (1, 2, 4, 8)  # tensor parallelism
HEAD_WIDTHS = (64, 80, 96, 128)
RUNS, BATCHES = 5, 5  # runs timed together, medians over batches
FIELDS = ("operation", "dtype", "m", "n", "k", "layout", "seconds")


def seconds(run: Callable[[], object]) -> float:
    """Seconds of ``run`` on the device."""
    for _ in range(2):
        run()
    taken = []
    for _ in range(BATCHES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # cycles: the host is ahead of the device from here on
        begin.record()
        for _ in range(RUNS):
            run()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1000 / RUNS)
    return median(taken)


def layers() -> Iterator[tuple[int, int]]:
    """(inputs, outputs) of the linear layers of transformers of many widths, whole and split."""
    found = set()
    for hidden in HIDDEN:
        for split in SPLITS:
            found |= {(hidden, 3 * hidden // split), (hidden // split, hidden)}
            found |= {(hidden, 4 * hidden // split), (4 * hidden // split, hidden)}
    yield from sorted(found)


def products(dtype: torch.dtype, tokens: tuple[int, ...], chosen: list[tuple[int, int]]) -> Iterator[tuple]:
    """Rows of the three products of each linear layer: output, gradient of input, gradient of weight."""
    for inputs, outputs in chosen:
        weight = torch.randn(outputs, inputs, device="cuda", dtype=dtype) * 0.02
        for count in tokens:
            if max(count * outputs, count * inputs) > 2**30:
                continue
            x = torch.randn(count, inputs, device="cuda", dtype=dtype)
            y = torch.randn(count, outputs, device="cuda", dtype=dtype)
            yield count, outputs, inputs, "x @ W.T", seconds(lambda x=x, w=weight: x @ w.T)
            yield count, inputs, outputs, "y @ W", seconds(lambda y=y, w=weight: y @ w)
            yield outputs, inputs, count, "y.T @ x", seconds(lambda y=y, x=x: y.T @ x)


def attentions(dtype: torch.dtype) -> Iterator[tuple]:
    """Rows of causal attention: m is samples × heads, n the sequence, k the width of a head."""
    for width in HEAD_WIDTHS:
        for heads, sequence in ((12, 1024), (96, 1024), (16, 2048), (128, 2048), (32, 4096), (32, 8192)):
            q, k, v = (
                torch.randn(1, heads, sequence, width, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)
            )

            def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

            def both(q: Tensor = q, k: Tensor = k, v: Tensor = v, forward: Callable[[], Tensor] = forward) -> None:
                torch.autograd.grad(forward().sum(), (q, k, v))

            yield heads, sequence, width, "forward", seconds(forward)
            yield heads, sequence, width, "forward, sum and backward", seconds(both)


def movers(dtype: torch.dtype) -> Iterator[tuple]:
    """Rows of operations that move memory: m × n elements."""
    for rows, columns in ((1024, 768), (4096, 1024), (4096, 4096), (16384, 768), (16384, 4096), (16384, 12288)):
        x = torch.randn(rows, columns, device="cuda", dtype=dtype)
        weight = torch.ones(columns, device="cuda", dtype=dtype)
        for name, run in {
            "copy": lambda x=x: x.clone(),
            "add": lambda x=x: x + x,
            "gelu": lambda x=x: functional.gelu(x),
            "layer norm": lambda x=x, w=weight: functional.layer_norm(x, x.shape[-1:], w, w),
            "softmax": lambda x=x: functional.softmax(x, -1),
            "dropout": lambda x=x: functional.dropout(x, 0.1),
            "to float32": lambda x=x: x.float(),
            "sum of columns": lambda x=x: x.sum(0),
        }.items():
            yield rows, columns, 0, name, seconds(run)


def main() -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(FIELDS)

    def write(operation: str, dtype: torch.dtype, rows: Iterator[tuple]) -> None:
        for m, n, k, layout, taken in rows:
            writer.writerow((operation, str(dtype).removeprefix("torch."), m, n, k, layout, f"{taken:.4g}"))
            sys.stdout.flush()

    everywhere, some = list(layers()), [(1024, 4096), (4096, 1024), (4096, 16384), (768, 2304)]
    heads = [(hidden, vocabulary) for hidden in (768, 2048, 4096) for vocabulary in VOCABULARIES]
    with torch.no_grad():
        write("product", torch.bfloat16, products(torch.bfloat16, TOKENS, everywhere))
        write("product", torch.bfloat16, products(torch.bfloat16, (1024, 4096, 16384), heads))
        write("product", torch.float16, products(torch.float16, (1024, 4096), some))
        write("product", torch.float32, products(torch.float32, (1024, 4096), some))
        write("mover", torch.bfloat16, movers(torch.bfloat16))
        write("mover", torch.float32, movers(torch.float32))
    write("attention", torch.bfloat16, attentions(torch.bfloat16))


if __name__ == "__main__":
    main()
