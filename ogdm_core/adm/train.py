"""OGDM in the trainer of openai/guided-diffusion: what the patched image_train.py calls.

Upstream counts a network's time from 0, the paper from 1: t = index + 1.
"""

import argparse
import copy
import functools
import itertools
import os
from typing import Any

import torch
from guided_diffusion import dist_util, image_datasets, logger, train_util
from guided_diffusion.script_util import str2bool
from torch import Tensor
from torch import distributed as dist

from .. import contact, folder
from ..checkpoints import Guard
from ..cli import number
from ..distributed import average
from ..flags import add_arguments, from_args
from ..forward import Recorder, lr_scale
from ..observer import Observer
from ..schedule import DiscreteVP
from ..solvers import ConditionalEpsFn
from . import beside, data, resume
from .compat import refusals

Upstream: Any = object  # TrainLoop, once it is mixed in


def claim(flags: argparse.Namespace) -> None:
    """Keeps other trainers out of the folder, before upstream's logger empties the files there.

    Does nothing without --ogdm, or without OPENAI_LOGDIR: upstream then makes a new folder.
    """
    where = os.getenv("OPENAI_LOGDIR")
    if flags.ogdm and where is not None:
        folder.claim(os.path.expanduser(where))


def schedule_of(diffusion) -> DiscreteVP:
    """The noise schedule of upstream's diffusion, respaced or not."""
    return DiscreteVP(diffusion.alphas_cumprod)


def to_eps(diffusion, output: Tensor, x_t: Tensor, index: Tensor) -> Tensor:
    """eps [N, C, H, W] from the network's raw output [N, C or 2C, H, W], whatever it predicts."""
    mean = output[:, : x_t.shape[1]]  # a `learn_sigma` model's other half is the variance's
    kind = diffusion.model_mean_type.name
    if kind == "EPSILON":
        return mean
    if kind == "PREVIOUS_X":
        mean = diffusion._predict_xstart_from_xprev(x_t=x_t, t=index, xprev=mean)
    return diffusion._predict_eps_from_xstart(x_t, index, mean)


def make_eps_fn(diffusion, model, model_kwargs: dict[str, Tensor], clip: bool = False) -> ConditionalEpsFn:
    """The denoiser as eps(x [N, ...], t [N]), with t = 1..T, or between whole t.

    The condition, upstream's `model_kwargs`, may be given per call. With `clip`, eps is the one
    that leads to the predicted x_0 clamped to [-1, 1].
    """
    # Past DDP's wrapper: the second pass of Heun's projection must not announce another backward.
    model = getattr(model, "module", model)

    def eps_fn(x: Tensor, t: Tensor, cond: dict[str, Tensor] = model_kwargs) -> Tensor:
        index = (t - 1).long()
        if t.is_floating_point():  # upstream's wrapper looks times up in a table of whole ones
            time = (t - 1) * (1000 / diffusion.num_timesteps if diffusion.rescale_timesteps else 1)
            output = model(x, time, **cond)
        else:
            output = diffusion._wrap_model(model)(x, index, **cond)
        eps = to_eps(diffusion, output, x, index)
        if clip:
            x_0 = diffusion._predict_xstart_from_eps(x_t=x, t=index, eps=eps).clamp(-1, 1)
            eps = diffusion._predict_eps_from_xstart(x, index, x_0)
        return eps

    return eps_fn


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --ogdm, --ogdm_k, ..., --init_checkpoint and --sync_gradients to upstream's parser."""
    for action in parser._actions:  # upstream takes any whole number, and divides by it
        if action.dest in ("batch_size", "log_interval", "save_interval"):
            action.type = number(int, 1)
    add_arguments(parser)
    start = "start from these weights (a model or an EMA .pt) with the step counter at zero"
    sync = "average gradients over CPU ranks without --ogdm too (with it they always are)"
    parser.add_argument("--init_checkpoint", default="", metavar="PATH", help=start)
    parser.add_argument("--grid_interval", default=0, type=number(int, 0), metavar="STEPS",
                        help="steps between grids of samples, in OPENAI_LOGDIR/grids (default: 0, none)")  # fmt: skip
    parser.add_argument("--grid_nfe", default=10, type=number(int, 1), metavar="INT",
                        help="network evaluations of those samples (default: 10)")  # fmt: skip
    parser.add_argument("--sync_gradients", default=False, type=str2bool, metavar="BOOL", help=sync)
    beside.adopt(parser, "resume_checkpoint", "init_checkpoint", where=_ours)


def _ours(flags: argparse.Namespace) -> bool:
    """Whether a training asks for more than upstream's."""
    return bool(flags.ogdm or flags.init_checkpoint)


class ObservedDiffusion:
    """Upstream's diffusion, whose training loss has gamma L_emission [N] added to it."""

    def __init__(self, diffusion, observer: Observer, guard: Guard):
        self._diffusion, self._observer, self._guard = diffusion, observer, guard

    def __getattr__(self, name: str):
        return getattr(self._diffusion, name)

    def training_losses(self, model, x_start, t, model_kwargs=None, noise=None) -> dict:
        """Upstream's losses for the same noise; the emission term is part of "loss".

        The noise is drawn here, where upstream would draw it, because the observer needs it too.
        """
        d, kwargs, seen = self._diffusion, model_kwargs or {}, Recorder(model)
        noise = torch.randn_like(x_start) if noise is None else noise
        losses = d.training_losses(seen, x_start, t, model_kwargs=model_kwargs, noise=noise)
        self._guard.count(losses["loss"])
        emission = self._observer.observe(
            x_0=x_start, eps=noise, x_t=seen.x, t=t + 1,
            eps_t=to_eps(d, seen.output, seen.x, t), eps_fn=make_eps_fn(d, model, kwargs), cond=kwargs,
            label=kwargs.get("y"), rng=seen.rng, transition=losses.get("mse", losses["loss"]),
        )  # fmt: skip
        return losses | {"loss": losses["loss"] + emission}


class ObservedLoop(Upstream):
    """Mixed into upstream's TrainLoop, to which it leaves everything without --ogdm, --init_checkpoint,
    --grid_interval and --sync_gradients, but for a file of its flags. `flags` is image_train.py's parsed command line.
    """

    diffusion: Any
    data: Any
    step: int
    observer: Observer | None = None

    def __init__(self, *, flags: argparse.Namespace, **kwargs: Any):
        with refusals():
            config, self.init_checkpoint = from_args(flags, "adm"), flags.init_checkpoint
        self.flags = flags
        self.resumed = train_util.find_resume_checkpoint() or flags.resume_checkpoint
        if config:
            folder.agree(vars(flags))
            self.fingerprint = folder.fingerprint(flags.data_dir) if flags.data_dir and dist.get_rank() == 0 else ""
        weights, given_as = self.resumed or self.init_checkpoint, f"--{'resume' if self.resumed else 'init'}_checkpoint"
        if _ours(flags) and (theirs := beside.check(weights, flags, given_as)):
            logger.log(f"model flags that are not given are those of {theirs}")
        if config and self.resumed:
            rates = [float(rate) for rate in str(flags.ema_rate).split(",")]
            state = resume.check(self.resumed, rates)
        if config and flags.data_dir:
            data.check(flags, kwargs["model"].num_classes or 0, image_datasets)
        super().__init__(**kwargs)
        if dist.get_rank() == 0:
            beside.write(train_util.get_blob_logdir(), flags)
        wanted = config is not None or flags.sync_gradients
        self.averages = wanted and not self.use_ddp and dist.get_world_size() > 1
        if self.averages:
            logger.log("gradients are averaged with gloo: the warning above does not hold")
        if config is None:
            return
        self.observer = Observer(
            config, schedule_of(self.diffusion), self.model.in_channels, self.model.image_size,
            labels=self.model.num_classes or 0, device=dist_util.dev(),
            steps=self.lr_anneal_steps,  # at which upstream ends; 0: never
            denoiser=make_eps_fn(self.diffusion, self.model, self._one_condition()),
        )  # fmt: skip
        self.replayed = resume.ReplayableData(self.data)
        if self.resumed:
            resume.load(self, state, logger)
        logger.log(f"observation guidance: {self.observer.config}")
        logger.log(self.observer.about_d())
        self.guard = self._guard()
        self.diffusion = ObservedDiffusion(self.diffusion, self.observer, self.guard)
        folder.outlive_output()
        self.place = self.replayed.place()
        self.stop = folder.Stop().listen()
        self.data = folder.Ahead(self.replayed, self.stop, device=dist_util.dev())

    def _one_condition(self) -> dict[str, Tensor]:
        """The condition of one image, by which the denoiser's operations are counted."""
        one = torch.zeros(1, dtype=torch.long, device=dist_util.dev())
        return {} if self.model.num_classes is None else {"y": one}

    @refusals()
    def _load_and_sync_parameters(self) -> None:
        path = self.init_checkpoint
        if path and self.resumed:
            logger.log(f"--init_checkpoint is not read: {self.resumed} is continued")
        elif path:
            logger.log(f"starting at step 0 from the weights of {path}...")
            try:
                weights = dist_util.load_state_dict(path, map_location=dist_util.dev())
                self.model.load_state_dict(weights)
            except FileNotFoundError as error:
                raise FileNotFoundError(f"--init_checkpoint: there is no file {path}") from error
            except RuntimeError as error:
                raise ValueError(
                    f"--init_checkpoint: {path} does not fit the model; give the model flags "
                    f"(--num_channels, --learn_sigma, ...) it was trained with.\n{error}"
                ) from error
        super()._load_and_sync_parameters()

    def forward_backward(self, batch: Tensor, cond: dict[str, Tensor]) -> None:
        super().forward_backward(batch, cond)
        if self.averages:
            average(p.grad for p in self.mp_trainer.model_params if p.grad is not None)

    def run_step(self, batch: Tensor, cond: dict[str, Tensor]) -> None:
        """Upstream's step, then D's, at the rate that upstream's step was taken with."""
        scale = lr_scale(self.opt)
        super().run_step(batch, cond)
        self._draw_grid()
        if self.observer is None:
            return
        self.observer.step(scale)
        # Means and quartiles of t for the observer's numbers, as upstream does for its losses.
        if values := dict(self.observer.per_sample):  # empty in the plain end of a run
            train_util.log_loss_dict(self.diffusion, values.pop("t") - 1, values)
        logger.logkv("d_skipped", float(self.observer.skipped))
        if self.step % self.log_interval == 0:
            self.guard.look(self._now())
            self.guard.check(self._now())
        self.place = self.replayed.place()  # before the next step's batch
        if not 0 < self.lr_anneal_steps <= self.step + self.resume_step + 1:
            self.data.look()
        if self.stop.together(dist_util.dev()):
            if self.step % self.log_interval == 0:
                logger.dumpkvs()
            self.save()
            self.stop.leave(f"at {self._now()}; --resume_checkpoint continues from there", logger.log)

    def _draw_grid(self) -> None:
        """Every --grid_interval steps rank 0 draws samples of the first average's, in a copy of the network."""
        step, every = self.step + self.resume_step, self.flags.grid_interval
        if not every or step % every or dist.get_rank():
            return
        model, device = copy.deepcopy(self.model).eval(), dist_util.dev()
        model.load_state_dict(self.mp_trainer.master_params_to_state_dict(self.ema_params[0]))
        cond = {"y": contact.labels(model.num_classes).to(device)} if model.num_classes else {}
        eps_fn = make_eps_fn(self.diffusion, model, cond, clip=True)
        shape = (model.in_channels, model.image_size, model.image_size)
        contact.write(logger.get_dir(), step, eps_fn, schedule_of(self.diffusion), shape, self.flags.grid_nfe, device)

    def save(self) -> None:
        if self.observer is None:
            return super().save()
        self.guard.check(self._now())
        resume.save(self, super().save, train_util.get_blob_logdir(), logger)
        logger.log("saved the observer")

    def _guard(self) -> Guard:
        good = functools.partial(resume.newest, train_util.get_blob_logdir(), self.ema_rate)
        return Guard(lambda: self.mp_trainer.master_params, lambda: itertools.chain(*self.ema_params), good)

    def _now(self) -> str:
        return f"step {self.step + self.resume_step}"
