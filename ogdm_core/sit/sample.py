"""Few-step sampling in willisma/SiT: what the patched sample_ddp.py calls."""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import fewstep
from ..guidance import guided_evaluations
from ..samplers import sample
from . import compat
from .train import edge_of, make_eps_fn, schedule_of

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


def fitting(model: Any, state: compat.Weights) -> Any:
    """The network for these weights: upstream trains twice the output channels, and samples its own without them."""
    linear: Any = model.final_layer.linear
    name = "final_layer.linear.weight"
    if name in state and len(state[name]) == 2 * linear.out_features:
        model.learn_sigma, model.out_channels = True, 2 * model.out_channels
        model.final_layer.linear = torch.nn.Linear(linear.in_features, 2 * linear.out_features).to(linear.weight.device)
    compat.load(model, state, "--ckpt: it", "its --model, --image-size and --num-heads")
    return model


def built(state: compat.Weights, num_heads: int) -> Any:
    """Upstream's network of the size of these weights."""
    import models

    (rows, width), patch = state["y_embedder.embedding_table.weight"].shape, state["x_embedder.proj.weight"].shape[-1]
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    return fitting(models.SiT(
        input_size=patch * math.isqrt(state["pos_embed"].shape[1]), patch_size=patch, hidden_size=width, depth=depth,
        num_heads=num_heads, num_classes=rows - 1, learn_sigma=False,
    ), state)  # fmt: skip


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
        eps_fn = make_eps_fn(network, schedule, args.prediction, edge_of(args))
        return [sample(lambda x, t: eps_fn(x, t, cond), z, schedule, **fewstep.solver_of(vars(args)), eta=eta)]

    return few_steps
