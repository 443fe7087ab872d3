"""The memory that a Plan needs on each device: one estimate for searches, refusals, reports and running trainings.

``segment`` adds up the tensors of a run of operations, ``stage`` the tensors of a stage with its recomputation.
``stage_bytes`` has what differs from system to system, ``needs`` what a device needs at each moment of a schedule,
``plan`` what the devices of a Plan need. ``device`` has the result.
"""
