"""What openai/guided-diffusion needs to run on today's stack, on CPUs, and to resume exactly.

Nothing here knows of the method. Each piece stands alone and says what it makes good:

    numpy_with_int        numpy as the code knew it: `np.int` is gone since numpy 1.24
    load_state_dict       resuming on several ranks, which upstream deadlocks on
    set_up_together       a rank that dies ends the job; CPU ranks on several hosts find each other
    default_channel_mult  32x32 images without knowing the channel multiplier
    average_gradients     data-parallel training without CUDA, for which upstream has no DDP
    ReplayableData, capture_random, restore_random     the data order and the random state
"""

from __future__ import annotations

import io
import os
import random
import socket
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor
from torch import distributed as dist

CHANNEL_MULT = {32: "1,2,2,2"}  # DDPM's for CIFAR-10
REPORT_SECONDS = 3  # for mpiexec to pass on a failed rank's last words; an abort drops them


class _NumpyWithInt(types.ModuleType):
    """numpy, with `int` where old code looks for it; numpy itself stays as it is."""

    int = int

    def __getattr__(self, name: str):
        return getattr(numpy, name)


numpy_with_int = _NumpyWithInt("numpy")


def load_state_dict(path: str, **kwargs) -> Any:
    """torch.load, on every rank that asks.

    Upstream reads on rank 0 and broadcasts, but its trainer asks on rank 0 alone, which leaves
    the ranks waiting for different broadcasts (guided-diffusion issues 23 and 68).
    """
    import blobfile

    with blobfile.BlobFile(path, "rb") as file:
        return torch.load(io.BytesIO(file.read()), weights_only=True, **kwargs)


def set_up_together(setup_dist: Callable[[], None]) -> Callable[[], None]:
    """Upstream's `setup_dist`, for ranks that live and die together, also on several hosts."""

    def set_up() -> None:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        if world.size > 1:
            abort_on_error(world)
            hosts = world.allgather(MPI.Get_processor_name())
            if len(set(hosts)) > 1 and not dist.is_initialized():
                _init_gloo_over(hosts, world)
        setup_dist()
        if world.size > 1:
            abort_on_error(world)  # again: torch's own hook, now in front, would swallow the report

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
    """Makes an uncaught exception on one rank end all of them.

    Without it the failed rank waits in MPI_Finalize for the others, and they for its gradients:
    the deadlock that mpi4py's manual describes under "Exceptions and deadlocks".
    """
    pid = os.getpid()

    def end_the_job(kind, value, trace) -> None:
        report = "".join(traceback.format_exception(kind, value, trace))
        if os.getpid() != pid:  # a data loader's worker reports to its parent
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


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replaces each gradient by its mean over the ranks, with one collective call a dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            by_dtype.setdefault(p.grad.dtype, []).append(p.grad)
    for gradients in by_dtype.values():
        flat = torch.cat([g.flatten() for g in gradients])
        flat /= dist.get_world_size()  # before the sum: half precision overflows early
        dist.all_reduce(flat)
        for g, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(mean.view_as(g))


class ReplayableData:
    """An endless stream of batches that can say where it is, and go there again.

    A torch DataLoader fixes a whole pass over the data (order, and its workers' seeds) by draws
    from torch's global generator when the pass starts, and draws nothing afterwards. So the
    generator's state at the start of the pass and the number of batches used since are enough.
    """

    def __init__(self, batches: Iterator):
        self._batches = batches
        self._start: Tensor | None = None
        self._used = 0

    def __iter__(self) -> ReplayableData:
        return self

    def __next__(self):
        before = torch.get_rng_state()
        batch = next(self._batches)
        if not torch.equal(before, torch.get_rng_state()):
            self._start, self._used = before, 0
        self._used += 1
        return batch

    def position(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {"start": self._start, "used": self._used}

    def go_to(self, position: dict[str, Any]) -> None:
        """Starts the saved pass again and skips what was used of it. Moves torch's generator."""
        if position["start"] is not None:
            torch.set_rng_state(position["start"])
        for _ in range(position["used"]):
            next(self)


def capture_random() -> dict[str, Any]:
    """The state of every global generator that upstream draws from, as plain values."""
    name, keys, *rest = numpy.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": [name, torch.from_numpy(keys.astype(numpy.int64)), *rest],
        "python": random.getstate(),
    }


def restore_random(state: dict[str, Any]) -> None:
    """Undoes whatever was drawn since `capture_random`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), *rest))
    random.setstate(state["python"])
