"""FID, sFID, precision and recall of image files: what `run/evaluate.sh` runs.

sources.py    npz files, folders of images, saved statistics
nets.py       feature nets: Inception, or any by import path
extract.py    images -> features and their statistics, in a stream that can be stopped and resumed
torch_evaluator.py    the numbers, with `run.evaluate.metrics`
adm.py        the same numbers from guided-diffusion's own evaluator, in an environment of its own
"""
