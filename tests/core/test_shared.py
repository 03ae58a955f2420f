"""What the backbones share: sampling flags, npz files, random states, state files."""

import argparse
import random
import re

import numpy as np
import pytest
import torch

from ogdm_core import DiscreteVP, fewstep, sealed
from ogdm_core.adm.resume import ReplayableData
from ogdm_core.diffusers import model
from ogdm_core.forward import Recorder, lr_scale
from ogdm_core.random import global_state, set_global_state


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--steps", type=int, default=50)
    made.add_argument("--batch_size", type=int, default=4)
    fewstep.add_arguments(made, tuple(fewstep.FLAGS), own=("steps",), seed=3)
    return made


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--nfe 10 --npz x.npz", "--nfe needs --sampler"),
        ("--seed 4 --discretization karras", "--discretization, --seed needs --sampler"),
        ("--sampler heun --nfe 10", "--nfe: heun cannot run in 10 .* 9 or 11"),
        ("--sampler f-pndm", "--nfe: f-pndm cannot run in 10 .* 13"),
        ("--sampler euler --nfe 0", "--nfe: euler cannot run in 0 "),
        ("--sampler ipndm --order 5", "--order: ipndm has no order 5; give 1 to 4"),
        ("--sampler heun --nfe 9 --order 2", "--order: heun has one order only"),
        ("--sampler euler --rho 3", "--rho: the model's own time grid has no rho"),
        ("--sampler euler --discretization logsnr --rho 3", "--rho: logsnr has no rho"),
        ("--sampler euler --grid karras --rho nan", "--rho: rho = nan is not allowed"),
        ("--sampler euler --grid cosine", "cosine is no time grid, and no such file exists; give a file, or one of"),
        ("--sampler euler --steps 5", "--steps steers upstream's own sampler"),
        ("--sampler ddim", "s-pndm"),
        ("--sampler stochastic --eta nan", "--eta: nan is not allowed"),
        ("--sampler stochastic --eta 5", "--eta: 5 is not allowed"),
        ("--eta nan", "--eta: nan is not allowed"),
        ("--sampler euler --batch_size 0", "--batch_size: 0 is not allowed"),
        ("--npz .", "--npz: cannot write"),
        (f"--npz {__file__}/x.npz", "--npz: cannot write"),
    ],
)
def test_contradictory_flags_are_usage_errors(capsys, args, message):
    with pytest.raises(SystemExit) as stop:
        parser().parse_args(args.split())
    assert stop.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_flags_have_their_defaults_and_unknown_ones_pass():
    args, rest = parser().parse_known_args(["--sampler", "euler", "--other"])
    assert (args.sampler, args.nfe, args.seed, args.eta) == ("euler", 10, 3, None)
    assert rest == ["--other"]
    assert parser().parse_args(["--steps", "5"]).nfe is None
    for spelling in ("--discretization", "--discretisation", "--grid"):
        assert parser().parse_args(["--sampler", "euler", spelling, "karras"]).discretization == "karras"


def test_a_grid_is_read_from_its_file_and_held_to_the_sampler_and_the_schedule(tmp_path, capsys):
    file = tmp_path / "grid.json"
    file.write_text('{"schedule": "DiscreteVP", "T": 1000, "times": [900, 300, 40, 0]}')
    words = ["--sampler", "ipndm", "--order", "2", "--grid", str(file)]
    values = vars(parser().parse_args([*words, "--nfe", "3"]))
    solver = fewstep.solver_of(values)
    schedule = DiscreteVP.linear()
    assert schedule.times(3, solver["discretisation"]) == [900, 300, 40, 0]
    assert (solver["sampler"], solver["nfe"], solver["order"], solver["rho"]) == ("ipndm", 3, 2, None)
    fewstep.check_grid(schedule, values)
    with pytest.raises(SystemExit, match="--grid: .*grid.json is for DiscreteVP with T = 1000"):
        fewstep.check_grid(DiscreteVP.linear(50), values)
    with pytest.raises(SystemExit) as stop:
        parser().parse_args([*words, "--nfe", "4"])
    assert stop.value.code == 2 and "grid.json has 3 steps; this sampler and NFE take 4" in capsys.readouterr().err


def test_an_npz_is_uint8_rgb_with_labels_in_the_order_of_the_seeds(tmp_path):
    path = tmp_path / "deep" / "images.npz"
    images = np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 4, 4, 1)
    collection = fewstep.Collection(str(path), seeds=[7, 3, 5])
    collection.add(torch.tensor([5, 7]), images[[2, 0]], torch.eye(4)[[2, 0]])
    collection.add(torch.tensor([3]), images[[1]], torch.eye(4)[[1]])
    collection.write()
    with np.load(path) as npz:
        assert npz["arr_0"].dtype == np.uint8 and npz["arr_1"].dtype == np.int64
        assert np.array_equal(npz["arr_0"], images.repeat(3, axis=3))
        assert npz["arr_1"].tolist() == [0, 1, 2]
    fewstep.write_npz(str(path), images)
    with np.load(path) as npz:
        assert npz.files == ["arr_0"]


def test_images_have_noise_and_labels_of_their_own():
    def generators(*numbers):
        return [torch.Generator().manual_seed(i) for i in numbers]

    whole = fewstep.normal(generators(1, 2, 3), (2, 4))
    assert torch.equal(fewstep.normal(generators(2), (2, 4))[0], whole[1])
    numbers = fewstep.labels(generators(*range(50)), 3)
    assert set(numbers.tolist()) == {0, 1, 2}
    black, white = fewstep.to_uint8(torch.tensor([-2.0, 2.0]).reshape(2, 1, 1, 1)).flatten()
    assert (black, white) == (0, 255)


def test_a_recorder_keeps_the_pass_and_the_random_state_before_it():
    net = Recorder(lambda x, t, scale: torch.nn.functional.dropout(x) * scale + t)
    x = torch.ones(2, 8)
    output = net(x, 1, scale=3)
    assert net.x is x and net.args == (1,) and net.kwargs == {"scale": 3}
    assert net.output is output
    torch.set_rng_state(net.rng[0])
    assert torch.equal(net(x, 1, scale=3), output)


def test_the_plain_loss_may_be_that_of_x_0_between_two_weights():
    schedule, x_0 = DiscreteVP.linear(), torch.randn(3, 1, 8, 8)
    eps, t = torch.randn_like(x_0), torch.tensor([10, 400, 900])  # sigma 0.04, 2 and 57

    def unet(x, t, class_labels=None):
        return argparse.Namespace(sample=torch.zeros_like(x))

    sigma2 = float(schedule.sigma(t)[1]) ** 2
    assert 1 < sigma2 < 30
    weight = torch.tensor([1, sigma2, 30])
    loss, _ = model.training_loss(unet, x_0, eps, t, schedule, x0_weight=30.0)
    torch.testing.assert_close(loss, (weight * eps.square().mean((1, 2, 3))).mean())
    plain, _ = model.training_loss(unet, x_0, eps, t, schedule)
    torch.testing.assert_close(plain, eps.square().mean())


def test_the_rate_is_measured_against_the_one_the_optimiser_was_built_with():
    optimizer = torch.optim.Adam([torch.zeros(1)], lr=1e-2)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 5e-3
    optimizer.load_state_dict(saved)
    assert lr_scale(optimizer) == 0.5
    assert lr_scale(torch.optim.Adam([torch.zeros(1)], lr=0.0)) == 1


def draws() -> list[float]:
    return [torch.rand(()).item(), np.random.rand(), random.random()]


def test_state_files_keep_every_random_state(tmp_path):
    path = str(tmp_path / "state.pt")
    sealed.save(path, {"random": global_state()})
    expected = draws()
    set_global_state(sealed.load(path)["random"])
    assert draws() == expected


def test_adms_first_state_files_still_load():
    """They named numpy's generator, and held CUDA's state or None."""
    name, keys, *rest = np.random.get_state()
    old = {
        "torch": torch.get_rng_state(),
        "cuda": None,
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
        "python": random.getstate(),
    }
    expected = draws()
    set_global_state(old)
    assert draws() == expected


def test_a_killed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "state.pt"
    path.write_bytes(b"old")

    def fail(state, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        sealed.save(str(path), {})
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_stream_of_batches_returns_to_its_place():
    def endless():
        data = torch.arange(7)
        while True:
            yield from torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)

    stream = ReplayableData(endless())
    for _ in range(6):
        next(stream)
    position, expected = stream.place()["data"], [next(stream) for _ in range(2)]
    assert position["used"] == 2  # of the second pass
    torch.manual_seed(99)
    again = ReplayableData(endless())
    again.go_to(position)
    assert all(torch.equal(next(again), batch) for batch in expected)
