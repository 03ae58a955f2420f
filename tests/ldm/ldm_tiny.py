"""A latent diffusion model small enough for a test: 16x16 digits, 4x8x8 latents.

Upstream's configs name classes by module, so this folder is on the path of the runs that use it.
"""

import os
import signal

import numpy as np
import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, Subset


class Digits(Dataset):
    """Real handwritten digits as upstream's datasets give images: [16, 16, 3] in [-1, 1]."""

    def __init__(self, count: int = 32, start: int = 0):
        digits = load_digits()
        images = digits.images[start : start + count].repeat(2, axis=1).repeat(2, axis=2)
        self.images = np.repeat(images[..., None] / 8.0 - 1.0, 3, axis=3).astype(np.float32)
        self.labels = digits.target[start : start + count]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> dict:
        return {
            "index": i,
            "image": self.images[i],
            "shape": self.images[i][::2, ::2],
            "class_label": int(self.labels[i]),
            "human_label": str(self.labels[i]),
        }


def config(ogdm: dict | None = None, **model_params) -> dict:
    """The tiny model, its data and a trainer, in the layout of upstream's configs."""
    target = "ldm.models.diffusion.ddpm.LatentDiffusion"
    if ogdm is not None:
        target = "ogdm_core.ldm.train.OGDMLatentDiffusion"
        model_params["ogdm"] = {"k": 0.2, "gamma": 0.1, "d_width": 0.05} | ogdm
    # fmt: off
    scheduler = {"warm_up_steps": [4], "cycle_lengths": [10000], "f_start": [0.1], "f_max": [1.0],
                 "f_min": [1.0]}
    autoencoder = {"double_z": True, "z_channels": 4, "resolution": 16, "in_channels": 3,
                   "out_ch": 3, "ch": 32, "ch_mult": [1, 1], "num_res_blocks": 1,
                   "attn_resolutions": [], "dropout": 0.0}
    params = {
        "linear_start": 0.0015, "linear_end": 0.0155, "num_timesteps_cond": 1, "log_every_t": 50,
        "timesteps": 100, "loss_type": "l1", "first_stage_key": "image", "cond_stage_key": "image",
        "image_size": 8, "channels": 4, "concat_mode": False, "scale_by_std": True,
        "monitor": "val/loss_simple_ema", "unet_config": unet(),
        "cond_stage_config": "__is_unconditional__",
        "scheduler_config": {"target": "ldm.lr_scheduler.LambdaLinearScheduler",
                             "params": scheduler},
        "first_stage_config": {
            "target": "ldm.models.autoencoder.AutoencoderKL",
            "params": {"embed_dim": 4, "ddconfig": autoencoder,
                       "lossconfig": {"target": "torch.nn.Identity"}}},
    }
    data = {
        "batch_size": 8, "num_workers": 0, "train": {"target": "ldm_tiny.Digits"},
        "validation": {"target": "ldm_tiny.Digits", "params": {"count": 8, "start": 100}},
    }
    images = {
        "batch_frequency": 4, "max_images": 2, "increase_log_steps": False,
        "log_images_kwargs": {"ddim_steps": 2, "inpaint": False, "plot_progressive_rows": False},
    }
    # fmt: on
    return {
        "model": {"base_learning_rate": 5e-3, "target": target, "params": params | model_params},
        "data": {"target": "main.DataModuleFromConfig", "params": data},
        "lightning": {
            "trainer": {"log_every_n_steps": 1, "enable_progress_bar": False},
            "callbacks": {"image_logger": {"target": "main.ImageLogger", "params": images}},
        },
    }


def unet(**params) -> dict:
    """A U-Net of 0.7 M parameters on 8x8 latents."""
    tiny = {
        "image_size": 8, "in_channels": 4, "out_channels": 4, "model_channels": 32,
        "attention_resolutions": [2], "num_res_blocks": 1, "channel_mult": [1, 2], "num_heads": 2,
    }  # fmt: skip
    target = "ldm.modules.diffusionmodules.openaimodel.UNetModel"
    return {"target": target, "params": tiny | params}


def on_meta(target: str, params: dict):
    """Any module of a config, without memory for its weights."""
    from ldm.util import get_obj_from_str

    with torch.device("meta"):
        return get_obj_from_str(target)(**params)


class Blocks(pl.LightningDataModule):
    """Batch k of one process is batch k of several put together, in the order of ranks."""

    def __init__(self, batch_size: int, count: int = 32):
        super().__init__()
        self.batch_size, self.datasets = batch_size, {"train": Digits(count)}

    def setup(self, stage: str | None = None) -> None:
        """Upstream calls it without a stage."""

    def train_dataloader(self) -> DataLoader:
        rank, world, n = self.trainer.global_rank, self.trainer.world_size, self.batch_size
        data = self.datasets["train"]
        mine = [i for i in range(len(data)) if (i // n) % world == rank]
        return DataLoader(Subset(data, mine), batch_size=n)


class Interrupt(pl.Callback):
    """A fault after optimiser step `at`, or (`middle`) in the middle of the next one, before its weights are changed.

    what   a signal's name, "error", "half" (an error between the weights' step and D's) or "nan" (in the EMA)
    """

    def __init__(self, at: int, what: str, middle: bool = False):
        self.at, self.what, self.middle = at, what, middle

    def on_train_batch_end(self, trainer, pl_module, *args):
        if not self.middle:
            self._act(trainer, pl_module)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if self.middle:
            self._act(trainer, pl_module)

    def _act(self, trainer, pl_module):
        if trainer.global_step != self.at:
            return
        if self.what == "error":
            raise RuntimeError("as the test asked for")
        if self.what == "half":
            pl_module.observer.step = None
        elif self.what == "nan":
            next(b for b in pl_module.model_ema.buffers() if b.dim() > 1).view(-1)[0] = torch.nan
        elif trainer.global_rank == 0:
            os.kill(os.getpid(), getattr(signal, self.what))
