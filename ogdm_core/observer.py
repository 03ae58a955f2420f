"""The observer: owns D, its optimiser and its state, and takes turns with the trainer.

A trainer touches the method in four places:

    observer = Observer(config, schedule, channels, size)         # 1. build it
    loss = transition + observer.observe(x_0=..., ...)            # 2. add the emission term
    optimizer.step(); observer.step()                             # 3. let D take its step
    state = observer.state_dict()                                 # 4. save and load it

The trainer's own forward pass is handed over, not repeated: Euler's projection costs no evaluation
of the denoiser, Heun's one, D's step none. The observer never touches the global random state.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from .config import OGDMConfig
from .discriminator import Discriminator
from .light import LightDiscriminator
from .lookahead import reach, sample_lookahead
from .losses import emission_loss, fake_loss, r1_penalty, real_loss
from .schedule import Schedule, expand
from .solvers import EpsFn, project

STATE_VERSION = 1
KINDS = {"paper": Discriminator, "light": LightDiscriminator}


@dataclass
class _Observation:
    """What D's step needs of one microbatch: all detached."""

    real: Tensor
    fake: Tensor
    t: Tensor
    condition: tuple[Tensor, Tensor, Tensor | None]
    emission: Tensor
    fake_logit: Tensor


class Observer:
    """Observation guidance for one trainer.

    config     OGDMConfig
    schedule   noise schedule of the denoiser
    channels   of the (latent) images [N, channels, size, size]
    labels     number of classes that D is told about, 0 for none
    build      makes D from (channels, size, labels, width); by default config.d_kind's, for images
    """

    def __init__(
        self,
        config: OGDMConfig,
        schedule: Schedule,
        channels: int,
        size: int,
        labels: int = 0,
        device: torch.device | str = "cpu",
        build: Callable[..., torch.nn.Module] | None = None,
    ):
        reach(schedule, config.k)
        self.config, self.schedule, self.device = config, schedule, torch.device(device)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.seed)  # torch.manual_seed: CUDA's as well
            D = (build or KINDS[config.d_kind])(channels, size, labels, config.d_width)
        self.D = D.to(self.device)
        self._built_for = {"channels": channels, "size": size, "labels": labels}
        for p in self.D.parameters():
            _broadcast(p)
        self.optimizer = torch.optim.Adam(
            self.D.parameters(), lr=config.d_lr, betas=config.d_betas, fused=True
        )
        self.steps = 0
        self.skipped = torch.zeros((), device=self.device)
        self.per_sample: dict[str, Tensor] = {}
        self._pending: list[_Observation] = []
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._generator = torch.Generator(self.device)

    # ---- 2. the emission term -----------------------------------------------------------------

    def observe(
        self,
        *,
        x_0: Tensor,
        eps: Tensor,
        x_t: Tensor,
        t: Tensor,
        eps_t: Tensor,
        eps_fn: EpsFn | None = None,
        label: Tensor | None = None,
        s: Tensor | None = None,
    ) -> Tensor:
        """gamma L_emission [N] of one microbatch, and a note for D's next step.

        x_0, eps   the clean images and the unit noise behind x_t = a_t x_0 + b_t eps
        x_t, t     the denoiser's input [N, C, H, W] and its time [N] in the schedule's own terms
        eps_t      the denoiser's answer at (x_t, t), from the trainer's own forward pass
        eps_fn     the denoiser as a function of (x, t); only Heun's projection asks it, once
        s          lookahead [N]; drawn if absent
        """
        c, schedule = self.config, self.schedule
        with torch.no_grad():
            if s is None:
                s = sample_lookahead(schedule, t, c.k, self._seeded())
            u = schedule.lookahead(t, s)
            real = schedule.whiten(schedule.diffuse(x_0.float(), eps.float(), u), u)
        fake = project(
            c.projection, schedule, x_t.float(), t, u, eps_t.float(), self._apart(eps_fn)
        )
        fake = schedule.whiten(fake.float(), u)
        condition = (schedule.unit_time(t), schedule.unit_lookahead(s), label)
        if c.fused and torch.is_grad_enabled():
            emission, logit = self._observe_fused(fake, condition)
        else:
            with _frozen(self.D):
                logit = self._score(fake, condition)
            emission = emission_loss(logit, c.adversarial)
        if torch.is_grad_enabled():
            self._pending.append(
                _Observation(real, fake.detach(), t, condition, emission.detach(), logit.detach())
            )
        if c.t_max < 1:
            emission = emission * (condition[0] <= c.t_max)
        return c.gamma * emission

    def _observe_fused(self, fake: Tensor, condition) -> tuple[Tensor, Tensor]:
        """One pass of D over the fakes for both updates.

        D's score is one number a sample, so its input gradient under the emission loss is the one
        under D's own loss times the ratio of the two losses' slopes. Where D's slope is zero
        (hinge, or far in the tail) a negligible one stands in, which the ratio undoes.
        """
        leaf = fake.detach().requires_grad_()
        logit = self._score(leaf, condition)
        at = logit.detach().requires_grad_()
        emission = emission_loss(at, self.config.adversarial)
        (slope_theta,) = torch.autograd.grad(emission.sum(), at)
        (slope_phi,) = torch.autograd.grad(fake_loss(at, self.config.adversarial).sum(), at)
        slope_phi = slope_phi.clamp(min=1e-10)
        logit.backward(slope_phi)
        gradient = leaf.grad * expand(slope_theta / slope_phi, leaf)
        return _WithGradient.apply(fake, emission.detach(), gradient), logit.detach()

    # ---- 3. the discriminator's step ----------------------------------------------------------

    def step(self, lr_scale: float = 1.0) -> None:
        """D's step over every microbatch observed since the last one.

        Minimises L_D + r1 ||grad D(real)||^2, averaged over samples and ranks; R1 is taken every
        `r1_every` steps with its weight multiplied by it. A gradient that is not finite is skipped
        and counted, on device.
        """
        if not self._pending:
            raise RuntimeError("observer.step() needs at least one observe() before it")
        c = self.config
        penalise = c.r1 > 0 and self.steps % c.r1_every == 0
        records = [self._backward(o, penalise) for o in self._pending]
        self.per_sample = {name: torch.cat([r[name] for r in records]) for name in records[0]}
        for name, values in self.per_sample.items():
            if name != "t":
                self._sums[name] = self._sums.get(name, 0) + values.sum()
                self._counts[name] = self._counts.get(name, 0) + values.numel()
        gradients = [p.grad for p in self.D.parameters()]
        torch._foreach_div_(gradients, sum(len(o.t) for o in self._pending))
        _average_over_ranks(gradients)
        bad = ~torch.stack(torch._foreach_norm(gradients)).isfinite().all()
        self.skipped += bad
        self.optimizer.found_inf = bad.float()
        for group in self.optimizer.param_groups:
            group["lr"] = c.d_lr * lr_scale
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._pending.clear()
        self.steps += 1

    def _backward(self, o: _Observation, penalise: bool) -> dict[str, Tensor]:
        """Adds the gradient of one microbatch's summed losses to D's parameters."""
        c, n = self.config, len(o.t)
        if c.fused or penalise:
            real = o.real.requires_grad_(penalise)
            real_logit = self._score(real, o.condition, full_precision=penalise)
            loss = real_loss(real_logit, c.adversarial).sum()
            if penalise:
                r1 = r1_penalty(real_logit, real)
                loss = loss + c.r1 * c.r1_every * r1.sum()
            fake_logit = o.fake_logit
            if not c.fused:
                fake_logit = self._score(o.fake, o.condition)
                loss = loss + fake_loss(fake_logit, c.adversarial).sum()
        else:
            t, s, label = o.condition
            twice = (t.repeat(2), s.repeat(2), None if label is None else torch.cat([label] * 2))
            logits = self._score(torch.cat([o.real, o.fake]), twice, parts=2)
            real_logit, fake_logit = logits[:n], logits[n:]
            loss = (
                real_loss(real_logit, c.adversarial) + fake_loss(fake_logit, c.adversarial)
            ).sum()
        loss.backward()
        real_logit, fake_logit = real_logit.detach(), fake_logit.detach()
        record = {
            "t": o.t,
            "emission": o.emission,
            "d_loss": real_loss(real_logit, c.adversarial) + fake_loss(fake_logit, c.adversarial),
            "d_real_acc": (real_logit > 0).float(),
            "d_fake_acc": (fake_logit < 0).float(),
        }
        return record | ({"r1": r1.detach()} if penalise else {})

    def stats(self) -> dict[str, float]:
        """Means since the last call, on this rank. Reading them is the only host sync."""
        means = {name: float(self._sums[name]) / self._counts[name] for name in self._sums}
        self._sums, self._counts = {}, {}
        return means | {"skipped": float(self.skipped)}

    # ---- 4. state -----------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Tensors and plain values; loads with torch.load(weights_only=True).

        Take it between steps: what was observed since the last step is not part of it.
        """
        return {
            "version": STATE_VERSION,
            "config": self.config.to_dict(),
            "shape": self._shape(),
            "discriminator": self.D.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "skipped": int(self.skipped),
        }

    def load_state_dict(self, state: dict) -> None:
        """Continues from `state_dict()`; a state of another discriminator is refused."""
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
            raise ValueError(
                "not an observer's state (or of another version); start without it to train a "
                "new discriminator"
            )
        theirs, ours = {"d_kind": "paper"} | state["shape"], self._shape()
        if theirs != ours:
            differ = ", ".join(f"{k} {theirs.get(k)} != {v}" for k, v in ours.items()
                               if theirs.get(k) != v)  # fmt: skip
            raise ValueError(
                f"the saved discriminator does not fit this run ({differ}); give the settings it "
                "was trained with, or start without it"
            )
        self.D.load_state_dict(state["discriminator"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["betas"] = self.config.d_betas
        self.optimizer.zero_grad()
        self.steps = int(state["steps"])
        self.skipped.fill_(state["skipped"])
        self._pending.clear()

    def _shape(self) -> dict[str, float | str]:
        c = self.config
        return self._built_for | {"d_kind": c.d_kind, "d_width": c.d_width}

    # ---- helpers ------------------------------------------------------------------------------

    def _score(self, x: Tensor, condition, parts: int = 1, full_precision: bool = False) -> Tensor:
        t, s, label = condition
        low = self.config.d_precision == "bf16" and not full_precision
        with torch.autocast(self.device.type, torch.bfloat16, enabled=low):
            return self.D(x, t, s, label, parts=parts)

    def _apart(self, eps_fn: EpsFn | None) -> EpsFn | None:
        """eps_fn that leaves the random state as it found it, whatever dropout draws inside."""
        devices = [self.device] if self.device.type == "cuda" else []

        def apart(x: Tensor, t: Tensor) -> Tensor:
            with torch.random.fork_rng(devices=devices):
                return eps_fn(x, t)

        return eps_fn and apart

    def _seeded(self) -> torch.Generator:
        """The generator for the next draw: a function of (seed, rank, step, microbatch) alone."""
        key = f"{self.config.seed}/{_rank()}/{self.steps}/{len(self._pending)}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little")
        return self._generator.manual_seed(seed)


class _WithGradient(torch.autograd.Function):
    """`value` [N] of x [N, ...] whose gradient with respect to x is already known."""

    @staticmethod
    def forward(ctx, x: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        (gradient,) = ctx.saved_tensors
        return expand(grad_output, gradient) * gradient, None, None


@contextlib.contextmanager
def _frozen(module: torch.nn.Module):
    """No gradients for the module's parameters, while they still flow to its input."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    for p in parameters:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_(True)


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _rank() -> int:
    return dist.get_rank() if _distributed() else 0


def _broadcast(p: Tensor) -> None:
    if _distributed():
        dist.broadcast(p.data, 0)


def _average_over_ranks(gradients: list[Tensor]) -> None:
    """Means over ranks, in place, with one collective call."""
    if not _distributed():
        return
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([g.numel() for g in gradients])
    torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])
