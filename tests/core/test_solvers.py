import pytest
import torch

from ogdm_core import DiscreteVP, KarrasVE, project, step
from ogdm_core.solvers import reach
from tests.core.toys import SCHEDULES, TinyNet


def diffused(kind, dtype, n=500):
    """x_0, eps, t, u over the whole range of t and s, the data end included."""
    generator = torch.Generator().manual_seed(0)
    schedule = SCHEDULES[kind]()
    x_0 = torch.randn(n, 3, generator=generator, dtype=torch.float64) / 2
    eps = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    if kind == "vp":
        t = torch.randint(1, 1001, (n,), generator=generator)
    else:
        t = schedule.from_unit_time(torch.rand(n, generator=generator).to(dtype))
    s = schedule.sample_lookahead(t, 1.0, generator)
    u = schedule.lookahead(t, s)
    u[:5] = 0
    return schedule, x_0.to(dtype), eps.to(dtype), t, u


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("projection", ["euler", "heun"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_exact_eps_projects_to_the_state_of_the_same_noise(kind, projection, dtype):
    schedule, x_0, eps, t, u = diffused(kind, dtype)
    x_t = schedule.diffuse(x_0, eps, t)
    x_u = project(projection, schedule, x_t, t, u, eps, lambda x, t: eps)
    assert x_u.dtype == dtype
    error = (x_u - schedule.diffuse(x_0, eps, u)).abs().amax(1)
    # x_t / a_t and sigma_t eps cancel: what is left is rounding of numbers of their size.
    size = schedule.a(u).double() * (1 + schedule.sigma(t).double()) * 5
    assert bool((error < 4 * torch.finfo(dtype).eps * size).all())


def test_a_step_is_ddims():
    schedule, x_0, eps, t, u = diffused("vp", torch.float64)
    x_t = torch.randn(x_0.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    a_t, a_u, b_t, b_u = (f(v)[:, None] for f in (schedule.a, schedule.b) for v in (t, u))
    x_0_hat = (x_t - b_t * eps) / a_t
    torch.testing.assert_close(step(schedule, x_t, eps, t, u), a_u * x_0_hat + b_u * eps)


def test_a_step_is_linear_in_sigma_for_ve():
    # dx / dsigma = eps: from 2 to 0.5 along 3 is -4.5.
    x = step(KarrasVE(), torch.ones(1, 1), torch.full((1, 1), 3.0), torch.tensor([2.0]), torch.tensor([0.5]))
    assert float(x) == 1 - 4.5


def test_heun_worked_by_hand():
    # Euler from t = 2 to u = 1 along 0.5 ends at 0.5; there eps = 0.5 + 1; the mean is 1.
    asked = []

    def eps_fn(x, t):
        asked.append((float(x), float(t)))
        return x + t

    one, t, u = torch.ones(1, 1), torch.tensor([2.0]), torch.tensor([1.0])
    x_u = project("heun", KarrasVE(), one, t, u, one / 2, lambda x, t: eps_fn(x, t[:, None]))
    assert float(x_u) == 0 and asked == [(0.5, 1.0)]


def test_projection_is_per_sample():
    schedule, x_0, eps, t, u = diffused("vp", torch.float64, n=20)
    x_t, net = schedule.diffuse(x_0, eps, t), lambda x, t: x * t[:, None].double().sin()
    whole = project("heun", schedule, x_t, t, u, net(x_t, t), net)
    for i in range(20):
        one = slice(i, i + 1)
        alone = project("heun", schedule, x_t[one], t[one], u[one], net(x_t[one], t[one]), net)
        torch.testing.assert_close(whole[one], alone)


@pytest.mark.parametrize("projection", ["euler", "heun"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_reach_is_the_derivative_of_the_whitened_projection(kind, projection):
    schedule, x_0, eps, t, u = diffused(kind, torch.float64)
    x_t, eps_t = schedule.diffuse(x_0, eps, t), eps.clone().requires_grad_()
    more = torch.zeros_like(eps).requires_grad_()

    def gaussian(x, t):  # the best eps for normal data
        return x * (schedule.b(t) / schedule.scale(t) ** 2)[:, None].to(x.dtype) + more

    x_u = schedule.whiten(project(projection, schedule, x_t, t, u, eps_t, gaussian), u)
    found = torch.autograd.grad(x_u.sum(), [eps_t, more], allow_unused=True)  # diagonal
    jacobian = sum(part[:, 0].square() for part in found if part is not None).sqrt()
    torch.testing.assert_close(jacobian, reach(projection, schedule, t, u).double(), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_euler_asks_nobody_and_heun_asks_once_never_at_the_data(kind):
    schedule = SCHEDULES[kind]()
    x = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    t = torch.tensor([1, 5, 5, 500, 1000, 1000]).to(torch.int64 if kind == "vp" else torch.float32)
    u = torch.tensor([0, 0, 4, 300, 0, 999]).to(t.dtype)
    net = TinyNet()
    project("euler", schedule, x, t, u, x, net)
    assert net.calls == 0
    project("heun", schedule, x, t, u, x, net)
    assert net.calls == 1
    assert bool((net.times[0] > 0).all())
    assert torch.equal(net.times[0][u > 0], u[u > 0])


@pytest.mark.parametrize("kind", SCHEDULES)
def test_heun_is_euler_at_the_data_end_whatever_the_network_says_there(kind):
    schedule = SCHEDULES[kind]()
    x, eps_t = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0)).unbind()
    eps_t = eps_t.requires_grad_()
    t = torch.tensor([10, 20, 30, 40]).to(torch.int64 if kind == "vp" else torch.float32)
    u = torch.tensor([0, 5, 0, 5]).to(t.dtype)
    garbage = torch.full((4, 3), 1e6, requires_grad=True)
    heun = project("heun", schedule, x, t, u, eps_t, lambda x, t: garbage)
    euler = project("euler", schedule, x, t, u, eps_t)
    assert torch.equal(heun[u == 0], euler[u == 0])
    assert bool((heun[u > 0] - euler[u > 0]).abs().min() > 1)
    heun.sum().backward()
    assert bool((garbage.grad[u == 0] == 0).all()) and bool((garbage.grad[u > 0] != 0).all())


@pytest.mark.parametrize("projection", ["euler", "heun"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_gradients_reach_the_network_through_every_eps(kind, projection):
    schedule, x_0, eps, t, u = diffused(kind, torch.float64, n=3)
    t, u = (torch.tensor(v).to(t.dtype) for v in ([5, 7, 9], [3, 4, 5]))
    theta = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)

    def phi(theta):
        def net(x, t):
            return theta * x.tanh() + t[:, None].double().cos()

        return project(projection, schedule, x_0, t, u, net(x_0, t), net)

    assert torch.autograd.gradcheck(phi, theta)


def test_unknown_projections_and_missing_networks_are_explained():
    schedule, x_0, eps, t, u = diffused("vp", torch.float32, n=8)
    with pytest.raises(ValueError, match="unknown projection 'rk4'.*euler or heun"):
        project("rk4", schedule, x_0, t, u, eps)
    with pytest.raises(ValueError, match="Heun's projection needs eps_fn"):
        project("heun", schedule, x_0, t, u, eps)


def test_neighbouring_levels_lose_no_digits_to_their_difference():
    # sigma_999 and sigma_1000 agree in two digits; float32 tables would leave five of the rest.
    schedule = DiscreteVP.linear(1000)
    t, u = torch.tensor([1000]), torch.tensor([999])
    eps = torch.ones(1, 1)
    exact = step(schedule, 0 * eps.double(), eps.double(), t, u)
    torch.testing.assert_close(step(schedule, 0 * eps, eps, t, u).double(), exact, rtol=3e-7, atol=0)
