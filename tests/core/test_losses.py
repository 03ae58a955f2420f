import pytest
import torch

from ogdm_core.losses import emission_loss, fake_loss, r1_penalty, real_loss

LOGITS = torch.tensor([-2.0, -0.4, 0.0, 0.7, 2.0], dtype=torch.float64)


def test_nonsaturating_is_the_papers_logarithms():
    D = LOGITS.sigmoid()
    torch.testing.assert_close(emission_loss(LOGITS, "nonsaturating"), -D.log())
    torch.testing.assert_close(real_loss(LOGITS, "nonsaturating"), -D.log())
    torch.testing.assert_close(fake_loss(LOGITS, "nonsaturating"), -(1 - D).log())


def test_hinge_worked_by_hand():
    assert emission_loss(LOGITS, "hinge").tolist() == [2.0, 0.4, 0.0, -0.7, -2.0]
    assert real_loss(LOGITS, "hinge").tolist() == pytest.approx([3.0, 1.4, 1.0, 0.3, 0.0])
    assert fake_loss(LOGITS, "hinge").tolist() == pytest.approx([0.0, 0.6, 1.0, 1.7, 3.0])


def test_nonsaturating_is_finite_and_has_a_slope_when_d_is_certain():
    at = torch.tensor([-1e4, 1e4], requires_grad=True)
    for loss in (emission_loss, real_loss, fake_loss):
        assert bool(loss(at, "nonsaturating").isfinite().all())
    (slope,) = torch.autograd.grad(emission_loss(at, "nonsaturating").sum(), at)
    assert slope.tolist() == [-1, 0]


def test_r1_worked_by_hand():
    # logit = w x + c x^2 summed over pixels: the gradient is w + 2 c x.
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    x = torch.tensor([[0.5, 1.0], [-1.0, 0.0]], requires_grad=True)
    logit = (w * x + 3 * x**2).sum(1)
    r1 = r1_penalty(logit, x)
    assert r1.tolist() == [4.0**2 + 4.0**2, 5.0**2 + 2.0**2]
    (gradient,) = torch.autograd.grad(r1.sum(), w)
    assert gradient.tolist() == [2 * (4 - 5), 2 * (4 - 2)]


def test_r1_is_a_sum_over_all_of_an_image_not_a_mean():
    x = torch.zeros(2, 3, 4, 4, requires_grad=True)
    assert r1_penalty(x.sum((1, 2, 3)), x).tolist() == [48, 48]
