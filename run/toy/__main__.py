"""What run/toy.sh does: the trainings, the samples, the picture."""

import copy
import math
import shlex
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm, trange

from ogdm_core import training_loss
from ogdm_core.cli import bar_interval, errors_in_one_line
from ogdm_core.config import OGDMConfig
from ogdm_core.discriminator import embed_time
from ogdm_core.files import check_writable, write_json
from ogdm_core.observer import Observer
from ogdm_core.samplers import sample
from ogdm_core.schedule import DiscreteVP
from run.figures import style
from run.toy.flags import parse

NFES = (5, 10, 20, 50)


def spiral(turn: Tensor) -> Tensor:
    """Points [N, 2, 1, 1] of a spiral at `turn` in [0.25, 1.75] turns; about unit variance."""
    angle, radius = 2 * math.pi * turn, 1.3 * turn
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1)[..., None, None]


def data(n: int) -> Tensor:
    """n points, about evenly spread over the spiral's length."""
    return spiral((0.25**2 + (1.75**2 - 0.25**2) * torch.rand(n)).sqrt())


def distance(x: Tensor) -> Tensor:
    """Distance [N] of points [N, 2, 1, 1] to the spiral."""
    curve = spiral(torch.linspace(0.25, 1.75, 8000)).flatten(1)
    return torch.cdist(x.flatten(1), curve).min(1).values


class Denoiser(nn.Module):
    """eps_theta(x_t, t): three hidden layers."""

    def __init__(self, width: int = 128):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2 + 64, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2),
        )  # fmt: skip

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(torch.cat([x.flatten(1), embed_time(t / 1000)], 1)).view_as(x)


class PointDiscriminator(nn.Module):
    """D_phi(x, t, s) on points: the dot product of an MLP of x with an MLP of (t, s)."""

    def __init__(self, channels: int, size: int, labels: int, width: float):
        super().__init__()
        self.x = nn.Sequential(nn.Linear(channels, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU())
        self.c = nn.Sequential(nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 128))
        self.out = nn.Linear(128, 1)

    def forward(self, x: Tensor, t: Tensor, s: Tensor, label=None, parts: int = 1) -> Tensor:
        c = self.c(torch.cat([embed_time(t), embed_time(s)], 1))
        h = self.x(x.flatten(1))
        return self.out(h)[:, 0] + (h * c).sum(1) / math.sqrt(h.shape[1])


def train(
    net: Denoiser, schedule: DiscreteVP, steps: int, seed: int, lr: float,
    config: OGDMConfig | None = None, batch: int = 512, name: str = "",
) -> Denoiser:  # fmt: skip
    """`net` after `steps` more steps, as its EMA; with `config`, observed."""
    torch.manual_seed(seed)
    net = copy.deepcopy(net).train().requires_grad_(True)
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)
    ema = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=average)
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    observer = config and Observer(config, schedule, 2, 1, build=PointDiscriminator)
    for i in trange(steps, desc=name, unit="step", mininterval=bar_interval()):
        x_0 = data(batch)
        t = torch.randint(1, schedule.T + 1, (batch,))
        loss, transition = training_loss(net, x_0, torch.randn_like(x_0), t, schedule, observer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(net)
        if observer:
            observer.step(1.0)
        if i % 1000 == 0 or i == steps - 1:
            tqdm.write(f"{name}: step {i + 1}/{steps}, transition loss {float(transition):.3f}", file=sys.stderr)
    return ema.module.eval().requires_grad_(False)


def plot(samples: dict[str, dict[int, Tensor]], off: dict[str, dict[int, float]], path: Path,
         command: str) -> None:  # fmt: skip
    """Methods down, NFE across; the data in grey."""
    curve = spiral(torch.linspace(0.25, 1.75, 500)).flatten(1)
    fig, axes = style.figure(len(samples), len(NFES), size=(10, 5.2), sharex=True, sharey=True)
    for line, (method, by_nfe) in zip(axes, samples.items(), strict=True):
        for ax, (nfe, x) in zip(line, by_nfe.items(), strict=True):
            ax.plot(*curve.T, color=style.ORANGE, linewidth=1)
            ax.scatter(*x.flatten(1).T, s=1.5, color=style.method_colour(method), linewidths=0)
            ax.set(title=f"NFE {nfe}: off by {off[method][nfe]:.3f}", xticks=[], yticks=[],
                   xlim=(-2.6, 2.6), ylim=(-2.6, 2.6), aspect="equal")  # fmt: skip
        line[0].set_ylabel("OGDM" if method == "ogdm" else "control", fontsize=10)
    fig.tight_layout(rect=(0, 0.02, 1, 1))
    style.save(fig, path, command)


def main(argv: list[str] | None = None) -> int:
    """Trains, samples, prints the distances, writes toy.png and toy.json."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    with errors_in_one_line():
        check_writable(args.out / "toy.json")
        schedule = DiscreteVP.linear(sigma_data=1.0)
        Observer(args.config, schedule, 2, 1, build=PointDiscriminator)  # refuses what does not fit, before training
    print("three trainings of an MLP: the baseline, the control, OGDM", flush=True)
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    torch.manual_seed(args.seed)
    baseline = train(Denoiser(), schedule, args.pretrain, args.seed, 1e-3, name="baseline")
    nets = {
        method: train(baseline, schedule, args.steps, args.seed + 1, 3e-4, c, name=method)
        for method, c in (("control", None), ("ogdm", args.config))
    }
    torch.manual_seed(args.seed)
    noise = torch.randn(2000, 2, 1, 1)
    samples = {m: {n: sample(net, noise, schedule, nfe=n) for n in NFES} for m, net in nets.items()}
    off = {m: {n: float(distance(x).mean()) for n, x in s.items()} for m, s in samples.items()}
    command = shlex.join(["run/toy.sh", *argv])
    print("mean distance to the data, Euler")
    print("NFE     " + "".join(f"{n:>9}" for n in NFES))
    for method, by_nfe in off.items():
        print(f"{method:<8}" + "".join(f"{d:>9.4f}" for d in by_nfe.values()))
    record = {"command": command, "mean_distance": off, "ogdm": args.config.to_dict()}
    write_json(args.out / "toy.json", record)
    plot(samples, off, args.out / "toy.png", command)
    print(args.out / "toy.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
