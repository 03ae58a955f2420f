import itertools
import math

import pytest
import torch

from ogdm_core import DISCRETISATIONS, SAMPLERS, DiscreteVP, KarrasVE, sample, steps_for_nfe
from ogdm_core.samplers import FUNCTIONS, deis
from ogdm_core.schedule import vp_sigma, vp_time
from tests.core.toys import SCHEDULES, Mixture, cosine_vp

PAPER = [
    ("euler", [(25, 25), (20, 20), (15, 15), (10, 10)]),
    ("s-pndm", [(25, 24), (20, 19), (15, 14), (10, 9)]),
    ("f-pndm", [(25, 16), (20, 11), (15, 6)]),
    ("heun", [(35, 18), (25, 13), (19, 10), (15, 8), (11, 6)]),
    ("stochastic", [(50, 50), (20, 20), (10, 10)]),
    ("dpmpp-2m", [(10, 10), (1, 1)]),
    ("unipc", [(10, 10), (2, 2)]),
]
OURS = [
    ("dpm-2", [(11, 6), (1, 1)]),
    ("dpmpp-3m", [(10, 10), (3, 3)]),
    ("unipc-3", [(10, 10), (3, 3)]),
    ("ipndm", [(10, 10), (2, 2)]),
    ("deis", [(10, 10), (1, 1)]),
]
COSTS = [(sampler, nfe, steps) for sampler, pairs in PAPER + OURS for nfe, steps in pairs]


def noise(n=16, dtype=torch.float64, seed=0):
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---------------------------------------------------------------- cost


def test_every_sampler_has_a_cost():
    assert list(FUNCTIONS) == list(SAMPLERS)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("sampler", "nfe", "steps"), COSTS)
def test_network_evaluations_are_exactly_nfe_and_never_at_the_data(kind, sampler, nfe, steps):
    schedule = SCHEDULES[kind]()
    for discretisation in DISCRETISATIONS:
        net = Mixture(schedule)
        path = sample(
            net, schedule.prior(noise(2)), schedule, sampler=sampler, nfe=nfe,
            discretisation=discretisation, trajectory=True, generator=torch.Generator(),
        )  # fmt: skip
        assert net.calls == nfe
        assert len(path) == steps + 1
        times = torch.stack([t.double() for t in net.times])
        assert bool((times > 0).all()) and bool((times <= schedule.T).all())
        assert bool((times[0] == schedule.times(steps, discretisation)[0]).all())


@pytest.mark.parametrize(("sampler", "nfe", "near"), [
    ("heun", 10, "9 or 11"), ("heun", 2, "1 or 3"), ("heun", 0, "1"), ("euler", 0, "1"),
    ("s-pndm", 2, "3"), ("s-pndm", -5, "3"), ("f-pndm", 10, "13"), ("f-pndm", 12, "13"),
])  # fmt: skip
def test_an_nfe_that_cannot_be_hit_names_the_nearest(sampler, nfe, near):
    with pytest.raises(ValueError, match=f"{sampler} cannot run in {nfe} .*nearest.* {near}$"):
        steps_for_nfe(sampler, nfe)
    for reachable in map(int, near.split(" or ")):
        assert SAMPLERS[sampler].nfe(steps_for_nfe(sampler, reachable)) == reachable


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_reachable_nfe_is_reached_and_no_other(sampler):
    schedule, hit = KarrasVE(), []
    for nfe in range(1, 31):
        net = Mixture(schedule)
        try:
            sample(net, schedule.prior(noise(1)), schedule, sampler=sampler, nfe=nfe)
        except ValueError:
            assert net.calls == 0
        else:
            assert net.calls == nfe
            hit.append(nfe)
    expected = {"heun": range(1, 31, 2), "dpm-2": range(1, 31, 2), "s-pndm": range(3, 31), "f-pndm": range(13, 31)}
    assert hit == list(expected.get(sampler, range(1, 31)))


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match="unknown sampler 'plms'; use one of euler, heun, s-pndm"):
        steps_for_nfe("plms", 10)
    with pytest.raises(ValueError, match="unknown discretisation 'cosine'.*linear, quadratic"):
        KarrasVE().times(10, "cosine")


# ---------------------------------------------------------------- discretisation


@pytest.mark.parametrize("discretisation", [None, *DISCRETISATIONS])
@pytest.mark.parametrize("steps", [1, 2, 7, 25, 100])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_times_fall_from_the_noise_to_the_data_without_repeating(kind, steps, discretisation):
    schedule = SCHEDULES[kind]()
    times = schedule.times(steps, discretisation)
    assert len(times) == steps + 1 and times[-1] == 0
    if kind == "vp" and steps > 1 and discretisation in (None, "linear", "quadratic"):
        assert 500 < times[0] < 1000 and times[-2] == 1  # as in DDIM and PNDM
    else:
        assert times[0] == pytest.approx(schedule.T)
    assert all(a > b for a, b in zip(times[:-1], times[1:], strict=True))
    if kind == "vp":
        assert all(type(t) is int for t in times)


def test_discretisations_worked_by_hand():
    vp, ve = DiscreteVP.linear(1000), KarrasVE(0.002, 80.0, 7.0)
    assert vp.times(4) == vp.times(4, "linear") == [751, 501, 251, 1, 0]
    assert vp.times(3, "linear") == [667, 334, 1, 0]
    assert vp.times(5, "quadratic") == [801, 451, 201, 51, 1, 0]
    assert vp.times(4, "trailing") == [1000, 750, 500, 250, 0]
    assert vp.times(1) == vp.times(1, "quadratic") == [1000, 0]
    assert ve.times(4, "linear") == [80, 60, 40, 20, 0]
    assert ve.times(4, "quadratic") == [80, 45, 20, 5, 0]
    edm = [(80 ** (1 / 7) + i / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7 for i in range(18)]
    assert ve.times(18) == pytest.approx([*edm, 0], rel=1e-12)


def test_karras_times_on_a_grid_are_the_nearest_noise_levels():
    vp = DiscreteVP.linear(1000)
    times = torch.tensor(vp.times(10, "karras"))
    sigma = vp.sigma(torch.arange(1, 1001))
    ve = KarrasVE(float(sigma[0]), float(sigma[-1]))
    wanted = torch.tensor(ve.times(10)[:-1], dtype=torch.float64)
    best = (wanted.log()[:, None] - sigma.log()).abs().min(1).values
    torch.testing.assert_close((vp.sigma(times[:-1]).log() - wanted.log()).abs(), best)


def test_grids_that_end_at_the_data_in_place_of_the_lowest_level():
    ve, vp = KarrasVE(0.002, 80.0), DiscreteVP.linear(1000)
    roots = [80 ** (1 / 7) + i / 5 * (0.002 ** (1 / 7) - 80 ** (1 / 7)) for i in range(5)]
    assert ve.times(5, "polynomial") == pytest.approx([*(r**7 for r in roots), 0], rel=1e-12)
    assert ve.times(5, "polynomial", rho=1)[1:] == pytest.approx([64.0004, 48.0008, 32.0012, 16.0016, 0])
    logs = [80 * (0.002 / 80) ** (i / 4) for i in range(4)]
    assert ve.times(4, "logsnr") == pytest.approx([*logs, 0], rel=1e-12)
    # Even in VP's own time, or in its root: what trailing and its square are on DDPM's betas, up to their rounding.
    assert vp.times(4, "uniform", rho=1) == pytest.approx([1000, 750, 500, 250, 0], abs=3)
    assert vp.times(4, "uniform") == pytest.approx([1000, 1000 * 9 / 16, 250, 1000 / 16, 0], abs=25)


def test_vp_time_and_sigma_are_inverse_and_ddpms():
    sigma = torch.tensor([0.002, 0.1, 1.0, 80.0], dtype=torch.float64)
    torch.testing.assert_close(vp_sigma(vp_time(sigma)), sigma)
    t = torch.tensor([100, 500, 1000])
    found = vp_time(DiscreteVP.linear(1000).sigma(t))
    torch.testing.assert_close(found, t / 1000, rtol=0, atol=5e-3, check_dtype=False)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_time_of_a_level_is_the_one_that_has_it(kind):
    schedule = SCHEDULES[kind]()
    t = torch.tensor(schedule.times(5)[:-1], dtype=schedule.time_dtype(torch.float64))
    torch.testing.assert_close(schedule.time_of(schedule.sigma(t)), t, check_dtype=False)


@pytest.mark.parametrize("name", ["linear", "logsnr"])
def test_a_grid_without_a_power_refuses_rho(name):
    with pytest.raises(ValueError, match=f"{name} has no rho; leave it out, or name one of karras"):
        KarrasVE().times(4, name, rho=3)
    with pytest.raises(ValueError, match="rho = 0 is not allowed"):
        KarrasVE().times(4, "karras", rho=0)


@pytest.mark.parametrize("discretisation", DISCRETISATIONS)
def test_as_many_steps_as_the_grid_has_visit_all_of_it(discretisation):
    schedule = DiscreteVP.linear(40)
    assert schedule.times(40, discretisation) == list(range(40, -1, -1))
    with pytest.raises(ValueError, match="41 steps do not fit on a grid of T = 40"):
        schedule.times(41, discretisation)


# ---------------------------------------------------------------- order of convergence


def errors(sampler, schedule, discretisation, counts, x_T):
    """RMS distance to the exact solution of the mixture's ODE, for each number of steps."""
    net = Mixture(schedule)
    T = torch.tensor([schedule.T], dtype=schedule.time_dtype(torch.float64))
    exact = net.solution(x_T / schedule.a(T), float(schedule.sigma(T)))
    found = []
    for n in counts:
        nfe = SAMPLERS[sampler].nfe(n)
        x = sample(net, x_T, schedule, sampler=sampler, nfe=nfe, discretisation=discretisation)
        found.append(float((x - exact).square().mean()) ** 0.5)
    return found


def in_eight(eps_fn, x_T, sampler):
    """The path of eight steps over even sigma, from 2 to 0."""
    return sample(eps_fn, x_T, KarrasVE(1e-5, 2.0), sampler=sampler, discretisation="linear",
                  nfe=SAMPLERS[sampler].nfe(8), trajectory=True)  # fmt: skip


SMOOTH = {
    "vp": (lambda: cosine_vp(2**14), "trailing"),
    "ve": (lambda: KarrasVE(1e-5, 20.0), "karras"),
    "ve-quadratic": (lambda: KarrasVE(1e-5, 5.0), "quadratic"),
}


@pytest.mark.parametrize(("sampler", "order"), [("euler", 1), ("heun", 2), ("s-pndm", 2), ("f-pndm", 2)])
@pytest.mark.parametrize("grid", SMOOTH)
def test_order_of_convergence_on_a_smooth_grid(grid, sampler, order):
    make, discretisation = SMOOTH[grid]
    schedule = make()
    coarse, fine = errors(sampler, schedule, discretisation, (64, 128), schedule.prior(noise()))
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.1)
    assert fine < (0.02 if order == 1 else 1e-3)


@pytest.mark.parametrize(("sampler", "order"), [
    ("dpmpp-2m", 2), ("unipc", 3), ("unipc-3", 4), ("dpm-2", 2), ("deis", 3), ("ipndm", 2), ("dpmpp-3m", 2),
])  # fmt: skip
def test_order_of_convergence_in_log_sigma(sampler, order):
    # On a grid that is smooth in log sigma; UniPC's corrector adds one order. iPNDM's weights are for even steps,
    # and DPM-Solver++(3M) takes half of the second difference.
    schedule = KarrasVE(1e-5, 20.0)
    coarse, fine = errors(sampler, schedule, "karras", (128, 256), schedule.prior(noise()))
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.15)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_ipndm_converges_by_its_order_where_steps_are_even_in_sigma(order):
    # Up to its first steps, whose order is lower: they start from the exact solution's path.
    schedule, slopes = KarrasVE(1e-5, 2.0), []
    for n in (64, 128):
        path = sample(lambda x, t: t[:, None].exp(), torch.zeros(1, 1, dtype=torch.float64), schedule,
                      sampler="ipndm", order=order, discretisation="linear", nfe=n, trajectory=True)  # fmt: skip
        slopes.append(float(path[-1] - path[4]) - (math.exp(0) - math.exp(2 - 2 * 4 / n)))
    assert math.log2(slopes[0] / slopes[1]) == pytest.approx(order, abs=0.15)


ADAMS_BASHFORTH = {1: [1], 2: [3 / 2, -1 / 2], 3: [23 / 12, -16 / 12, 5 / 12],
                   4: [55 / 24, -59 / 24, 37 / 24, -9 / 24]}  # fmt: skip


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_ipndm_by_hand(order):
    schedule = KarrasVE()
    net, known, x = Mixture(schedule), [], schedule.prior(noise())
    for t, u in itertools.pairwise(schedule.times(7)):
        known = [net(x, torch.full((16,), t, dtype=torch.float64)), *known]
        weights = ADAMS_BASHFORTH[min(order, len(known))]
        x = x + (u - t) * sum(w * e for w, e in zip(weights, known, strict=False))
    ours = sample(net, schedule.prior(noise()), schedule, sampler="ipndm", nfe=7, order=order)
    torch.testing.assert_close(ours, x, rtol=0, atol=1e-9)


def test_an_order_is_the_samplers_own_unless_it_is_given():
    schedule = KarrasVE()

    def run(sampler, order=None):
        return sample(Mixture(schedule), schedule.prior(noise()), schedule, sampler=sampler, nfe=8, order=order)

    for sampler in ("ipndm", "deis", "dpmpp-2m", "dpmpp-3m", "unipc", "unipc-3"):
        assert torch.equal(run(sampler), run(sampler, SAMPLERS[sampler].order))
        one = run(sampler, 1)
        if not sampler.startswith("unipc"):  # which corrects
            torch.testing.assert_close(one, run("euler"), rtol=0, atol=1e-9)
    torch.testing.assert_close(run("dpmpp-3m", 2), run("dpmpp-2m"), rtol=0, atol=0)
    torch.testing.assert_close(run("unipc-3", 2), run("unipc"), rtol=0, atol=0)


@pytest.mark.parametrize(("sampler", "order", "words"), [
    ("ipndm", 5, "ipndm has no order 5; give 1 to 4"), ("unipc", 3, "unipc has no order 3; give 1 to 2"),
    ("deis", 0, "deis has no order 0; give 1 to 3"), ("euler", 1, "euler has one order only; leave the order out, or"),
])  # fmt: skip
def test_a_wrong_order_is_named(sampler, order, words):
    net = Mixture(KarrasVE())
    with pytest.raises(ValueError, match=words):
        sample(net, noise(), KarrasVE(), sampler=sampler, nfe=5, order=order)
    assert net.calls == 0


@pytest.mark.parametrize(("sampler", "degree"), [("euler", 0), ("heun", 1), ("s-pndm", 1), ("f-pndm", 3)])
def test_polynomials_in_sigma_are_integrated_exactly_up_to_the_samplers_degree(sampler, degree):
    for power in range(degree + 2):
        x_T = torch.zeros(1, 1, dtype=torch.float64)
        path = in_eight(lambda x, t, p=power: t[:, None] ** p, x_T, sampler)
        sigma = torch.linspace(2, 0, 9, dtype=torch.float64)
        exact = (sigma ** (power + 1) - 2 ** (power + 1)) / (power + 1)
        # The last of Heun's steps is Euler's.
        got, exact = torch.cat(path)[:-1, 0], exact[:-1]
        assert torch.allclose(got, exact, rtol=0, atol=1e-12) == (power <= degree)


@pytest.mark.parametrize(("sampler", "terms"), [("euler", 2), ("heun", 3), ("s-pndm", 3), ("f-pndm", 5)])
def test_the_first_step_is_the_exponentials_series(sampler, terms):
    # dx / dsigma = x: a step of h multiplies x by 1 + h + h^2 / 2 + ... up to the start's order.
    path = in_eight(lambda x, t: x, torch.ones(1, 1, dtype=torch.float64), sampler)
    series = sum((-0.25) ** i / math.factorial(i) for i in range(terms))
    assert float(path[1]) == pytest.approx(series, rel=1e-12)


def test_f_pndm_is_of_fourth_order_where_steps_are_even_in_sigma():
    # Second order does not see a slip in the higher terms of Runge-Kutta or Adams-Bashforth.
    schedule = KarrasVE(1e-5, 2.0)
    coarse, fine = errors("f-pndm", schedule, "linear", (128, 256), schedule.prior(noise()))
    assert math.log2(coarse / fine) == pytest.approx(4, abs=0.1)


# ---------------------------------------------------------------- agreement with others


@pytest.mark.parametrize(("sampler", "nfe", "eta"), [
    ("euler", 10, 0.0), ("euler", 25, 0.0), ("stochastic", 20, 1.0), ("stochastic", 20, 0.5),
])  # fmt: skip
def test_euler_and_stochastic_are_diffusers_ddim(sampler, nfe, eta):
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDIMScheduler(
        beta_schedule="linear", clip_sample=False, set_alpha_to_one=True, timestep_spacing="leading"
    )
    scheduler.set_timesteps(nfe)
    schedule = DiscreteVP(scheduler.alphas_cumprod)
    net = Mixture(schedule, torch.float32)
    x_T = x = noise(dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    for index in scheduler.timesteps:
        eps = net(x, torch.full((len(x),), int(index) + 1))
        z = torch.randn(x.shape, generator=generator)
        x = scheduler.step(eps, index, x, eta=eta, variance_noise=z).prev_sample
    assert [int(t[0]) - 1 for t in net.times] == scheduler.timesteps.tolist()
    ours = sample(net, x_T, schedule, sampler=sampler, nfe=nfe, eta=eta, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(ours, x, rtol=0, atol=1e-5)
    assert ours.dtype == torch.float32


@pytest.mark.parametrize("nfe", [1, 2, 5, 10, 25])
@pytest.mark.parametrize(("sampler", "kind", "order"), [
    ("dpmpp-2m", "DPMSolverMultistepScheduler", 2), ("unipc", "UniPCMultistepScheduler", 2),
    ("dpmpp-3m", "DPMSolverMultistepScheduler", 3), ("unipc-3", "UniPCMultistepScheduler", 3),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:__array__ implementation")  # in diffusers
def test_multistep_solvers_of_the_data_are_diffusers(sampler, kind, order, nfe):
    """Over the same times; theirs are told ours."""
    diffusers = pytest.importorskip("diffusers")
    if sampler == "dpmpp-3m" and nfe >= 15:
        pytest.skip("from 15 steps on, diffusers does not lower the order of the last step but one")
    scheduler = getattr(diffusers, kind)(
        beta_schedule="linear", final_sigmas_type="zero", timestep_spacing="leading", steps_offset=0,
        solver_order=order,
    )  # fmt: skip
    schedule = DiscreteVP(scheduler.alphas_cumprod)
    times = torch.tensor(schedule.times(nfe))
    scheduler.set_timesteps(nfe)
    scheduler.timesteps, scheduler.sigmas = times[:-1] - 1, schedule.sigma(times)
    net = Mixture(schedule)
    x_T = x = noise()
    for index in scheduler.timesteps:
        x = scheduler.step(net(x, torch.full((len(x),), int(index) + 1)), index, x).prev_sample
    ours = sample(net, x_T, schedule, sampler=sampler, nfe=nfe)
    torch.testing.assert_close(ours, x.double(), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers")
@pytest.mark.parametrize("order", [1, 2, 3])
def test_deis_with_log_sigma_as_its_clock_is_diffusers(order):
    """But for the last two steps, whose order diffusers lowers."""
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DEISMultistepScheduler(
        beta_schedule="linear", timestep_spacing="leading", steps_offset=0, solver_order=order
    )
    schedule = DiscreteVP(scheduler.alphas_cumprod)
    times = torch.tensor(schedule.times(10))
    scheduler.set_timesteps(10)
    scheduler.timesteps, scheduler.sigmas = times[:-1] - 1, schedule.sigma(times)
    net, x, theirs = Mixture(schedule), noise(), []
    for index in scheduler.timesteps[:-2]:
        x = scheduler.step(net(x, torch.full((len(x),), int(index) + 1)), index, x).prev_sample
        theirs.append(x)
    ours = deis(net, noise(), [t.expand(16) for t in times], schedule, order, clock=torch.log)
    for mine, his in zip(ours, theirs, strict=False):
        torch.testing.assert_close(mine, his.double(), rtol=0, atol=1e-5)


def test_deis_integrates_polynomials_in_its_clock_exactly():
    schedule = KarrasVE(1e-5, 2.0)
    for power in range(4):
        path = sample(lambda x, t, p=power: vp_time(t)[:, None] ** p, torch.zeros(1, 1, dtype=torch.float64), schedule,
                      sampler="deis", discretisation="linear", nfe=8, trajectory=True)  # fmt: skip
        start, end = float(path[2]), float(path[-1])  # from its third step on it has order 3
        sigma = torch.linspace(0, 1.5, 2_000_001, dtype=torch.float64)
        exact = -float(torch.trapezoid(vp_time(sigma) ** power, sigma))
        assert (end - start == pytest.approx(exact, abs=1e-7)) == (power <= 2)


@pytest.mark.parametrize(("ours", "theirs", "counts"), [
    ("linear", "leading", (5, 10, 20, 25, 50, 100)),  # diffusers strides by T // N: only for these
    ("trailing", "trailing", (7, 15, 19, 100)),
])  # fmt: skip
def test_times_are_diffusers(ours, theirs, counts):
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDIMScheduler(timestep_spacing=theirs)
    for steps in counts:
        scheduler.set_timesteps(steps)
        assert DiscreteVP.linear().times(steps, ours)[:-1] == (scheduler.timesteps + 1).tolist()


@pytest.mark.parametrize("fractional", [True, False])
def test_f_pndm_asks_halfway_between_the_times_of_the_grid(fractional):
    schedule = DiscreteVP(DiscreteVP.linear()._abar[1:], fractional=fractional)
    net = Mixture(schedule)
    sample(net, noise(), schedule, sampler="f-pndm", nfe=15)
    asked = [float(t[0]) for t in net.times[:4]]
    middle = (834 + 667) / 2
    assert asked == [834, middle, middle, 667] if fractional else [834, 750, 750, 667]
    low, high = (schedule.a(torch.tensor([t])) for t in (750, 750.5))
    assert torch.equal(low, high)


@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_ve_samplers_are_edms(solver):
    """The deterministic sampler of Karras et al., written out from their algorithm 1."""
    steps, low, high, rho = 10, 0.002, 80.0, 7
    ramp = torch.arange(steps, dtype=torch.float64) / (steps - 1)
    sigmas = (high ** (1 / rho) + ramp * (low ** (1 / rho) - high ** (1 / rho))) ** rho
    sigmas = [*sigmas.tolist(), 0.0]
    schedule = KarrasVE(low, high, rho)
    net = Mixture(schedule)

    def denoise(x, sigma):
        return x - sigma * net.eps(x, 1.0, sigma)

    x = noise() * sigmas[0]
    for now, after in zip(sigmas[:-1], sigmas[1:], strict=True):
        slope = (x - denoise(x, now)) / now
        ahead = x + (after - now) * slope
        if solver == "heun" and after > 0:
            slope_ahead = (ahead - denoise(ahead, after)) / after
            ahead = x + (after - now) * (slope / 2 + slope_ahead / 2)
        x = ahead
    nfe = SAMPLERS[solver].nfe(steps)
    ours = sample(net, schedule.prior(noise()), schedule, sampler=solver, nfe=nfe)
    torch.testing.assert_close(ours, x, rtol=0, atol=1e-9)
    net = Mixture(schedule, torch.float32)
    ours = sample(net, schedule.prior(noise().float()), schedule, sampler=solver, nfe=nfe)
    torch.testing.assert_close(ours.double(), x, rtol=0, atol=2e-5)


# ---------------------------------------------------------------- stochastic


@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_fresh_noise_makes_up_exactly_for_the_noise_removed(eta):
    # With all data at 0, eps = x / sigma and x_u must have standard deviation sigma_u.
    schedule, n = KarrasVE(), 100_000
    x_T = schedule.prior(torch.randn(n, 1, generator=torch.Generator().manual_seed(0)).double())
    path = sample(lambda x, t: x / t[:, None], x_T, schedule, sampler="stochastic", nfe=5, eta=eta,
                  generator=torch.Generator().manual_seed(1), trajectory=True)  # fmt: skip
    for x, sigma in zip(path, schedule.times(5), strict=True):
        assert float(x.std()) == pytest.approx(sigma, rel=0.01)
    fresh = (path[1] - path[0] * float(path[1].norm() / path[0].norm())).std()
    assert float(fresh) > 0.1 * eta * float(path[1].std())


def test_eta_zero_is_euler_and_draws_nothing():
    for kind in SCHEDULES:
        schedule = SCHEDULES[kind]()
        net, x_T = Mixture(schedule), schedule.prior(noise())
        generator = torch.Generator().manual_seed(0)
        before = generator.get_state()
        got = sample(net, x_T, schedule, sampler="stochastic", nfe=12, eta=0.0, generator=generator)
        torch.testing.assert_close(got, sample(net, x_T, schedule, sampler="euler", nfe=12))
        assert torch.equal(generator.get_state(), before)


def test_the_generator_alone_decides_the_noise():
    schedule = DiscreteVP.linear()
    net, x_T, before = Mixture(schedule), noise(), torch.get_rng_state()
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
    runs = [sample(net, x_T, schedule, sampler="stochastic", nfe=5, generator=g) for g in generators]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------- plumbing


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_trajectories_begin_at_the_noise_and_end_at_the_sample(kind, sampler):
    schedule, nfe = SCHEDULES[kind](), 15
    net, x_T = Mixture(schedule), schedule.prior(noise())

    def run(**kwargs):
        generator = torch.Generator().manual_seed(0)
        return sample(net, x_T, schedule, sampler=sampler, nfe=nfe, generator=generator, **kwargs)

    path = run(trajectory=True)
    assert path[0] is x_T and torch.equal(path[-1], run())
    assert len(path) == steps_for_nfe(sampler, nfe) + 1
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(path[:-1], path[1:], strict=True))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_double_precision_is_kept_to_the_end(kind, sampler):
    schedule = SCHEDULES[kind]()
    seen = []

    def net(x, t):
        seen.append((x.dtype, t.dtype))
        return x.tanh() * t[:, None].double().cos()

    x = sample(net, schedule.prior(noise()), schedule, sampler=sampler, nfe=15)
    assert x.dtype == torch.float64
    times = {time for _, time in seen} - {torch.float32}  # F-PNDM's midpoints of a grid
    assert {image for image, _ in seen} == {torch.float64}
    assert times == {torch.int64 if kind == "vp" else torch.float64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_times_are_never_less_than_single_precision(dtype):
    schedule, seen = KarrasVE(), []

    def net(x, t):
        seen.append((x.dtype, t.dtype))
        return x * 0

    x = sample(net, schedule.prior(noise().to(dtype)), schedule, sampler="euler", nfe=3)
    assert x.dtype == dtype
    assert set(seen) == {(dtype, torch.float32)}


def test_sampling_builds_no_graph_and_does_not_change_its_input():
    schedule, weight = KarrasVE(), torch.ones((), requires_grad=True)
    x_T = schedule.prior(noise())
    before = x_T.clone()
    for sampler in SAMPLERS:
        x = sample(lambda x, t: weight * x, x_T, schedule, sampler=sampler, nfe=15)
        assert not x.requires_grad
        assert torch.equal(x_T, before)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_callback_is_given_the_estimate_of_every_step(kind, sampler):
    schedule, estimates = SCHEDULES[kind](), []
    net, x_T = Mixture(schedule), schedule.prior(noise())
    options = {"sampler": sampler, "nfe": 15, "eta": 0.0}
    path = sample(net, x_T, schedule, **options, callback=estimates.append, trajectory=True)
    assert len(estimates) == steps_for_nfe(sampler, 15)
    times = schedule.times(len(estimates))
    first = [torch.full((16,), t, dtype=net.times[0].dtype) for t in times]
    for x, t, x_0 in zip(path, first, estimates, strict=False):
        eps = net(x, t)
        if not sampler.startswith("unipc"):  # whose x is corrected after the evaluation
            torch.testing.assert_close(x_0, x / schedule.a(t)[:, None] - schedule.sigma(t)[:, None] * eps)
    assert torch.equal(path[-1], sample(Mixture(schedule), x_T, schedule, **options))


def test_the_progress_bar_changes_nothing(capsys):
    pytest.importorskip("tqdm")
    schedule = DiscreteVP.linear()
    net, x_T = Mixture(schedule), noise()
    bar = sample(net, x_T, schedule, sampler="heun", nfe=19, progress=True)
    assert "heun, NFE 19" in capsys.readouterr().err
    assert torch.equal(bar, sample(net, x_T, schedule, sampler="heun", nfe=19))
