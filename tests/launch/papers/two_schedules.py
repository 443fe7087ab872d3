"""The begin of an item with one small predicted part, to which tests add what they are about."""

TWO_SCHEDULES = """
paper: a test
place: figure 0
title: Two schedules
parts:
  - how: simulated
    title: Time by depth
    quantity: iteration_s
    base: tiny
    changes: {cluster: rtx3090-64, cluster.nodes: 1, search.dp: [1], search.tp: [1], search.micro_batch_size: [1],
              search.allow_idle_devices: true, search.recompute: [full], search.sync: [lazy]}
    axes: [{two: {search.pp: [2]}, four: {search.pp: [4]}}]
    systems:
      gpipe: {search.schedule: [gpipe]}
      merak: {search.schedule: [shifted-critical-path]}
"""
