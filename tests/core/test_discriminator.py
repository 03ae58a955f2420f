import math

import pytest
import torch
from torch.nn import functional as F

from ogdm_core import Discriminator
from ogdm_core.discriminator import KINDS, Conv, embed_time, minibatch_std
from tests.core.toys import inputs


def make(kind="paper", size=8, channels=3, labels=0, width=None, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return KINDS[kind](channels, size, labels, width or {"paper": 0.02, "light": 0.25}[kind])


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("size", [8, 16, 32, 64])
@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_one_logit_per_image_at_every_size(kind, size, channels):
    D = make(kind, size, channels)
    x, t, s = inputs(4, size, channels)
    x.requires_grad_()
    logit = D(x, t, s)
    assert logit.shape == (4,) and logit.dtype == torch.float32
    logit.sum().backward()
    for gradient in [x.grad, *(p.grad for p in D.parameters())]:
        assert bool(gradient.isfinite().all()) and bool((gradient != 0).any())


@pytest.mark.parametrize("size", [0, 1, 4, 12, 28, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_are_not_powers_of_two_from_8_are_refused(kind, size):
    with pytest.raises(ValueError, match=f"power-of-two size from 8, got {size}; resize or pad"):
        make(kind, size)


@pytest.mark.parametrize("shape", [(4, 1, 8, 8), (4, 3, 16, 16), (4, 3, 8, 16)])
@pytest.mark.parametrize("kind", KINDS)
def test_images_of_another_shape_are_refused(kind, shape):
    D = make(kind)
    with pytest.raises(ValueError, match=r"expects images of shape \(3, 8, 8\), got"):
        D(torch.zeros(shape), torch.zeros(4), torch.zeros(4))


def test_width_one_is_the_papers_size(monkeypatch):
    monkeypatch.setattr(torch, "randn", torch.empty)  # only shapes matter
    small, large, half = (Discriminator(3, size, width=w) for size, w in [(32, 1), (256, 1), (32, 0.5)])
    assert small.first.weight.shape == (512, 3, 1, 1)
    assert [b.conv_1.weight.shape[:2] for b in small.blocks] == [(512, 512)] * 3
    assert [b.conv_1.weight.shape[:2] for b in large.blocks[:4]] == [(256, 128), (512, 256), (512, 512), (512, 512)]
    assert len(small.mapping) == 8
    assert half.first.weight.shape[0] == 256
    count = [sum(p.numel() for p in D.parameters()) for D in (half, small)]
    assert 3 < count[1] / count[0] < 4


# ---------------------------------------------------------------- condition


@pytest.mark.parametrize("kind", KINDS)
def test_the_score_depends_on_the_image_on_t_on_s_and_on_the_label(kind):
    D = make(kind, labels=3)
    x, t, s = inputs(1)
    label = torch.tensor([0])
    others = [(x + 1, t, s, label), (x, t + 0.05, s, label), (x, t, s + 0.05, label),
              (x, s, t, label), (x, t, s, label + 1)]  # fmt: skip
    with torch.no_grad():
        base = D(x, t, s, label)
        for other in others:
            assert abs(float(D(*other) - base)) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_integer_and_one_hot_labels_agree_and_a_missing_one_is_explained(kind):
    D = make(kind, labels=5)
    x, t, s = inputs(6)
    label = torch.tensor([0, 4, 2, 2, 1, 3])
    one_hot = F.one_hot(label, 5).float()
    assert torch.equal(D(x, t, s, label), D(x, t, s, one_hot))
    assert not torch.equal(D(x, t, s, label), D(x, t, s, label.flip(0)))
    with pytest.raises(ValueError, match="knows 5 classes and was given no label"):
        D(x, t, s)


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_is_a_condition_by_its_direction(kind):
    D = make(kind, labels=7)
    x, t, s = inputs(4)
    text = 30 * torch.randn(4, 7, generator=torch.Generator().manual_seed(1)).half()
    with torch.no_grad():
        torch.testing.assert_close(D(x, t, s, text), D(x, t, s, text / 10), rtol=1e-3, atol=1e-3)
        assert bool((D(x, t, s, text) != D(x, t, s, text.roll(1, 0))).all())
        nothing = D(x, t, s, torch.zeros(4, 7))
    assert bool(nothing.isfinite().all()), "a condition that was dropped may be zeros"
    with pytest.raises(ValueError, match=r"expects labels of shape \[N\] or \[N, 7\], got \[4, 8\]"):
        D(x, t, s, torch.zeros(4, 8))


def test_one_hot_labels_are_of_unit_length_to_the_last_bit():
    one_hot = torch.eye(1000)
    assert torch.equal(make(labels=1000).unit_label(one_hot), one_hot)


def test_an_unconditional_d_ignores_labels():
    D = make()
    x, t, s = inputs()
    assert torch.equal(D(x, t, s), D(x, t, s, torch.zeros(4, 0)))


def test_neighbouring_times_of_a_fine_grid_are_told_apart():
    e = embed_time(torch.arange(1, 1001) / 1000)
    assert e.shape == (1000, 64)
    assert float((e[1:] - e[:-1]).norm(dim=1).min()) > 0.5
    assert float(e.abs().max()) <= 1


# ---------------------------------------------------------------- minibatch standard deviation


def test_minibatch_std_worked_by_hand():
    # Values 1, 3 in one pixel and 0, 0 in the other: deviations 1 and 0, mean 1/2.
    x = torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 5.0], [5.0, 5.0]]).reshape(4, 2, 1, 1)
    channel = minibatch_std(x, most=2)[:, -1].flatten()
    assert channel.tolist() == pytest.approx([0.5, 0.5, 0, 0], abs=1e-3)
    assert torch.equal(minibatch_std(x, most=2)[:, :-1], x)


@pytest.mark.parametrize(("n", "group"), [(1, 1), (2, 2), (3, 3), (5, 1), (6, 3), (8, 4), (10, 2)])
def test_groups_are_the_largest_that_divide_the_batch(n, group):
    x = torch.randn(n, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    expected = [part.std(0, unbiased=False).mean() for part in x.split(group)]
    channel = minibatch_std(x)[:, -1]
    assert bool((channel == channel[:, :1, :1]).all())
    torch.testing.assert_close(channel[:, 0, 0], torch.stack(expected).repeat_interleave(group), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("n", [4, 6, 5])
def test_real_and_fake_never_share_a_group(n):
    D = make()
    real, t, s = inputs(n)
    twice = t.repeat(2), s.repeat(2)
    with torch.no_grad():
        alone = D(real, t, s)
        for seed, scale in [(1, 1), (2, 50)]:
            fake = scale * inputs(n, seed=seed)[0]
            both = D(torch.cat([real, fake]), *twice, parts=2)
            torch.testing.assert_close(both[:n], alone)
            torch.testing.assert_close(both[n:], D(fake, t, s))


def test_the_statistic_is_used_but_each_score_has_its_own_gradient():
    D = make()
    x, t, s = inputs(4)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(D(x, t, s)[1], x)
    assert bool((gradient[1] != 0).any())
    assert not bool(gradient[[0, 2, 3]].any())
    with torch.no_grad():
        changed = torch.cat([x[:3], 3 * x[3:]])
        assert not torch.allclose(D(changed, t, s)[1], D(x, t, s)[1])


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize("kernel", [1, 3])
def test_downsampling_blurs_first(kernel):
    conv = Conv(2, 2, kernel, bias=False, down=True).requires_grad_(False)
    pattern = torch.tensor([1.0, -1.0]).repeat(8)
    stripes = pattern.expand(1, 2, 16, 16)
    flat = torch.ones(1, 2, 16, 16)
    inner = slice(2, -2)
    assert conv(stripes).shape == (1, 2, 8, 8)
    assert float(conv(stripes)[..., inner, inner].abs().max()) < 1e-6
    expected = (conv.weight * conv.scale).sum((1, 2, 3))  # the blur itself has gain 1
    torch.testing.assert_close(conv(flat)[0, :, 4, 4], expected)


def test_signals_keep_their_size_through_a_new_discriminator():
    logits = []
    for seed in range(6):
        D = make(size=32, width=0.1, seed=seed)
        x, t, s = inputs(8, 32, seed=seed)
        with torch.no_grad():
            logits.append(D(x, t, s))
    assert 0.1 < float(torch.cat(logits).std()) < 5


def test_learning_rates_are_equalised():
    # Weights have unit variance whatever the fan-in; the scale is in the forward pass.
    D = make(size=32, width=0.25)
    for p in D.parameters():
        if p.ndim > 1 and p.numel() > 1000:
            assert float(p.detach().std()) == pytest.approx(1, rel=0.15)
        elif p.ndim == 1:
            assert not bool(p.any())
    assert D.dense.scale == pytest.approx(1 / math.sqrt(D.dense.weight.shape[1]))


# ---------------------------------------------------------------- precision and memory layout


def test_channels_last_changes_nothing():
    D = make(size=16)
    x, t, s = inputs(4, 16)
    plain = D(x, t, s)
    last = D.to(memory_format=torch.channels_last)
    torch.testing.assert_close(last(x.contiguous(memory_format=torch.channels_last), t, s), plain)


def test_autocast_runs_and_stays_close():
    D = make(size=16, labels=3, width=0.1)
    x, t, s = inputs(8, 16)
    label = torch.arange(8) % 3
    exact = D(x, t, s, label)
    with torch.autocast("cpu", torch.bfloat16):
        low = D(x, t, s, label)
    assert low.dtype == torch.float32
    assert not torch.equal(low, exact)
    torch.testing.assert_close(low, exact, rtol=0.05, atol=0.05 * float(exact.detach().std()))


def test_state_holds_parameters_only():
    D = make()
    assert set(D.state_dict()) == {name for name, _ in D.named_parameters()}


# ---------------------------------------------------------------- the light one


def test_the_light_ones_score_is_its_own_samples_alone():
    D, (x, t, s) = make("light"), inputs()
    torch.testing.assert_close(D(x[1:2], t[1:2], s[1:2])[0], D(x, t, s)[1])
