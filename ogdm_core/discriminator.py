"""D_phi(x, t, s[, label]): is x on the real manifold at noise level t - s?

Discriminator        the paper's: residual blocks with equalised learning rates and blurred
                     downsampling; t, s and an optional label pass a mapping network, and the
                     score is its scaled dot product with the image features
LightDiscriminator   plain strided convolutions, for small images and small budgets
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SLOPE = 0.2
GAIN = math.sqrt(2 / (1 + SLOPE**2))


def scaled(z: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """scale z + bias, in one pass over z [N, C, ...].

    We scale the layer's output. Scaling the weights would copy them and keep the copy for the
    backward pass, and at small batches weights are most of D's memory.
    """
    if bias is None:
        return z * scale
    return torch.add(bias.to(z.dtype).reshape(-1, *[1] * (z.ndim - 2)), z, alpha=scale)


def activated(layer: nn.Module, x: Tensor, gain: float = 1.0) -> Tensor:
    """Leaky ReLU of layer(x), scaled to keep the variance of a normal input, times gain.

    leaky(c z) = c leaky(z) for c > 0, so the factors join the layer's own scale. In place: the
    backward pass reads the sign from the result, and no second copy is kept.
    """
    return F.leaky_relu_(layer(x, GAIN * gain), SLOPE)


class Linear(nn.Module):
    """Linear layer with an equalised learning rate: unit weights, scaled by 1 / sqrt(fan-in)."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in))
        self.bias = nn.Parameter(torch.zeros(n_out))
        self.scale = 1 / math.sqrt(n_in)

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        return scaled(F.linear(x, self.weight), self.scale * gain, self.bias * gain)


class Conv(nn.Module):
    """Convolution with an equalised learning rate; with `down`, blurred, then at stride 2."""

    def __init__(self, n_in: int, n_out: int, kernel: int, bias: bool = True, down: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(n_out)) if bias else None
        self.scale = 1 / math.sqrt(n_in * kernel**2)
        self.kernel, self.down = kernel, down
        self.blur: Tensor
        if down:
            tap = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
            self.register_buffer("blur", torch.outer(tap, tap)[None, None], persistent=False)

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        bias = None if self.bias is None else self.bias * gain
        return scaled(self.convolve(x), self.scale * gain, bias)

    def convolve(self, x: Tensor) -> Tensor:
        """The convolution alone, with weights as they are stored."""
        if not self.down:
            return F.conv2d(x, self.weight, padding=self.kernel // 2)
        blur = self.blur.expand(x.shape[1], 1, 4, 4).to(x.dtype)
        if self.kernel == 1:  # blur only where the stride lands
            x = F.conv2d(x, blur, stride=2, padding=1, groups=x.shape[1])
            return F.conv2d(x, self.weight)
        x = F.conv2d(x, blur, padding=2, groups=x.shape[1])
        return F.conv2d(x, self.weight, stride=2)


class Block(nn.Module):
    """Residual block that halves the resolution: (F(x) + skip(x)) / sqrt(2)."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__()
        self.conv_0 = Conv(n_in, n_in, 3)
        self.conv_1 = Conv(n_in, n_out, 3, down=True)
        self.skip = Conv(n_in, n_out, 1, bias=False, down=True)

    def forward(self, x: Tensor) -> Tensor:
        half = math.sqrt(0.5)
        y = activated(self.conv_1, activated(self.conv_0, x), half)
        return torch.add(y, self.skip.convolve(x), alpha=self.skip.scale * half)


def minibatch_std(x: Tensor, parts: int = 1, most: int = 4) -> Tensor:
    """Appends one channel: the mean standard deviation within groups of up to `most` samples.

    Groups are runs of neighbours inside each of the `parts` equal parts of the batch, so real and
    fake never mix, and a batch split over ranks has the groups of the whole. The statistic is
    observed, not differentiated: each score's gradient stays its own sample's.
    """
    n = len(x) // parts
    size = max(g for g in range(1, most + 1) if n % g == 0)
    y = x.detach().float().reshape(-1, size, *x.shape[1:])
    variance = (y - y.mean(1, keepdim=True)).square().mean(1)
    std = (variance + 1e-8).sqrt().mean((1, 2, 3))
    std = std.repeat_interleave(size).to(x.dtype).reshape(-1, 1, 1, 1)
    return torch.cat([x, std.expand(-1, 1, *x.shape[2:])], 1)


def embed_time(t: Tensor, dim: int = 64) -> Tensor:
    """Sines and cosines of 1000 t at geometric frequencies: [N] in [0, 1] -> [N, dim]."""
    frequency = torch.exp(-math.log(10_000) * torch.arange(dim // 2, device=t.device) / (dim // 2))
    angle = 1000 * t.float()[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], 1)


class ImageDiscriminator(nn.Module):
    """D_phi of images: checks x [N, channels, size, size] and label, [N] or [N, labels].

    size     a power of two from 8
    labels   number of classes, or length of the vectors that stand for a condition; 0 for none
    """

    def __init__(self, channels: int, size: int, labels: int):
        super().__init__()
        if size < 8 or size & (size - 1):
            raise ValueError(
                f"D needs square images of a power-of-two size from 8, got {size}; resize or pad the images"
            )
        self.channels, self.size, self.labels = channels, size, labels

    def check(self, x: Tensor) -> None:
        """Refuses images of another shape."""
        expected = (self.channels, self.size, self.size)
        if x.shape[1:] != expected:
            raise ValueError(f"D expects images of shape {expected}, got {tuple(x.shape[1:])}")

    def unit_label(self, label: Tensor | None) -> Tensor:
        """[N, labels] of unit length: one-hot of classes [N], or vectors [N, labels] over their length."""
        if label is None:
            raise ValueError(f"D knows {self.labels} classes and was given no label")
        if label.ndim != 1 and label.shape[1:] != (self.labels,):
            raise ValueError(
                f"D expects labels of shape [N] or [N, {self.labels}], got {list(label.shape)}; its size is set by "
                "`labels` of the Observer"
            )
        return F.one_hot(label.long(), self.labels).float() if label.ndim == 1 else F.normalize(label.float())


class Discriminator(ImageDiscriminator):
    """D_phi as logits: D = sigmoid(logit).

    width   1 gives min(32768 / resolution, 512) channels at each resolution
    """

    def __init__(self, channels: int, size: int, labels: int = 0, width: float = 1.0):
        super().__init__(channels, size, labels)

        def at(resolution: int) -> int:
            return max(8, round(width * min(32768 // resolution, 512) / 8) * 8)

        resolutions = [2**i for i in range(size.bit_length() - 1, 2, -1)]
        self.first = Conv(channels, at(size), 1)
        self.blocks = nn.ModuleList(Block(at(r), at(r // 2)) for r in resolutions)
        top = at(4)
        self.conv = Conv(top + 1, top, 3)
        self.dense = Linear(top * 16, top)
        self.out = Linear(top, top)
        self.embed_label = Linear(labels, 64) if labels else None
        inputs = 128 + (64 if labels else 0)
        self.mapping = nn.ModuleList(Linear(inputs if i == 0 else top, top) for i in range(8))

    def mapping_parameters(self) -> list[nn.Parameter]:
        """The parameters of the mapping of (t, s[, label])."""
        embedding = [] if self.embed_label is None else self.embed_label.parameters()
        return [*embedding, *self.mapping.parameters()]

    def condition(self, t: Tensor, s: Tensor, label: Tensor | None) -> Tensor:
        """The vector [N, C] that the features are compared with."""
        parts = [embed_time(t), embed_time(s)]
        if self.embed_label is not None:
            parts.append(self.embed_label(self.unit_label(label)) * math.sqrt(self.labels))
        z = torch.cat(parts, 1)
        z = z * (z.square().mean(1, keepdim=True) + 1e-8).rsqrt()
        for layer in self.mapping:
            z = activated(layer, z)
        return z

    def forward(self, x: Tensor, t: Tensor, s: Tensor, label: Tensor | None = None, parts: int = 1) -> Tensor:
        """Logits [N] of x [N, C, H, W] at t, s [N] in [0, 1]; label [N] or vectors [N, labels]."""
        self.check(x)
        x = activated(self.first, x)
        for block in self.blocks:
            x = block(x)
        x = activated(self.conv, minibatch_std(x, parts))
        features = self.out(activated(self.dense, x.flatten(1))).float()
        z = self.condition(t, s, label).float()
        return (features * z).sum(1) / math.sqrt(z.shape[1])


class LightDiscriminator(ImageDiscriminator):
    """D_phi as logits: out(h) + <h, z> / sqrt(C), h of the image, z of (t, s[, label]).

    Its weights have torch's own initialisation, about 1 / sqrt(fan-in), and move by the full
    learning rate; equalised ones are about 1. So it learns faster at the same rate.

    width   1 gives 32 channels at full resolution and 64 below
    """

    def __init__(self, channels: int, size: int, labels: int = 0, width: float = 1.0):
        super().__init__(channels, size, labels)
        first, rest = (max(8, round(width * n / 8) * 8) for n in (32, 64))
        halvings = size.bit_length() - 2  # down to 2x2
        self.first = nn.Conv2d(channels, first, 3, padding=1)
        self.convs = nn.ModuleList(
            nn.Conv2d(rest if i else first, rest, 3, padding=1, stride=2) for i in range(halvings)
        )
        self.dense = nn.Linear(rest * 4, rest)
        self.out = nn.Linear(rest, 1)
        inputs = 128 + labels
        self.condition = nn.Sequential(nn.Linear(inputs, rest), nn.SiLU(), nn.Linear(rest, rest))

    def mapping_parameters(self) -> list[nn.Parameter]:
        return list(self.condition.parameters())

    def forward(self, x: Tensor, t: Tensor, s: Tensor, label: Tensor | None = None, parts: int = 1) -> Tensor:
        """Logits [N] of x [N, C, H, W] at t, s [N] in [0, 1]; label [N] or vectors [N, labels].

        Every score depends on its own sample alone, so `parts` makes no difference here.
        """
        self.check(x)
        given = [embed_time(t), embed_time(s)]
        if self.labels:
            given.append(self.unit_label(label))
        h = F.leaky_relu(self.first(x), SLOPE)
        for conv in self.convs:
            h = F.leaky_relu(conv(h), SLOPE)
        h = F.leaky_relu(self.dense(h.flatten(1)), SLOPE)
        z = self.condition(torch.cat(given, 1))
        return (self.out(h)[:, 0] + (h * z).sum(1) / math.sqrt(h.shape[1])).float()


KINDS: dict[str, Callable[..., nn.Module]] = {"paper": Discriminator, "light": LightDiscriminator}
