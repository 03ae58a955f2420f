"""Runs guided-diffusion's evaluator as it is: `python adm_runner.py EVALUATOR REFERENCE SAMPLES`.

Executed by the Python of the evaluator's own environment, which has TensorFlow and no torch; so it
imports nothing of ours. Upstream's output goes to stderr as it comes. The only line on stdout is
JSON: upstream's lines again, and the versions that its numbers come from.
"""

import contextlib
import io
import json
import os
import runpy
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its start-up messages hide upstream's lines


class Shown(io.StringIO):
    """Keeps what is written and shows it on stderr."""

    def write(self, text: str) -> int:
        sys.stderr.write(text)
        sys.stderr.flush()
        return super().write(text)


def main() -> None:
    """Upstream's `__main__`, with its own command line."""
    import numpy
    import scipy
    import tensorflow

    if not hasattr(numpy, "bool"):  # absent from 1.24 to 1.26, and upstream's word for a dtype
        numpy.bool = bool
    sys.argv = sys.argv[1:]
    with contextlib.redirect_stdout(Shown()) as shown:
        runpy.run_path(sys.argv[0], run_name="__main__")
    versions = {module.__name__: module.__version__ for module in (numpy, scipy, tensorflow)}
    print(json.dumps({"lines": shown.getvalue().splitlines(), "versions": versions}), flush=True)


if __name__ == "__main__":
    main()
