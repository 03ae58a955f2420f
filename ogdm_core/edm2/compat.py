"""Lets NVlabs/edm2, written in 2024 for CUDA, run on today's torch and on a CPU.

As a program, this module runs an *untouched* script of a clone of NVlabs/edm2:

    python -m ogdm_core.edm2.compat path/to/edm2/generate_images.py --net=... --outdir=...
"""

import functools
import importlib
import inspect
import sys
import warnings
from pathlib import Path

import torch

from .. import dnnlib, trust
from ..cpu import CPU, device, run_ddp_without_device_ids, start_gloo_for_nccl

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
        run_ddp_without_device_ids()
        _average_statistics_on_the_cpu()
        # The status line resets a counter of GPU memory, which a CPU build of torch does not have.
        torch.cuda.reset_peak_memory_stats = lambda device=None: None
        # Upstream always pins memory; without a GPU torch ignores it, and warns at every start.
        warnings.filterwarnings("ignore", "'pin_memory' argument is set as true")


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


def main(argv: list[str]) -> None:
    """Runs `argv[0]`, a click script of an untouched clone, with the arguments that follow."""
    if not argv or not Path(argv[0]).is_file():
        sys.exit(
            "usage: python -m ogdm_core.edm2.compat edm2/train_edm2.py|generate_images.py [--trust] [its arguments]"
        )
    if "--trust" in argv:
        trust.GIVEN.set(True)
    script = Path(argv[0]).resolve()
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *(argument for argument in argv[1:] if argument != "--trust")]
    install()
    module = importlib.import_module(script.stem)
    loop = importlib.import_module("training.training_loop")
    for function in (loop.training_loop, getattr(module, "generate_images", None)):
        if inspect.isfunction(function):
            values = function.__defaults__ or ()
            function.__defaults__ = tuple(device(v) if isinstance(v, torch.device) else v for v in values)
    if script.stem == "generate_images":
        module.pickle = careful_pickle
    module.cmdline()


if __name__ == "__main__":
    main(sys.argv[1:])
