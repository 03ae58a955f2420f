"""OGDM in the real NVlabs/edm: its trainer, its generator, its snapshots."""

import json
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest
import torch

from ogdm_core.guidance import Guide, save_guide
from ogdm_core.schedule import KarrasVE
from tests.core.toys import differences
from tests.edm.edm_tiny import OGDM, ROOT, TINY, digits, run, state, stats

LOOP, GENERATE = ROOT / "tests" / "edm" / "edm_loop.py", ROOT / "tests" / "edm" / "edm_generate.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return digits(tmp_path_factory.mktemp("data") / "digits-8x8.zip")


@pytest.fixture
def unpickle(pristine, monkeypatch):
    """Upstream's pickles need upstream's modules."""
    monkeypatch.syspath_prepend(pristine("edm"))


# ---- training -----------------------------------------------------------------------------------


PLAIN = ["--cond=1", "--batch=100", "--batch-gpu=50", "--seed=1", "--duration=0.001", "--ls=2"]


@pytest.fixture(scope="module")
def baseline(pristine, data, tmp_path_factory):
    """A run of the untouched trainer."""
    folder = tmp_path_factory.mktemp("baseline")
    args = [*TINY, *PLAIN, f"--data={data}", f"--outdir={folder}"]
    run(pristine("edm") / "train.py", *args, shims=True)
    return folder


def test_flags_off_is_upstream_bit_for_bit(baseline, patched, data, tmp_path, unpickle):
    run(patched("edm") / "train.py", *TINY, *PLAIN, f"--data={data}", f"--outdir={tmp_path}")
    theirs, ours = state(baseline, 1), state(tmp_path, 1)
    assert not differences(theirs, ours)
    assert any("/ema/" in name for name in ours) and any("exp_avg" in name for name in ours)
    assert stats(baseline) == stats(tmp_path)
    assert {p.name for p in baseline.iterdir()} == {p.name for p in tmp_path.iterdir()}


def test_grids_of_samples_leave_the_training_as_it_was(baseline, patched, data, tmp_path, unpickle):
    grid = ["--grid-ticks=1", "--grid-nfe=3"]
    run(patched("edm") / "train.py", *TINY, *PLAIN, *grid, f"--data={data}", f"--outdir={tmp_path}")
    assert not differences(state(baseline, 1), state(tmp_path, 1)) and stats(baseline) == stats(tmp_path)
    found = sorted((tmp_path / "grids").iterdir())
    assert [p.name for p in found] == ["000000.png", "000001.png"]
    drawn = np.asarray(PIL.Image.open(found[1]))  # the rate ramps up from zero, so both are nearly the same
    assert drawn.shape == (32, 32) and drawn.std() > 1


def test_weights_of_another_network_are_refused_by_name(baseline, patched, data, tmp_path):
    """Upstream copies the weights that have the same name, and leaves the others random."""
    args = [*TINY, *OGDM, *PLAIN, f"--data={data}", f"--transfer={baseline / 'network-snapshot-000001.pkl'}"]
    with pytest.raises(AssertionError, match=r"000001.pkl holds another network \(\d+ tensors are not in both"):
        run(patched("edm") / "train.py", *args, "--blocks=1", f"--outdir={tmp_path}")
    with pytest.raises(AssertionError, match=r"channel_mult: \[1\] there, \[1, 1\] here"):
        run(patched("edm") / "train.py", *args, "--cres=1,1", f"--outdir={tmp_path}")


@pytest.fixture(scope="module")
def loops(patched, data, tmp_path_factory):
    """folder/1/NAME and folder/2/NAME: the same cases on one rank and on two."""
    folder = tmp_path_factory.mktemp("loops")
    ogdm = {"d_width": 0.02, "k": 0.3, "gamma": 0.5}
    heun = ogdm | {"projection": "heun"}
    # Plain gradient descent: Adam would blow up rounding errors of gradients that are zero.
    shared = {"same_noise": True, "optimizer": "torch.optim.SGD"}
    noisy = {"cond": True, "augment": True, "dropout": 0.2, "batch_gpu": 8}
    both = {
        "euler": shared | {"ogdm": ogdm},
        "heun-cond": shared | {"ogdm": heun, "cond": True, "loss_scaling": 4},
    }
    alone = {
        "off": noisy,
        "gamma-zero": noisy | {"ogdm": heun | {"gamma": 0}},
        "rounds": both["heun-cond"] | {"batch_gpu": 4},
        "vp": {"precond": "vp", "ogdm": ogdm},
        "ve": {"precond": "ve", "ogdm": heun},
        "adm": noisy | {"model_type": "DhariwalUNet", "ogdm": heun},
    }
    bare = {name: case | {"bare": True} for name, case in both.items()}
    for ranks, cases in ((1, bare | alone), (2, both)):
        cases = [case | {"out": str(folder / str(ranks) / name), "data": str(data)} for name, case in cases.items()]
        listed = folder / f"{ranks}.json"
        listed.write_text(json.dumps(cases))
        run(LOOP, patched("edm"), listed, ranks=None if ranks == 1 else ranks)
    return folder


def close(a: dict, b: dict) -> None:
    """Weights of network and discriminator agree up to the order of summation."""
    names = [name for name in a if name.startswith(("/net/", "/ogdm/observer/discriminator/"))]
    assert sum(name.startswith("/ogdm/") for name in names) > 10
    for name in names:
        assert torch.allclose(a[name], b[name], rtol=1e-4, atol=5e-5), name


@pytest.mark.parametrize("name", ["euler", "heun-cond"])
def test_two_ranks_are_one_rank_with_the_whole_batch(loops, unpickle, name):
    """One rank without DDP, two ranks with: gradients of both of Heun's passes are averaged."""
    one, two = state(loops / "1" / name, 0), state(loops / "2" / name, 0)
    close(one, two)
    first, *_, last = (tick["OGDM/emission"] for tick in stats(loops / "1" / name))
    assert first != last
    for a, b in zip(stats(loops / "1" / name), stats(loops / "2" / name), strict=True):
        assert a == pytest.approx(b, rel=1e-3)


def test_accumulated_rounds_are_one_round(loops, unpickle):
    close(state(loops / "1" / "heun-cond", 0), state(loops / "1" / "rounds", 0))


def test_gamma_zero_trains_as_if_off_bit_for_bit(loops, unpickle):
    """The observer draws no random number and takes no image of the trainer's."""
    off, zero = state(loops / "1" / "off", 0), state(loops / "1" / "gamma-zero", 0)
    assert any(name.startswith("/ogdm/") for name in zero)
    assert not differences(off, {name: value for name, value in zero.items() if not name.startswith("/ogdm/")})


@pytest.mark.parametrize("name", ["vp", "ve", "adm"])
def test_every_preconditioning_and_architecture_trains(loops, unpickle, name):
    ticks = stats(loops / "1" / name)
    for key in ("emission", "d_loss", "r1", "d_real_acc", "d_fake_acc"):
        assert all(np.isfinite(tick[f"OGDM/{key}"]) for tick in ticks)
    assert all(tick["OGDM/skipped"] == 0 for tick in ticks)
    weights = {k: v for k, v in state(loops / "1" / name, 0).items() if k.startswith("/net/")}
    assert all(w.isfinite().all() for w in weights.values())


@pytest.fixture(scope="module")
def resumed(patched, baseline, data, tmp_path_factory):
    """Upstream's network fine-tuned at a stretch, and with a break in the middle.

    Two ranks, class-conditional, Heun, several rounds a step.
    """
    folder = tmp_path_factory.mktemp("resumed")
    args = [*TINY, *OGDM, f"--data={data}", "--cond=1", "--batch=240", "--batch-gpu=60", "--ogdm-projection=heun"]
    begin = [f"--transfer={baseline / 'network-snapshot-000001.pkl'}", "--seed=1"]
    train = patched("edm") / "train.py"
    whole, parts = folder / "whole", folder / "parts"
    log = run(train, f"--outdir={whole}", *args, *begin, "--duration=0.002", ranks=2)
    run(train, f"--outdir={parts}", *args, *begin, "--duration=0.001", ranks=2)
    again = f"--resume={parts / 'training-state-000001.pt'}"
    run(train, f"--outdir={parts}", *args, again, "--duration=0.002", ranks=2)
    return whole, parts, log


def test_stop_and_resume_is_never_stopped(resumed, unpickle):
    whole, parts, _ = resumed
    at_stop = torch.load(parts / "ogdm-state-000001.pt", weights_only=True)
    assert at_stop["nimg"] == 1200 and len(at_stop["rng"]) == 2
    ours, theirs = state(parts, 2), state(whole, 2)
    assert not differences(ours, theirs)
    for part in ("/net/", "/ema/", "/optimizer_state/", "/ogdm/observer/optimizer/", "/ogdm/rng/"):
        assert any(name.startswith(part) for name in ours), part


def test_statistics_and_console_tell_of_the_observer(resumed):
    whole, _, log = resumed
    lines = [line for line in log.splitlines() if line.startswith("tick ")]
    assert len(lines) == len(stats(whole)) == 3
    for name in ("emission", "d_loss", "r1", "d_real_acc", "d_fake_acc"):
        assert all(f" {name} " in line for line in lines)
        assert all(np.isfinite(tick[f"OGDM/{name}"]) for tick in stats(whole))


# ---- snapshots and sampling ---------------------------------------------------------------------


def pixels(folder):
    return {path.name: np.asarray(PIL.Image.open(path)) for path in sorted(folder.glob("*.png"))}


@pytest.fixture(scope="module")
def sampled(patched, resumed, tmp_path_factory):
    """folder/NAME: eight images each, by upstream's samplers and by ours."""
    folder = tmp_path_factory.mktemp("sampled")
    network = resumed[0] / "network-snapshot-000002.pkl"
    ablate = ["--disc=edm", "--schedule=linear", "--scaling=none", "--solver=euler"]
    cases = {
        "upstream-heun": ["--steps=4"],
        "heun": ["--sampler=heun", "--nfe=7"],
        "guided": ["--sampler=heun", "--nfe=7", f"--guide={folder / 'guide'}", "--guide-weight=50"],
        "upstream-euler": [*ablate, "--steps=5"],
        "euler": ["--sampler=euler", "--nfe=5", f"--npz={folder / 'euler.npz'}"],
        "karras": ["--sampler=ipndm", "--nfe=5", "--order=1"],  # is Euler
        "polynomial": ["--sampler=euler", "--nfe=5", "--grid=polynomial"],
        "rho": ["--sampler=euler", "--nfe=5", "--grid=uniform", "--rho=7"],
        "uniform": ["--sampler=euler", "--nfe=5", "--grid=uniform"],
        "file": ["--sampler=euler", "--nfe=5", f"--grid={folder / 'grid.json'}"],
        "s-pndm": ["--sampler=s-pndm", "--nfe=6", "--subdirs"],
        "f-pndm": ["--sampler=f-pndm", "--nfe=14", "--class=3", f"--npz={folder / 'three.npz'}"],
    }
    common = [f"--network={network}", "--seeds=0-7", "--batch=3"]
    save_guide(folder / "guide", Guide(1, 8, labels=10))
    grid = {"schedule": "KarrasVE", "T": 80.0, "times": KarrasVE().times(5, "polynomial")}
    (folder / "grid.json").write_text(json.dumps(grid))
    listed = folder / "cases.json"
    listed.write_text(json.dumps([[*common, f"--outdir={folder / name}", *args] for name, args in cases.items()]))
    run(GENERATE, patched("edm"), listed)
    return folder


def test_snapshot_is_upstreams_own(pristine, resumed, sampled, tmp_path):
    """An untouched clone samples from a network trained here; ogdm_core need not exist."""
    snapshot = resumed[0] / "network-snapshot-000002.pkl"
    assert b"ogdm" not in snapshot.read_bytes().lower()
    read = (
        "import pickle, sys, torch; sys.modules['ogdm_core'] = None; "
        "data = pickle.load(open(sys.argv[1], 'rb')); "
        "print(sorted(data), type(data['loss_fn']).__name__, type(data['augment_pipe']).__name__, "
        "data['ema'](torch.zeros(1, 1, 8, 8), torch.ones(1), torch.eye(10)[:1]).isfinite().all())"
    )
    found = subprocess.run([sys.executable, "-c", read, snapshot], cwd=pristine("edm"), capture_output=True, text=True)
    assert found.stdout.split("] ")[1:] == ["EDMLoss AugmentPipe tensor(True)\n"], found.stderr
    args = [f"--network={snapshot}", "--seeds=0-7", "--batch=3", "--steps=4"]
    run(pristine("edm") / "generate.py", f"--outdir={tmp_path}", *args, shims=True)
    theirs, ours = pixels(tmp_path), pixels(sampled / "upstream-heun")
    assert len(theirs) == 8 and theirs.keys() == ours.keys()
    assert all(np.array_equal(theirs[name], ours[name]) for name in theirs)


@pytest.mark.parametrize("name", ["euler", "heun"])
def test_samplers_by_name_are_upstreams_where_it_has_them(sampled, name):
    ours, theirs = pixels(sampled / name), pixels(sampled / f"upstream-{name}")
    assert len(ours) == 8 and ours.keys() == theirs.keys()
    for key in ours:
        assert np.abs(ours[key].astype(int) - theirs[key].astype(int)).max() <= 1
    others = pixels(sampled / ("heun" if name == "euler" else "euler"))
    assert any(np.abs(ours[k].astype(int) - others[k].astype(int)).max() > 1 for k in ours)


def test_a_time_grid_is_taken_by_name_with_its_power_or_from_a_file(sampled):
    made = {n: pixels(sampled / n) for n in ("euler", "karras", "polynomial", "file", "uniform", "rho")}
    for name, same in (("karras", "euler"), ("file", "polynomial")):
        assert all(np.abs(made[name][k].astype(int) - made[same][k]).max() <= 1 for k in made[same])
    several = [b"".join(image.tobytes() for image in made[n].values()) for n in ("euler", "file", "uniform", "rho")]
    assert len(set(several)) == 4


def test_a_guide_changes_the_images(sampled):
    plain, guided = pixels(sampled / "heun"), pixels(sampled / "guided")
    assert plain.keys() == guided.keys()
    assert any(np.abs(plain[k].astype(int) - guided[k].astype(int)).max() > 1 for k in plain)


def test_npz_holds_the_images_in_order_with_their_labels(sampled):
    with np.load(sampled / "euler.npz") as npz:
        images, labels = npz["arr_0"], npz["arr_1"]
    assert images.shape == (8, 8, 8, 3) and images.dtype == np.uint8
    files = list(pixels(sampled / "euler").values())
    assert all(np.array_equal(images[i, :, :, 0], files[i]) for i in range(8))
    assert labels.shape == (8,) and len(set(labels.tolist())) > 1
    with np.load(sampled / "three.npz") as npz:
        assert npz["arr_1"].tolist() == [3] * 8


def test_upstreams_output_options_still_work(sampled):
    assert len(pixels(sampled / "s-pndm" / "000000")) == 8


# ---- the whole way ------------------------------------------------------------------------------


def test_end_to_end_on_digits(patched, tmp_path):
    """Baseline, fine-tune with OGDM, three samplers, npz: 32x32 digits, upstream's commands."""
    data = digits(tmp_path / "digits-32x32.zip", size=32)
    edm = patched("edm")
    args = [*TINY, "--cres=1,1", f"--data={data}", "--batch=100", "--duration=0.001", "--seed=0"]
    run(edm / "train.py", f"--outdir={tmp_path / 'baseline'}", *args, "--lr-rampup=0")
    baseline = tmp_path / "baseline" / "network-snapshot-000001.pkl"
    tuned = tmp_path / "tuned"
    args = [*args, *OGDM, f"--transfer={baseline}"]
    log = run(edm / "train.py", f"--outdir={tuned}", *args, ranks=2)
    assert "a new one is trained" in log
    snapshot = tuned / "network-snapshot-000001.pkl"
    for sampler, nfe, ranks in (("euler", 4, 2), ("heun", 5, None), ("s-pndm", 4, None)):
        npz = tmp_path / f"{sampler}.npz"
        args = [f"--network={snapshot}", f"--sampler={sampler}", f"--nfe={nfe}", "--seeds=0-9",
                "--batch=4", f"--outdir={tmp_path / sampler}", f"--npz={npz}"]  # fmt: skip
        run(edm / "generate.py", *args, ranks=ranks)
        with np.load(npz) as made:
            assert made.files == ["arr_0"], "no labels without classes"
            images = made["arr_0"]
        assert images.shape == (10, 32, 32, 3) and images.std() > 1
        files = list(pixels(tmp_path / sampler).values())
        assert all(np.array_equal(images[i, :, :, 0], files[i]) for i in range(10))
