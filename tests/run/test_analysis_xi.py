import csv
import math

import numpy as np
import pytest
from PIL import Image

from run.figures.__main__ import main
from run.figures.xi import Problem, initial_slope, runs, total_variation

PAPER = Problem(mu=2.0, v=0.1, beta=0.4)


def normal(u, mean, variance):
    return np.exp(-((u - mean) ** 2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)


def prior(u, mu):
    return (normal(u, mu, 1) + normal(u, -mu, 1)) / 2


def by_bayes(mu, v, beta):
    """p(u | v) as the paper writes it: likelihood times prior over their integral."""
    integrate = pytest.importorskip("scipy.integrate")

    def joint(u):
        return normal(v, math.sqrt(1 - beta) * u, beta) * prior(u, mu)

    evidence, _ = integrate.quad(joint, -30, 30, points=[v, mu, -mu], limit=200, epsabs=1e-13)
    return lambda u: joint(u) / evidence


@pytest.mark.parametrize(("mu", "v", "beta"), [(2, 0.1, 0.4), (2, 1, 0.05), (3, -1.5, 0.9)])
def test_reverse_density_is_bayes_rule(mu, v, beta):
    problem = Problem(mu, v, beta)
    np.testing.assert_allclose(problem.reverse, by_bayes(mu, v, beta)(problem.u), atol=1e-10)


@pytest.mark.parametrize("v", [-2.0, 0.1, 1.3])
def test_gaussian_uses_the_score_of_the_prior(v):
    h = 1e-5
    score = (math.log(prior(v + h, 2.0)) - math.log(prior(v - h, 2.0))) / (2 * h)
    assert Problem(2.0, v, 0.3).score == pytest.approx(score, abs=1e-8)
    assert Problem(2.0, v, 0.3).gaussian_mean == pytest.approx((v + 0.3 * score) / math.sqrt(0.7))


def test_the_papers_example():
    assert pytest.approx(0.54, abs=0.005) == PAPER.xi
    at_xi, gaussian, at_prior = PAPER.distance(np.array([PAPER.xi, 0.0, 1.0]))
    assert at_xi == pytest.approx(0.004, abs=5e-4)
    assert gaussian == pytest.approx(0.105, abs=5e-4)
    assert at_prior == pytest.approx(0.192, abs=5e-4)
    assert 20 * at_xi < min(gaussian, at_prior)


def test_xi_agrees_with_adaptive_quadrature_and_a_general_minimiser():
    optimize = pytest.importorskip("scipy.optimize")
    integrate = pytest.importorskip("scipy.integrate")
    reverse = by_bayes(2.0, 0.1, 0.4)
    mean = PAPER.gaussian_mean

    def mixture(u, xi):
        return normal(u, mean, 0.4) ** (1 - xi) * prior(u, 2.0) ** xi

    def loss(xi):
        options = {"limit": 200, "epsabs": 1e-12, "epsrel": 1e-12}
        total, _ = integrate.quad(mixture, -14, 14, args=(xi,), **options)
        return integrate.quad(lambda u: (mixture(u, xi) / total - reverse(u)) ** 2, -14, 14)[0]

    best = optimize.minimize_scalar(loss, bounds=(0, 1), method="bounded", options={"xatol": 1e-7})
    assert pytest.approx(best.x, abs=1e-4) == PAPER.xi
    assert PAPER.distance(PAPER.xi) == pytest.approx(best.fun, abs=1e-6)


@pytest.mark.parametrize("beta", [1e-4, 0.01, 0.4, 0.95, 0.9999])
@pytest.mark.parametrize("mu", [0.5, 2.0, 6.0])
def test_the_grids_error_is_below_a_millionth(mu, beta):
    problem = Problem(mu, 0.7, beta)
    points = np.linspace(0, 1, 5)
    difference = problem.distance(points) - problem.refined.distance(points)
    assert np.abs(difference).max() < 1e-6
    assert abs(problem.xi - problem.refined.xi) < 1e-4
    for density in (problem.reverse, problem.gaussian, problem.prior, problem.mixture(0.3)):
        assert problem.integrate(density) == pytest.approx(1, abs=1e-9)


def test_slope_is_the_derivative_of_the_distance():
    xi, h = np.array([0.1, 0.5, 0.9]), 1e-6
    numeric = (PAPER.distance(xi + h) - PAPER.distance(xi - h)) / (2 * h)
    np.testing.assert_allclose(PAPER.slope(xi), numeric, rtol=1e-6)


@pytest.mark.parametrize("v", [0.1, 0.5, 1.0, 2.0])
def test_xi_goes_to_0_with_beta_and_to_1_with_beta(v):
    small = [Problem(2.0, v, beta).xi for beta in (1e-2, 1e-3, 1e-4)]
    large = [Problem(2.0, v, 1 - beta).xi for beta in (1e-2, 1e-3, 1e-4)]
    assert small[0] >= small[1] >= small[2] and small[2] < 5e-4
    assert large[0] < large[1] < large[2] and large[2] > 0.999


@pytest.mark.parametrize("v", [0.0, 0.1, 0.5, 1.0])
def test_xi_starts_with_the_slope_that_matching_variances_gives(v):
    assert Problem(2.0, v, 1e-4).xi / 1e-4 == pytest.approx(initial_slope(2.0, v), rel=0.02)


def test_lemma_1_small_beta_the_gaussian_is_reached_linearly():
    for v in (0.1, 1.0):
        problems = [Problem(2.0, v, beta) for beta in (1e-3, 1e-4)]
        tv = [total_variation(p, p.gaussian) for p in problems]
        assert tv[1] < 1e-4
        assert math.log10(tv[0] / tv[1]) == pytest.approx(1, abs=0.1)


def test_lemma_1_large_beta_the_prior_is_reached_with_the_square_root():
    for v in (0.1, 1.0):
        problems = [Problem(2.0, v, 1 - rest) for rest in (1e-4, 1e-5)]
        tv = [total_variation(p, p.prior) for p in problems]
        assert tv[1] < 0.02
        assert math.log10(tv[0] / tv[1]) == pytest.approx(0.5, abs=0.05)


def test_total_variation_of_disjoint_densities_is_one():
    problem = Problem(2.0, 0.0, 1e-3)
    assert total_variation(problem, normal(problem.u, 5.0, 1e-3)) == pytest.approx(1, abs=1e-6)


def test_xi_is_not_always_inside_as_the_paper_says():
    betas = np.array([0.05, 0.2, 0.3, 0.4, 0.5, 0.9])
    xi = np.array([Problem(2.0, 1.0, beta).xi for beta in betas])
    assert runs(betas, xi == 0) == [(0.2, 0.4)]
    assert (xi[[0, 4, 5]] > 0).all() and (xi < 1).all()
    # Zero is a minimum there: the distance grows from it.
    problem = Problem(2.0, 1.0, 0.3)
    assert problem.slope(0.0) > 0 and problem.distance(0.0) < problem.distance(0.01)
    assert all(0 < Problem(2.0, 0.1, beta).xi < 1 for beta in betas)


def test_runs():
    values = np.arange(6.0)
    flags = np.array([True, False, True, True, False, True])
    assert runs(values, flags) == [(0, 0), (2, 3), (5, 5)]
    assert runs(values, ~np.ones(6, bool)) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2.0, 0.1, 1.0), "strictly between 0 and 1"),
        ((-1.0, 0.1, 0.5), "must be positive"),
        ((2.0, math.inf, 0.5), "must be finite"),
        ((2.0, 0.1, 1e-12), "Keep beta between"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        _ = Problem(*arguments).u


def test_command_writes_the_picture_and_the_numbers(tmp_path, capsys):
    assert main(["xi", "--vs", "0.1", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "xi = 0.54346" in printed and "v = 1.0: beta 0.15 to 0.4" in printed
    with (tmp_path / "xi.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 99
    assert max(float(row["error_l2_squared"]) for row in rows) < 1e-6
    at = {(row["v"], row["beta"]): row for row in rows}
    assert float(at["0.1", "0.4"]["xi"]) == pytest.approx(PAPER.xi, abs=1e-6)
    assert at["1", "0.3"]["interior"] == "0" and at["0.1", "0.3"]["interior"] == "1"
    assert "beta -> 1" in (tmp_path / "lemma1.csv").read_text()
    picture = tmp_path / "fig4.png"
    with Image.open(picture) as image:
        assert image.text["Command"].startswith("run/analysis_xi.sh --vs 0.1 1")
    assert picture.stat().st_size < 300_000
