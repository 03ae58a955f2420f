"""The observer: owns D, its optimiser and its state.

A trainer touches the method in four places:

    observer = Observer(config, schedule, channels, size)         # 1. build it
    loss = transition + observer.observe(x_0=..., ...)            # 2. add the emission term
    optimizer.step(); observer.step(lr_scale)                     # 3. update D
    state = observer.state_dict()                                 # 4. save and load it

The trainer's own forward pass is handed over, not repeated: Euler's projection costs no evaluation
of the denoiser, Heun's one, D's step none. The observer never touches the global random state.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import cost, distributed
from .checkpoints import differences, format_differences
from .config import OGDMConfig
from .discriminator import KINDS
from .losses import emission_loss, fake_loss, r1_penalty, real_loss
from .random import replayed, seed_of, torch_state
from .schedule import Schedule, expand
from .solvers import ConditionalEpsFn, EpsFn, project, reach, under

STATE_VERSION = 1
DArguments = tuple[Tensor, Tensor, Tensor | None]  # what D is told beside x: unit t, unit s, label


@dataclass
class _Observation:
    """What D's step needs of one microbatch; every tensor is detached."""

    real: Tensor
    fake: Tensor
    t: Tensor
    d_args: DArguments
    emission: Tensor
    fake_logit: Tensor


class Observer:
    """Observation guidance for one trainer.

    config     OGDMConfig
    schedule   noise schedule of the denoiser
    channels   of the (latent) images [N, channels, size, size]
    labels     number of classes that D is conditioned on, or length of its condition's vectors, such as
               text embeddings; 0 for none
    steps      length of the run, for config.plain_end; None where it is not known
    build      makes D from (channels, size, labels, width); by default config.d_kind's, for images.
               With d_mapping_lr other than 1 it needs `mapping_parameters()`
    denoiser   the denoiser as a function of (x [1, C, H, W], t [1]). It is called once, to count what D costs
               beside it, from which d_kind `auto` follows; without it `auto` is the light D
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
        steps: float | None = None,
        denoiser: EpsFn | None = None,
    ):
        schedule.longest_lookahead(config.k)  # raises where k is too small
        self.config, self.schedule, self.device = config, schedule, torch.device(device)
        self._shape: dict[str, Any] = {"channels": channels, "size": size, "labels": labels, "d_width": config.d_width}
        self._build, self.auto = build, config.d_kind == "auto"
        self._operations: float | None = None  # of the denoiser's forward pass
        if denoiser is not None and build is None:
            x = torch.zeros(1, channels, size, size, device=self.device)
            t = torch.full((1,), schedule.T, device=self.device)
            self._operations = cost.operations(lambda: denoiser(x, t), self.device) or None
        self._make_d(cost.choose(config, channels, size, labels, self._operations))
        self.steps, self.total_steps = 0, steps
        self.skipped = torch.zeros((), device=self.device)
        self._outside = torch.zeros((), device=self.device)  # times that the schedule does not have
        self.per_sample: dict[str, Tensor] = {}
        self._pending: list[_Observation] = []
        self._sums: dict[str, tuple[Any, int]] = {}  # of per_sample, and how many they are of
        self._generator = torch.Generator(self.device)

    def _make_d(self, kind: str) -> None:
        """A new D of this kind, and its optimiser."""
        c, shape = replace(self.config, d_kind=kind), self._shape
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(c.seed)  # torch.manual_seed: CUDA's as well
            D = (self._build or KINDS[kind])(shape["channels"], shape["size"], shape["labels"], c.d_width)
        self.config, self._shape = c, shape | {"d_kind": kind}
        self.D = D.to(self.device)
        distributed.broadcast(self.D.parameters())
        self.optimizer = torch.optim.Adam(self._parameter_groups(), lr=c.d_lr, fused=True)

    def about_d(self) -> str:
        """For a trainer's log: D's kind and size and, where the denoiser is known, what it costs."""
        parameters = sum(p.numel() for p in self.D.parameters())
        said = f"D: {self.config.d_kind}, {parameters:,} parameters"
        if self._operations is None:
            return said
        kind, shape = self.config.d_kind, self._shape
        sizes = (shape["channels"], shape["size"], shape["labels"])
        times = cost.cost_of_d(self.config, kind, *sizes, self._operations)
        said += f"; its passes cost about {times:.2g} times the denoiser's step"
        if times > cost.DEAR:
            cheaper = "d_kind light, or a smaller d_width," if kind == "paper" else "a smaller d_width"
            said += f"\nwarning: D costs more than {cost.DEAR:g} steps of the denoiser; {cheaper} costs less"
        return said

    @property
    def watching(self) -> bool:
        """Whether this step observes: always with a fixed gamma, with rho until the plain end of the run."""
        c, total = self.config, self.total_steps
        return c.gamma is not None or not total or self.steps < (1 - c.plain_end) * total

    # ---- 2. the emission term -----------------------------------------------------------------

    def observe(
        self,
        *,
        x_0: Tensor,
        eps: Tensor,
        x_t: Tensor,
        t: Tensor,
        eps_t: Tensor,
        eps_fn: ConditionalEpsFn | None = None,
        cond: Any = None,
        label: Tensor | None = None,
        s: Tensor | None = None,
        rng: list[Tensor] | None = None,
        transition: Tensor | None = None,
    ) -> Tensor:
        """Returns gamma L_emission [N] and queues this microbatch for the next `step`.

        In the plain end of a run it returns zeros and queues nothing.

        x_0, eps   the clean images and the unit noise behind x_t = a_t x_0 + b_t eps
        x_t, t     the denoiser's input [N, C, H, W] and its time [N] in the schedule's own terms
        eps_t      the denoiser's output at (x_t, t), from the trainer's own forward pass
        eps_fn     the denoiser as a function of (x, t), or of (x, t, cond) with a condition; only
                   Heun's projection calls it, once
        cond       the denoiser's condition, whatever it is
        label      what D is conditioned on: classes [N], or vectors [N, labels], of which D sees the
                   direction: one-hot, or a text's pooled embedding
        s          lookahead [N]; drawn if absent
        rng        `random.torch_state` before the trainer's forward pass. Heun's second pass then
                   has the dropout masks of the first, because both evaluations belong to one step
                   of one network
        transition the trainer's own loss per sample [N], from which rho knows how much an error of eps
                   costs at t; absent, the loss is the pixels' mean of (eps_t - eps)^2
        """
        c, schedule = self.config, self.schedule
        if not self.watching:
            return x_t.new_zeros(len(t), dtype=torch.float32)
        self._outside += schedule.outside(t).sum()
        if self.device.type == "cpu":  # elsewhere the count is read with the other numbers
            self._check_times()
        with torch.no_grad():
            if s is None:
                seed = seed_of(c.seed, distributed.rank(), self.steps, len(self._pending))
                s = schedule.sample_lookahead(t, c.k, self._generator.manual_seed(seed))
            u = schedule.lookahead(t, s)
            real = schedule.whiten(schedule.diffuse(x_0.float(), eps.float(), u), u)
        second = eps_fn and under(replayed(rng, self.device)(eps_fn), cond)
        fake = project(c.projection, schedule, x_t.float(), t, u, eps_t.float(), second)
        fake = schedule.whiten(fake.float(), u)
        d_args = (schedule.unit_time(t), schedule.unit_lookahead(s), label)
        if c.fused and torch.is_grad_enabled():
            emission, logit = self._observe_fused(fake, d_args)
        else:
            with _frozen(self.D):
                logit = self._score(fake, d_args)
            emission = emission_loss(logit, c.adversarial)
        if torch.is_grad_enabled():
            self._pending.append(_Observation(real, fake.detach(), t, d_args, emission.detach(), logit.detach()))
        return self._weight(t, u, eps_t, eps, transition) * emission

    def _weight(self, t: Tensor, u: Tensor, eps_t: Tensor, eps: Tensor, transition: Tensor | None) -> Tensor | float:
        """gamma: the fixed one, or [N] for each sample

            gamma = rho w / (slope n (1 + J^2)),   n = C H W

        with w the weight of the pixels' mean of (eps_t - eps)^2 in the trainer's loss, J the reach of the
        projection and slope that of the emission loss where D is at chance. D asks for a shift of the
        projection and eps moves it by J, so that what comes back, the loop gain gamma slope n J^2 / w, is
        below rho for every t, s, image size, schedule and loss.
        """
        if self.config.gamma is not None:
            return self.config.gamma
        J = reach(self.config.projection, self.schedule, t, u)
        w: Tensor | float = 1.0
        if transition is not None:
            error = (eps_t.detach().float() - eps).square().flatten(1).mean(1)
            w = transition.detach().float() / error.clamp(min=1e-12)
        slope = 1.0 if self.config.adversarial == "hinge" else 0.5
        return (self.config.rho * w / (slope * eps[0].numel() * (1 + J**2))).float()

    def _observe_fused(self, fake: Tensor, d_args: DArguments) -> tuple[Tensor, Tensor]:
        """One pass of D over the fakes for both updates.

        D's score is one number per sample, so its input gradient under the emission loss is the
        one under D's own loss times the ratio of the two losses' slopes. D's slope, which is zero
        in the hinge's flat part and far in the tail, is clamped to 1e-10; the ratio cancels it.
        """
        leaf = fake.detach().requires_grad_()
        logit = self._score(leaf, d_args)
        at = logit.detach().requires_grad_()
        emission = emission_loss(at, self.config.adversarial)
        (slope_theta,) = torch.autograd.grad(emission.sum(), at)
        (slope_phi,) = torch.autograd.grad(fake_loss(at, self.config.adversarial).sum(), at)
        slope_phi = slope_phi.clamp(min=1e-10)
        logit.backward(slope_phi)
        assert leaf.grad is not None
        gradient = leaf.grad * expand(slope_theta / slope_phi, leaf)
        return _WithGradient.apply(fake, emission.detach(), gradient), logit.detach()

    # ---- 3. the discriminator's step ----------------------------------------------------------

    def step(self, lr_scale: float) -> None:
        """Updates D on every microbatch observed since the last step.

        Minimises L_D + r1 ||grad D(real)||^2, averaged over samples and ranks; R1 is taken every
        `r1_every` steps with its weight multiplied by it. D's learning rate is d_lr * lr_scale,
        with lr_scale the trainer's own rate over its base rate: D follows the trainer's schedule.
        A gradient that is not finite is skipped and counted, on device. In the plain end of a run only the
        steps are counted.
        """
        if not self.watching:
            self.steps, self.per_sample = self.steps + 1, {}
            return
        if not self._pending:
            raise RuntimeError("observer.step() needs at least one observe() before it")
        c = self.config
        penalise = c.r1 > 0 and self.steps % c.r1_every == 0
        records = [self._backward(o, penalise) for o in self._pending]
        self.per_sample = {name: torch.cat([r[name] for r in records]) for name in records[0]}
        for name, values in self.per_sample.items():
            if name != "t":
                total, count = self._sums.get(name, (0, 0))
                self._sums[name] = total + values.sum(), count + len(values)
        gradients = [p.grad for p in self.D.parameters() if p.grad is not None]
        torch._foreach_div_(gradients, sum(len(o.t) for o in self._pending))
        distributed.average(gradients)
        bad = ~torch.stack(torch._foreach_norm(gradients)).isfinite().all()
        self.skipped += bad
        # Fused Adam leaves weights and moments alone where found_inf is 1, and reads it on device.
        self.optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        for group in self.optimizer.param_groups:
            group["lr"] = c.d_lr * lr_scale * group["multiple"]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._pending.clear()
        self.steps += 1

    def _backward(self, o: _Observation, penalise: bool) -> dict[str, Tensor]:
        """Adds the gradient of one microbatch's summed losses to D's parameters.

        One pass of D over real and fake together, or one over each where R1 needs the gradient of
        the real one. When fused, `observe` has already added the gradient of the fakes.
        """
        c, record = self.config, {"t": o.t, "emission": o.emission}
        if penalise or c.fused:
            real = o.real.detach().requires_grad_(penalise)
            real_logit = self._score(real, o.d_args, full_precision=penalise)
            loss = real_loss(real_logit, c.adversarial).sum()
            if penalise:
                r1 = r1_penalty(real_logit, real)
                loss = loss + c.r1 * c.r1_every * r1.sum()
                record["r1"] = r1.detach()
            fake_logit = o.fake_logit if c.fused else self._score(o.fake, o.d_args)
        else:
            t, s, label = o.d_args
            twice = (t.repeat(2), s.repeat(2), None if label is None else torch.cat([label] * 2))
            both = self._score(torch.cat([o.real, o.fake]), twice, parts=2)
            real_logit, fake_logit = both.chunk(2)
            loss = real_loss(real_logit, c.adversarial).sum()
        if not c.fused:
            loss = loss + fake_loss(fake_logit, c.adversarial).sum()
        loss.backward()
        real_logit, fake_logit = real_logit.detach(), fake_logit.detach()
        return record | {
            "d_loss": real_loss(real_logit, c.adversarial) + fake_loss(fake_logit, c.adversarial),
            "d_real_acc": (real_logit > 0).float(),
            "d_fake_acc": (fake_logit < 0).float(),
        }

    def stats(self) -> dict[str, float]:
        """Means since the last call, on this rank. This is the only host synchronisation."""
        self._check_times()
        means = {name: float(total) / count for name, (total, count) in self._sums.items()}
        self._sums = {}
        return means | {"skipped": float(self.skipped)}

    # ---- 4. state -----------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Tensors and plain values; loads with torch.load(weights_only=True).

        Take it between steps: what was observed since the last step is not part of it.
        """
        return {
            "version": STATE_VERSION,
            "config": self.config.to_dict(),
            "shape": self._shape,
            "schedule": self.schedule.description(),
            "discriminator": self.D.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "skipped": int(self.skipped),
            "sums": {name: (float(total), count) for name, (total, count) in self._sums.items()},
        }

    def load_state_dict(self, state: dict) -> str:
        """Continues from `state_dict()`; returns the settings that differ, in words for the log.

        The settings of this run hold. A state of another discriminator or schedule is refused.
        """
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
            raise ValueError(
                "not an observer's state (or of another version); start without it to train a new discriminator"
            )
        theirs = {"d_kind": "paper"} | state["shape"] | state.get("schedule", {})
        if self.auto and theirs["d_kind"] != self.config.d_kind and theirs["d_kind"] in KINDS:
            self._make_d(theirs["d_kind"])  # a run keeps the D that it began with
        differ = format_differences(differences(theirs, self._shape | self.schedule.description()))
        if differ:
            raise ValueError(
                f"the saved discriminator does not fit this run ({differ}); give the settings it "
                "was trained with, or start without it"
            )
        if len(state["optimizer"]["param_groups"]) != len(self.optimizer.param_groups):
            raise ValueError(
                "the saved discriminator was trained with d_mapping_lr "
                f"{state['config'].get('d_mapping_lr', 1.0):g}, this run has "
                f"{self.config.d_mapping_lr:g}; one of them at 1 and the other not cannot be mixed"
            )
        self.D.load_state_dict(state["discriminator"])
        multiples = [group["multiple"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, multiple in zip(self.optimizer.param_groups, multiples, strict=True):
            group["multiple"] = multiple
        self.optimizer.zero_grad()
        self.steps = int(state["steps"])
        self.skipped.fill_(state["skipped"])
        self._sums = dict(state.get("sums", {}))
        self._pending.clear()
        return format_differences(differences(state["config"], self.config.to_dict()))

    def _check_times(self) -> None:
        """Raises where `observe` was given a time that the schedule does not have."""
        if self._outside > 0:
            T = self.schedule.T
            raise ValueError(
                f"observe: {int(self._outside)} of the times t are not in 1..{T}, which the schedule counts; t = 0 is "
                f"the data. For a network that counts from 0: t = torch.randint(1, {T + 1}, ...), net(x_t, t - 1)"
            )

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """D's parameters; those of its mapping apart where they have a rate of their own."""
        D: Any = self.D
        multiple = self.config.d_mapping_lr
        if multiple == 1:
            return [{"params": list(D.parameters()), "multiple": 1.0}]
        mapping = set(D.mapping_parameters())
        others = [p for p in D.parameters() if p not in mapping]
        mapped = [p for p in D.parameters() if p in mapping]
        return [{"params": others, "multiple": 1.0}, {"params": mapped, "multiple": multiple}]

    def _score(self, x: Tensor, d_args: DArguments, parts: int = 1, full_precision: bool = False) -> Tensor:
        t, s, label = d_args
        low = self.config.d_precision == "bf16" and not full_precision
        with torch.autocast(self.device.type, torch.bfloat16, enabled=low):
            return self.D(x, t, s, label, parts=parts)


def training_loss(
    eps_fn: ConditionalEpsFn,
    x_0: Tensor,
    eps: Tensor,
    t: Tensor,
    schedule: Schedule,
    observer: Observer | None = None,
    label: Tensor | None = None,
    cond: Any = None,
) -> tuple[Tensor, Tensor]:
    """L_transition + gamma L_emission, and L_transition alone, for a network that predicts eps.

    Two scalars from one forward pass at x_t (Heun's projection takes one more):
    L_transition = mean ||eps_theta(x_t, t) - eps||^2. `label` and `cond` are as in `Observer.observe`.
    """
    x_t = schedule.diffuse(x_0, eps, t)
    rng = torch_state(x_t.device)
    eps_t = under(eps_fn, cond)(x_t, t)
    transition = (eps_t - eps).square().mean()
    if observer is None:
        return transition, transition.detach()
    emission = observer.observe(
        x_0=x_0, eps=eps, x_t=x_t, t=t, eps_t=eps_t, eps_fn=eps_fn, cond=cond, label=label, rng=rng
    )
    return transition + emission.mean(), transition.detach()


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
def _frozen(module: torch.nn.Module) -> Iterator[None]:
    """No gradients for the module's parameters, while they still flow to its input."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    for p in parameters:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_(True)
