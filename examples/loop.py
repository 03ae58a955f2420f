"""OGDM in a plain torch training loop: the method is two calls in it, marked "OGDM".

    python examples/loop.py                         scikit-learn's digits, 8x8
    python examples/loop.py --data images.pt        a tensor [N, C, H, W] of floats in [-1, 1]

Trains a small network of its own to predict the noise, then draws samples in 10 steps to a PNG file.
"""

import argparse
import math
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from ogdm_core import DiscreteVP, Observer, OGDMConfig, sample
from ogdm_core.images import digits, to_uint8


class Block(nn.Module):
    """Two convolutions around a shift by the time; adds its output to its input."""

    def __init__(self, width: int):
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.shift = nn.Linear(width, width)
        self.second = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return x + self.second(self.first(x) + self.shift(time)[..., None, None])


class Net(nn.Module):
    """eps_theta(x_t [N, C, H, W], t [N]): blocks at one resolution, which suffices for tiny images."""

    def __init__(self, channels: int, width: int = 48, blocks: int = 4):
        super().__init__()
        self.frequencies = torch.exp(torch.linspace(0, -math.log(10_000), width // 2))
        self.enter = nn.Conv2d(channels, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.leave = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t.float()[:, None] * self.frequencies.to(x.device)
        time, h = torch.cat([angles.sin(), angles.cos()], 1), self.enter(x)
        for block in self.blocks:
            h = block(h, time)
        return self.leave(h)


def save_png(images: Tensor, path: Path, columns: int = 10, zoom: int = 6) -> None:
    """Writes images [N, C, H, W] in [-1, 1], C 1 or 3, side by side; N is a multiple of `columns`."""
    framed = nn.functional.pad(to_uint8(images), (1, 1, 1, 1))
    rows = framed.unflatten(0, (-1, columns)).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    picture = Image.fromarray(rows.squeeze(-1).numpy())
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.resize((zoom * picture.width, zoom * picture.height), Image.Resampling.NEAREST).save(path)


def main(argv: list[str] | None = None) -> None:
    """Trains, then samples."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=Path, help="a file with a tensor of images (default: scikit-learn's digits)")
    p.add_argument("--steps", type=int, default=2000, help="(default: %(default)s)")
    p.add_argument("--batch", type=int, default=64, help="images per step (default: %(default)s)")
    p.add_argument("--rho", type=float, default=OGDMConfig.rho, help="strength of OGDM (default: %(default)s)")
    p.add_argument("--output", type=Path, default=Path("out/loop.png"), help="(default: %(default)s)")
    args = p.parse_args(argv)

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = torch.load(args.data, weights_only=True) if args.data else digits().all()
    channels, size = data.shape[1:3]
    net, schedule = Net(channels).to(device), DiscreteVP.linear(T=1000)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)

    config = OGDMConfig(rho=args.rho, d_kind="light")  # for small images
    observer = Observer(config, schedule, channels, size, device=device, steps=args.steps)

    for step in range(args.steps):
        rate = 1 - step / args.steps  # of both networks, falls to 0
        optimizer.param_groups[0]["lr"] = 2e-3 * rate
        x_0 = data[torch.randint(len(data), (args.batch,))].to(device)
        eps, t = torch.randn_like(x_0), torch.randint(1, 1001, (len(x_0),), device=device)
        x_t = schedule.diffuse(x_0, eps, t)
        eps_t = net(x_t, t)
        transition = (eps_t - eps).square().mean()
        emission = observer.observe(x_0=x_0, eps=eps, x_t=x_t, t=t, eps_t=eps_t).mean()  # OGDM
        optimizer.zero_grad()
        (transition + emission).backward()
        optimizer.step()
        observer.step(lr_scale=rate)  # OGDM: updates D
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: transition {transition:.4f}, gamma x emission {emission:.4f}", flush=True)

    noise = torch.randn(40, *data.shape[1:], device=device)
    with torch.no_grad():
        images = sample(net, schedule.prior(noise), schedule, sampler="euler", nfe=10)
    save_png(images, args.output)
    print(f"wrote {args.output}: 40 samples, Euler, 10 network evaluations")


if __name__ == "__main__":
    main()
