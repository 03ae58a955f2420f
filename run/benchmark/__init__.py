"""What observation costs: time and memory of a training step, as ratios to the baseline's.

cases      what is compared: projections, widths of D, exact or fused, lazy R1, the naive schedule
trainers   whole training steps of a real network: EDM's own, or diffusers' where that is absent
measure    seconds by phase, peak memory, operations and evaluations of one step
extras     sampling, imports, bookkeeping, checkpoints
report     JSON, a table, a picture
"""
