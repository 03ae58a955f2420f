import math

import pytest
import torch

from ogdm_core import DiscreteVP, KarrasVE, Observer, OGDMConfig


def chi_square(counts):
    """Pearson's statistic against equal counts, and its degrees of freedom."""
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1


def assert_typical(statistics, degrees):
    """A sum of chi-square variables within four standard deviations of its mean."""
    assert abs(statistics - degrees) < 4 * math.sqrt(2 * degrees)


@pytest.mark.parametrize(("T", "k"), [(50, 0.2), (40, 1.0), (30, 0.05)])
def test_s_is_uniform_on_exactly_the_right_set_for_every_t(T, k):
    schedule, draws = DiscreteVP.linear(T), 4000
    longest = math.floor(round(k * T, 9))
    t = torch.arange(1, T + 1).repeat_interleave(draws)
    s = schedule.sample_lookahead(t, k, torch.Generator().manual_seed(0)).reshape(T, draws)
    total = degrees = 0
    for time, row in enumerate(s, start=1):
        most = min(time, longest)
        counts = torch.bincount(row, minlength=T + 1)
        assert int(counts[0]) == 0 and int(counts[most + 1 :].sum()) == 0
        assert bool((counts[1 : most + 1] > 0).all())
        statistic, freedom = chi_square(counts[1 : most + 1].double())
        assert statistic < freedom + 6 * math.sqrt(2 * freedom + 1)
        total, degrees = total + statistic, degrees + freedom
    if degrees:
        assert_typical(total, degrees)


@pytest.mark.parametrize("tau", [0.1, 0.2, 0.7, 1.0])
def test_karras_s_is_uniform_up_to_tau_or_k(tau):
    schedule, k, n, bins = KarrasVE(), 0.2, 40_000, 25
    t = schedule.from_unit_time(torch.full((n,), tau, dtype=torch.float64))
    s = schedule.sample_lookahead(t, k, torch.Generator().manual_seed(0))
    most = min(tau, k)
    assert float(s.min()) > 0 and float(s.max()) <= most + 1e-12
    counts = torch.histc(s / most, bins, 0, 1)
    assert_typical(*chi_square(counts.double()))


@pytest.mark.parametrize("draw", ["lowest", "highest", "one"])
def test_the_extreme_draws_give_the_extreme_s(monkeypatch, draw):
    one = torch.tensor(1.0)
    # "one" is outside torch.rand's range: a guard, should a device ever round up to it.
    value = {"lowest": one * 0, "highest": one.nextafter(one * 0), "one": one}[draw]
    monkeypatch.setattr(torch, "rand", lambda shape, **_: value.expand(shape))
    t = torch.arange(1, 1001)
    s = DiscreteVP.linear(1000).sample_lookahead(t, 0.5)
    assert torch.equal(s, torch.ones_like(t) if draw == "lowest" else t.clamp(max=500))


@pytest.mark.parametrize("T", [3, 7, 10, 49, 1000, 3000, 4000])
def test_too_small_a_k_names_the_smallest_that_works(T):
    schedule = DiscreteVP([1 - (i + 1) / (T + 1) for i in range(T)])
    with pytest.raises(ValueError, match="looks ahead .*smallest k that works is") as error:
        schedule.longest_lookahead(0.99 / T)
    smallest = float(str(error.value).split()[-1])
    assert schedule.longest_lookahead(smallest) == 1
    assert f"T = {T}" in str(error.value)
    assert smallest == pytest.approx(1 / T)


@pytest.mark.parametrize(("T", "k", "steps"), [(100, 0.29, 29), (1000, 0.2, 200), (1000, 1, 1000), (1000, 0.0015, 1)])
def test_reach_is_the_floor_of_the_decimal_product(T, k, steps):
    assert DiscreteVP([1 - (i + 1) / (T + 1) for i in range(T)]).longest_lookahead(k) == steps


def test_an_observer_that_could_not_look_ahead_is_not_built():
    with pytest.raises(ValueError, match="k = 0 .*smallest k that works is 0.001"):
        Observer(OGDMConfig(k=0, d_width=0.02), DiscreteVP.linear(1000), 3, 8)
    with pytest.raises(ValueError, match=r"k = 0 does not look ahead.*\(0, 1\]"):
        Observer(OGDMConfig(k=0, d_width=0.02), KarrasVE(), 3, 8)
