"""OGDM in the trainer of NVlabs/edm2: what the lines of `patches/edm2` call.

    train_edm2.py       `train_options` adds the flags, `training_kwargs` hands them to the loop
    training_loop.py    `transfer` starts from a snapshot, `session` returns the loop's observer, or None without --ogdm

Noise and network are EDM's: x_t = y + sigma eps, and the network returns the denoised image D. Beside it stands
u(sigma), a learned logarithm of the loss at sigma, and upstream's loss per pixel is

    w(sigma) (D - y)^2 / e^u + u.

EDM's own loss is w(sigma) (D - y)^2, beside which the emission has the weight gamma. So here it has gamma / e^u, and
rho and gamma mean what they mean on EDM. u learns from upstream's loss alone.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from .. import folder
from ..checkpoints import Guard
from ..config import OGDMConfig
from ..denoiser import SIGMA_MAX, SIGMA_MIN, make_eps_fn, to_eps
from ..distributed import print_once, rank
from ..dnnlib import checks_pictures
from ..flags import click_options, from_args, whole_numbers
from ..forward import Recorder
from ..observer import Observer
from ..schedule import RHO, KarrasVE, expand
from ..sealed import Checkpoint
from ..sealed import newest as newest_of
from ..trust import trust_option
from .compat import careful_pickle

__all__ = ["session", "train_options", "training_kwargs", "transfer"]  # the patch's
RAMP = 10.0  # upstream's ramp-up, in millions of images


# ---- flags --------------------------------------------------------------------------------------


def train_options(main: Callable) -> Callable:
    """Adds `--ogdm`, ..., `--trust`, `--transfer` and settings without a flag of upstream's to its click command."""
    for name, metavar, kind, text in (
        ("--transfer", "PKL|URL", str, "Start from this snapshot, at image 0, where --outdir has no checkpoint"),
        ("--lr-rampup", "MIMG", click.FloatRange(min=0), "Learning rate ramp-up, from zero; 0 = full rate at once  "
         f"[default: {RAMP:g}]"),
        ("--model-channels", "INT", click.IntRange(min=1), "Channels, also fewer than --channels allows"),
        ("--channel-mult", "LIST", whole_numbers, "Channels per resolution, as multiples  [default: 1,2,3,4]"),
        ("--blocks", "INT", click.IntRange(min=1), "Residual blocks per resolution  [default: 3]"),
        ("--attention", "LIST", whole_numbers, "Resolutions with self-attention  [default: 16,8]"),
    ):  # fmt: skip
        main = click.option(name, metavar=metavar, type=kind, help=text)(main)
    return trust_option(click_options(checks_pictures(main)))


def training_kwargs(opts: dict[str, Any], options: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """What the flags add to `options`, the arguments of upstream's training loop."""
    names = {"num_blocks": "blocks", "attn_resolutions": "attention"}
    names |= {name: name for name in ("model_channels", "channel_mult")}
    options["network_kwargs"].update({n: opts[flag] for n, flag in names.items() if opts[flag] is not None})
    if opts["lr_rampup"] is not None:
        options["lr_kwargs"]["rampup_Mimg"] = opts["lr_rampup"]
    config, own = from_args(opts), {}
    if opts["transfer"] is not None:
        own["transfer"] = opts["transfer"]
    if config is not None:
        own["ogdm"] = config.to_dict()
        folder.agree(own["ogdm"] | {"batch_size": options["batch_size"], "total_nimg": options["total_nimg"]})
        if last := _last(run_dir):
            _read(last)
    if own:
        print_once(f"OGDM: {_rate(options)}")
    return own


def _rate(options: dict[str, Any]) -> str:
    """Upstream's learning rate over the run, in words; images count from 0, also after --transfer."""
    lr, batch = options["lr_kwargs"], options["batch_size"]
    ramp, decay = lr.get("rampup_Mimg", RAMP), lr["ref_batches"] * batch / 1e6
    start = f"rises from 0 to {lr['ref_lr']:g} over {ramp:g} million images" if ramp else f"is {lr['ref_lr']:g} at once"
    end = f", and falls with the inverse square root after {decay:g} million" if decay else ", and stays"
    return f"the learning rate {start}{end}; the run has {options['total_nimg'] / 1e6:g} million"


# ---- a start from a snapshot ----------------------------------------------------------------------


def transfer(net: torch.nn.Module, snapshot: str | None, run_dir: str) -> None:
    """Copies a snapshot's weights into the network, before its EMAs are made of it.

    Ends the command for a snapshot of another network. Does nothing where the run continues.
    """
    if snapshot is None or _last(run_dir):
        return
    import dnnlib

    if rank():
        torch.distributed.barrier()  # rank 0 downloads first
    try:
        with dnnlib.util.open_url(snapshot) as file:
            ema = careful_pickle.load(file)["ema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise click.ClickException(f"--transfer: {snapshot} cannot be read as a snapshot ({error})") from error
    if not rank() and torch.distributed.is_initialized():
        torch.distributed.barrier()
    theirs, ours = ema.state_dict(), net.state_dict()
    for name in {**theirs, **ours}:
        shapes = [tuple(state[name].shape) if name in state else "nothing" for state in (theirs, ours)]
        if shapes[0] != shapes[1]:
            raise click.ClickException(
                f"--transfer: {snapshot} is of another network: {name} is {shapes[0]} there, {shapes[1]} here; give "
                "the --preset, --channels, --cond and data that it was trained with"
            )
    net.load_state_dict(theirs)
    print_once(f'OGDM: the weights are those of "{snapshot}"')


# ---- the observer ---------------------------------------------------------------------------------


class RecordedLoss:
    """Upstream's loss function, which also observes the network's pass.

    emission   gamma L_emission / e^u [N, 1, 1, 1] of the last call, to add to upstream's loss [N, C, H, W]

    Pickles as upstream's loss function itself, so a snapshot holds nothing of ours.
    """

    emission: Tensor

    def __init__(self, loss_fn: Callable[..., Tensor], net, observer: Observer, guard: Guard):
        self.loss_fn, self.net, self.observer, self.guard = loss_fn, net, observer, guard

    def __call__(self, net, images: Tensor, labels: Tensor | None = None) -> Tensor:
        network = Recorder(net)
        loss = self.loss_fn(net=network, images=images, labels=labels)
        (denoised, u), x, (sigma, labels) = network.output, network.x, network.args
        u = u.detach()
        plain = (loss.detach() - u) * u.exp()  # EDM's own loss
        self.guard.count(plain)
        eps_fn = make_eps_fn(self.net)  # the bare network: see ogdm_core.edm.train

        def second(*args: Any) -> Tensor:
            with normalised(self.net):
                return eps_fn(*args)

        emission = self.observer.observe(
            x_0=images, eps=to_eps(images, x, sigma), x_t=x, t=sigma.flatten(), eps_t=to_eps(denoised, x, sigma),
            eps_fn=second, cond={"class_labels": labels}, label=labels if self.net.label_dim else None,
            rng=network.rng, transition=plain.flatten(1).mean(1),
        )  # fmt: skip
        self.emission = expand(emission, loss) / u.exp()
        return loss

    def __reduce__(self):
        return self.loss_fn.__reduce__()


@contextlib.contextmanager
def normalised(net: torch.nn.Module) -> Iterator[None]:
    """Upstream's layers write normalised weights in place when they train, which would spoil the first pass's graph.

    The first pass has done so. Their parents stay in training mode, because they hold the dropout.
    """
    layers = [m for m in net.modules() if m.training and next(m.children(), None) is None]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True


class Session:
    """Observation guidance of one training loop."""

    def __init__(
        self, config: OGDMConfig, net, loss_fn: Callable[..., Tensor], steps: float, base_lr: float, run_dir: str
    ):  # fmt: skip
        schedule = KarrasVE(SIGMA_MIN, SIGMA_MAX, RHO, sigma_data=net.sigma_data)
        device = next(net.parameters()).device
        self.net, self.base_lr = net, base_lr
        no_class = torch.zeros(1, net.label_dim, device=device)

        def denoiser(x: Tensor, sigma: Tensor) -> Tensor:
            with normalised(net):  # leaves the weights as they are
                return make_eps_fn(net, no_class)(x, sigma)

        self.observer = Observer(
            config, schedule, net.img_channels, net.img_resolution, labels=net.label_dim, device=device, steps=steps,
            denoiser=denoiser,
        )  # fmt: skip
        print_once(f"OGDM: {self.observer.about_d()}")
        self.guard = Guard(net.parameters, tuple, lambda: newest(run_dir))
        self.loss_fn = RecordedLoss(loss_fn, net, self.observer, self.guard)

    def step(self, lr: float) -> None:
        """D's step, at a rate that follows upstream's over its --lr. Frees the applied gradients first."""
        self.net.zero_grad(set_to_none=True)
        self.observer.step(float(lr) / self.base_lr)  # upstream's rate is numpy's

    def report(self, report: Callable) -> None:
        """Hands the means since the last status line to upstream's statistics, and prints them.

        Upstream sets gradients that are not finite to zero, so that the weights stay finite: the losses tell.
        """
        self.guard.look("this status line")
        stats = self.observer.stats()
        for name, value in stats.items():
            report(f"OGDM/{name}", value)
        print_once("OGDM:   " + " ".join(f"{name} {value:<7.4g}" for name, value in stats.items()))

    def save(self, run_dir: str, nimg: int) -> None:
        """Writes `ogdm-state-*.pt` after upstream's `training-state-*.pt`, as its seal."""
        if rank() == 0:
            checkpoint(run_dir, nimg).save({"observer": self.observer.state_dict(), "nimg": nimg})

    def check(self, run_dir: str, nimg: int) -> None:
        """Stops a diverged run before it saves, and takes the seal off a checkpoint that is written again."""
        self.guard.check(f"{nimg / 1000:g} kimg")
        if rank() == 0:
            checkpoint(run_dir, nimg).unseal()


def session(
    ogdm: dict[str, Any] | None, net, loss_fn: Callable[..., Tensor], run_dir: str, nimg: int, total: int, batch: int,
    lr: dict[str, Any],
) -> Session | None:  # fmt: skip
    """The observer of a loop at image `nimg` of `total` with the settings of --ogdm; None without.

    Upstream draws each step's noise from the images seen, so D's state is all that a resume needs beside its own.
    """
    if ogdm is None:
        return None
    folder.claim(run_dir)
    made = Session(OGDMConfig.from_mapping(ogdm), net, loss_fn, total / batch, lr["ref_lr"], run_dir)
    if nimg:
        state = _read(checkpoint(run_dir, nimg))
        try:
            changed = made.observer.load_state_dict(state["observer"])
        except ValueError as error:
            raise click.ClickException(f"{checkpoint(run_dir, nimg)}: {error}") from error
        print_once(f"OGDM: continues with its discriminator{f', with other settings: {changed}' if changed else ''}")
    if nimg >= total:
        print_once(f"{run_dir} is finished: {nimg} of {total} images. A longer --duration continues it.")
        raise SystemExit(0)
    return made


# ---- D's state beside upstream's checkpoints --------------------------------------------------------


def checkpoint(run_dir: str, nimg: int) -> Checkpoint:
    """The checkpoint that upstream writes after `nimg` images."""
    return _of(Path(run_dir, f"training-state-{nimg // 1000:07d}.pt"))


def newest(run_dir: str) -> str:
    """The newest complete checkpoint in a run's folder, in words."""
    return newest_of(map(_of, _states(run_dir)), run_dir)


def _of(state: Path) -> Checkpoint:
    return Checkpoint(str(state.parent), [state.name], state.name.replace("training", "ogdm"))


def _states(run_dir: str) -> list[Path]:
    """Upstream's training states, the newest first."""
    return sorted(Path(run_dir).glob("training-state-*.pt"), reverse=True)


def _last(run_dir: str) -> Checkpoint | None:
    """The checkpoint that upstream continues from, if there is one: the newest, whole or not."""
    return next(map(_of, _states(run_dir)), None)


def _read(last: Checkpoint) -> dict[str, Any]:
    """Our state of a checkpoint; ends the command where it is not complete."""
    try:
        return last.read()
    except ValueError as error:
        raise click.ClickException(
            f"{error}, and upstream continues from it; {newest(last.folder)}. Move what is newer away to go on from "
            "there; or start a new discriminator in another --outdir with --transfer=network-snapshot-*.pkl"
        ) from error
