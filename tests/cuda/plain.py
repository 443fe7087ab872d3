"""The loop that a recipe's plans are compared with on one GPU: python -m tests.cuda.plain RECIPE [OVERRIDES…]

The unmodified model under torch.autocast, with gradients that accumulate over the micro-batches and torch's fused
AdamW. Prints a line per micro-batch size: seconds of an iteration (median), GiB of live tensors at the peak.
"""

import sys
from statistics import median

import torch

from auto3d.capture.autocast import PRECISIONS
from auto3d.data import Batches
from launch.model.build import build_function
from launch.recipe.data import data_settings
from launch.recipe.load import load

WARMUP, ITERATIONS = 3, 5


def main() -> None:
    recipe = load(sys.argv[1], sys.argv[2:])
    values, data = recipe.values, data_settings(recipe.values)
    precision = values.training.precision
    device = torch.device("cuda", 0)
    for size in values.search.micro_batch_size:
        torch.manual_seed(1)
        with device:
            model = build_function(recipe)()
        model.to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        batches = Batches(data, seed=1, global_batch=values.training.global_batch, micro_batch_size=size)
        count = values.training.global_batch // size
        torch.cuda.reset_peak_memory_stats()
        times = []
        for iteration in range(WARMUP + ITERATIONS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            total = torch.zeros((), device=device)
            for index in range(count):
                inputs = batches.micro_batch(iteration, index, tuple(data.inputs))
                inputs = {name: value.to(device, non_blocking=True) for name, value in inputs.items()}
                with torch.autocast("cuda", PRECISIONS[precision], enabled=precision != "float32"):
                    loss = model(**inputs, use_cache=False).loss / count
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), values.training.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            end.record()
            total.item()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        peak = torch.cuda.max_memory_allocated() / 2**30
        taken = f"{median(times[WARMUP:]):.4f} s, {peak:.2f} GiB, loss {total.item():.4f}"
        print(f"plain, micro-batch {size}: {taken}", flush=True)
        del model, optimizer


if __name__ == "__main__":
    main()
