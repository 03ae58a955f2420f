"""Runs upstream's training loop several times in one process, a few steps each.

    python edm_loop.py CLONE CASES.json

A case is a folder to write to and the arguments that differ from the usual. With `same_noise`,
every random choice depends on the image alone, so it does not matter which rank makes it.
"""

import atexit
import json
import os
import sys
import zlib
from pathlib import Path

import torch

from ogdm_core import KarrasVE
from ogdm_core.edm import compat
from ogdm_core.schedule import Schedule


class SameNoise:
    """EDM's loss, with noise that depends on the image alone."""

    def __call__(self, net, images, labels=None, augment_pipe=None):
        noise, level = [], []
        for image in images:
            g = torch.Generator().manual_seed(zlib.crc32(image.numpy().tobytes()))
            noise.append(torch.randn(image.shape, generator=g))
            level.append(torch.randn((1, 1, 1), generator=g))
        sigma = (torch.stack(level) * 1.2 - 1.2).exp()
        weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
        denoised = net(images + torch.stack(noise) * sigma, sigma, labels, augment_labels=None)
        return weight * (denoised - images) ** 2


class InTurn:
    """Ranks take neighbouring blocks of the data, so that together they see the whole in order."""

    def __init__(self, dataset, rank, num_replicas, batch, **unused):
        self.n, self.rank, self.world, self.batch = len(dataset), rank, num_replicas, batch

    def __iter__(self):
        share, start = self.batch // self.world, 0
        while True:
            first = start + self.rank * share
            yield from (i % self.n for i in range(first, first + share))
            start += self.batch


def halfway(schedule: Schedule, t, k, generator=None):
    """A lookahead that depends on t alone."""
    return schedule.unit_time(t).clamp(max=k) / 2


class Bare:
    """No DDP: the network itself."""

    def __new__(cls, net, device_ids=None):
        return net


def run(case: dict, training_loop, misc) -> None:
    """One case: `steps` steps of upstream's loop, each a tick of its own."""
    out, steps, batch = case["out"], case.get("steps", 4), case.get("batch", 16)
    first = torch.distributed.get_rank() == 0
    if first:
        Path(out).mkdir(parents=True)
    kinds = {"edm": "EDM", "vp": "VP", "ve": "VE"}
    kind = kinds[case.get("precond", "edm")]
    loss = {"class_name": f"training.loss.{kind}Loss"}
    restore = (misc.InfiniteSampler, KarrasVE.sample_lookahead)
    ddp = torch.nn.parallel.DistributedDataParallel
    if case.get("same_noise"):
        loss = {"class_name": "edm_loop.SameNoise"}
        misc.InfiniteSampler = lambda **kwargs: InTurn(batch=batch, **kwargs)
        KarrasVE.sample_lookahead = halfway
    if case.get("bare"):
        torch.nn.parallel.DistributedDataParallel = Bare
    network = {
        "class_name": f"training.networks.{kind}Precond", "model_channels": 8, "channel_mult": [1],
        "dropout": case.get("dropout", 0), "model_type": case.get("model_type", "SongUNet"),
    }  # fmt: skip
    augment = None
    if case.get("augment"):
        augment = {"class_name": "training.augment.AugmentPipe", "p": 0.5, "xflip": 1, "scale": 1}
        network["augment_dim"] = 2
    training_loop(
        run_dir=out if first else None,
        dataset_kwargs={
            "class_name": "training.dataset.ImageFolderDataset", "path": case["data"],
            "use_labels": case.get("cond", False),
        },
        network_kwargs=network, loss_kwargs=loss, augment_kwargs=augment,
        optimizer_kwargs={"class_name": case.get("optimizer", "torch.optim.Adam"), "lr": 1e-3},
        seed=6 // torch.distributed.get_world_size(),  # rank 0 starts from seed * ranks
        batch_size=batch, batch_gpu=case.get("batch_gpu"),
        loss_scaling=case.get("loss_scaling", 1),
        total_kimg=(steps * batch - 0.5) / 1000, kimg_per_tick=0,
        lr_rampup_kimg=0, snapshot_ticks=None, state_dump_ticks=10**9,
        device=compat.CPU, ogdm=case.get("ogdm"),
    )  # fmt: skip
    misc.InfiniteSampler, KarrasVE.sample_lookahead = restore
    torch.nn.parallel.DistributedDataParallel = ddp


def main(clone: str, cases: str) -> None:
    """All cases of a JSON file, in order."""
    sys.path.insert(0, clone)
    compat.install()
    from torch_utils import distributed, misc
    from training.training_loop import training_loop

    if not torch.cuda.is_available():  # runs last: gloo's group must be gone by then
        atexit.register(lambda: torch.distributed.is_initialized() and os._exit(3))
    distributed.init()
    for case in json.loads(Path(cases).read_text()):
        run(case, training_loop, misc)


if __name__ == "__main__":
    main(*sys.argv[1:])
