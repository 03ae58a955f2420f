"""Lets NVlabs/edm, written in 2022 for CUDA, run on today's torch and on a CPU.

`install()` puts the shims in place; each gives its one reason. With CUDA only the shims for current
Python and torch are installed. They touch code that would fail otherwise. As a program, this module runs
an *untouched* script of a clone of NVlabs/edm:

    python -m ogdm_core.edm.compat path/to/edm/generate.py --network=... --outdir=...
"""

import functools
import os
import sys
import types

import click
import torch

from .. import dnnlib
from ..config import parse_bool
from ..cpu import CPU, device
from ..distributed import leave_at_exit, say_who_the_environment_awaits

__all__ = ["CPU", "agree_on_seed", "careful_pickle", "device", "install"]  # the patch's

careful_pickle = dnnlib.Pickles("networks", "loss", "augment")  # in place of upstream's


@functools.cache
def install() -> None:
    """Puts every shim in place. Call it before upstream's first import; twice does no harm."""
    say_who_the_environment_awaits()
    _provide_distutils()
    dnnlib.let_samplers_name_their_data()
    careful_pickle.read_training_states()
    if not torch.cuda.is_available():
        _start_gloo()
        dnnlib.train_on_a_cpu()


def agree_on_seed(seed: int | None) -> int | None:
    """Rank 0's random seed for everybody, if none is given: upstream draws it on a CUDA device."""
    if seed is not None and not 0 <= seed < 2**32:
        raise click.ClickException(f"--seed: {seed} is not allowed; give one in [0, 2^32)")
    if seed is not None or torch.cuda.is_available():
        return seed
    drawn = torch.randint(1 << 31, size=[])
    torch.distributed.broadcast(drawn, src=0)
    return int(drawn)


def _provide_distutils() -> None:
    """dnnlib takes one function from distutils, which Python 3.12 no longer has."""
    if sys.version_info < (3, 12):
        return
    util = types.ModuleType("distutils.util")
    util.strtobool = lambda text: int(parse_bool(text))
    package = types.ModuleType("distutils")
    package.util = util
    sys.modules.setdefault("distutils", package)
    sys.modules.setdefault("distutils.util", util)


def _start_gloo() -> None:
    """Upstream starts NCCL and picks a CUDA device; a CPU uses gloo and has no device to pick."""
    from torch_utils import distributed, training_stats

    def init() -> None:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        here = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        for name, value in (alone | here).items():
            os.environ.setdefault(name, value)
        torch.distributed.init_process_group(backend="gloo", init_method="env://")
        leave_at_exit()
        several = distributed.get_world_size() > 1
        training_stats.init_multiprocessing(distributed.get_rank(), CPU if several else None)

    distributed.init = init


if __name__ == "__main__":
    dnnlib.run_untouched(sys.argv[1:], "ogdm_core.edm.compat", install, careful_pickle)
