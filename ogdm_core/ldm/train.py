"""OGDM in CompVis/latent-diffusion: upstream's LatentDiffusion, observed. A config names it:

    model:
      target: ogdm_core.ldm.train.OGDMLatentDiffusion
      params:
        ogdm: {k: 0.1, gamma: 0.01}        # OGDMConfig

The denoiser's optimiser stays Lightning's, with its accumulation, clipping, precision and
scheduler; D's is the observer's, stepped by hand right after. D is no submodule: `state_dict` is
upstream's, key by key, and D is saved under the checkpoint's key "ogdm".

Upstream counts a network's time from 0, the paper from 1: t = index + 1.
"""

import functools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from .. import folder
from ..checkpoints import Guard, differences, format_differences, newest_whole, reading
from ..config import OGDMConfig
from ..distributed import print_once
from ..forward import Recorder, lr_scale
from ..observer import Observer
from ..schedule import DiscreteVP
from ..solvers import ConditionalEpsFn, EpsFn
from .export import run_configs

CHECKPOINT_KEY = "ogdm"
Upstream: Any = object  # LatentDiffusion, once it is mixed in


@functools.cache
def __getattr__(name: str) -> type:
    """`OGDMLatentDiffusion`, made when it is asked for: only then must upstream be on the path."""
    if name != "OGDMLatentDiffusion":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ldm.models.diffusion.ddpm import LatentDiffusion

    return type(name, (ObservedModel, LatentDiffusion), {"__module__": __name__})


def schedule_of(model) -> DiscreteVP:
    """The model's noise schedule. Latents are scaled to unit variance, hence sigma_data = 1."""
    return DiscreteVP(model.alphas_cumprod, sigma_data=1.0)


def to_eps(model, output: Tensor, x_t: Tensor, index: Tensor) -> Tensor:
    """eps [N, C, H, W] from what the network predicts, which is eps or x_0."""
    if model.parameterization == "eps":
        return output
    return model._predict_eps_from_xstart(x_t, index, output)


def make_eps_fn(model, cond: Any = None) -> ConditionalEpsFn:
    """The denoiser as eps(x [N, C, H, W], t [N]), with t = 1..T or between, under `cond`, which
    may be given per call."""

    def eps_fn(x: Tensor, t: Tensor, cond: Any = cond) -> Tensor:
        output = model.apply_model(x, t - 1, cond)
        return to_eps(model, output, x, (t - 1).long())

    return eps_fn


def classes_of(model) -> int:
    """Number of classes of a class-conditional model, 0 for any other."""
    embedding = getattr(model.cond_stage_model, "embedding", None)
    if model.cond_stage_key == "class_label" and isinstance(embedding, torch.nn.Embedding):
        return embedding.num_embeddings
    return 0


class ObservedModel(Upstream):
    """Mixed into upstream's LatentDiffusion: L = L_transition + gamma L_emission on latents
    [N, channels, image_size, image_size].

    ogdm   settings of the method, the fields of OGDMConfig
    The other parameters are upstream's.
    """

    def __init__(self, *args: Any, ogdm: dict[str, Any] | None = None, **kwargs: Any):
        config = OGDMConfig.from_mapping(ogdm or {}, "ldm")
        first_stage = kwargs.get("first_stage_config") or {}
        self._first_stage_trained = bool(first_stage.get("params", {}).get("ckpt_path"))
        self._unet_params = dict((kwargs.get("unet_config") or {}).get("params", {}))
        super().__init__(*args, **kwargs)
        self.ogdm = config
        self.observer: Any = None  # an Observer from `setup` on
        self.half_done = False  # whether the weights are a step ahead of D and of Lightning's counts

    def setup(self, stage: str) -> None:
        """Builds the observer, when the process group and the device are known."""
        if stage == "fit" and self.observer is None:
            if logdir := getattr(self._trainer, "logdir", ""):  # upstream's main.py sets it
                folder.claim(logdir)
                folder.outlive_output()
            folder.agree(self.ogdm.to_dict() | {"max_steps": getattr(self._trainer, "max_steps", 0)})
            self.observer = Observer(
                self.ogdm, schedule_of(self), self.channels, self.image_size, classes_of(self), self.device,
                steps=max(getattr(self._trainer, "max_steps", 0), 0),  # -1: no end
                denoiser=self._denoiser(),
            )  # fmt: skip
            self.guard = Guard(self.parameters, self._averages, self._good)
            print_once(f"OGDM: a new discriminator, {self.observer.config.to_dict()}")
            print_once(f"OGDM: {self.observer.about_d()}")

    def _denoiser(self) -> EpsFn | None:
        """The network for one image, by which its operations are counted; None under a condition but classes."""
        if self.cond_stage_model is None:
            return make_eps_fn(self)
        if not classes_of(self):
            return None
        one = {self.cond_stage_model.key: torch.zeros(1, dtype=torch.long, device=self.device)}
        with torch.no_grad():
            return make_eps_fn(self, self.get_learned_conditioning(one))

    def configure_callbacks(self) -> list:
        """Adds the callback that makes resume exact."""
        from .resume import ExactResume

        return [ExactResume()]

    def init_from_ckpt(self, path: str, ignore_keys=(), only_model: bool = False) -> None:
        """Upstream's, but a first stage of random weights is an error and not a line in the log."""
        self._missing: list[str] = []
        check_unet(path, self._unet_params)
        super().init_from_ckpt(path, ignore_keys=list(ignore_keys), only_model=only_model)
        lost = sum(name.startswith("first_stage_model.") for name in self._missing)
        if lost and not self._first_stage_trained:
            raise ValueError(
                f"{path} holds no first stage ({lost} weights missing); name a trained one in "
                "model.params.first_stage_config.params.ckpt_path"
            )

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """torch's; keeps the names of what was missing."""
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        self._missing = list(result.missing_keys)
        return result

    def shared_step(self, batch: dict, **kwargs: Any) -> tuple[Tensor, dict]:
        """Upstream's; hands the class labels, which its loss does not see, on to `p_losses`."""
        x, c = self.get_input(batch, self.first_stage_key)
        label = {"label": batch[self.cond_stage_model.key]} if classes_of(self) else {}
        return self(x, c, **label)

    def p_losses(self, x_start: Tensor, cond, t: Tensor, noise: Tensor | None = None, label: Tensor | None = None):
        """Upstream's loss and, in training, gamma L_emission of the same forward pass.

        x_start [N, C, H, W], t [N] counted from 0. The noise is drawn as upstream draws it.
        """
        noise = torch.randn_like(x_start) if noise is None else noise
        if not (self.training and torch.is_grad_enabled() and self.observer is not None):
            return super().p_losses(x_start, cond, t, noise)
        seen = Recorder(self.apply_model)
        with patch.object(self, "apply_model", seen):  # upstream's loss calls it once
            loss, loss_dict = super().p_losses(x_start, cond, t, noise)
        self.guard.count(loss)
        target = noise if self.parameterization == "eps" else x_start
        error = self.get_loss(seen.output.detach(), target, mean=False).flatten(1).mean(1)
        emission = self.observer.observe(
            x_0=x_start, eps=noise, x_t=seen.x, t=t + 1,
            eps_t=to_eps(self, seen.output, seen.x, t), eps_fn=make_eps_fn(self), cond=cond,
            label=label, rng=seen.rng, transition=self.l_simple_weight * error / self.logvar.to(error.device)[t].exp(),
        )  # fmt: skip
        return loss + emission.mean(), loss_dict

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None) -> None:
        """The denoiser's step, then D's, at a rate that follows the same schedule."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.half_done = True  # until `resume.ExactResume` finds the batch done
        self.observer.step(lr_scale(optimizer))
        step = self.global_step  # counted from 0; Lightning raises it after this hook
        if (step + 1) % self.trainer.log_every_n_steps == 0:
            self.guard.look(f"step {step}")
            self.guard.check(f"step {step}")
            numbers = observed(self.observer) if self.global_rank == 0 else {}
            for logger in self.loggers if numbers else []:
                logger.log_metrics(numbers, step=step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """D beside what Lightning saves; not in checkpoints of weights alone."""
        if self.observer is not None:
            self.guard.check(f"step {self.global_step}")
        if self.observer is not None and "optimizer_states" in checkpoint:
            checkpoint[CHECKPOINT_KEY] = self.observer.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continues with the checkpoint's D; one without starts a fine-tune."""
        if self.observer is not None and CHECKPOINT_KEY in checkpoint:
            changed = self.observer.load_state_dict(checkpoint[CHECKPOINT_KEY])
            print_once(f"OGDM: the discriminator continues at step {self.observer.steps}")
            if changed:
                print_once(f"OGDM: it continues with other settings: {changed}")
        elif self.observer is not None:
            print_once("OGDM: no discriminator in the checkpoint: fine-tuning with a new one")
        if self.observer is not None and self.observer.total_steps:  # D may have begun after Lightning's step 0
            self.observer.total_steps -= checkpoint.get("global_step", 0) - self.observer.steps

    def _averages(self) -> list[Tensor]:
        """The EMA's weights, which are buffers; beside them are counts."""
        return [b for b in self.model_ema.buffers() if b.is_floating_point()] if self.use_ema else []

    def _good(self) -> str:
        callback = getattr(self.trainer, "checkpoint_callback", None)
        return newest_whole(Path(getattr(callback, "dirpath", None) or ".").rglob("*.ckpt"))


def check_unet(path: str, ours: dict[str, Any]) -> None:
    """ValueError where the config around a checkpoint has another U-Net, of which other heads would go unnoticed."""
    from omegaconf import OmegaConf

    config = Path(path).with_name("config.yaml")
    files = [config] if config.is_file() else [Path(file) for file in run_configs(path)]
    if not files:
        return
    with reading(files[-1]):
        merged: Any = OmegaConf.to_container(OmegaConf.merge(*map(OmegaConf.load, files)))
        theirs = merged["model"]["params"]["unet_config"]["params"]
    differ = differences(theirs, OmegaConf.to_container(OmegaConf.create(ours)))
    for name in ("image_size", "dropout", "use_checkpoint", "use_fp16"):
        differ.pop(name, None)
    if differ:
        raise ValueError(
            f"model.params.ckpt_path: {path} was trained with another U-Net ({format_differences(differ)}); set "
            f"model.params.unet_config.params as {files[-1]} has it"
        )


def observed(observer: Observer) -> dict[str, float]:
    """The observer's numbers for the log: means, and L_emission and L_D by quartile of t."""
    numbers, values = observer.stats(), observer.per_sample
    quartile = (4 * (values["t"] - 1)) // observer.schedule.T if values else torch.empty(0)  # in the plain end of a run
    for q in quartile.unique().tolist():
        for name in ("emission", "d_loss"):
            numbers[f"{name}_q{q}"] = values[name][quartile == q].mean().item()
    return {f"ogdm/{name}": value for name, value in numbers.items()}
