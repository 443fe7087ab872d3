"""The memory that a Plan needs on each device: one estimate for searches, refusals, reports and running trainings.

``tensors`` says when each tensor of a model is made, used and saved; ``segment`` adds them up over a run of operations,
``stage`` over a stage with its recomputation, ``plan`` over the moments of a schedule. ``device`` has the result.
"""
