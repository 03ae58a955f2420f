import copy
import io
import random

import numpy as np
import pytest
import torch

from ogdm_core import DiscreteVP, Observer, OGDMConfig, RectifiedFlow, step, training_loss
from ogdm_core.losses import emission_loss, fake_loss, r1_penalty, real_loss
from ogdm_core.random import torch_state
from ogdm_core.solvers import reach
from tests.core.toys import (
    SCHEDULES,
    SMALL,
    TinyNet,
    gradients,
    make_batch,
    make_observer,
    observe,
    weights,
)

FORMS = ["nonsaturating", "hinge"]


def listen(observer):
    """Collects the gradients that D's optimiser is given, a list for every step."""
    heard, plain = [], observer.optimizer.step

    def spy():
        heard.append(gradients(observer.D))
        return plain()

    observer.optimizer.step = spy
    return heard


def sharpen(observer, factor=400.0):
    """Makes D opinionated: logits of either sign, many of them past hinge's margin."""
    with torch.no_grad():
        observer.D.out.weight *= factor


def run(observer, net, steps, start=0, **kwargs):
    """`steps` turns of a trainer whose denoiser stands still; the emission terms."""
    terms = []
    for i in range(start, start + steps):
        batch, _ = make_batch(observer.schedule, seed=i)
        terms.append(observe(observer, batch, net, **kwargs).detach())
        observer.step(1.0)
    return torch.stack(terms)


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def assert_close(ours, theirs, **tolerances):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **tolerances)


# ---------------------------------------------------------------- what the two losses are


@pytest.mark.parametrize("adversarial", FORMS)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_emission_term_and_its_gradient_from_first_principles(kind, adversarial):
    observer, net = make_observer(kind, adversarial=adversarial, gamma=0.7), TinyNet()
    schedule = observer.schedule
    batch, s = make_batch(schedule)
    term = observe(observer, batch, net, s=s)
    term.sum().backward()
    ours = gradients(net)
    net.zero_grad()

    t, u = batch["t"], schedule.lookahead(batch["t"], s)
    a_u, b_u, a_t, b_t = (f(v).reshape(-1, 1, 1, 1).float() for v in (u, t) for f in (schedule.a, schedule.b))
    eps_t = net(batch["x_t"], t)
    fake = a_u * (batch["x_t"] - b_t * eps_t) / a_t + b_u * eps_t
    fake = fake / (a_u**2 * 0.25 + b_u**2).sqrt()
    logit = observer.D(fake, schedule.unit_time(t), schedule.unit_lookahead(s))
    by_hand = 0.7 * (-logit if adversarial == "hinge" else -logit.sigmoid().log())
    torch.testing.assert_close(term, by_hand, rtol=1e-4, atol=1e-5)
    by_hand.sum().backward()
    assert_close(ours, gradients(net), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("adversarial", FORMS)
@pytest.mark.parametrize("penalised", [True, False])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_gradient_of_d_from_first_principles(kind, penalised, adversarial):
    r1 = 0.3 if penalised else 0.0
    observer, net = make_observer(kind, adversarial=adversarial, r1=r1, r1_every=3), TinyNet()
    schedule, D = observer.schedule, copy.deepcopy(observer.D)
    batch, s = make_batch(schedule)
    heard = listen(observer)
    observe(observer, batch, net, s=s)
    observer.step(1.0)

    u = schedule.lookahead(batch["t"], s)
    real = schedule.whiten(schedule.diffuse(batch["x_0"], batch["eps"], u), u).requires_grad_()
    with torch.no_grad():
        eps_t = net(batch["x_t"], batch["t"])
        fake = schedule.whiten(step(schedule, batch["x_t"], eps_t, batch["t"], u), u)
    condition = schedule.unit_time(batch["t"]), schedule.unit_lookahead(s)
    real_logit, fake_logit = D(real, *condition), D(fake, *condition)
    loss = real_loss(real_logit, adversarial) + fake_loss(fake_logit, adversarial)
    penalty = r1_penalty(real_logit, real)
    (loss + 3 * r1 * penalty).mean().backward()
    assert_close(heard[0], gradients(D), rtol=1e-4, atol=1e-6)

    stats, means = observer.stats(), {"d_loss": loss} | ({"r1": penalty} if penalised else {})
    for name, values in means.items():
        assert stats[name] == pytest.approx(float(values.detach().mean()), rel=1e-4)
    assert ("r1" in stats) == penalised
    assert stats["d_real_acc"] == float((real_logit > 0).float().mean())
    assert stats["d_fake_acc"] == float((fake_logit < 0).float().mean())
    expected = emission_loss(fake_logit.detach(), adversarial).mean()
    assert stats["emission"] == pytest.approx(float(expected), rel=1e-4)


def test_the_two_players_want_opposite_things():
    """D learns to tell a denoiser that always answers 0; a free eps_t learns to please D."""
    observer = make_observer(d_lr=5e-3, d_width=0.05, r1=0.0)
    for i in range(60):
        batch, s = make_batch(observer.schedule, n=16, seed=i)
        observer.observe(**batch, eps_t=torch.zeros_like(batch["eps"]), s=s)
        observer.step(1.0)
        if i == 40:
            observer.stats()
    stats = observer.stats()
    assert stats["d_real_acc"] > 0.8 and stats["d_fake_acc"] > 0.8
    batch, s = make_batch(observer.schedule, n=16, seed=100)
    eps_t = torch.zeros_like(batch["eps"]).requires_grad_()
    terms = []
    for _ in range(20):
        term = observer.observe(**batch, eps_t=eps_t, s=s)
        (gradient,) = torch.autograd.grad(term.sum(), eps_t)
        with torch.no_grad():
            eps_t -= 0.5 * torch.nn.functional.normalize(gradient.flatten(1)).view_as(eps_t)
        terms.append(float(term.detach().mean()))
    assert terms[-1] < 0.7 * terms[0]


# ---------------------------------------------------------------- cost and separation


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("projection", "extra"), [("euler", 0), ("heun", 1)])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_evaluations_of_the_denoiser_are_counted(kind, projection, extra, fused):
    observer, net = make_observer(kind, projection=projection, fused=fused), TinyNet()
    for i in range(5):
        batch, _ = make_batch(observer.schedule, seed=i)
        net.calls = 0
        term = observe(observer, batch, net)
        assert net.calls == 1 + extra
        term.mean().backward()
        observer.step(1.0)
        assert net.calls == 1 + extra
    assert all(bool((t > 0).all()) for t in net.times)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("projection", ["euler", "heun"])
@pytest.mark.parametrize("d_kind", ["paper", "light"])
def test_each_players_gradient_is_its_own(d_kind, projection, fused):
    """The emission term moves the denoiser and not D; D's step moves all of D and nothing else."""
    observer = make_observer(projection=projection, fused=fused, d_kind=d_kind)
    net, phi = TinyNet(), weights(observer.D)
    batch, _ = make_batch(observer.schedule)
    term = observe(observer, batch, net)
    before = gradients(observer.D)
    term.mean().backward()
    gradient, value = net.weight.grad.clone(), net.weight.detach().clone()
    assert bool(gradient.any())
    after = gradients(observer.D)
    if fused:  # D's own half of the gradient is there already; the trainer's backward adds nothing
        assert_same(after, before)
    else:
        assert before == after == [None] * len(before)
    assert all(p.requires_grad for p in observer.D.parameters())
    observer.step(1.0)
    assert torch.equal(net.weight.grad, gradient) and torch.equal(net.weight.detach(), value)
    assert not any(torch.equal(a, b) for a, b in zip(phi, weights(observer.D), strict=True))
    assert gradients(observer.D) == [None] * len(phi)


# ---------------------------------------------------------------- R1, every so often


@pytest.mark.parametrize("fused", [False, True])
def test_lazy_r1_has_the_expected_gradient_of_r1_at_every_step(fused):
    means = []
    for every in (1, 4):
        observer, net = make_observer(r1=0.5, r1_every=every, fused=fused), TinyNet()
        batch, s = make_batch(observer.schedule)
        heard = listen(observer)
        for _ in range(4):
            observe(observer, batch, net, s=s)
            observer.step(0.0)
        means.append([sum(parts) / 4 for parts in zip(*heard, strict=True)])
        if every == 4:
            assert not all(map(torch.allclose, heard[0], heard[1]))
            assert_close(heard[1], heard[2])
    assert_close(*means, rtol=1e-4, atol=1e-6)


def test_r1_is_taken_every_nth_step_from_the_first():
    observer, net = make_observer(r1_every=3), TinyNet()
    taken = []
    for i in range(7):
        run(observer, net, 1, start=i)
        taken.append("r1" in observer.stats())
    assert taken == [True, False, False, True, False, False, True]


# ---------------------------------------------------------------- one pass for both updates


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("adversarial", FORMS)
@pytest.mark.parametrize("projection", ["euler", "heun"])
def test_fused_gradients_are_those_of_the_two_passes(projection, adversarial, precision):
    results = []
    for fused in (False, True):
        observer = make_observer(projection=projection, adversarial=adversarial, fused=fused,
                                 d_precision=precision, gamma=0.3)  # fmt: skip
        sharpen(observer)
        net, heard = TinyNet(), listen(observer)
        batch, s = make_batch(observer.schedule, n=16)
        term = observe(observer, batch, net, s=s)
        (1.7 * term).sum().backward()
        observer.step(1.0)
        emission = observer.per_sample["emission"]
        results.append((term.detach(), net.weight.grad, heard[0], observer.stats(), emission))
    (term, theta, phi, stats, emission), (term_1, theta_1, phi_1, stats_1, _) = results
    if adversarial == "hinge":  # samples on the flat side of the margin, and on the other
        assert 3 < int((emission > 1).sum()) < 13
    else:  # and where the slope of log(1 - D) is next to nothing
        assert float(emission.max()) > 20
    loose = {"rtol": 1e-4, "atol": 1e-5} if precision == "fp32" else {"rtol": 0.05, "atol": 0.02}
    assert_close([term], [term_1], **loose)
    scale = theta.abs().max()
    assert_close([theta / scale], [theta_1 / scale], **loose)
    for a, b in zip(phi, phi_1, strict=True):
        size = a.abs().max().clamp(min=1e-8)
        assert_close([a / size], [b / size], **loose)
    assert stats_1 == pytest.approx(stats, rel=loose["rtol"], abs=1e-3)


# ---------------------------------------------------------------- microbatches


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("kind", "cut"), [*((kind, 8) for kind in SCHEDULES), ("vp", 4)])
def test_two_parts_and_one_step_are_one_whole(kind, cut, fused):
    results = []
    for parts in ([slice(16)], [slice(cut), slice(cut, 16)]):
        observer, net = make_observer(kind, fused=fused), TinyNet()
        heard = listen(observer)
        for i in range(2):  # the first step with R1, the second without
            batch, s = make_batch(observer.schedule, n=16, seed=i)
            for part in parts:
                of_part = {name: value[part] for name, value in batch.items()}
                (observe(observer, of_part, net, s=s[part]).sum() / 16).backward()
            observer.step(0.0)
        per_sample = {k: v for k, v in observer.per_sample.items() if k != "t"}
        results.append((heard, net.weight.grad, per_sample, observer.stats()))
    whole, split = results
    assert_close(whole[0][0], split[0][0], rtol=1e-4, atol=1e-6)
    assert_close(whole[0][1], split[0][1], rtol=1e-4, atol=1e-6)
    assert_close([whole[1]], [split[1]])
    assert_close(list(whole[2].values()), list(split[2].values()), rtol=1e-4, atol=1e-5)
    assert whole[3] == pytest.approx(split[3], rel=1e-4)


def test_a_step_needs_an_observation_and_forgets_it():
    observer, net = make_observer(), TinyNet()
    with pytest.raises(RuntimeError, match=r"step\(\) needs at least one observe\(\)"):
        observer.step(1.0)
    run(observer, net, 1)
    with pytest.raises(RuntimeError, match="needs at least one observe"):
        observer.step(1.0)


@pytest.mark.parametrize("fused", [False, True])
def test_validation_under_no_grad_leaves_no_trace(fused):
    plain, checked = make_observer(fused=fused), make_observer(fused=fused)
    net = TinyNet()
    for i in range(3):
        for observer in (plain, checked):
            if observer is checked:
                with torch.no_grad():
                    batch, _ = make_batch(observer.schedule, seed=99)
                    term = observe(observer, batch, net)
                assert term.shape == (8,) and not observer._pending
                assert all(g is None for g in gradients(observer.D))
            run(observer, net, 1, start=i)
    assert_same(weights(plain.D), weights(checked.D))
    assert plain.stats() == checked.stats()


@pytest.mark.parametrize("fused", [False, True])
def test_a_frozen_denoiser_still_trains_d(fused):
    observer, net = make_observer(fused=fused), TinyNet().requires_grad_(False)
    before = weights(observer.D)
    batch, _ = make_batch(observer.schedule)
    term = observe(observer, batch, net)
    assert not term.requires_grad
    observer.step(1.0)
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(observer.D), strict=True))
    twin = make_observer(fused=fused)
    run(twin, TinyNet(), 1)
    assert_same(weights(observer.D), weights(twin.D))


# ---------------------------------------------------------------- randomness


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("projection", ["euler", "heun"])
def test_the_global_random_states_are_never_touched(projection, fused, monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    batches = [make_batch(DiscreteVP.linear(), seed=i)[0] for i in range(2)]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    observer = make_observer(projection=projection, fused=fused, seed=7)
    net = TinyNet()
    for batch in batches:
        observe(observer, batch, net).sum().backward()
        observer.step(1.0)
    observer.stats()
    observer.load_state_dict(copy.deepcopy(observer.state_dict()))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert bool((np.random.get_state()[1] == states[2]).all())
    assert not seeded, "a GPU trainer's noise would change"


def test_the_global_random_state_does_not_matter():
    ends = []
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            observer = make_observer()
            run(observer, TinyNet(), 2)
        ends.append(weights(observer.D))
    assert_same(*ends)


def drawn(observer, net, n=64):
    """The lookahead that the observer draws for a batch at t = T, from what it noted of it."""
    batch, _ = make_batch(observer.schedule, n=n)
    batch["t"] = torch.full((n,), observer.schedule.T)
    observe(observer, batch, net)
    return (observer._pending[-1].d_args[1] * observer.schedule.T).round()


def test_draws_differ_by_seed_step_and_microbatch_and_by_nothing_else():
    net, draws = TinyNet(), []
    for seed in (0, 1):
        observer = make_observer(seed=seed)
        for _ in range(2):
            draws += [drawn(observer, net), drawn(observer, net)]
            observer.step(1.0)
    again = make_observer(seed=0)
    assert torch.equal(drawn(again, net), draws[0]) and torch.equal(drawn(again, net), draws[1])
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert float((a == b).float().mean()) < 0.2


def test_seeds_decide_the_first_weights():
    assert_same(weights(make_observer(seed=3).D), weights(make_observer(seed=3).D))
    pairs = zip(weights(make_observer(seed=3).D), weights(make_observer(seed=4).D), strict=True)
    assert all(not torch.equal(a, b) for a, b in pairs if a.ndim > 1)


# ---------------------------------------------------------------- state


def saved(observer):
    """The state through a file that may hold nothing but tensors and plain values."""
    file = io.BytesIO()
    torch.save(observer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"projection": "heun"},
                                      {"adversarial": "hinge", "d_precision": "bf16"}])  # fmt: skip
@pytest.mark.parametrize("kind", SCHEDULES)
def test_saved_loaded_and_continued_is_bit_identical_to_never_stopped(kind, settings):
    net = TinyNet()
    whole = make_observer(kind, **settings)
    terms = run(whole, net, 7)
    first = make_observer(kind, **settings)
    run(first, net, 3)
    second = make_observer(kind, **settings)
    second.load_state_dict(saved(first))
    assert second.steps == 3
    assert torch.equal(run(second, net, 4, start=3), terms[3:])
    assert_same(weights(second.D), weights(whole.D))
    ours, theirs = second.optimizer.state_dict(), whole.optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for i, moments in theirs["state"].items():
        for name, value in moments.items():
            assert torch.equal(ours["state"][i][name], value)


def test_a_loaded_observer_shares_nothing_with_its_origin():
    net, first, second = TinyNet(), make_observer(), make_observer()
    run(first, net, 2)
    second.load_state_dict(first.state_dict())
    kept, skipped = weights(first.D), float(first.skipped)
    batch, _ = make_batch(second.schedule)
    observe(second, batch | {"eps": batch["eps"] * float("nan")}, net)
    second.step(1.0)
    run(second, net, 2)
    assert_same(weights(first.D), kept)
    assert float(second.skipped) == skipped + 1 and float(first.skipped) == skipped


@pytest.mark.parametrize("fused", [False, True])
def test_loading_forgets_what_was_observed_before(fused):
    net, first = TinyNet(), make_observer(fused=fused)
    state = saved(first)
    second = make_observer(fused=fused)
    batch, _ = make_batch(second.schedule, seed=50)
    observe(second, batch, net)
    second.load_state_dict(state)
    run(first, net, 1)
    run(second, net, 1)
    assert_same(weights(first.D), weights(second.D))


def test_settings_of_the_run_win_over_those_of_the_state():
    net, first = TinyNet(), make_observer()
    run(first, net, 1)
    second = make_observer(d_lr=1e-4)
    second.load_state_dict(saved(first))
    run(second, net, 1)
    (group,) = second.optimizer.param_groups
    assert group["lr"] == 1e-4


@pytest.mark.parametrize("state", [{}, None, {"version": 99}, {"state_dict": {}}, [1, 2]])
def test_what_is_not_an_observers_state_is_refused(state):
    with pytest.raises(ValueError, match="not an observer's state"):
        make_observer().load_state_dict(state)


# ---------------------------------------------------------------- numbers that are not finite


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["x_0", "eps_t"])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(where, poison, fused):
    net, observer = TinyNet(), make_observer(fused=fused)
    run(observer, net, 2)
    before = copy.deepcopy(observer.state_dict())
    batch, _ = make_batch(observer.schedule, seed=9)
    eps_t = net(batch["x_t"], batch["t"]).detach()
    bad = batch | {"eps_t": eps_t}
    bad[where] = bad[where].clone()
    bad[where][3, 1, 2, 2] = poison
    observer.observe(**bad)
    observer.step(1.0)
    after = observer.state_dict()
    assert_same(list(after["discriminator"].values()), list(before["discriminator"].values()))
    for i, moments in before["optimizer"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(after["optimizer"]["state"][i][name], value), name
    assert observer.stats()["skipped"] == 1 and after["steps"] == 3
    second = make_observer(fused=fused)
    second.load_state_dict(saved(observer))
    assert second.stats()["skipped"] == 1
    run(observer, net, 1, start=20)
    assert observer.stats()["skipped"] == 1
    moved = observer.D.state_dict().items()
    assert any(not torch.equal(p, before["discriminator"][name]) for name, p in moved)
    assert all(bool(p.isfinite().all()) for p in observer.D.parameters())


# ---------------------------------------------------------------- mixed precision


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("projection", ["euler", "heun"])
def test_a_scaled_loss_gives_scaled_gradients_and_the_same_d(projection, fused):
    results = []
    for scale in (1.0, 1024.0):
        observer, net = make_observer(projection=projection, fused=fused), TinyNet()
        for i in range(2):
            batch, _ = make_batch(observer.schedule, seed=i)
            (observe(observer, batch, net).mean() * scale).backward()
            observer.step(1.0)
        results.append((net.weight.grad / scale, weights(observer.D)))
    assert torch.equal(results[0][0], results[1][0])
    assert_same(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("projection", ["euler", "heun"])
def test_denoisers_of_another_precision(projection, dtype):
    observer, net = make_observer(projection=projection), TinyNet()
    batch, s = make_batch(observer.schedule)

    def low(x, t):
        return net(x.to(dtype), t)

    exact = observe(observer, batch, net, s=s)
    cast = {k: v if k == "t" else v.to(dtype) for k, v in batch.items()}
    eps_t = low(cast["x_t"], cast["t"])
    term = observer.observe(**cast, eps_t=eps_t, eps_fn=low, s=s)
    assert term.dtype == torch.float32
    term.sum().backward()
    assert bool(net.weight.grad.isfinite().all()) and bool(net.weight.grad.any())
    torch.testing.assert_close(term, exact, rtol=0.3, atol=0.1)
    observer.step(1.0)


def test_the_trainers_autocast_does_not_reach_d():
    observer, net = make_observer(), TinyNet()
    batch, s = make_batch(observer.schedule)
    eps_t = net(batch["x_t"], batch["t"]).detach()
    plain = observer.observe(**batch, eps_t=eps_t, s=s)
    with torch.autocast("cpu", torch.bfloat16):
        inside = observer.observe(**batch, eps_t=eps_t, s=s)
    assert torch.equal(plain, inside)


def test_bf16_d_runs_and_is_close():
    runs = []
    for precision in ("fp32", "bf16"):
        observer, net = make_observer(d_precision=precision, d_width=0.1), TinyNet()
        heard = listen(observer)
        terms = run(observer, net, 6)
        runs.append((terms, heard, observer.stats()))
    (terms, heard, stats), (terms_1, heard_1, stats_1) = runs
    assert not torch.equal(terms, terms_1)
    torch.testing.assert_close(terms, terms_1, rtol=0.1, atol=0.1)
    first, first_1 = (torch.cat([g.flatten() for g in h[1]]) for h in (heard, heard_1))
    assert float(torch.cosine_similarity(first, first_1, dim=0)) > 0.99
    assert stats_1["d_loss"] == pytest.approx(stats["d_loss"], rel=0.1)
    assert all(p.dtype == torch.float32 for p in observer.D.parameters())


# ---------------------------------------------------------------- labels, sizes, logs


def test_per_sample_values_follow_the_batch():
    observer, net = make_observer(gamma=0.5), TinyNet()
    first, s_1 = make_batch(observer.schedule, n=4, seed=1)
    second, s_2 = make_batch(observer.schedule, n=8, seed=2)
    terms = [observe(observer, first, net, s=s_1), observe(observer, second, net, s=s_2)]
    observer.step(1.0)
    values = observer.per_sample
    assert set(values) == {"t", "emission", "d_loss", "d_real_acc", "d_fake_acc", "r1"}
    assert all(v.shape == (12,) and not v.requires_grad for v in values.values())
    assert torch.equal(values["t"], torch.cat([first["t"], second["t"]]))
    torch.testing.assert_close(0.5 * values["emission"], torch.cat(terms).detach())


def test_stats_are_means_since_they_were_last_asked_for():
    observer, net = make_observer(), TinyNet()
    assert observer.stats() == {"skipped": 0}
    sums = []
    for i in range(3):
        run(observer, net, 1, start=i)
        sums.append({k: float(v.mean()) for k, v in observer.per_sample.items() if k != "t"})
    stats = observer.stats()
    for name in ("emission", "d_loss", "d_real_acc", "d_fake_acc"):
        assert stats[name] == pytest.approx(sum(s[name] for s in sums) / 3)
    assert stats["r1"] == pytest.approx(sums[0]["r1"])  # a mean over the steps that took it
    assert observer.stats() == {"skipped": 0}


def test_the_learning_rate_follows_the_trainers():
    moved = []
    for scale in (0.0, 0.5, 1.0):
        observer, net = make_observer(r1=0.0), TinyNet()
        before = weights(observer.D)
        batch, s = make_batch(observer.schedule)
        observe(observer, batch, net, s=s)
        observer.step(scale)
        moved.append([a - b for a, b in zip(weights(observer.D), before, strict=True)])
    assert not any(bool(m.any()) for m in moved[0])
    assert_close([2 * m for m in moved[1]], moved[2], rtol=1e-3, atol=1e-6)
    # Adam's first step is the learning rate itself, up or down.
    assert max(float(m.abs().max()) for m in moved[2]) == pytest.approx(1e-3, rel=1e-2)


def test_the_whole_way_to_the_data_is_a_legal_projection():
    for projection in ("euler", "heun"):
        observer, net = make_observer(projection=projection, k=1.0), TinyNet()
        batch, _ = make_batch(observer.schedule)
        observe(observer, batch, net, s=batch["t"]).sum().backward()
        observer.step(1.0)
        assert bool(net.weight.grad.isfinite().all()) and observer.stats()["skipped"] == 0


class PointD(torch.nn.Module):
    """A discriminator of points [N, 2]."""

    def __init__(self, channels, size, labels, width):
        super().__init__()
        self.made_of = (channels, size, labels, width)
        self.layers = torch.nn.Sequential(torch.nn.Linear(channels + 2, 16), torch.nn.SiLU(), torch.nn.Linear(16, 1))

    def forward(self, x, t, s, label=None, parts=1):
        return self.layers(torch.cat([x, t[:, None], s[:, None]], 1)).flatten()


@pytest.mark.parametrize("fused", [False, True])
def test_data_that_are_not_images_bring_their_own_discriminator(fused):
    config = OGDMConfig(**SMALL | {"fused": fused})
    observer = Observer(config, DiscreteVP.linear(), 2, 1, build=PointD)
    assert observer.D.made_of == (2, 1, 0, SMALL["d_width"])
    x_0, eps = torch.randn(2, 8, 2, generator=torch.Generator().manual_seed(0)).unbind()
    t = torch.arange(100, 900, 100)
    x_t = observer.schedule.diffuse(x_0, eps, t)
    eps_t, before = eps.clone().requires_grad_(), weights(observer.D)
    observer.observe(x_0=x_0, eps=eps, x_t=x_t, t=t, eps_t=eps_t).sum().backward()
    observer.step(1.0)
    assert bool(eps_t.grad.any())
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(observer.D), strict=True))
    twin = Observer(config, DiscreteVP.linear(), 2, 1, build=PointD)
    twin.load_state_dict(saved(observer))
    assert_same(weights(twin.D), weights(observer.D))


@pytest.mark.parametrize("replay", [True, False])
def test_heuns_second_pass_has_the_dropout_masks_of_the_first(replay):
    observer, net = make_observer(projection="heun"), torch.nn.Dropout(0.5)
    batch, s = make_batch(observer.schedule)
    masks = []

    def eps_fn(x, t):
        masks.append(net(torch.ones_like(x)) > 0)
        return x

    rng = torch_state(torch.device("cpu"))
    eps_t = eps_fn(batch["x_t"], batch["t"])
    before = torch.get_rng_state()
    observer.observe(**batch, eps_t=eps_t, eps_fn=eps_fn, s=s, rng=rng if replay else None)
    assert torch.equal(*masks) == replay
    assert torch.equal(torch.get_rng_state(), before), "the trainer's own noise must not change"


def test_a_training_step_of_ones_own_needs_the_loss_and_two_steps():
    schedule = RectifiedFlow()
    observer = Observer(OGDMConfig(**SMALL), schedule, 3, 8)
    net = TinyNet()
    batch, _ = make_batch(schedule)
    given = batch["x_0"], batch["eps"], batch["t"], schedule
    plain, transition = training_loss(net, *given)
    assert torch.equal(plain.detach(), transition)
    loss, same = training_loss(net, *given, observer)
    assert torch.equal(same, transition) and bool(loss > plain)
    loss.backward()
    observer.step(1.0)
    assert observer.steps == 1


@pytest.mark.parametrize("adversarial", FORMS)
@pytest.mark.parametrize("projection", ["euler", "heun"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_rho_bounds_the_loop_gain_whatever_the_time_the_size_and_the_loss(kind, projection, adversarial):
    observer = make_observer(kind, rho=7.0, gamma=None, projection=projection, adversarial=adversarial)
    schedule, generator = observer.schedule, torch.Generator().manual_seed(0)
    for size, dearer in ((8, 1.0), (32, 50.0)):
        eps, eps_t = torch.randn(2, 64, 3, size, size, generator=generator)
        tau = torch.rand(64, generator=generator)
        t = (1 + tau * 999).long() if kind == "vp" else schedule.from_unit_time(tau)
        u = schedule.lookahead(t, schedule.sample_lookahead(t, 0.9, generator))
        error = (eps_t - eps).square().flatten(1).mean(1)
        weight = observer._weight(t, u, eps_t, eps, dearer * error)
        torch.testing.assert_close(weight, dearer * observer._weight(t, u, eps_t, eps, None))
        slope = 1.0 if adversarial == "hinge" else 0.5
        gain = weight.double() * slope * eps[0].numel() * reach(projection, schedule, t, u) ** 2 / dearer
        assert bool((gain < 7).all()) and float(gain.max()) > 1


def test_a_fixed_gamma_knows_neither_the_loss_nor_the_end_of_the_run():
    net = TinyNet()
    (batch, _), given = make_batch(SCHEDULES["vp"]()), {"gamma": 0.3}
    plain, other = make_observer("vp", **given), make_observer("vp", **given, rho=90.0, plain_end=0.9)
    other.total_steps = 1
    one = observe(plain, batch, net)
    assert torch.equal(one, observe(other, batch, net, transition=torch.rand(len(batch["t"]))))
    doubled = make_observer("vp", gamma=0.6)
    torch.testing.assert_close(observe(doubled, batch, net), 2 * one)


@pytest.mark.parametrize("fused", [False, True])
def test_the_end_of_a_run_is_plain_and_costs_nothing(fused):
    observer, net = make_observer("vp", gamma=None, rho=5.0, plain_end=0.5, fused=fused, projection="heun"), TinyNet()
    observer.total_steps = 4
    assert bool((run(observer, net, 2) != 0).all())
    before, state = weights(observer.D), observer.state_dict()
    net.calls = 0
    assert bool((run(observer, net, 2, start=2) == 0).all()) and net.calls == 2
    assert observer.steps == 4 and not observer.per_sample and observer.stats().keys() >= {"skipped"}
    assert_same(before, weights(observer.D))
    again = make_observer("vp", gamma=None, rho=5.0, plain_end=0.5, fused=fused, projection="heun")
    again.total_steps = 4
    again.load_state_dict(state)
    assert not again.watching
    again.total_steps = None  # an end that is not known does not come
    assert again.watching


@pytest.mark.parametrize("kind", ["paper", "light"])
def test_the_mapping_learns_at_its_own_rate_and_resumes(kind):
    """Adam's first step moves every weight by the learning rate, up to its epsilon."""
    observer = make_observer(d_kind=kind, d_mapping_lr=0.01, d_lr=1e-3, r1=0.0, labels=3)
    mapping = {id(p) for p in observer.D.mapping_parameters()}
    assert 0 < len(mapping) < len(list(observer.D.parameters()))
    before = weights(observer.D)
    batch, s = make_batch(observer.schedule)
    observe(observer, batch, TinyNet(), s=s, label=torch.arange(8) % 3)
    observer.step(1.0)
    for p, old in zip(observer.D.parameters(), before, strict=True):
        moved = float((p - old).detach().abs().max())
        assert moved == pytest.approx(1e-5 if id(p) in mapping else 1e-3, rel=0.1)
    again = make_observer(d_kind=kind, d_mapping_lr=0.01, labels=3)
    again.load_state_dict(observer.state_dict())
    plain = make_observer(d_kind=kind, labels=3)
    with pytest.raises(ValueError, match="d_mapping_lr 0.01, this run has 1"):
        plain.load_state_dict(observer.state_dict())


@pytest.mark.parametrize("t", [0, 1001])
def test_a_time_that_the_schedule_does_not_count_is_refused(t):
    observer = make_observer()
    batch, _ = make_batch(observer.schedule)
    batch["t"][3] = t
    with pytest.raises(ValueError, match=r"1 of the times t are not in 1\.\.1000.*net\(x_t, t - 1\)"):
        observer.observe(**batch, eps_t=batch["eps"])


def test_auto_without_a_denoiser_is_the_light_d_and_a_resumed_run_keeps_its_own():
    auto, paper = make_observer(d_kind="auto"), make_observer(d_kind="paper")
    assert auto.config.d_kind == "light" and auto.about_d().startswith("D: light, ")
    batch, _ = make_batch(paper.schedule)
    paper.observe(**batch, eps_t=batch["eps"])
    paper.step(1.0)
    assert auto.load_state_dict(paper.state_dict()) == "" and auto.config.d_kind == "paper"
    assert_same(weights(auto.D), weights(paper.D))
    with pytest.raises(ValueError, match="d_kind: paper there, light here"):
        make_observer(d_kind="light").load_state_dict(paper.state_dict())


@pytest.mark.parametrize("fused", [False, True])
def test_the_cost_of_d_is_what_torch_counts_of_a_step(fused):
    from torch.utils.flop_counter import FlopCounterMode

    net = torch.nn.Conv2d(3, 3, 3, padding=1)
    config = OGDMConfig(d_kind="paper", d_width=0.2, fused=fused, r1=0.0, k=0.3, gamma=0.5)
    observer = Observer(config, DiscreteVP.linear(), 3, 8, denoiser=lambda x, t: net(x))
    batch, _ = make_batch(observer.schedule, n=4)
    with FlopCounterMode(display=False) as counter:
        leaf = batch["eps"].clone().requires_grad_()
        observer.observe(**batch, eps_t=leaf).sum().backward()
        observer.step(1.0)
    counted = counter.get_total_flops() / 4 / (3 * 2 * 81 * 64)  # images; the convolution's three passes
    said = float(observer.about_d().split("about ")[1].split(" times")[0])
    assert said == pytest.approx(counted, rel=0.1)
    assert "warning: D costs more than 2 steps of the denoiser; d_kind light" in observer.about_d()
