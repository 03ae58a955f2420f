import math

import pytest
import torch
from torch.nn import functional as F

from ogdm_core.discriminator import GAIN, SLOPE, Block, Conv, Discriminator, Linear, activated


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_scaled_weights(layer, x):
    """What a layer computes, with its scale on the weights."""
    weight = layer.weight * layer.scale
    if isinstance(layer, Linear):
        return F.linear(x, weight, layer.bias)
    if not layer.down:
        return F.conv2d(x, weight, layer.bias, padding=layer.kernel // 2)
    blur = layer.blur.expand(x.shape[1], 1, 4, 4)
    blurred = F.conv2d(x, blur, padding=2, groups=x.shape[1])
    if layer.kernel == 1:
        return F.conv2d(blurred[..., 1:-1, 1:-1], weight, layer.bias, stride=2)
    return F.conv2d(blurred, weight, layer.bias, stride=2)


def derivatives(f, x, parameters):
    """f(x), its gradient, and the gradients of a loss with a gradient penalty."""
    x = x.clone().requires_grad_()
    y = f(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return [y, gradient, *torch.autograd.grad(gradient.square().sum() + y.sum(), parameters)]


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (Linear(5, 4), (3, 5)),
        (Conv(3, 4, 3), (2, 3, 8, 8)),
        (Conv(3, 4, 3, down=True), (2, 3, 8, 8)),
        (Conv(3, 4, 1, down=True), (2, 3, 8, 8)),
    ],
)
def test_scaled_results_are_results_of_scaled_weights(layer, shape):
    layer = layer.double()
    with torch.no_grad():
        layer.bias += noise(*layer.bias.shape)
    x, parameters = noise(*shape, seed=1), list(layer.parameters())
    ours = derivatives(lambda x: activated(layer, x), x, parameters)
    theirs = derivatives(lambda x: GAIN * F.leaky_relu(with_scaled_weights(layer, x), SLOPE), x, parameters)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_block_is_its_formula():
    block, x = Block(3, 4).double(), noise(2, 3, 8, 8)
    parameters = [p for p in block.parameters() if p.ndim > 1]

    def formula(x):
        y = x
        for layer in (block.conv_0, block.conv_1):
            y = GAIN * F.leaky_relu(with_scaled_weights(layer, y), SLOPE)
        return (y + with_scaled_weights(block.skip, x)) * math.sqrt(0.5)

    for a, b in zip(derivatives(block, x, parameters), derivatives(formula, x, parameters), strict=True):
        torch.testing.assert_close(a, b)


def test_the_backward_pass_keeps_no_copy_of_the_weights():
    D = Discriminator(3, 8, width=0.25)
    own = {p.untyped_storage().data_ptr() for p in D.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logit = D(torch.zeros(1, 3, 8, 8), torch.zeros(1), torch.zeros(1))
    assert logit.requires_grad
    assert sum(kept.values()) < sum(p.numel() * 4 for p in D.parameters()) / 4
