import numpy as np
import pytest
import torch

from ogdm_core import GVP, DiscreteVP, KarrasVE, RectifiedFlow, step
from ogdm_core.schedule import expand
from tests.core.toys import SCHEDULES

BETAS = np.linspace(1e-4, 0.02, 1000)


# ---------------------------------------------------------------- x_t = a_t x_0 + b_t eps


def test_discrete_levels_are_the_cumulative_product_with_the_data_at_zero():
    schedule = DiscreteVP.from_betas(BETAS)
    abar = np.concatenate([[1.0], np.cumprod(1 - BETAS)])
    t = torch.arange(1001)
    np.testing.assert_allclose(schedule.a(t).numpy() ** 2, abar, rtol=1e-12)
    np.testing.assert_allclose(schedule.b(t).numpy() ** 2, 1 - abar, rtol=1e-12)
    np.testing.assert_allclose(schedule.sigma(t).numpy() ** 2, (1 - abar) / abar, rtol=1e-12)
    assert schedule.T == 1000
    assert (float(schedule.a(t)[0]), float(schedule.b(t)[0])) == (1, 0)


@pytest.mark.parametrize("kind", ["numpy", "list", "float32", "betas", "linear"])
def test_discrete_schedule_is_made_of_whatever_upstream_has(kind):
    abar = np.cumprod(1 - BETAS)
    schedule = {
        "numpy": lambda: DiscreteVP(abar),
        "list": lambda: DiscreteVP(abar.tolist()),
        "float32": lambda: DiscreteVP(torch.tensor(abar, dtype=torch.float32)),
        "betas": lambda: DiscreteVP.from_betas(torch.tensor(BETAS)),
        "linear": lambda: DiscreteVP.linear(1000),
    }[kind]()
    got = schedule.a(torch.arange(1, 1001)).numpy()
    np.testing.assert_allclose(got, np.sqrt(abar), rtol=1e-6 if kind == "float32" else 1e-12)


def test_linear_ends_at_about_the_same_noise_for_every_T():
    ends = [float(DiscreteVP.linear(T).sigma(torch.tensor(T))) for T in (1000, 4000, 250)]
    assert ends == pytest.approx([ends[0]] * 3, rel=0.2)


def test_linear_is_diffusers():
    diffusers = pytest.importorskip("diffusers")
    theirs = diffusers.DDIMScheduler(beta_schedule="linear").alphas_cumprod.double()
    ours = DiscreteVP.linear(1000).a(torch.arange(1, 1001)) ** 2
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


def test_karras_time_is_sigma():
    sigma = torch.tensor([0.0, 0.002, 1.0, 80.0])
    schedule = KarrasVE()
    assert schedule.a(sigma).tolist() == [1, 1, 1, 1]
    assert torch.equal(schedule.b(sigma), sigma)
    assert torch.equal(schedule.sigma(sigma), sigma)
    assert schedule.T == 80


@pytest.mark.parametrize("kind", SCHEDULES)
def test_diffusion_mixes_image_and_noise_per_sample(kind):
    schedule = SCHEDULES[kind]()
    t = torch.tensor([1, 30]) if kind == "vp" else torch.tensor([0.5, 30.0])
    x_0, eps = torch.full((2, 3, 4, 4), 2.0), torch.full((2, 3, 4, 4), -1.0)
    x_t = schedule.diffuse(x_0, eps, t)
    for i in range(2):
        expected = 2 * float(schedule.a(t)[i]) - float(schedule.b(t)[i])
        torch.testing.assert_close(x_t[i], torch.full((3, 4, 4), expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_images_keep_their_precision(kind, dtype):
    schedule = SCHEDULES[kind]()
    t = torch.tensor([3, 700]) if kind == "vp" else torch.tensor([0.1, 7.0], dtype=torch.float64)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low = schedule.diffuse(x.to(dtype), x.to(dtype), t)
    assert low.dtype == dtype == schedule.whiten(low, t).dtype
    exact = x * (schedule.a(t).double() + schedule.b(t).double())[:, None]
    torch.testing.assert_close(low.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_expand_broadcasts_over_any_shape():
    v = torch.arange(3)
    for shape in [(3,), (3, 2), (3, 1, 4, 4), (3, 2, 2, 2, 2)]:
        assert expand(v, torch.zeros(shape)).shape == (3, *[1] * (len(shape) - 1))


# ---------------------------------------------------------------- what D sees


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("sigma_data", [0.5, 1.3])
def test_whitened_images_have_unit_variance_at_every_noise_level(kind, sigma_data):
    generator = torch.Generator().manual_seed(0)
    if kind == "vp":
        schedule = DiscreteVP.linear(1000, sigma_data)
        t = torch.tensor([0, 1, 10, 100, 500, 1000])
    else:
        schedule = KarrasVE(sigma_data=sigma_data)
        t = torch.tensor([0.0, 0.002, 0.1, 1, 10, 80])
    x_0 = sigma_data * torch.randn(len(t), 40_000, generator=generator)
    eps = torch.randn(len(t), 40_000, generator=generator)
    std = schedule.whiten(schedule.diffuse(x_0, eps, t), t).std(1)
    torch.testing.assert_close(std, torch.ones(len(t)), rtol=0.02, atol=0)


def test_unit_times_of_a_grid():
    schedule = DiscreteVP.linear(1000)
    t = torch.tensor([0, 1, 500, 1000])
    assert schedule.unit_time(t).tolist() == pytest.approx([0, 0.001, 0.5, 1])
    assert schedule.unit_lookahead(t).tolist() == pytest.approx([0, 0.001, 0.5, 1])
    assert schedule.lookahead(t, torch.tensor([0, 1, 3, 10])).tolist() == [0, 0, 497, 990]


def test_karras_time_is_the_published_spacing():
    schedule = KarrasVE(0.002, 80.0, 7.0)
    i = np.arange(18)
    edm = (80 ** (1 / 7) + i / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    tau = torch.tensor(1 - i / 17)
    np.testing.assert_allclose(schedule.from_unit_time(tau).numpy(), edm, rtol=1e-12)
    np.testing.assert_allclose(schedule.unit_time(torch.tensor(edm)).numpy(), tau, atol=1e-12)


def test_karras_lookahead_goes_down_by_s_in_karras_time_and_never_leaves_the_range():
    schedule = KarrasVE()
    tau = torch.linspace(0, 1, 101, dtype=torch.float64)
    t = schedule.from_unit_time(tau)
    u = schedule.lookahead(t, torch.full_like(t, 0.25))
    torch.testing.assert_close(schedule.unit_time(u), (tau - 0.25).clamp(min=0))
    assert bool((u <= t).all())
    torch.testing.assert_close(u.min(), torch.tensor(0.002, dtype=torch.float64))


def test_karras_levels_outside_the_range_keep_their_own_sigma():
    schedule = KarrasVE()
    t = torch.tensor([0.001, 200.0])
    assert schedule.unit_time(t).tolist() == [0, 1]
    assert schedule.b(t).tolist() == t.tolist()
    u = schedule.lookahead(t, torch.tensor([0.0, 0.1]))
    assert float(u[0]) == float(t[0])  # below the range there is nowhere to look
    assert float(u[1]) == pytest.approx(float(schedule.from_unit_time(torch.tensor(0.9))))


def test_the_data_end_is_replaced_by_the_least_noisy_level():
    vp, ve = DiscreteVP.linear(10**3), KarrasVE()
    assert vp.network_time(torch.tensor([0, 1, 2])).tolist() == [1, 1, 2]
    assert ve.network_time(torch.tensor([0.0, 0.001])).tolist() == pytest.approx([0.002, 0.001])


def test_prior_is_noise_at_the_schedules_own_scale():
    noise = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(DiscreteVP.linear().prior(noise), noise)
    assert torch.equal(KarrasVE(sigma_max=40.0).prior(noise), 40 * noise)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("abar", [[], [1.0, 0.5], [0.9, 0.0], [0.9, float("nan")], [-0.1]])
def test_levels_outside_zero_and_one_are_refused(abar):
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        DiscreteVP(abar)


@pytest.mark.parametrize("abar", [[0.5, 0.9], [0.9, 0.9]])
def test_levels_that_do_not_decrease_are_refused(abar):
    with pytest.raises(ValueError, match="must decrease"):
        DiscreteVP(abar)


@pytest.mark.parametrize("low, high", [(0, 80), (2, 1), (1, 1), (1, float("inf"))])
def test_empty_noise_ranges_are_refused(low, high):
    with pytest.raises(ValueError, match="0 < sigma_min < sigma_max"):
        KarrasVE(low, high)


def test_bad_rho_is_refused():
    with pytest.raises(ValueError, match="rho > 0"):
        KarrasVE(rho=0)


# ---------------------------------------------------------------- rectified flow


def test_rectified_flow_is_a_straight_path():
    schedule, t = RectifiedFlow(), torch.tensor([0.0, 0.25, 0.5, 0.75])
    assert torch.equal(schedule.a(t), 1 - t) and torch.equal(schedule.b(t), t)
    torch.testing.assert_close(schedule.sigma(t), torch.tensor([0, 1 / 3, 1.0, 3.0]))


def test_gvp_is_a_quarter_of_a_circle():
    schedule, t = GVP(), torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(schedule.a(t) ** 2 + schedule.b(t) ** 2, torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(schedule.sigma(t), (t * torch.pi / 2).tan())
    x_0, eps = torch.randn(2, 4, dtype=torch.float64)
    x_t = schedule.diffuse(x_0, eps, t)
    (v,) = torch.autograd.grad(x_t.sum(), t)
    torch.testing.assert_close(schedule.b(t) * x_t + 2 / torch.pi * schedule.a(t) * v, eps)
    times = GVP().times(5, "karras")
    assert times[0] == 1 and times[-1] == 0 and all(a > b for a, b in zip(times[:-1], times[1:], strict=True))


@pytest.mark.parametrize("u", [0.0, 0.3, 0.999])
def test_rectified_flow_is_finite_at_its_noisy_end(u):
    """From t = 1, an exact velocity leads to the state of the same noise, in single precision."""
    schedule, t = RectifiedFlow(), torch.ones(4)
    x_0, eps = torch.rand(4, 3), torch.randn(4, 3)
    x_t = schedule.diffuse(x_0, eps, t)
    a, b = (expand(level, x_t) for level in (schedule.a(t), schedule.b(t)))
    predicted = (x_t + a * (eps - x_0)) / (a + b)
    u = torch.full((4,), u)
    x_u = step(schedule, x_t, predicted, t, u)
    torch.testing.assert_close(x_u, schedule.diffuse(x_0, eps, u), atol=2e-3, rtol=0)
