"""Runs guided-diffusion's evaluator as it is: `python adm_runner.py EVALUATOR REFERENCE SAMPLES`.

Executed by the Python of the evaluator's own environment, which has TensorFlow and no torch; so it
imports nothing of ours. Behind upstream's lines it prints `NAME version: X` of its packages.
"""

import os
import runpy
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's start-up messages hide upstream's lines

import numpy  # noqa: E402
import scipy  # noqa: E402
import tensorflow  # noqa: E402

if not hasattr(numpy, "bool"):  # absent from 1.24 to 1.26, and upstream's word for a dtype
    numpy.bool = bool
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
for module in (numpy, scipy, tensorflow):
    print(f"{module.__name__} version: {module.__version__}")
