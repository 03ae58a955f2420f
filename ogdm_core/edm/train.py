"""OGDM in the trainer of NVlabs/edm: what the lines of `patches/edm` call.

    train.py            `train_options` adds the flags, `training_kwargs` hands them to the loop
    training_loop.py    `session` returns the loop's observer, or None without --ogdm

EDM in the paper's terms: x_t = y + n with y the (augmented) image and n = sigma eps, so a = 1 and
t *is* sigma; the network returns the denoised image D, and eps_t = (x_t - D) / sigma.
"""

import functools
import json
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import click
from torch import Tensor
from torch.nn.functional import one_hot
from torch.optim import Optimizer
from torch.utils.data import Dataset

from .. import contact, folder
from ..checkpoints import Guard, differences, format_differences
from ..config import OGDMConfig
from ..denoiser import SIGMA_MAX, SIGMA_MIN, make_eps_fn, to_eps
from ..distributed import gather, print_once, rank, world
from ..dnnlib import checks_pictures
from ..flags import click_options, from_args, whole_numbers
from ..forward import Recorder, lr_scale
from ..observer import Observer
from ..random import replayed, set_torch_state, torch_state
from ..schedule import RHO, KarrasVE, expand
from ..trust import trust_option
from .resume import SkipFirst, check, checkpoint, flat, load_state, newest

__all__ = [
    "SkipFirst",
    "check_weights",
    "draw_grid",
    "load_state",
    "named",
    "session",
    "train_options",
    "training_kwargs",
]  # the patch's


def schedule_of(net) -> KarrasVE:
    """Noise levels of the network: its own range where it has one (vp, ve), else Karras et al.'s.
    Its input is x_t itself for any preconditioning, so a = 1 and b = sigma throughout."""
    low = net.sigma_min if net.sigma_min > 0 else SIGMA_MIN
    high = net.sigma_max if math.isfinite(net.sigma_max) else SIGMA_MAX
    return KarrasVE(low, high, RHO, sigma_data=getattr(net, "sigma_data", 0.5))


def train_options(main: Callable) -> Callable:
    """Adds `--ogdm`, `--ogdm-k`, ..., `--trust` and settings without a flag of upstream's to its click command."""
    text = "Learning rate ramp-up, from zero; 0 = full rate at once  [default: 10]"
    main = click.option("--lr-rampup", metavar="MIMG", type=click.FloatRange(min=0), help=text)(main)
    text = "Residual blocks per resolution  [default: varies]"
    main = click.option("--blocks", metavar="INT", type=click.IntRange(min=1), help=text)(main)
    text = "Resolutions with self-attention  [default: varies]"
    main = click.option("--attention", metavar="LIST", type=whole_numbers, help=text)(main)
    text = "How often to draw a grid of samples, in RUN/grids  [default: never]"
    main = click.option("--grid-ticks", metavar="TICKS", type=click.IntRange(min=1), help=text)(main)
    text = "Network evaluations of those samples"
    main = click.option("--grid-nfe", metavar="INT", type=click.IntRange(min=1), default=10, show_default=True,
                        help=text)(main)  # fmt: skip
    return trust_option(click_options(checks_pictures(main)))


def training_kwargs(opts: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What the flags add to `options`, the arguments of upstream's training loop."""
    ramp, config = opts["lr_rampup"], from_args(opts, "edm")
    if config is not None and opts["resume"] is not None:
        check(opts["resume"], options)
    network = {"num_blocks": opts["blocks"], "attn_resolutions": opts["attention"]}
    if given := {name: value for name, value in network.items() if value is not None}:
        options["network_kwargs"].update(given)
    kwargs: dict[str, Any] = {} if ramp is None else {"lr_rampup_kimg": ramp * 1000}
    if opts["grid_ticks"] is not None:
        kwargs["grids"] = {"ticks": opts["grid_ticks"], "nfe": opts["grid_nfe"]}
    if config is not None:
        kwargs["ogdm"] = config.to_dict()
        if opts.get("nosubdir") and not opts.get("dry_run"):
            folder.claim(opts["outdir"])  # before upstream writes into it
        folder.agree(flat(options | kwargs))
    return kwargs


def draw_grid(wanted: dict[str, int] | None, ema, run_dir: str | None, nimg: int, tick: int, done: bool) -> None:
    """Rank 0 draws a grid of samples of the average's, every `wanted["ticks"]` ticks and at the end."""
    if wanted is None or run_dir is None or not (done or tick % wanted["ticks"] == 0):
        return
    device = next(ema.parameters()).device
    label = one_hot(contact.labels(ema.label_dim), ema.label_dim).to(device) if ema.label_dim else None
    shape = (ema.img_channels, ema.img_resolution, ema.img_resolution)
    contact.write(run_dir, nimg // 1000, make_eps_fn(ema, label), schedule_of(ema), shape, wanted["nfe"], device)


class RecordedLoss:
    """Upstream's loss function, which also observes the network's pass and the augmented images y.

    emission   gamma L_emission [N, 1, 1, 1] of the last call. Upstream sums its loss [N, C, H, W]
               over pixels, so that an image's loss grows by C H W gamma L_emission, the weight
               that gamma has beside a mean over pixels

    Pickles as upstream's loss function itself, so a snapshot holds nothing of ours.
    """

    emission: Tensor

    def __init__(self, loss_fn: Callable[..., Tensor], net, observer: Observer, guard: Guard):
        self.loss_fn, self.net, self.observer, self.guard = loss_fn, net, observer, guard

    def __call__(self, net, images, labels=None, augment_pipe=None) -> Tensor:
        network, pipe = Recorder(net), augment_pipe and Recorder(augment_pipe)
        loss = self.loss_fn(net=network, images=images, labels=labels, augment_pipe=pipe)
        self.guard.count(loss)
        self.emission = expand(self._observe(network, pipe.output[0] if pipe else images, loss), loss)
        return loss

    def _observe(self, seen: Recorder, y: Tensor, loss: Tensor) -> Tensor:
        """gamma L_emission [N] of the recorded pass."""
        sigma, labels = seen.args
        cond = {"class_labels": labels, **seen.kwargs}
        # The bare network, not its DDP wrapper: one wrapped pass arms DDP, which averages a
        # parameter's gradient once it is complete, after all passes; another would only broadcast
        # the buffers again.
        eps_fn, eps_t = make_eps_fn(self.net), to_eps(seen.output, seen.x, sigma)
        if self.observer.config.augment_labels == "drop" and cond.pop("augment_labels", None) is not None:
            with replayed(seen.rng, seen.x.device):
                eps_t = eps_fn(seen.x, sigma.flatten(), cond)
        return self.observer.observe(
            x_0=y, eps=to_eps(y, seen.x, sigma), x_t=seen.x, t=sigma.flatten(), eps_t=eps_t,
            eps_fn=eps_fn, cond=cond, label=labels if self.net.label_dim else None, rng=seen.rng,
            transition=loss.flatten(1).mean(1),
        )  # fmt: skip

    def __reduce__(self):
        return self.loss_fn.__reduce__()


class Session:
    """Observation guidance of one training loop."""

    def __init__(
        self, config: OGDMConfig, net, ema, loss_fn: Callable[..., Tensor], optimizer: Optimizer,
        seed: int = 0, fine_tuned: bool = False, steps: float | None = None, run_dir: str | None = None,
        images: str = "",
    ):  # fmt: skip
        self.run_dir, self.images, self.stopped = run_dir, images, False
        self.net, self.optimizer, self.seed, self.fine_tuned = net, optimizer, seed, fine_tuned
        self.device = next(net.parameters()).device
        self.observer = Observer(
            config, schedule_of(net), net.img_channels, net.img_resolution, labels=net.label_dim, device=self.device,
            steps=steps, denoiser=make_eps_fn(net, next(net.parameters()).new_zeros(1, net.label_dim)),
        )  # fmt: skip
        print_once(f"OGDM: {self.observer.about_d()}")
        self.guard = Guard(net.parameters, ema.parameters, functools.partial(newest, run_dir or "."))
        self.loss_fn = RecordedLoss(loss_fn, net, self.observer, self.guard)
        self.last: dict[str, float] = {}
        self.stop = folder.Stop()

    def resume(self, state: dict[str, Any]) -> tuple[int, int]:
        """Puts back D and the random states; returns the exact counts of images and ticks.

        Comes last before the loop, since building the network also draws random numbers.
        """
        if changed := self.observer.load_state_dict(state["observer"]):
            print_once(f"OGDM: the observer continues with other settings: {changed}")
        if [len(rng) for rng in state["rng"]] == [len(torch_state(self.device))] * world():
            set_torch_state(state["rng"][rank()], self.device)
        else:
            print_once(
                f"OGDM: the random states of {len(state['rng'])} ranks do not fit this run "
                f"({world()} on {self.device.type}); the noise starts anew, all else continues."
            )
        folder.named(state.get("images"), self.images)
        return state["nimg"], state["tick"] + 1

    def step(self) -> None:
        """D's step, at a rate that follows upstream's ramp-up.

        The network's gradients are dropped first: they have been applied, and D needs the memory.
        """
        self.net.zero_grad(set_to_none=True)
        self.observer.step(lr_scale(self.optimizer))

    def report(self, report: Callable) -> list[str]:
        """Hands the means since the last tick to upstream's statistics; returns console fields."""
        stats = self.observer.stats()
        for name, value in stats.items():
            report(f"OGDM/{name}", value)
        self.last = (self.last if "d_loss" in stats else {}) | stats  # r1 is not taken in every tick
        return [f"{name} {value:<7.4g}" for name, value in self.last.items()]

    def ahead(self, batches: Iterator, rounds: int) -> Iterator:
        """Upstream's batches, of which a step takes one per round."""
        self.data = folder.Ahead(batches, self.stop, rounds, self.device)
        return self.data

    def stopping(self, done: bool) -> bool:
        """Whether this step is the run's last, after which upstream saves.

        done   whether it is by the run's length; else a signal, or a batch that cannot be read, may end it
        """
        if not done:
            self.data.look()
        self.stopped = self.stop.together(self.device)
        return done or self.stopped

    def check(self, nimg: int) -> None:
        """Stops a diverged run before it saves. Deletes our state file of this step, because upstream
        may overwrite the files that it vouches for.

        Upstream sets gradients that are not finite to zero, so that its weights stay finite: the losses tell.
        """
        self.guard.look(f"{nimg / 1000:g} kimg")
        self.guard.check(f"{nimg / 1000:g} kimg")
        if rank() == 0 and self.run_dir is not None:
            checkpoint(self.run_dir, nimg).unseal()

    def save(self, nimg: int, tick: int, every: int | None, done: bool) -> None:
        """Writes `ogdm-state-*.pt` after upstream's `training-state-*.pt`, as its seal."""
        if every is None or tick == 0 or not (done or tick % every == 0):
            return
        rng = gather(torch_state(self.device))
        if rank() == 0 and self.run_dir is not None:
            checkpoint(self.run_dir, nimg).save({
                "observer": self.observer.state_dict(), "rng": rng, "nimg": nimg, "tick": tick,
                "seed": self.seed, "fine_tuned": self.fine_tuned, "images": self.images,
            })  # fmt: skip

    def leave(self, nimg: int) -> None:
        """Ends the command where it was stopped, when everything has been written."""
        if self.stopped:
            self.stop.leave(f"at {nimg / 1000:g} kimg; --resume: {newest(self.run_dir or '.')}")


def named(ogdm: dict[str, Any] | None, images: Dataset) -> Dataset:
    """Upstream's data set, which with --ogdm names a file that cannot be read."""
    return images if ogdm is None else folder.Named(images, _file)


def _file(images: Any, i: int) -> str:
    return os.path.join(images._path, images._image_fnames[images._raw_idx[i]])


def check_weights(session: Session | None, source, path: str) -> None:
    """Ends the command where the weights of `path` are of another network: upstream copies what has the same name.

    Labels and augmentation may be new, and then start from random weights.
    """
    if session is None:
        return
    net = session.net
    kinds = [{"precond": type(n).__name__, **json.loads(json.dumps(n.init_kwargs))} for n in (source, net)]
    differ = differences(*kinds)
    for name in ("label_dim", "augment_dim", "img_resolution", "dropout", "use_fp16"):
        differ.pop(name, None)
    theirs, ours = ({k: v.shape for k, v in n.state_dict().items()} for n in (source, net))
    new = ("map_label.", "map_augment.")
    odd = [
        n for n in sorted(theirs.keys() | ours.keys()) if theirs.get(n) != ours.get(n) and not any(p in n for p in new)
    ]
    if differ or odd:
        why = format_differences(differ) or f"{len(odd)} tensors are not in both or differ in shape, such as {odd[0]}"
        raise click.ClickException(f"{path} holds another network ({why}); give the flags that it was trained with")


def session(
    ogdm: dict[str, Any] | None, net, ema, loss_fn: Callable[..., Tensor], optimizer: Optimizer, seed: int,
    resume_pkl: str | None, state: dict[str, Any] | None, steps: float, run_dir: str | None, data: str,
) -> Session | None:  # fmt: skip
    """The observer of a loop of so many steps with the settings of --ogdm, None without.

    run_dir   on rank 0, whose files are written
    data      the path of the images
    """
    if ogdm is None:
        return None
    folder.claim(run_dir or "")
    folder.outlive_output()
    if resume_pkl is not None and state is None:
        print_once("OGDM: a snapshot carries no discriminator; a new one is trained beside it.")
    fine_tuned = resume_pkl is not None if state is None else state["fine_tuned"]
    images = folder.fingerprint(data) if data and rank() == 0 else ""
    made = Session(
        OGDMConfig.from_mapping(ogdm), net, ema, loss_fn, optimizer, seed, fine_tuned, steps, run_dir, images
    )
    made.stop.listen()
    return made
