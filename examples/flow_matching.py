"""OGDM with flow matching, on scikit-learn's digits: `python examples/flow_matching.py`.

A network learns the velocity v = eps - x_0 of the straight path x_t = (1 - t) x_0 + t eps. The
observer and the samplers speak of eps, which follows from v:

    eps = (x_t + (1 - t) v) / ((1 - t) + t),

with 1 - t held at a small number near t = 1 (`RectifiedFlow`). Samples in 10 steps go to a PNG file.
"""

import argparse
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from ogdm_core import Observer, OGDMConfig, RectifiedFlow, sample
from ogdm_core.images import digits, to_uint8
from ogdm_core.schedule import expand


class Velocity(nn.Module):
    """v_theta(x_t [N, 1, 8, 8], t [N] in [0, 1]): residual layers on the 64 pixels."""

    def __init__(self, width: int = 512, layers: int = 4):
        super().__init__()
        self.enter = nn.Linear(64 + 16, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(layers)
        )
        self.leave = nn.Linear(width, 64)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t.float()[:, None] * torch.pi * torch.arange(1, 9, device=x.device)
        h = self.enter(torch.cat([x.flatten(1), angles.sin(), angles.cos()], 1))
        for layer in self.layers:
            h = h + layer(h)
        return self.leave(h).reshape(x.shape)


def to_eps(v: Tensor, x_t: Tensor, t: Tensor, schedule: RectifiedFlow) -> Tensor:
    """The noise eps [N, ...] behind x_t, from the velocity."""
    a, b = expand(schedule.a(t), x_t), expand(schedule.b(t), x_t)
    return (x_t + a * v) / (a + b)


def main(argv: list[str] | None = None) -> None:
    """Trains, then samples."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=3000, help="(default: %(default)s)")
    p.add_argument("--batch", type=int, default=128, help="images per step (default: %(default)s)")
    p.add_argument("--rho", type=float, default=OGDMConfig.rho, help="strength of OGDM (default: %(default)s)")
    p.add_argument("--output", type=Path, default=Path("out/flow_matching.png"), help="(default: %(default)s)")
    args = p.parse_args(argv)

    torch.manual_seed(0)
    data, net, schedule = digits().all(), Velocity(), RectifiedFlow()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    config = OGDMConfig(rho=args.rho, d_kind="light")
    observer = Observer(config, schedule, channels=1, size=8, steps=args.steps)
    for step in range(args.steps):
        rate = 1 - step / args.steps  # of both networks, falls to 0
        optimizer.param_groups[0]["lr"] = 1e-3 * rate
        x_0 = data[torch.randint(len(data), (args.batch,))]
        eps, t = torch.randn_like(x_0), torch.rand(len(x_0))
        x_t = schedule.diffuse(x_0, eps, t)
        v = net(x_t, t)
        matching = (v - (eps - x_0)).square().flatten(1).mean(1)  # per sample
        eps_t = to_eps(v, x_t, t, schedule)
        emission = observer.observe(x_0=x_0, eps=eps, x_t=x_t, t=t, eps_t=eps_t, transition=matching)
        optimizer.zero_grad()
        (matching + emission).mean().backward()
        optimizer.step()
        observer.step(lr_scale=rate)
        if (step + 1) % 100 == 0:
            print(
                f"step {step + 1}: flow matching {matching.mean():.4f}, gamma x emission {emission.mean():.4f}",
                flush=True,
            )

    def eps_fn(x: Tensor, t: Tensor) -> Tensor:
        return to_eps(net(x, t), x, t, schedule)

    with torch.no_grad():
        images = sample(eps_fn, schedule.prior(torch.randn(40, 1, 8, 8)), schedule, sampler="euler", nfe=10)
    framed = nn.functional.pad(to_uint8(images), (1, 1, 1, 1))
    rows = framed.reshape(4, 10, 10, 10).transpose(1, 2).reshape(40, 100)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rows.numpy()).resize((600, 240), Image.Resampling.NEAREST).save(args.output)
    print(f"wrote {args.output}: 40 samples, Euler, 10 network evaluations")


if __name__ == "__main__":
    main()
