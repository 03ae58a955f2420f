"""The ranks of a torch process group; without one, there is a single rank 0."""

import atexit
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


def rank() -> int:
    """This process's number."""
    return dist.get_rank() if _started() else 0


def world() -> int:
    """The number of processes."""
    return dist.get_world_size() if _started() else 1


def gather(item: Any) -> list[Any]:
    """Every rank's item, on every rank."""
    if world() == 1:
        return [item]
    items = [None] * world()
    dist.all_gather_object(items, item)
    return items


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Overwrites the tensors with rank 0's."""
    if world() > 1:
        for tensor in tensors:
            dist.broadcast(tensor.data, 0)


def average(tensors: Iterable[Tensor]) -> None:
    """Replaces each tensor by its mean over the ranks, with one collective call per dtype."""
    if world() == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        flat = torch.cat([tensor.flatten() for tensor in group])
        flat /= world()  # before the sum: half precision overflows early
        dist.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in group])
        torch._foreach_copy_(group, [p.view_as(t) for p, t in zip(parts, group, strict=True)])


def print_once(text: str) -> None:
    """Prints on rank 0 only."""
    if rank() == 0:
        print(text, flush=True)


def say_who_is_awaited(number: int, count: int, where: str) -> None:
    """Before several processes meet, which may take for ever: says who waits for whom."""
    if count > 1:
        print(f"rank {number}: waiting for {count} processes at {where}", file=sys.stderr, flush=True)


def say_who_the_environment_awaits() -> None:
    """The same, by the variables of torchrun and accelerate."""
    env = os.environ
    where = f"{env.get('MASTER_ADDR', 'localhost')}:{env.get('MASTER_PORT', '')}"
    say_who_is_awaited(int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1)), where)


def leave_at_exit() -> None:
    """Joins gloo's threads at exit: one that still runs aborts the process (signal 6)."""
    atexit.register(_leave_gloo)


def _leave_gloo() -> None:
    if _started() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def _started() -> bool:
    return dist.is_available() and dist.is_initialized()
