"""Runs guided-diffusion's evaluator as it is: `python adm_runner.py EVALUATOR REFERENCE SAMPLES`.

Executed by the Python of the evaluator's own environment, which has TensorFlow and no torch; so it
imports nothing of ours. Prints its last line as JSON: the versions that the numbers come from.
"""

import json
import os
import runpy
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its start-up talk hides upstream's lines


def main() -> None:
    """Upstream's `__main__`, with its own command line."""
    import numpy
    import scipy
    import tensorflow

    evaluator, reference, samples = sys.argv[1:]
    if not hasattr(numpy, "bool"):  # absent from 1.24 to 1.26, and upstream's word for a dtype
        numpy.bool = bool
    sys.argv = [evaluator, reference, samples]
    runpy.run_path(evaluator, run_name="__main__")
    packages = {module.__name__: module.__version__ for module in (numpy, scipy, tensorflow)}
    print(json.dumps({"versions": packages}), flush=True)


if __name__ == "__main__":
    main()
