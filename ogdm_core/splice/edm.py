"""OGDM in NVlabs/edm: everything that the lines of `patches/edm` call.

    train.py            `train_options` adds the flags, `training_kwargs` hands them to the loop
    training_loop.py    `session` makes the object that the loop talks to, four times a step
    generate.py         `generate_options` adds --sampler, --nfe and --npz

EDM in the paper's terms: x_t = y + n with y the (augmented) image and n = sigma eps, so a = 1 and
t *is* sigma; the network returns the denoised image D, and eps_t = (x_t - D) / sigma.

As a program, it expands a row of the paper's Table 5 to the full command line, and runs it:

    python -m ogdm_core.splice.edm cifar10-edm-ogdm-ft --data cifar10-32x32.zip --gpus 8
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from .. import flags
from ..compat import edm as compat
from ..config import OGDMConfig
from ..observer import Observer
from ..samplers import sample, steps_for_nfe
from ..schedule import KarrasVE

ROOT = Path(__file__).resolve().parents[2]
SIGMA_MIN, SIGMA_MAX, RHO = 0.002, 80.0, 7.0  # Karras et al.; EDM's networks name no range
SAMPLERS = ("euler", "heun", "s-pndm", "f-pndm")
PRETRAINED = "https://nvlabs-fi-cdn.nvidia.com/edm/pretrained/edm-cifar10-32x32-{}-vp.pkl"

install = compat.install
device = compat.device
agree_on_seed = compat.agree_on_seed


# ---- train.py -----------------------------------------------------------------------------------


def train_options(main: Callable) -> Callable:
    """Adds `--ogdm`, `--ogdm-k`, ... and `--lr-rampup` to upstream's click command."""
    ramp = click.option(
        "--lr-rampup", metavar="MIMG", type=click.FloatRange(min=0),
        help="Learning rate ramp-up, from zero; 0 = full rate at once  [default: 10]",
    )  # fmt: skip
    return ramp(flags.click_options(main))


def training_kwargs(opts: dict[str, Any]) -> dict[str, Any]:
    """What the flags add to the arguments of upstream's training loop; nothing without them."""
    kwargs: dict[str, Any] = {}
    if opts["lr_rampup"] is not None:
        kwargs["lr_rampup_kimg"] = opts["lr_rampup"] * 1000
    config = flags.from_args(opts)
    if config is None:
        return kwargs
    if opts["resume"] is not None and not state_beside(opts["resume"]).is_file():
        raise click.ClickException(
            f"--resume: {state_beside(opts['resume'])} is missing, and with it the discriminator. "
            "Put it back beside the training state; or start a new discriminator with "
            "--transfer=network-snapshot-*.pkl; or resume without --ogdm."
        )
    if opts["resume"] is not None and _load_state(opts["resume"])["fine_tuned"]:
        kwargs["ema_rampup_ratio"] = None  # as upstream sets it for --transfer, and only then
    return kwargs | {"ogdm": config.to_dict()}


# ---- training_loop.py ---------------------------------------------------------------------------


class Seen(NamedTuple):
    """One forward pass of the trainer: all that the projection has to know of it."""

    y: Tensor  # the augmented image [N, C, H, W]
    x_t: Tensor  # y + n, what the network was given
    sigma: Tensor  # [N, 1, 1, 1]
    denoised: Tensor  # D, what the network answered
    labels: Tensor  # [N, label_dim], one-hot
    kwargs: dict[str, Any]  # augmentation labels
    rng: list[Tensor]  # random state before the pass, of which dropout's masks are made


class Recorded:
    """Upstream's loss function, unchanged, but for a note of what passed through the network.

    Pickles as the loss function itself, so a snapshot holds nothing of ours.
    """

    def __init__(self, loss_fn: Callable[..., Tensor], device: torch.device):
        self.loss_fn, self.device = loss_fn, device
        self.seen: Seen | None = None

    def __call__(self, net, images, labels=None, augment_pipe=None) -> Tensor:
        shown = [images]

        def augment(x: Tensor) -> tuple[Tensor, Tensor]:
            y, augment_labels = augment_pipe(x)
            shown[0] = y
            return y, augment_labels

        def network(x_t: Tensor, sigma: Tensor, labels: Tensor, **kwargs) -> Tensor:
            rng = _rng_state(self.device)
            denoised = net(x_t, sigma, labels, **kwargs)
            self.seen = Seen(shown[0], x_t, sigma, denoised, labels, kwargs, rng)
            return denoised

        pipe = None if augment_pipe is None else augment
        return self.loss_fn(net=network, images=images, labels=labels, augment_pipe=pipe)

    def __reduce__(self):
        return self.loss_fn.__reduce__()


class Plain:
    """What the loop talks to without `--ogdm`: hands back whatever it is given."""

    def sampler(self, dataset_sampler):
        return dataset_sampler

    def record(self, loss_fn, net):
        return loss_fn

    def resume(self, nimg: int, tick: int) -> tuple[int, int]:
        return nimg, tick

    def add_emission(self, loss: Tensor) -> Tensor:
        return loss

    def step(self) -> None:
        """Nothing to optimise."""

    def report(self, report: Callable) -> list[str]:
        return []

    def save(self, run_dir: str | None, nimg: int, tick: int, every: int | None, done: bool):
        """Nothing to save."""


class Observed(Plain):
    """What the loop talks to with `--ogdm`."""

    def __init__(
        self, config: OGDMConfig, seed: int, device: torch.device, state: dict | None,
        fine_tuned: bool,
    ):  # fmt: skip
        self.config, self.seed, self.device, self.state = config, seed, device, state
        self.fine_tuned = fine_tuned
        self.last: dict[str, float] = {}

    def sampler(self, dataset_sampler):
        """Upstream's endless shuffled order, from where the interrupted run had come to."""
        if self.state is None:
            return dataset_sampler
        self.seed = dataset_sampler.seed = self.state["seed"]
        millions = self.state["nimg"] / 1e6
        _print(f"OGDM: skipping {millions:g} million images of the shuffled order (4 s each)...")
        return Continued(dataset_sampler, self.state["nimg"] // _world())

    def record(self, loss_fn, net) -> Recorded:
        """Builds the observer for `net` and returns the loss function that it listens to."""
        self.net = net
        self.observer = Observer(
            self.config, training_schedule(net), net.img_channels, net.img_resolution,
            labels=net.label_dim, device=self.device,
        )  # fmt: skip
        self.recorded = Recorded(loss_fn, self.device)
        return self.recorded

    def resume(self, nimg: int, tick: int) -> tuple[int, int]:
        """Loads all that upstream forgets: D, random states, the exact count of images and ticks.

        Comes last before the loop, since building the network also draws random numbers.
        """
        state, self.state = self.state, None
        if state is None:
            return nimg, tick
        self.observer.load_state_dict(state["observer"])
        if [len(rng) for rng in state["rng"]] == [1 + len(_cuda(self.device))] * _world():
            _set_rng_state(state["rng"][_rank()], self.device)
        else:
            _print(
                f"OGDM: the random states of {len(state['rng'])} ranks do not fit this run "
                f"({_world()} on {self.device.type}); the noise starts anew, all else continues."
            )
        return state["nimg"], state["tick"] + 1

    def add_emission(self, loss: Tensor) -> Tensor:
        """loss [N, C, H, W] + gamma L_emission: upstream sums over pixels, so an image's loss grows
        by C H W gamma L_emission, the weight that gamma has beside a mean over pixels."""
        seen, self.recorded.seen = self.recorded.seen, None
        y, x_t, sigma = seen.y, seen.x_t, seen.sigma

        def eps_fn(x_u: Tensor, u: Tensor) -> Tensor:
            # The bare network, not its DDP wrapper: one wrapped pass arms DDP, which averages a
            # parameter's gradient once it is complete, after both passes; a second would only
            # broadcast the buffers again. The same random state gives the same dropout masks
            # (Heun's step is one network's) and leaves the trainer's own noise be.
            with torch.random.fork_rng(devices=_cuda(self.device)):
                _set_rng_state(seen.rng, self.device)
                denoised = self.net(x_u, u, seen.labels, **seen.kwargs)
            return (x_u - denoised) / u.reshape(-1, 1, 1, 1)

        emission = self.observer.observe(
            x_0=y, eps=(x_t - y) / sigma, x_t=x_t, t=sigma.flatten(),
            eps_t=(x_t - seen.denoised) / sigma, eps_fn=eps_fn,
            label=seen.labels if self.net.label_dim else None,
        )  # fmt: skip
        return loss + emission.reshape(-1, 1, 1, 1)

    def step(self) -> None:
        """D's turn. The network's gradients have served; upstream drops them only after it."""
        self.net.zero_grad(set_to_none=True)
        self.observer.step(1.0)

    def report(self, report: Callable) -> list[str]:
        """Hands the means since the last tick to upstream's statistics (which average over ranks);
        returns this rank's, for the console line."""
        stats = self.observer.stats()
        for name, value in stats.items():
            report(f"OGDM/{name}", value)
        self.last |= stats
        return [f"{name} {value:<7.4g}" for name, value in self.last.items()]

    def save(self, run_dir: str | None, nimg: int, tick: int, every: int | None, done: bool):
        """Writes `ogdm-state-*.pt` whenever upstream writes its `training-state-*.pt`."""
        if every is None or tick == 0 or not (done or tick % every == 0):
            return
        rng = _gather(_rng_state(self.device))
        if _rank() != 0:
            return
        state = {
            "observer": self.observer.state_dict(), "rng": rng,
            "nimg": nimg, "tick": tick, "seed": self.seed, "fine_tuned": self.fine_tuned,
        }  # fmt: skip
        path = Path(run_dir) / f"ogdm-state-{nimg // 1000:06d}.pt"
        _replace(path, lambda f: torch.save(state, f))


def session(
    ogdm: dict[str, Any] | None,
    seed: int,
    device: torch.device,
    resume_pkl: str | None,
    resume_state_dump: str | None,
) -> Plain:
    """The loop's partner: `Observed` with the settings of `--ogdm`, `Plain` without."""
    if ogdm is None:
        return Plain()
    config = OGDMConfig.from_mapping(ogdm)
    state, fine_tuned = None, resume_pkl is not None
    if resume_state_dump:
        _print(
            f'OGDM: loading discriminator and random state from "{state_beside(resume_state_dump)}"'
        )
        state = _load_state(resume_state_dump)
        fine_tuned = state["fine_tuned"]
    elif resume_pkl is not None:
        _print("OGDM: a snapshot carries no discriminator; a new one is trained beside it.")
    return Observed(config, seed, device, state, fine_tuned)


def _load_state(training_state: str) -> dict[str, Any]:
    return torch.load(state_beside(training_state), map_location="cpu", weights_only=True)


def state_beside(training_state: str) -> Path:
    """Our state file's path, beside upstream's."""
    path = Path(training_state)
    return path.with_name(path.name.replace("training-state-", "ogdm-state-"))


def training_schedule(net) -> KarrasVE:
    """Noise levels of the network: its own range where it has one (vp, ve), else Karras et al.'s.

    The network's input is x_t itself for any preconditioning, so a = 1 and b = sigma throughout.
    """
    low = net.sigma_min if net.sigma_min > 0 else SIGMA_MIN
    high = net.sigma_max if math.isfinite(net.sigma_max) else SIGMA_MAX
    return KarrasVE(low, high, RHO, sigma_data=getattr(net, "sigma_data", 0.5))


class Continued(torch.utils.data.Sampler):
    """A sampler from its `start`-th item on, which it finds by going through those before."""

    def __init__(self, sampler, start: int):
        self.rest, self.start = sampler, start

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(iter(self.rest), self.start, None)


def _cuda(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _rng_state(device: torch.device) -> list[Tensor]:
    """The states of the generators that a forward pass on `device` may draw from."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in _cuda(device))]


def _set_rng_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    for d, state in zip(_cuda(device), states[1:], strict=True):
        torch.cuda.set_rng_state(state, d)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gather(item: Any) -> list:
    """Every rank's `item`, on rank 0."""
    if _world() == 1:
        return [item]
    items = [None] * _world() if _rank() == 0 else None
    dist.gather_object(item, items, dst=0)
    return items or []


def _print(text: str) -> None:
    if _rank() == 0:
        print(text)


def _replace(path: Path, write: Callable) -> None:
    """Writes a file whole or not at all: a killed run leaves the old one, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as f:
        write(f)
    os.replace(part, path)


# ---- generate.py --------------------------------------------------------------------------------


def generate_options(main: Callable) -> Callable:
    """Adds --sampler, --nfe and --npz to upstream's click command, and lets it run on a CPU."""

    @functools.wraps(main)
    def run(**kwargs):
        _check_sampler(kwargs["sampler"], kwargs["nfe"])
        return main(**kwargs, device=device(torch.device("cuda")))

    options = (
        click.option("--sampler", type=click.Choice(SAMPLERS), metavar="|".join(SAMPLERS),
                     help="Sampler by name, in place of upstream's own"),
        click.option("--nfe", type=click.IntRange(min=1), metavar="INT",
                     help="Network evaluations an image; goes with --sampler"),
        click.option("--npz", type=click.Path(dir_okay=False), metavar="FILE",
                     help="Also write all images to one file, as ADM's evaluator reads it"),
    )  # fmt: skip
    for option in reversed(options):
        run = option(run)
    return run


def _check_sampler(sampler: str | None, nfe: int | None) -> None:
    """Refuses contradictory flags before anything is loaded."""
    if (sampler is None) != (nfe is None):
        raise click.UsageError("--sampler and --nfe go together, as in --sampler=euler --nfe=10")
    if sampler is None:
        return
    try:
        steps_for_nfe(sampler, nfe)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--nfe") from error
    context = click.get_current_context()
    own = {"num_steps": "--steps", "solver": "--solver", "discretization": "--disc",
           "schedule": "--schedule", "scaling": "--scaling", "S_churn": "--S_churn",
           "S_min": "--S_min", "S_max": "--S_max", "S_noise": "--S_noise"}  # fmt: skip
    given = [
        flag
        for name, flag in own.items()
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(
            f"{', '.join(given)} steers upstream's own sampler; leave it out with --sampler, "
            "or leave --sampler out"
        )


def sampler_fn(upstream: Callable, kwargs: dict[str, Any]) -> Callable:
    """The sampler that the flags ask for; upstream's choice without `--sampler`."""
    return _sample if "sampler" in kwargs else upstream


def _sample(
    net,
    latents: Tensor,
    class_labels: Tensor | None,
    randn_like: Callable,
    *,
    sampler: str,
    nfe: int,
    sigma_min: float = SIGMA_MIN,
    sigma_max: float = SIGMA_MAX,
    rho: float = RHO,
    **own: Any,
) -> Tensor:
    """Images [N, C, H, W] from unit noise, over upstream's default noise levels, in float64."""
    schedule = KarrasVE(max(sigma_min, net.sigma_min), min(sigma_max, net.sigma_max), rho)

    def eps_fn(x: Tensor, sigma: Tensor) -> Tensor:
        denoised = net(x, sigma, class_labels).to(x.dtype)
        return (x - denoised) / sigma.to(x.dtype).reshape(-1, 1, 1, 1)

    return sample(eps_fn, schedule.prior(latents.double()), schedule, sampler=sampler, nfe=nfe)


class Collection:
    """All images of a run in one npz: arr_0 uint8 [N, H, W, 3] and, with classes, arr_1 int64 [N].

    In the order of `seeds`, whichever rank made them. Grey images are repeated to RGB, which is
    what an evaluator's network takes. Collects nothing if `path` is None.
    """

    def __init__(self, path: str | None, seeds: list[int]):
        self.path, self.seeds = path, seeds
        self.made: dict[int, tuple[np.ndarray, int | None]] = {}

    def add(self, seeds: Tensor, images: np.ndarray, class_labels: Tensor | None) -> None:
        """Takes one batch: images uint8 [N, H, W, C], labels one-hot or None."""
        if self.path is None:
            return
        n = len(images)
        labels = [None] * n if class_labels is None else class_labels.argmax(1).tolist()
        self.made |= zip(seeds.tolist(), zip(images, labels, strict=True), strict=True)

    def write(self) -> None:
        """Rank 0 writes what all ranks made; every rank must call."""
        if self.path is None:
            return
        made = dict(itertools.chain.from_iterable(part.items() for part in _gather(self.made)))
        if _rank() != 0:
            return
        images = np.stack([made[seed][0] for seed in self.seeds])
        labels = [made[seed][1] for seed in self.seeds]
        if images.shape[3] == 1:
            images = images.repeat(3, axis=3)
        arrays = [images] if labels[0] is None else [images, np.array(labels, dtype=np.int64)]
        _replace(Path(self.path), lambda f: np.savez(f, *arrays))
        _print(f'Wrote {len(images)} images to "{self.path}".')
