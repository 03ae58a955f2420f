"""The observation's losses, per sample, from D's logits.

With D = sigmoid(logit), the paper's (non-saturating) form is

    L_emission = -log D(x_hat_{t-s}, t, s)                                      eq. (emission)
    L_D        = -log D(x_{t-s}, t, s) - log(1 - D(x_hat_{t-s}, t, s))          eq. (disc_loss)

and the hinge form replaces them by -logit and relu(1 - real) + relu(1 + fake).
"""

import torch
from torch import Tensor
from torch.nn.functional import relu, softplus


def emission_loss(fake_logit: Tensor, adversarial: str) -> Tensor:
    """L_emission [N]: what the denoiser minimises."""
    return -fake_logit if adversarial == "hinge" else softplus(-fake_logit)


def real_loss(real_logit: Tensor, adversarial: str) -> Tensor:
    """The real half of L_D [N]."""
    return relu(1 - real_logit) if adversarial == "hinge" else softplus(-real_logit)


def fake_loss(fake_logit: Tensor, adversarial: str) -> Tensor:
    """The fake half of L_D [N]."""
    return relu(1 + fake_logit) if adversarial == "hinge" else softplus(fake_logit)


def r1_penalty(real_logit: Tensor, real: Tensor) -> Tensor:
    """||grad_x logit(x)||^2 [N] at the real images x [N, ...], itself differentiable."""
    (gradient,) = torch.autograd.grad(real_logit.sum(), real, create_graph=True)
    return gradient.flatten(1).square().sum(1)
