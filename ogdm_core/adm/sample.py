"""Few-step sampling in openai/guided-diffusion: what the patched image_sample.py calls."""

import argparse
from collections.abc import Callable

import torch
from guided_diffusion import dist_util, logger
from torch import Tensor
from torch import distributed as dist

from .. import fewstep
from ..random import generator_of
from ..samplers import sample
from . import beside
from .train import make_eps_fn, schedule_of


class Sampling:
    """The sampling function and the labels for one run of image_sample.py.

    Without --sampler both are upstream's. With --seed, image i of the run is made from a seed of
    its own, (--seed, i), so that samplers, NFEs, batch sizes and numbers of ranks can be compared.
    """

    def __init__(self, args: argparse.Namespace, diffusion):
        self.args, self.diffusion = args, diffusion
        if args.clip_denoised is None:  # upstream's default, and the paper's for these two
            args.clip_denoised = args.sampler in (None, "euler", "stochastic")
        if args.sampler:
            theirs = beside.check(args.model_path, args, "--model_path")
            fewstep.check_grid(schedule_of(diffusion), vars(args))
            logger.log(f"predicted x_0 clipped: {args.clip_denoised}")
            logger.log(
                f"model flags that are not given are those of {theirs}" if theirs else
                f"assuming --num_heads {args.num_heads}, --num_head_channels "
                f"{args.num_head_channels}: weights of other heads load all the same, and sample wrongly"
            )  # fmt: skip
        self.first = dist.get_rank() * args.batch_size

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Adds the flags that the patched image_sample.py has more than upstream's."""
        names = ("sampler", "nfe", "discretization", "rho", "order", "eta", "seed")
        fewstep.add_arguments(parser, names, own=("timestep_respacing", "use_ddim"), eta=1.0)
        parser.add_argument("--num_classes", type=int, default=0, metavar="INT",
                            help="draw labels below this; upstream draws below 1000 on any data "
                                 "set")  # fmt: skip
        # None means "not given": S-PNDM, F-PNDM and Heun do not clip by default.
        parser.set_defaults(clip_denoised=None)
        beside.adopt(parser, "model_path", where=lambda args: args.sampler)

    def labels(self, classes: Tensor) -> Tensor:
        """The labels [N] of the next batch, in place of upstream's draw."""
        a = self.args
        if a.sampler and a.seed is not None:
            return fewstep.labels(self._generators("label"), a.num_classes or 1000).to(classes)
        return torch.randint_like(classes, a.num_classes) if a.num_classes else classes

    def sampler(self, upstream: Callable) -> Callable:
        """A function with the signature of upstream's sampling loops."""
        return self._sample if self.args.sampler else upstream

    def _sample(self, model, shape, clip_denoised=False, model_kwargs=None) -> Tensor:
        a, device, schedule = self.args, dist_util.dev(), schedule_of(self.diffusion)
        if a.seed is None:
            noise, generator = torch.randn(*shape, device=device), None
        else:
            noise = fewstep.normal(self._generators("noise"), shape[1:]).to(device)
            generator = generator_of(a.seed, "steps", self.first, device=device)
        self.first += dist.get_world_size() * a.batch_size
        return sample(
            make_eps_fn(self.diffusion, model, model_kwargs or {}, clip=clip_denoised),
            schedule.prior(noise), schedule, **fewstep.solver_of(vars(a)), eta=a.eta, generator=generator,
        )  # fmt: skip

    def _generators(self, purpose: str) -> list[torch.Generator]:
        """One for each image of the next batch; upstream files batches in the order of ranks."""
        numbers = range(self.first, self.first + self.args.batch_size)
        return [generator_of(self.args.seed, purpose, i) for i in numbers]
