"""Lets NVlabs/edm2, written in 2024 for CUDA, run on today's torch and on a CPU.

As a program, this module runs an *untouched* script of a clone of NVlabs/edm2:

    python -m ogdm_core.edm2.compat path/to/edm2/generate_images.py --net=... --outdir=...
"""

import functools
import inspect
import sys

import torch

from .. import dnnlib
from ..cpu import CPU, device, start_gloo_for_nccl

__all__ = ["careful_pickle", "device", "install", "keep_source"]  # the patch's

MARK = "# ogdm"  # at the end of each line that the patch adds to training_loop.py
careful_pickle = dnnlib.Pickles("networks_edm2", "encoders", "training_loop")  # in place of upstream's


@functools.cache
def install() -> None:
    """Puts every shim in place. Call it before upstream's first import; twice does no harm."""
    dnnlib.let_samplers_name_their_data()
    careful_pickle.read_training_states()
    if not torch.cuda.is_available():
        start_gloo_for_nccl()
        dnnlib.train_on_a_cpu()
        _average_statistics_on_the_cpu()


def keep_source(module: str) -> None:
    """Makes upstream's persistence store its own source code of a patched module, without our lines.

    A snapshot holds its loss function with the source of the module around it, which an untouched clone runs.
    """
    from torch_utils import persistence

    here = sys.modules[module]
    lines = inspect.getsource(here).splitlines(keepends=True)
    source = "".join(line for line in lines if not line.rstrip().endswith(MARK))
    persistence._module_to_src_dict[here], persistence._src_to_module_dict[source] = source, here


def _average_statistics_on_the_cpu() -> None:
    """Upstream averages its statistics over ranks on the CUDA device."""
    from torch_utils import training_stats

    start = training_stats.init_multiprocessing
    training_stats.init_multiprocessing = lambda rank, sync_device: start(rank, sync_device and CPU)


if __name__ == "__main__":
    dnnlib.run_untouched(sys.argv[1:], "ogdm_core.edm2.compat", install, careful_pickle)
