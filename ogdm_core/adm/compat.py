"""What openai/guided-diffusion needs to run on today's stack and on CPUs.

Nothing here knows of the method. Each piece stands alone and names the failure that it prevents.
"""

import contextlib
import io
import os
import socket
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import distributed as dist

from .. import trust
from ..checkpoints import DamagedError, reading
from ..distributed import leave_at_exit, say_who_is_awaited
from ..sealed import blobfile

CHANNEL_MULT = {32: "1,2,2,2"}  # DDPM's for CIFAR-10
REPORT_SECONDS = 3  # for mpiexec to print a failed rank's traceback; an abort would drop it


class _NumpyWithInt(types.ModuleType):
    """numpy with `int`, which is gone since numpy 1.24; numpy itself stays as it is."""

    int = int

    def __getattr__(self, name: str):
        return getattr(numpy, name)


numpy_with_int = _NumpyWithInt("numpy")


def load_state_dict(path: str, **kwargs) -> Any:
    """torch.load, on every rank that asks.

    Upstream reads on rank 0 and broadcasts, but its trainer asks on rank 0 alone, which leaves
    the ranks waiting for different broadcasts (guided-diffusion issues 23 and 68).
    """
    with reading(path), blobfile().BlobFile(path, "rb") as file:
        return trust.load(io.BytesIO(file.read()), weights_only=True, **kwargs)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Around checks, or a function of checks: what the user can mend is reported in one line; see `abort_on_error`."""
    try:
        yield
    except (ValueError, OSError) as error:
        error.refusal = True  # type: ignore[union-attr]
        raise


def set_up_together(setup_dist: Callable[[], None]) -> Callable[[], None]:
    """Upstream's `setup_dist`; then an exception on one rank ends all, also on several hosts."""

    def set_up() -> None:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        abort_on_error(world)
        say_who_is_awaited(world.rank, world.size, "MPI's first host")
        if world.size > 1:
            hosts = world.allgather(MPI.Get_processor_name())
            if len(set(hosts)) > 1 and not dist.is_initialized():
                _init_gloo_over(hosts, world)
        setup_dist()
        abort_on_error(world)  # again: torch's own hook, now in front, drops the report
        if world.size > 1:
            leave_at_exit()

    return set_up


def _init_gloo_over(hosts: list[str], world) -> None:
    """A gloo group over several hosts without GPUs; upstream's always meets at localhost."""
    from guided_diffusion import dist_util

    # As upstream does, and before CUDA is first asked: afterwards it would have no effect.
    os.environ["CUDA_VISIBLE_DEVICES"] = str(world.rank % dist_util.GPUS_PER_NODE)
    if torch.cuda.is_available():
        return
    port = None
    if world.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
    meeting = f"tcp://{hosts[0]}:{world.bcast(port)}"
    dist.init_process_group("gloo", init_method=meeting, rank=world.rank, world_size=world.size)


def abort_on_error(world) -> None:
    """Makes an uncaught exception on one rank end all of them; a refusal is shown without its traceback.

    Without it the failed rank waits in MPI_Finalize for the others, and they for its gradients:
    the deadlock that mpi4py's manual describes under "Exceptions and deadlocks".
    """
    pid = os.getpid()

    def end_the_job(kind, value, trace) -> None:
        refusal = isinstance(value, DamagedError) or getattr(value, "refusal", False)
        report = f"error: {value}\n" if refusal else "".join(traceback.format_exception(kind, value, trace))
        if os.getpid() != pid or world.size == 1:  # a data loader's worker, or a rank that is alone
            sys.stderr.write(report)
            return
        sys.stdout.flush()
        sys.stderr.write(f"{report}rank {world.rank} failed; ending all {world.size} ranks\n")
        sys.stderr.flush()
        time.sleep(REPORT_SECONDS)
        world.Abort(1)

    sys.excepthook = end_the_job


def default_channel_mult(image_size: int) -> str:
    """The channel multiplier of a size that upstream has none for, else ''."""
    channel_mult = CHANNEL_MULT.get(image_size, "")
    if channel_mult:
        from guided_diffusion import logger

        logger.log(f"--channel_mult is not given: {channel_mult} for {image_size}x{image_size}")
    return channel_mult
