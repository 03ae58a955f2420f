"""EDM's train.py by itself: no clone of upstream is needed."""

import copy
import pickle

import click
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from ogdm_core.config import OGDMConfig
from ogdm_core.edm import sample, train
from tests.core.toys import loss_weights


class Net(torch.nn.Module):
    """A denoiser with EDM's interface: dropout, class labels and augmentation labels matter."""

    img_channels, img_resolution, label_dim = 1, 8, 3
    sigma_min, sigma_max, sigma_data = 0, float("inf"), 0.5

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 1, 3, padding=1)
        self.drop = torch.nn.Dropout(0.5)
        self.calls = []

    def forward(self, x, sigma, class_labels=None, augment_labels=None):
        self.calls.append((x, sigma, class_labels, augment_labels))
        shift = class_labels.sum(1)
        shift = shift if augment_labels is None else shift + augment_labels.sum(1)
        return self.drop(self.conv(x)) + shift.reshape(-1, 1, 1, 1)


class Loss:
    """Shaped like upstream's losses; keeps y and n for the test to look at."""

    def __call__(self, net, images, labels=None, augment_pipe=None):
        sigma = torch.rand(len(images), 1, 1, 1) + 0.5
        y, augment_labels = augment_pipe(images) if augment_pipe is not None else (images, None)
        self.y, self.n = y, torch.randn_like(y) * sigma
        return (net(y + self.n, sigma, labels, augment_labels=augment_labels) - y) ** 2


def flip(images):
    return images.flip(3), torch.arange(len(images))[:, None] / 4


def observed(projection="euler", gamma=0.1, fine_tuned=False, run_dir=None, **settings):
    config = OGDMConfig(projection=projection, gamma=gamma, k=0.3, d_width=0.02, **settings)
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    session = train.Session(config, net, net, Loss(), optimizer, fine_tuned=fine_tuned, run_dir=run_dir)
    net.calls.clear()  # D's cost was counted
    return session, net, session.loss_fn


def batch():
    return torch.rand(4, 1, 8, 8), torch.eye(3)[[0, 1, 2, 0]]


def observe_without_a_trace(net, loss_fn, images, labels):
    """The loss and the dropout masks of all passes; the trainer's own noise must not change."""
    masks = []
    net.drop.register_forward_hook(lambda module, x, y: masks.append(y == 0))
    start = torch.get_rng_state()
    loss_fn.loss_fn(net, images, labels, flip)
    after = torch.get_rng_state()
    net.calls.clear(), masks.clear()
    torch.set_rng_state(start)
    loss = loss_fn(net, images, labels, flip)
    assert torch.equal(torch.get_rng_state(), after)
    return loss, masks


def test_projection_sees_what_the_loss_saw(monkeypatch):
    session, net, loss_fn = observed()
    images, labels = batch()
    given = {}
    real_observe = session.observer.observe

    def observe(**kwargs):
        given.update(kwargs)
        return real_observe(**kwargs)

    monkeypatch.setattr(session.observer, "observe", observe)
    loss = loss_fn(net=net, images=images, labels=labels, augment_pipe=flip)
    inner = loss_fn.loss_fn
    x_t, sigma, _, augment_labels = net.calls[0]
    assert len(net.calls) == 1, "Euler's projection evaluates nothing"
    assert torch.equal(given["x_0"], images.flip(3))
    assert torch.equal(augment_labels, flip(images)[1])
    assert torch.equal(given["t"], sigma.flatten())
    assert torch.equal(given["x_t"], inner.y + inner.n)
    assert torch.allclose(given["eps"], inner.n / sigma, atol=1e-6)
    assert torch.equal(given["label"], labels)
    denoised = x_t - sigma * given["eps_t"]
    assert torch.allclose((denoised - inner.y) ** 2, loss, atol=1e-5)


@pytest.mark.parametrize(("projection", "more"), [("euler", 1), ("heun", 2)])
def test_dropped_augmentation_labels_cost_one_more_evaluation(projection, more):
    session, net, loss_fn = observed(projection, augment_labels="drop")
    _, masks = observe_without_a_trace(net, loss_fn, *batch())
    first, *others = net.calls
    assert len(others) == more and all(call[3] is None for call in others)
    assert torch.equal(others[0][0], first[0]) and torch.equal(masks[0], masks[1])


def test_without_augmentation_there_is_no_label_to_drop():
    session, net, loss_fn = observed(augment_labels="drop")
    images, labels = batch()
    loss_fn(net=net, images=images, labels=labels)
    assert len(net.calls) == 1


def test_emission_is_added_to_every_pixel_with_weight_gamma():
    session, net, loss_fn = observed(gamma=0.1)
    loss = loss_fn(net, *batch(), augment_pipe=flip)
    more = (loss + loss_fn.emission).sum((1, 2, 3)) - loss.sum((1, 2, 3))
    session.step()
    emission = session.observer.per_sample["emission"]
    assert torch.allclose(more, 0.1 * 1 * 8 * 8 * emission, rtol=1e-3)


def test_rho_reads_from_upstreams_loss_how_much_an_error_of_eps_costs():
    session, net, loss_fn = observed(gamma=None)
    found = loss_weights(session.observer)
    loss_fn(net, *batch(), augment_pipe=flip)
    ((sigma, w),) = found
    torch.testing.assert_close(w, sigma**2)  # the loss is one of the denoised image


def test_heun_asks_the_network_once_more_with_the_same_labels_and_dropout():
    session, net, loss_fn = observed("heun")
    images, labels = batch()
    loss, masks = observe_without_a_trace(net, loss_fn, images, labels)
    (_, sigma, *_), (_, u, class_labels, augment_labels) = net.calls
    assert torch.equal(masks[0], masks[1]) and masks[0].any()
    assert torch.equal(class_labels, labels)
    assert torch.equal(augment_labels, flip(images)[1])
    assert (u < sigma.flatten()).all()
    (loss + loss_fn.emission).sum().backward()
    assert net.conv.weight.grad.isfinite().all()


def test_recorded_loss_pickles_as_upstreams_own():
    _, net, loss_fn = observed()
    images, labels = batch()
    loss_fn(net=net, images=images, labels=labels, augment_pipe=flip)
    assert type(pickle.loads(pickle.dumps(loss_fn))) is Loss
    assert type(copy.deepcopy(loss_fn)) is Loss


def test_ds_rate_follows_upstreams_ramp_up():
    session, net, loss_fn = observed()
    for scale in (0.0, 0.25, 1.0):
        for group in session.optimizer.param_groups:
            group["lr"] = 1e-3 * scale
        loss_fn(net, *batch(), augment_pipe=flip)
        session.step()
        (group,) = session.observer.optimizer.param_groups
        assert group["lr"] == pytest.approx(session.observer.config.d_lr * scale)


def test_without_ogdm_there_is_no_session():
    assert train.session(None, Net(), Net(), Loss(), None, 0, None, None, 10, None, "") is None
    assert train.load_state(None, "training-state-000001.pt") is None


def test_noise_range_is_the_networks_own_where_it_has_one():
    net = Net()
    assert (train.schedule_of(net).sigma_min, train.schedule_of(net).sigma_max) == (0.002, 80)
    net.sigma_min, net.sigma_max = 0.02, 100
    assert (train.schedule_of(net).sigma_min, train.schedule_of(net).sigma_max) == (0.02, 100)


def test_a_run_continues_at_the_next_image_of_the_shuffled_order():
    assert list(train.SkipFirst(range(10, 16), 4)) == [14, 15]


@pytest.mark.parametrize("fine_tuned", [True, False])
def test_a_state_file_brings_back_the_observer_and_that_the_run_is_a_fine_tune(tmp_path, fine_tuned):
    """Upstream sets the EMA's ramp-up for --transfer only, so a resumed fine-tune needs to know."""
    session, net, loss_fn = observed(fine_tuned=fine_tuned, run_dir=str(tmp_path))
    loss_fn(net, *batch(), augment_pipe=flip)
    session.step()
    torch.save({}, tmp_path / "training-state-000002.pt")  # upstream's files
    (tmp_path / "network-snapshot-000002.pkl").write_bytes(pickle.dumps({}))
    session.save(nimg=2000, tick=1, every=1, done=False)
    noise = torch.rand(3)
    state = train.load_state({}, str(tmp_path / "training-state-000002.pt"))
    ogdm = session.observer.config.to_dict()
    again = train.session(ogdm, net, net, Loss(), session.optimizer, 0, "snapshot.pkl", state, 10, str(tmp_path), "")
    again.stop.forget()
    assert again.observer.total_steps == 10
    assert again.fine_tuned is fine_tuned
    assert again.resume(state) == (2000, 2) and again.observer.steps == 1
    assert torch.equal(torch.rand(3), noise)
    again.check(nimg=2000)  # upstream may now write its files again
    with pytest.raises(ValueError, match="ogdm-state-000002.pt is missing"):
        train.load_state({}, str(tmp_path / "training-state-000002.pt"))


# ---- flags --------------------------------------------------------------------------------------


def options(*args):
    seen = {}

    @click.command()
    @click.option("--resume")
    @click.option("--data", default="")
    @train.train_options
    def main(**kwargs):
        seen.update(train.training_kwargs(kwargs, {"network_kwargs": {}}))

    result = CliRunner().invoke(main, args)
    return seen, result


def test_flags_reach_the_loop_and_nothing_does_without_them():
    assert options()[0] == {}
    assert options("--lr-rampup=0")[0] == {"lr_rampup_kimg": 0}
    seen, _ = options("--ogdm", "--ogdm-k=0.3", "--ogdm-projection=heun", "--lr-rampup=0.5")
    assert seen["lr_rampup_kimg"] == 500
    assert seen["ogdm"] == OGDMConfig(k=0.3, projection="heun").to_dict()


def test_resume_without_the_discriminator_says_what_to_do(tmp_path):
    seen, result = options("--ogdm", f"--resume={tmp_path}/training-state-000001.pt")
    assert result.exit_code != 0 and seen == {}
    for part in ("ogdm-state-000001.pt", "--transfer", "without --ogdm"):
        assert part in result.output


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([(16, 16), (16, 16)], None),
        ([(16, 16), (32, 32)], "1.png is 32x32 with 3 channels, 0.png is 16x16 with 3 channels"),
        ([(16, 12), (16, 12)], "0.png is 16x12"),
        ([(16, 16), "L"], "1.png is 16x16 with 1 channels"),
        ([(16, 16), None], "1.png cannot be read as an image"),
    ],
)
def test_pictures_that_upstream_asserts_away_are_refused_by_name(tmp_path, sizes, words):
    (tmp_path / "folder.png").mkdir()
    for i, size in enumerate(sizes):
        (tmp_path / f"{i}.png").touch()
        if size:
            Image.new("L" if size == "L" else "RGB", (16, 16) if size == "L" else size).save(tmp_path / f"{i}.png")
    data = f"--data={tmp_path}"
    assert options(data)[1].exit_code == 0
    _, result = options(data, "--ogdm")
    assert result.exit_code == (1 if words else 0) and (words or "") in result.output


def generate(*args):
    @click.command()
    @click.option("--steps", "num_steps", default=18)
    @click.option("--S_churn", "S_churn", default=0.0)
    @sample.generate_options
    def main(**kwargs):
        click.echo(str({k: v for k, v in kwargs.items() if v is not None}))

    return CliRunner().invoke(main, args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--nfe=10"], "--nfe needs --sampler"),
        (["--sampler=ddim", "--nfe=10"], "s-pndm"),
        (["--sampler=euler", "--nfe=5", "--steps=5"], "--steps"),
        (["--sampler=euler", "--nfe=5", "--S_churn=1"], "--S_churn"),
        (["--sampler=euler", "--guide-weight=2"], "--guide-weight needs --guide"),
        (["--sampler=euler", "--guide=nowhere"], "no file nowhere"),
        ([f"--guide={__file__}"], "--guide needs --sampler"),
    ],
)
def test_contradictory_sampler_flags_are_refused(args, message):
    result = generate(*args)
    assert result.exit_code == 2
    assert message in result.output


def test_generate_flags_are_absent_unless_given():
    assert generate().output == "{'num_steps': 18, 'S_churn': 0.0}\n"
    assert "'nfe': 10" in generate("--sampler=euler").output
