"""Runs upstream's training loop several times in one process, a few steps each.

    python edm2_loop.py CLONE CASES.json

A case is a folder to write to and the arguments that differ from the usual. With `same_noise`, every random choice
depends on the image alone, so it does not matter which rank makes it. An error ends up in the folder's error.txt.
"""

import json
import sys
import zlib
from pathlib import Path

import click
import torch

from ogdm_core import KarrasVE
from ogdm_core.edm2 import compat

BATCH = 64


class SameNoise:
    """EDM2's loss, with noise that depends on the image alone."""

    def __call__(self, net, images, labels=None):
        noise, level = [], []
        for image in images:
            g = torch.Generator().manual_seed(zlib.crc32(image.numpy().tobytes()))
            noise.append(torch.randn(image.shape, generator=g))
            level.append(torch.randn((1, 1, 1), generator=g))
        sigma = (torch.stack(level) - 0.4).exp()
        weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
        denoised, u = net(images + torch.stack(noise) * sigma, sigma, labels, return_logvar=True)
        return (weight / u.exp()) * (denoised - images) ** 2 + u


class InTurn:
    """Ranks take neighbouring blocks of the data, so that together they see the whole in order."""

    def __init__(self, dataset, rank, num_replicas, **unused):
        self.n, self.rank, self.world = len(dataset), rank, num_replicas

    def __iter__(self):
        share, start = BATCH // self.world, 0
        while True:
            first = start + self.rank * share
            yield from (i % self.n for i in range(first, first + share))
            start += BATCH


def run(case: dict, training_loop, misc) -> None:
    """One case of 16 steps, with a checkpoint every 8 or 16."""
    out, keep = Path(case["out"]), (misc.InfiniteSampler, KarrasVE.sample_lookahead)
    out.mkdir(parents=True, exist_ok=True)
    loss = {"class_name": "training.training_loop.EDM2Loss"}
    if case.get("same_noise"):
        loss = {"class_name": "edm2_loop.SameNoise"}
        misc.InfiniteSampler = InTurn
        KarrasVE.sample_lookahead = lambda self, t, k, generator=None: self.unit_time(t).clamp(max=k) / 2
    if case.get("bare"):
        torch.nn.parallel.DistributedDataParallel = lambda net, device_ids=None: net
    ours = {name: case[name] for name in ("ogdm", "transfer") if name in case}
    try:
        training_loop(
            run_dir=str(out),
            dataset_kwargs={"class_name": "training.dataset.ImageFolderDataset", "path": case["data"],
                            "use_labels": True},
            encoder_kwargs={"class_name": "training.encoders.StandardRGBEncoder"},
            data_loader_kwargs={"class_name": "torch.utils.data.DataLoader"},
            network_kwargs={"class_name": "training.networks_edm2.Precond", "model_channels": case.get("channels", 8),
                            "channel_mult": [1], "num_blocks": 1, "attn_resolutions": [], "channels_per_head": 8,
                            "dropout": case.get("dropout", 0)},
            loss_kwargs=loss,
            lr_kwargs={"func_name": "training.training_loop.learning_rate_schedule", "ref_lr": 1e-2, "rampup_Mimg": 0},
            batch_size=BATCH, batch_gpu=case.get("batch_gpu"), total_nimg=1024, status_nimg=256, snapshot_nimg=1024,
            checkpoint_nimg=1024, slice_nimg=None, seed=0, device=compat.CPU, **ours,
        )  # fmt: skip
    except (click.ClickException, SystemExit) as error:
        (out / "error.txt").write_text(str(getattr(error, "message", error)))
    misc.InfiniteSampler, KarrasVE.sample_lookahead = keep


def main(clone: str, cases: str) -> None:
    """All cases of a JSON file, in order."""
    sys.path.insert(0, clone)
    compat.install()
    from torch_utils import distributed, misc
    from training.training_loop import training_loop

    distributed.init()
    for case in json.loads(Path(cases).read_text()):
        run(case, training_loop, misc)


if __name__ == "__main__":
    main(*sys.argv[1:])
