"""A predictor to start from: `auto3d yardstick --program "python examples/yardstick_predictor.py"` scores it."""

import csv
import sys

rows = list(csv.DictReader(sys.stdin))
answers = csv.DictWriter(sys.stdout, ["id", "seconds", "peak_bytes"])
answers.writeheader()
for row in rows:
    tp, dp, pp = int(row["tp"]), int(row["dp"]), int(row["pp"])
    tokens = int(row["global_batch"]) * int(row["sequence"])
    flops = 6 * int(row["parameters"]) * tokens / (tp * dp * pp)
    micro_batches = int(row["global_batch"]) / (dp * int(row["micro_batch_size"]))
    seconds = flops / (0.45 * float(row["peak_flops"])) * (1 + (pp - 1) / micro_batches)
    answers.writerow({"id": row["id"], "seconds": seconds, "peak_bytes": 18 * int(row["parameters"]) / (tp * pp)})
