"""OGDM in openai/guided-diffusion: what `patches/guided-diffusion` calls.

    ObservedLoop   mixed into upstream's TrainLoop: the observer's four touches, and exact resume
    Sampling       --sampler, --nfe and their kind for upstream's image_sample.py
    train_argv,    the paper's rows as full command lines;
    sample_argv    `python -m ogdm_core.splice.adm PRESET ...` runs them

Upstream counts a network's time from 0, the paper from 1: t = index + 1.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ogdm_core.compat import adm as compat
from ogdm_core.flags import add_arguments, from_args
from ogdm_core.observer import Observer
from ogdm_core.samplers import SAMPLERS, sample, steps_for_nfe
from ogdm_core.schedule import DISCRETISATIONS, DiscreteVP
from ogdm_core.solvers import EpsFn

# ---- the denoiser, as the method sees it ------------------------------------------------------


def to_eps(diffusion, output: Tensor, x_t: Tensor, index: Tensor) -> Tensor:
    """The network's eps [N, C, H, W], whatever it predicts, from its raw output [N, C or 2C, H, W].

    The second half of a `learn_sigma` model's channels is the variance's.
    """
    mean = output[:, : x_t.shape[1]]
    kind = diffusion.model_mean_type.name
    if kind == "EPSILON":
        return mean
    if kind == "PREVIOUS_X":
        mean = diffusion._predict_xstart_from_xprev(x_t=x_t, t=index, xprev=mean)
    return diffusion._predict_eps_from_xstart(x_t, index, mean)


def make_eps_fn(diffusion, model, model_kwargs: dict[str, Tensor], clip: bool = False) -> EpsFn:
    """The denoiser as eps(x [N, ...], t [N]), with t = 1..T.

    With `clip`, eps is the one that leads to the predicted x_0 clamped to [-1, 1].
    """
    # Past DDP's wrapper: the second pass of Heun's projection must not announce another backward.
    model = diffusion._wrap_model(getattr(model, "module", model))

    def eps_fn(x: Tensor, t: Tensor) -> Tensor:
        index = t - 1
        output = model(x, diffusion._scale_timesteps(index), **model_kwargs)
        eps = to_eps(diffusion, output, x, index)
        if clip:
            x_0 = diffusion._predict_xstart_from_eps(x_t=x, t=index, eps=eps).clamp(-1, 1)
            eps = diffusion._predict_eps_from_xstart(x, index, x_0)
        return eps

    return eps_fn


# ---- training ---------------------------------------------------------------------------------


class Recorder:
    """A model that remembers its last call: the trainer's own forward pass, not a second one."""

    def __init__(self, model):
        self.model = model
        self.x_t: Tensor | None = None
        self.output: Tensor | None = None

    def __call__(self, x_t: Tensor, *args, **kwargs) -> Tensor:
        self.x_t, self.output = x_t, self.model(x_t, *args, **kwargs)
        return self.output


class ObservedDiffusion:
    """Upstream's diffusion, whose training loss has gamma L_emission [N] added to it."""

    def __init__(self, diffusion, observer: Observer):
        self._diffusion, self._observer = diffusion, observer

    def __getattr__(self, name: str):
        return getattr(self._diffusion, name)

    def training_losses(
        self, model, x_start, t, model_kwargs=None, noise=None
    ) -> dict[str, Tensor]:
        """Upstream's losses for the same noise; the emission term is part of "loss".

        The noise is drawn here, where upstream would draw it, because the observer needs it too.
        """
        kwargs = model_kwargs or {}
        noise = torch.randn_like(x_start) if noise is None else noise
        call = Recorder(model)
        losses = self._diffusion.training_losses(
            call, x_start, t, model_kwargs=model_kwargs, noise=noise
        )
        emission = self._observer.observe(
            x_0=x_start,
            eps=noise,
            x_t=call.x_t,
            t=t + 1,
            eps_t=to_eps(self._diffusion, call.output, call.x_t, t),
            eps_fn=make_eps_fn(self._diffusion, model, kwargs),
            label=kwargs.get("y"),
        )
        return losses | {"loss": losses["loss"] + emission}


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that the patched image_train.py has more than upstream's."""
    from guided_diffusion.script_util import str2bool

    add_arguments(parser)
    parser.add_argument(
        "--init_checkpoint", default="", metavar="PATH",
        help="start from these weights (a model or an EMA .pt) with the step counter at zero",
    )  # fmt: skip
    parser.add_argument(
        "--sync_gradients", default=False, type=str2bool, metavar="BOOL",
        help="average gradients over CPU ranks without --ogdm too (with it they always are)",
    )  # fmt: skip


class ObservedLoop:
    """Mixed into upstream's TrainLoop: `class TrainLoop(ObservedLoop, TrainLoop)`.

    `flags` is image_train.py's parsed command line. Without --ogdm, --init_checkpoint and
    --sync_gradients everything is left to upstream.
    """

    def __init__(self, *, flags: argparse.Namespace, **kwargs):
        from guided_diffusion import dist_util, logger

        config = from_args(flags)
        self.init_checkpoint = flags.init_checkpoint
        self.observer: Observer | None = None
        super().__init__(**kwargs)

        self.averages = not self.use_ddp and dist.get_world_size() > 1
        self.averages &= config is not None or flags.sync_gradients
        if self.averages:
            logger.log(
                f"gradients are averaged over {dist.get_world_size()} ranks with gloo; the "
                "warning above does not hold"
            )
        if config is None:
            return
        self.observer = Observer(
            config,
            DiscreteVP(self.diffusion.alphas_cumprod),
            channels=self.model.in_channels,
            size=self.model.image_size,
            labels=self.model.num_classes or 0,
            device=dist_util.dev(),
        )
        self.diffusion = ObservedDiffusion(self.diffusion, self.observer)
        self.data = compat.ReplayableData(self.data)
        self.updates = 0
        logger.log(f"observation guidance: {config}")
        if self.resume_step:
            self._load_observed()

    def _load_and_sync_parameters(self):
        from guided_diffusion import dist_util, logger, train_util

        path = self.init_checkpoint
        resumed = train_util.find_resume_checkpoint() or self.resume_checkpoint
        if path and resumed:
            logger.log(f"--init_checkpoint is not read: {resumed} is continued")
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

    def forward_backward(self, batch, cond):
        super().forward_backward(batch, cond)
        if self.averages:
            compat.average_gradients(self.mp_trainer.model_params)

    def run_step(self, batch, cond):
        lr_scale = self.opt.param_groups[0]["lr"] / self.lr if self.lr else 1.0
        super().run_step(batch, cond)
        if self.observer is not None:
            self.observer.step(lr_scale)
            self._log_observed()
            self.updates = self.step + self.resume_step + 1

    def _log_observed(self) -> None:
        """Means and quartiles of t for the observer's numbers, as upstream does for its losses."""
        from guided_diffusion import logger, train_util

        values = dict(self.observer.per_sample)
        index = values.pop("t") - 1
        train_util.log_loss_dict(self.diffusion, index, values)
        logger.logkv("d_skipped", float(self.observer.skipped))

    def save(self):
        if self.observer is not None:  # first: a model file never stands without its observer's
            self._save_observed()
        super().save()

    def _save_observed(self) -> None:
        """ogdmNNNNNN.pt: the observer, and what else upstream's own files leave out."""
        from guided_diffusion import logger, train_util
        from mpi4py import MPI

        rank = {"random": compat.capture_random(), "data": self.data.position()}
        ranks = MPI.COMM_WORLD.gather(rank, root=0)
        if dist.get_rank() == 0:
            logger.log("saving the observer...")
            name = f"ogdm{self.step + self.resume_step:06d}.pt"
            state = {
                "observer": self.observer.state_dict(),
                "updates": self.updates,
                "lg_loss_scale": self.mp_trainer.lg_loss_scale,
                "schedule_sampler": _sampler_state(self.schedule_sampler),
                "batch_size": self.batch_size,
                "ranks": ranks,
            }
            _write(train_util.bf.join(train_util.get_blob_logdir(), name), state)

    def _load_observed(self) -> None:
        """Continues from the ogdmNNNNNN.pt beside the resumed model, as if never stopped.

        Upstream names a checkpoint by the step just done and would do that step again. From here
        on its step is counted from the run's start, so names, intervals and annealing go on.
        """
        from guided_diffusion import dist_util, logger, train_util

        bf = train_util.bf
        model = train_util.find_resume_checkpoint() or self.resume_checkpoint
        path = bf.join(bf.dirname(model), f"ogdm{self.resume_step:06d}.pt")
        if not bf.exists(path):
            raise FileNotFoundError(
                f"--resume_checkpoint: {path} is missing. It holds the discriminator and is "
                "written beside the model when --ogdm is on; copy it there to continue. To add "
                f"observation guidance to a model trained without it: --init_checkpoint {model}"
            )
        if not bf.exists(bf.join(bf.dirname(model), f"opt{self.resume_step:06d}.pt")):
            logger.warn("the optimizer's opt*.pt is not beside the model: its moments start anew")
        logger.log(f"loading the observer from {path}...")
        state = dist_util.load_state_dict(path, map_location="cpu")
        self.observer.load_state_dict(state["observer"])
        self.mp_trainer.lg_loss_scale = state["lg_loss_scale"]
        _restore_sampler(self.schedule_sampler, state["schedule_sampler"])
        self.updates = self.step = state["updates"]
        self.resume_step = 0

        here = (dist.get_world_size(), self.batch_size)
        there = (len(state["ranks"]), state["batch_size"])
        if here != there:
            logger.warn(
                f"saved by {there[0]} ranks of batch {there[1]}, now {here[0]} of {here[1]}: "
                "the order of the data and the noise start anew"
            )
            return
        rank = state["ranks"][dist.get_rank()]
        logger.log(f"going back to batch {rank['data']['used']} of its pass over the data...")
        self.data.go_to(rank["data"])
        compat.restore_random(rank["random"])


def _sampler_state(sampler) -> dict[str, Tensor]:
    """The loss history of a loss-aware schedule sampler; {} for the uniform one."""
    names = ("_loss_history", "_loss_counts")
    return {n: torch.tensor(getattr(sampler, n)) for n in names if hasattr(sampler, n)}


def _restore_sampler(sampler, state: dict[str, Tensor]) -> None:
    if sorted(state) != sorted(_sampler_state(sampler)):
        raise ValueError("--schedule_sampler: resume with the one that the run was started with")
    for name, value in state.items():
        getattr(sampler, name)[:] = value.numpy()


def _write(path: str, state: dict[str, Any]) -> None:
    """torch.save; a local file appears whole or not at all."""
    import blobfile

    if "://" in path:
        with blobfile.BlobFile(path, "wb") as file:
            torch.save(state, file)
        return
    partial = f"{path}.partial"
    torch.save(state, partial)
    os.replace(partial, path)


# ---- sampling ---------------------------------------------------------------------------------


class Sampling:
    """The few-step samplers behind upstream's image_sample.py.

    Without --sampler it hands back whatever it is given. Image i of the run is made from a seed of
    its own, (--seed, i), so that samplers, NFEs, batch sizes and numbers of ranks can be compared.
    """

    def __init__(self, args: argparse.Namespace, diffusion):
        self.args, self.diffusion = args, diffusion
        if args.clip_denoised is None:
            args.clip_denoised = not args.sampler
        self.first = dist.get_rank() * args.batch_size
        if not args.sampler:
            return
        if args.timestep_respacing:
            raise ValueError(
                "--timestep_respacing belongs to upstream's own samplers; with --sampler the "
                "steps follow from --nfe and --discretization"
            )
        self.schedule = DiscreteVP(diffusion.alphas_cumprod)
        try:
            self.schedule.times(steps_for_nfe(args.sampler, args.nfe), args.discretization)
        except ValueError as error:
            raise ValueError(f"--nfe: {error}") from error

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """The flags that the patched image_sample.py has more than upstream's."""
        group = parser.add_argument_group("few-step sampling")
        group.add_argument("--sampler", default="", choices=("", *SAMPLERS), metavar="NAME",
                           help=f"{', '.join(SAMPLERS)}; upstream's own if not given")  # fmt: skip
        group.add_argument("--nfe", type=int, default=10, metavar="INT",
                           help="network evaluations an image (default: 10)")  # fmt: skip
        group.add_argument("--discretization", default=None, choices=DISCRETISATIONS,
                           help="spacing of the time steps (default: linear)")  # fmt: skip
        group.add_argument("--eta", type=float, default=1.0, metavar="FLOAT",
                           help="noise of the stochastic sampler: 0 is euler, 1 is DDPM's "
                                "(default: 1)")  # fmt: skip
        group.add_argument("--seed", type=int, default=None, metavar="INT",
                           help="seed of noise and labels; not seeded if not given")  # fmt: skip
        group.add_argument("--num_classes", type=int, default=0, metavar="INT",
                           help="draw labels below this; upstream draws below 1000 on any data "
                                "set")  # fmt: skip
        # None tells "not given" from "True": clipping is upstream's default, not the samplers'.
        parser.set_defaults(clip_denoised=None)

    def labels(self, classes: Tensor) -> Tensor:
        """The labels [N] of the next batch, in place of upstream's draw."""
        a = self.args
        if not (a.sampler and a.seed is not None):
            return torch.randint_like(classes, a.num_classes) if a.num_classes else classes
        high = a.num_classes or 1000
        draws = [torch.randint(high, (), generator=g) for g in self._generators("label")]
        return torch.stack(draws).to(classes)

    def sampler(self, upstream: Callable) -> Callable:
        """A function with the signature of upstream's sampling loops."""
        return self._sample if self.args.sampler else upstream

    def _sample(self, model, shape, clip_denoised=False, model_kwargs=None) -> Tensor:
        from guided_diffusion import dist_util

        a, device = self.args, dist_util.dev()
        if a.seed is None:
            x_T, generator = torch.randn(*shape, device=device), None
        else:
            noise = [torch.randn(shape[1:], generator=g) for g in self._generators("noise")]
            x_T = torch.stack(noise).to(device)
            generator = torch.Generator(device).manual_seed(_seed(a.seed, "steps", self.first))
        self.first += dist.get_world_size() * a.batch_size
        return sample(
            make_eps_fn(self.diffusion, model, model_kwargs or {}, clip=clip_denoised),
            self.schedule.prior(x_T),
            self.schedule,
            sampler=a.sampler,
            nfe=a.nfe,
            discretisation=a.discretization,
            eta=a.eta,
            generator=generator,
        )

    def _generators(self, purpose: str) -> list[torch.Generator]:
        """One for each image of the next batch; upstream files batches in the order of ranks."""
        numbers = range(self.first, self.first + self.args.batch_size)
        return [torch.Generator().manual_seed(_seed(self.args.seed, purpose, i)) for i in numbers]


def _seed(*key) -> int:
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
