"""Trainers written for CUDA, on a CPU: what EDM, EDM2 and SiT share. Nothing here is used where there is CUDA."""

import time
from typing import Any

import torch

from .distributed import leave_at_exit

CPU = torch.device("cpu")


def device(wanted: torch.device | int) -> torch.device | int:
    """`wanted`, or the CPU where there is no CUDA: upstreams name a CUDA device."""
    return wanted if torch.cuda.is_available() else CPU


def run_ddp_without_device_ids() -> None:
    """Upstream names the device of each replica; DDP takes no such names for CPU modules."""

    class CPUDistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
        """DDP that ignores `device_ids`."""

        def __init__(self, module, device_ids=None, **kwargs):
            super().__init__(module, **kwargs)

    torch.nn.parallel.DistributedDataParallel = CPUDistributedDataParallel


def start_gloo_for_nccl() -> None:
    """Upstreams start NCCL by name and pick a CUDA device; a CPU uses gloo and has no device to pick.

    gloo's threads drop the tensors of the last collective a little later, for which they need the interpreter's lock;
    a process group that is freed keeps it and waits for them, for ever. So the group's end waits first.
    """
    start, end = torch.distributed.init_process_group, torch.distributed.destroy_process_group

    def init_process_group(backend=None, *args, **kwargs):
        start("gloo" if backend == "nccl" else backend, *args, **kwargs)
        leave_at_exit()

    def destroy_process_group(group: Any = None) -> None:
        time.sleep(0.3)
        end(group)

    torch.distributed.init_process_group = init_process_group
    torch.distributed.destroy_process_group = destroy_process_group
    torch.cuda.set_device = lambda device: None
