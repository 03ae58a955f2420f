"""OGDM in the trainer of willisma/SiT: what the lines of `patches/SiT/train.py.patch` call.

Upstream's time runs from noise (0) to data (1), ours from data to noise: t = 1 - upstream's. Its linear path is
`RectifiedFlow`, its GVP path `GVP`. With v = dx/d(1 - t), as the network predicts it, eps follows from

    linear   eps = (x_t - a v) / (a + b)      noise   eps = the output
    GVP      eps = b x_t - (2 / pi) a v       score   eps = -b times the output
"""

import argparse
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch.utils.data import Dataset, Sampler

from .. import flags
from ..checkpoints import Guard, differences, format_differences
from ..config import OGDMConfig
from ..distributed import print_once, rank, world
from ..forward import Recorder, lr_scale
from ..observer import Observer
from ..random import seed_of
from ..schedule import GVP, RectifiedFlow, expand
from ..sealed import Checkpoint, newest
from . import compat
from .latents import FromMoments, cached

__all__ = ["Run", "add_arguments"]  # the patch's
SCHEDULES = {"Linear": RectifiedFlow, "GVP": GVP}
FIXED = ("model", "path_type", "prediction", "image_size", "num_classes")  # of a checkpoint that weights come from


def schedule_of(path_type: str) -> RectifiedFlow:
    """The path as a schedule; the autoencoder's latents are scaled to unit variance."""
    if path_type not in SCHEDULES:
        raise SystemExit(f"error: --path-type: {path_type} has no schedule here; give one of {', '.join(SCHEDULES)}")
    return SCHEDULES[path_type](sigma_data=1.0)


def to_eps(output: Tensor, x_t: Tensor, t: Tensor, schedule: RectifiedFlow, prediction: str) -> Tensor:
    """eps from what the network returns [N, C, H, W] at our time t [N]."""
    a, b = (expand(level, x_t) for level in (schedule.a(t), schedule.b(t)))
    if prediction == "noise":
        return output
    if prediction == "score":
        return -b * output
    if isinstance(schedule, GVP):
        return b * x_t - (2 / math.pi) * a * output
    return (x_t - a * output) / (a + b)


def edge_of(args: argparse.Namespace) -> float:
    """How far from 0 and 1 the times of a training stay, as upstream understands its flags."""
    own = 1e-3 if args.train_eps is None else args.train_eps
    return 0.0 if args.prediction == "velocity" else own


def make_eps_fn(
    network: Callable[..., Tensor], schedule: RectifiedFlow, prediction: str, edge: float
) -> Callable[..., Tensor]:
    """The network as eps(x [N, C, H, W], t [N], cond), asked within the times of its training."""

    def eps_fn(x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        return to_eps(network(x, (1 - t).clamp(edge, 1 - edge), **cond), x, t, schedule, prediction)

    return eps_fn


# ---- flags --------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--ogdm`, ... and settings without a flag of upstream's."""
    add = parser.add_argument_group("beside upstream's").add_argument
    add("--init", metavar="FILE", help="start from these weights, a checkpoint's or released ones, at step 0")
    add("--latents", metavar="DIR", help="encode each image once, into this folder, and train on its latents")
    add("--lr", type=float, help="learning rate (default: 1e-4, upstream's)")
    add("--ema", type=float, help="decay of the averaged weights (default: 0.9999, upstream's)")
    flags.add_arguments(parser)
    compat.tiny(parser)


# ---- one training ---------------------------------------------------------------------------------


class Run:
    """What upstream's main() calls as it goes. Without flags of ours every call gives back what it was given.

    `average` alone makes a difference then: without it upstream cannot sample a network of fewer than 1000 classes.

    args         upstream's flags; ours are taken out of it, and --ckpt, whose own code cannot work. A resume with
                 another global batch adds `batch_since` to it: the steps done, the epoch and its images at that time
    update_ema   upstream's function
    """

    def __init__(self, args: argparse.Namespace, update_ema: Any):
        self.config = flags.from_args(args, "sit")
        self.args = args
        self.observer: Observer | None = None
        self.resumed, self.init = args.ckpt, args.init
        self.latents, self.lr = args.latents, args.lr
        if args.ema is not None:
            inspect.unwrap(update_ema).__defaults__ = (args.ema,)  # inside torch.no_grad's wrapper
        for name in [n for n in vars(args) if n.startswith("ogdm") or n in ("init", "latents", "lr", "ema")]:
            delattr(args, name)
        args.ckpt = None
        if self.config is not None:
            schedule_of(args.path_type)
        self.state = compat.checkpoint(self.resumed) if self.resumed else {}
        self.ours = _read(self.resumed) if self.resumed and self.config is not None else {}
        self.done = self._steps_done()
        of_run = compat.weights(self.state).flags
        self.batch = of_run.get("global_batch_size", args.global_batch_size)  # of the steps since the next line's
        self.since = of_run.get("batch_since", (0, 0, 0))
        self.seeded: Seeded | None = None
        self.saved = self.resumed
        self.ema: torch.nn.Module | None = None

    def _steps_done(self) -> int:
        """Steps of the run that --ckpt continues; upstream's name of a checkpoint says them."""
        if not self.resumed:
            return 0
        if {"model", "ema", "opt"} - set(self.state) or not Path(self.resumed).stem.isdigit():
            raise SystemExit(f"error: --ckpt: {self.resumed} is no checkpoint of train.py's, as 0050000.pt; "
                             "weights alone start a run by --init")  # fmt: skip
        return int(Path(self.resumed).stem)

    def start(self, model: torch.nn.Module, ema: torch.nn.Module) -> None:
        """Loads --ckpt or --init into the network and its average."""
        file = self.resumed or self.init
        if file is None:
            return
        state, flag = self.state or compat.checkpoint(file), "--ckpt" if self.resumed else "--init"
        average, advice = compat.weights(state), "the flags it was trained with"
        here = {name: getattr(self.args, name) for name in FIXED}
        if differ := format_differences(differences(average.flags, here)):
            raise SystemExit(f"error: {flag}: {file} is of another network ({differ}); give {advice}")
        own = compat.weights(state | {"ema": state["model"]}) if self.resumed else average
        for network, weights in ((model, own), (ema, average)):
            compat.load(network, weights, f"{flag}: {file}", advice)
        print_once(f"OGDM: the weights are those of {file}")

    def average(self, ema: torch.nn.Module) -> None:
        """Puts the average of --ckpt back, which upstream has just replaced by the network's weights.

        Upstream samples it with labels below 1000, and 1000 for none: a network of fewer classes takes its own, of
        which `classes` is none.
        """
        self.ema, classes = ema, self.args.num_classes

        def own(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            y = torch.where(args[0] > classes, args[0] % classes, args[0])
            return (torch.where(args[0] == 1000, classes, y), *args[1:])

        if classes < 1000:
            embedder: Any = ema.y_embedder
            embedder.register_forward_pre_hook(own)
        if self.resumed:
            ema.load_state_dict(self.state["ema"])
            self.state = {}

    def optimise(self, opt: torch.optim.Optimizer) -> None:
        """Loads the optimiser's state of --ckpt, and sets --lr."""
        if self.resumed:
            opt.load_state_dict(self.state["opt"])
        for group in opt.param_groups if self.lr is not None else ():
            group["lr"] = group["initial_lr"] = self.lr
        self.opt = opt

    def data(self, dataset: Any, vae: Any) -> tuple[Any, Any]:
        """The dataset and the autoencoder of the loop."""
        if len(dataset.classes) > self.args.num_classes:
            raise SystemExit(f"error: --num-classes: {self.args.data_path} has {len(dataset.classes)} classes, one per "
                             f"folder, and the network {self.args.num_classes}")  # fmt: skip
        if self.latents:
            dataset, vae = cached(self.latents, dataset, vae, self.args.image_size), FromMoments(vae)
        if self.config is not None:
            dataset = self.seeded = Seeded(dataset, self.args.global_seed)
        return dataset, vae

    def order(self, sampler: Any) -> Any:
        """Upstream's sampler, from the place in the data where --ckpt stood."""
        if self.seeded is not None:
            self.seeded.sampler = sampler
        batch, all_images = self.args.global_batch_size, len(sampler) * world()
        if all_images < batch:
            raise SystemExit(f"error: --global-batch-size: {batch} is more than the images")
        epoch, images = self._place(all_images)
        if batch != self.batch:
            print_once(f"OGDM: --global-batch-size was {self.batch}; the run goes on behind {images} images of epoch "
                       f"{epoch}")  # fmt: skip
            self.since = (self.done, epoch, images)
        if any(self.since):
            self.args.batch_since = self.since
        left = (all_images - images) // batch + (self.args.epochs - epoch - 1) * (all_images // batch)
        self.steps = self.done + left
        return Resumed(sampler, epoch, images // world()) if self.done else sampler

    def _place(self, all_images: int) -> tuple[int, int]:
        """The epoch that --ckpt stood in, and how many images of it were behind; 0 and 0 for a new run."""
        before, epoch, images = self.since
        steps, left = self.done - before, (all_images - images) // self.batch
        if steps < left:
            return epoch, images + steps * self.batch
        more, steps = divmod(steps - left, max(all_images // self.batch, 1))
        return epoch + 1 + more, steps * self.batch

    def observe(self, model: Any, transport: Any) -> None:
        """Builds the observer, with its state of --ckpt, and lets it see each loss that `transport` computes."""
        if self.config is None:
            return
        self.model = model
        self.schedule = schedule_of(self.args.path_type)
        side, device = self.args.image_size // 8, next(model.parameters()).device
        self.eps_fn = make_eps_fn(model, self.schedule, self.args.prediction, edge_of(self.args))
        one = {"y": torch.zeros(1, dtype=torch.long, device=device)}
        self.observer = Observer(
            OGDMConfig.from_mapping(self.config.to_dict()), self.schedule, 4, side, labels=self.args.num_classes,
            device=device, steps=self.steps, denoiser=lambda x, t: self.eps_fn(x, t, one),
        )  # fmt: skip
        print_once(f"OGDM: {self.observer.about_d()}")
        if self.ours:
            try:
                changed = self.observer.load_state_dict(self.ours["observer"])
            except ValueError as error:
                raise SystemExit(f"error: --ckpt: {error}") from error
            print_once(f"OGDM: continues with its discriminator{f', other settings: {changed}' if changed else ''}")
        self.guard = Guard(model.parameters, lambda: self.ema.parameters() if self.ema else (), self._good)
        model.y_embedder.embedding_table.register_forward_pre_hook(self._see_labels)
        self._losses, self._sample = transport.training_losses, transport.sample
        transport.training_losses, transport.sample = self._observed, self._draw

    def _see_labels(self, table: torch.nn.Module, args: tuple[Tensor]) -> None:
        self.labels = args[0]  # after upstream's dropout, which gives the class behind the last one

    def _draw(self, x_1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.drawn = self._sample(x_1)
        return self.drawn

    def _observed(self, model: Any, x_1: Tensor, model_kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Upstream's losses; the emission [N] of the same pass is kept."""
        network, prediction = Recorder(model), self.args.prediction
        terms = self._losses(network, x_1, model_kwargs)
        time, noise, x_1 = self.drawn
        self.guard.count(terms["loss"])
        t, classes = 1 - time, self.args.num_classes
        label = one_hot(self.labels, classes + 1)[:, :classes].float()  # a dropped label is none: zeros
        assert self.observer is not None
        self.emission = self.observer.observe(
            x_0=x_1, eps=noise, x_t=network.x, t=t,
            eps_t=to_eps(network.output, network.x, t, self.schedule, prediction),
            eps_fn=self.eps_fn, cond=network.kwargs, label=label, rng=network.rng, transition=terms["loss"],
        )  # fmt: skip
        return terms

    def seed(self, step: int) -> None:
        """With --ogdm each step's random numbers follow from the seed, the rank and the step, so a resume has them."""
        if self.observer is not None:
            torch.manual_seed(seed_of(self.args.global_seed, rank(), step))

    def add(self, loss: Tensor) -> Tensor:
        """The loss to differentiate."""
        self.plain = loss
        return loss if self.observer is None else loss + self.emission.mean()

    def step(self) -> Tensor:
        """D's step, after the network's; returns upstream's own loss, which it logs."""
        if self.observer is not None:
            self.opt.zero_grad(set_to_none=True)
            self.observer.step(lr_scale(self.opt))
        return self.plain

    def log(self, logger: Any) -> None:
        """The means since the last line. Stops a run whose losses have diverged."""
        if self.observer is not None:
            self.guard.look("this line of the log")
            stats = self.observer.stats()
            logger.info("OGDM: " + ", ".join(f"{name} {value:.4g}" for name, value in stats.items()))

    def check(self, model: torch.nn.Module, step: int) -> None:
        """Stops a run that diverged before it saves."""
        if self.observer is not None:
            self.guard.check(f"step {step}")

    def _good(self) -> str:
        """The last good checkpoint, in words."""
        return f"the last checkpoint is {self.saved}" if self.saved else "there is no checkpoint"

    def save(self, path: str) -> None:
        """Writes `ogdm-*.pt` after upstream's checkpoint, as its seal."""
        if self.observer is not None:
            _of(path).save({"observer": self.observer.state_dict()})
            self.saved = path


def _of(path: str | Path) -> Checkpoint:
    file = Path(path)
    return Checkpoint(str(file.parent), [file.name], f"ogdm-{file.name}")


def _read(path: str) -> dict[str, Any]:
    """Our state beside a checkpoint; ends the program where it is not complete."""
    try:
        return _of(path).read()
    except ValueError as error:
        others = sorted(Path(path).parent.glob("[0-9]*.pt"), reverse=True)
        raise SystemExit(f"error: --ckpt: {error}; {newest(map(_of, others), str(Path(path).parent))}. Or start a new "
                         "discriminator with --init") from error  # fmt: skip


class Seeded(Dataset):
    """A dataset whose random choices (mirroring) follow from the seed, the epoch and the image's number."""

    sampler: Any  # knows the epoch

    def __init__(self, dataset: Any, seed: int):
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed_of(self.seed, self.sampler.epoch, index))
            return self.dataset[index]


class Resumed(Sampler):
    """Upstream's sampler without the epochs that are done, and without so many of a rank's images in the next one."""

    def __init__(self, sampler: Any, epoch: int, images: int):
        self.sampler, self.epoch, self.skip = sampler, epoch, images

    def set_epoch(self, epoch: int) -> None:
        """As upstream's."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        if self.sampler.epoch < self.epoch:
            return iter(())
        return itertools.islice(iter(self.sampler), self.skip if self.sampler.epoch == self.epoch else 0, None)
