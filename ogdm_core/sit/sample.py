"""Few-step sampling in willisma/SiT: what the patched sample_ddp.py calls."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import fewstep
from ..guidance import guided_evaluations
from ..samplers import sample
from . import compat
from .train import make_eps_fn, schedule_of

__all__ = ["add_arguments", "fitting", "sampler"]  # the patch's
OWN = ("num_sampling_steps", "sampling_method", "atol", "rtol", "diffusion_form", "diffusion_norm", "last_step",
       "last_step_size", "likelihood", "reverse")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--sampler`, `--nfe` and their kind, which the parser checks.

    With guidance, `nfe` becomes the evaluations of the guided network, each of which costs two.
    """
    compat.tiny(parser)
    parse = parser.parse_known_args

    def parse_and_count(*args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
        namespace, rest = parse(*args, **kwargs)
        if namespace.sampler and namespace.cfg_scale > 1:
            try:
                namespace.nfe = guided_evaluations(fewstep.NFE if namespace.nfe is None else namespace.nfe)
            except ValueError as error:
                parser.error(f"--nfe: {error}")
        return namespace, rest

    parser.parse_known_args = parse_and_count  # type: ignore[method-assign]
    there = {action.dest for action in parser._actions}
    fewstep.add_arguments(
        parser, ("sampler", "nfe", "discretization", "rho", "order", "eta"), [n for n in OWN if n in there]
    )


def fitting(model: Any, weights: dict[str, Tensor]) -> Any:
    """The network for these weights: upstream trains twice the output channels, and samples its own without them."""
    linear: Any = model.final_layer.linear
    name = "final_layer.linear.weight"
    if name in weights and len(weights[name]) == 2 * linear.out_features:
        model.learn_sigma, model.out_channels = True, 2 * model.out_channels
        model.final_layer.linear = torch.nn.Linear(linear.in_features, 2 * linear.out_features).to(linear.weight.device)
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        why = str(error).strip().splitlines()[-1].strip()
        raise SystemExit(
            f"error: --ckpt: it is of another network ({why}); give its --model and --image-size"
        ) from error
    return model


def sampler(upstream: Callable[..., Any], args: argparse.Namespace) -> Callable[..., Any]:
    """Upstream's function from noise to a list that ends in samples; with --sampler ours, which the folder names."""
    if not args.sampler:
        return upstream
    schedule = schedule_of(args.path_type)
    kind = [args.sampler, args.discretization, args.rho, args.order, args.eta]
    args.num_sampling_steps = args.nfe
    args.sampling_method = "-".join(
        k if isinstance(k, str) else f"{k:g}" for k in kind if isinstance(k, str | float | int)
    )
    fewstep.check_grid(schedule, vars(args))
    eta = 1.0 if args.eta is None else args.eta

    def few_steps(z: Tensor, network: Callable[..., Tensor], **cond: Any) -> list[Tensor]:
        cond["y"] = cond["y"].clamp(max=args.num_classes)  # upstream's null class is always 1000
        eps_fn = make_eps_fn(network, schedule, args.prediction)
        return [sample(lambda x, t: eps_fn(x, t, cond), z, schedule, **fewstep.solver_of(vars(args)), eta=eta)]

    return few_steps
