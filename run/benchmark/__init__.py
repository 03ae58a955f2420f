"""What observation costs: time, memory and operations of a training step, as ratios to a plain one.

cases      what is compared: projections, sizes of D, exact or fused, lazy R1, the naive schedule
step       whole training steps of any network, and EDM's or a diffusers U-Net to take them with
measure    operations, evaluations, memory and interleaved timings of steps
report     a table and a picture
"""
