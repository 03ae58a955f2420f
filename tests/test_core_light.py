"""The light discriminator: shapes, what its score depends on, that it learns, that it is light."""

import pytest
import torch
from core_toys import TinyNet, inputs, make_batch, make_observer, observe
from torch.nn.functional import softplus
from torch.utils.flop_counter import FlopCounterMode

from ogdm_core import Discriminator, LightDiscriminator


def make(size=8, channels=3, labels=0, width=0.25, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LightDiscriminator(channels, size, labels, width)


@pytest.mark.parametrize("size", [8, 16, 32, 64])
@pytest.mark.parametrize("channels", [1, 4])
def test_one_logit_an_image_at_every_size(size, channels):
    D = make(size, channels)
    x, t, s = inputs(4, size, channels)
    x.requires_grad_()
    logit = D(x, t, s)
    assert logit.shape == (4,) and logit.dtype == torch.float32
    logit.sum().backward()
    for gradient in [x.grad, *(p.grad for p in D.parameters())]:
        assert bool(gradient.isfinite().all()) and bool((gradient != 0).any())


@pytest.mark.parametrize("size", [0, 4, 12, 33])
def test_sizes_that_are_not_powers_of_two_from_8_are_refused(size):
    with pytest.raises(ValueError, match=f"power-of-two size from 8, got {size}; resize or pad"):
        LightDiscriminator(3, size)


def test_images_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"expects images of shape \(3, 8, 8\), got \(1, 8, 8\)"):
        make()(torch.zeros(4, 1, 8, 8), torch.zeros(4), torch.zeros(4))


def test_the_score_depends_on_image_t_s_and_label_and_on_its_own_sample_alone():
    D = make(labels=10)
    x, t, s = inputs()
    label = torch.tensor([0, 3, 5, 9])
    score = D(x, t, s, label).detach()
    for other in (D(x + 1, t, s, label), D(x, t / 2, s, label), D(x, t, s / 2, label),
                  D(x, t, s, label.flip(0))):  # fmt: skip
        assert float((other.detach() - score).abs().max()) > 1e-4
    torch.testing.assert_close(D(x[1:2], t[1:2], s[1:2], label[1:2])[0], score[1])
    one_hot = torch.nn.functional.one_hot(label, 10).float()
    torch.testing.assert_close(D(x, t, s, one_hot), score)
    with pytest.raises(ValueError, match="10 classes and was given no label"):
        D(x, t, s)


def test_it_learns_within_a_hundred_steps_what_the_papers_cannot_at_the_same_rate():
    """Real and fake differ by a faint pattern, the kind that a good denoiser leaves."""
    torch.manual_seed(0)
    pattern = 0.2 * torch.randn(1, 1, 8, 8)

    def final_loss(D):
        optimizer, losses = torch.optim.Adam(D.parameters(), lr=1e-3), []
        generator = torch.Generator().manual_seed(1)
        for _ in range(100):
            x = torch.randn(128, 1, 8, 8, generator=generator)
            x[:64] += pattern
            t = torch.rand(128, generator=generator)
            logit = D(x, t, t / 3)
            loss = (softplus(-logit[:64]) + softplus(logit[64:])).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return sum(losses[-20:]) / 20

    light = final_loss(make(channels=1, width=1))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        paper = final_loss(Discriminator(1, 8, width=0.0625))
    assert light < 0.9 and light < paper - 0.1


def test_it_costs_a_hundredth_of_the_papers():
    def cost(D):
        x, t, s = inputs(2, 32)
        with FlopCounterMode(display=False) as counter:
            D(x, t, s)
        return counter.get_total_flops()

    assert cost(LightDiscriminator(3, 32)) < cost(Discriminator(3, 32, width=0.25)) / 10


@pytest.mark.parametrize("fused", [False, True])
def test_an_observer_trains_with_it(fused):
    observer, net = make_observer(d_kind="light", d_width=0.25, fused=fused), TinyNet()
    assert isinstance(observer.D, LightDiscriminator)
    before = [p.clone() for p in observer.D.parameters()]
    batch, s = make_batch(observer.schedule)
    observe(observer, batch, net, s=s).mean().backward()
    observer.step(1.0)
    assert all(bool((p != q).any()) for p, q in zip(observer.D.parameters(), before, strict=True))
