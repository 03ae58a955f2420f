import csv
import json

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("PIL")

from PIL import Image  # noqa: E402

from ogdm_core.images import to_uint8  # noqa: E402
from run.figures import __main__ as figures  # noqa: E402
from run.figures import neighbours, samples, style, teaser  # noqa: E402
from run.figures.samples import load_images  # noqa: E402
from run.figures.style import tile  # noqa: E402

NFES = (2, 4, 8)


def smooth(noise, nfe, sampler):
    """A made-up method: 1 / nfe of its noise is left in the image."""
    return torch.full_like(noise, 0.5) + noise / nfe


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny U-Net with random weights in diffusers' format."""
    diffusers = pytest.importorskip("diffusers")
    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unet = diffusers.UNet2DModel(
            sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=4,
            block_out_channels=(8, 8), down_block_types=("DownBlock2D",) * 2,
            up_block_types=("UpBlock2D",) * 2, attention_head_dim=4,
        )  # fmt: skip
    unet.save_pretrained(folder / "unet")
    diffusers.DDPMScheduler(num_train_timesteps=50).save_pretrained(folder / "scheduler")
    return folder


def write_npz(path, images):
    """uint8 NHWC, as ADM's sampling script leaves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, arr_0=to_uint8(images).permute(0, 2, 3, 1).numpy())


@pytest.fixture
def files(tmp_path):
    """Files of two methods, Euler at NFES: `ogdm` moves half as far as `base`."""
    generator = torch.Generator().manual_seed(3)
    final = torch.rand(6, 3, 8, 8, generator=generator) - 0.5
    towards = torch.rand(6, 3, 8, 8, generator=generator) - 0.5
    for name, size in (("base", 0.8), ("ogdm", 0.4)):
        for nfe in NFES:
            far = size * (1 / nfe - 1 / NFES[-1])
            write_npz(tmp_path / name / f"euler-{nfe}.npz", final + far * towards)
    return tmp_path


def methods_of(folder):
    return [
        "--method", f"Baseline={folder}/base/{{sampler}}-{{nfe}}.npz",
        "--method", f"OGDM={folder}/ogdm/{{sampler}}-{{nfe}}.npz",
    ]  # fmt: skip


def draw(out, *words):
    """Runs a command of run/figures.sh that writes to `out`."""
    assert figures.main([*map(str, words), "--out", str(out)]) == 0


def read_csv(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def command_in(path):
    with Image.open(path) as image:
        return image.text["Command"]


# ---------------------------------------------------------------- images and sources


def test_tile_places_images_row_by_row():
    images = torch.tensor([-1.0, 0.0, 1.0]).reshape(3, 1, 1, 1).expand(3, 1, 2, 2)
    picture = tile(images, columns=2, gap=1)
    assert picture.shape == (5, 5)
    assert (picture[:2, :2] == 0).all() and np.allclose(picture[:2, 3:], 128 / 255)
    assert (picture[3:, :2] == 1).all() and (picture[2] == 1).all()
    assert tile(torch.zeros(1, 3, 2, 2), 1).shape == (2, 2, 3)
    assert np.array_equal(picture, tile(to_uint8(images), columns=2, gap=1))
    with pytest.raises(ValueError, match="1 or 3 channels"):
        tile(torch.zeros(1, 4, 2, 2), 1)


def test_images_come_from_a_file_and_are_counted(tmp_path):
    images = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    write_npz(tmp_path / "x.npz", images)
    assert torch.equal(load_images(str(tmp_path / "x.npz")), to_uint8(images))
    assert len(load_images(str(tmp_path / "x.npz"), 2)) == 2
    with pytest.raises(ValueError, match="holds 4 images, but 5 are wanted"):
        load_images(str(tmp_path / "x.npz"), 5)


def test_a_diffusers_folder_samples_the_same_noise_the_same_way(model):
    method = samples.load_method(f"A={model}")
    assert method.name == "A" and method.shape == (1, 8, 8)
    noise = samples.shared_noise([method], 3, seed=1)
    assert torch.equal(noise, samples.shared_noise([method], 3, seed=1))
    assert not torch.equal(noise, samples.shared_noise([method], 3, seed=2))
    images = method.draw(noise, 4, "euler")
    assert images.shape == (3, 1, 8, 8) and images.dtype == torch.uint8
    assert torch.equal(images, method.draw(noise, 4, "euler"))
    assert not torch.equal(images, method.draw(noise, 5, "euler"))


def test_methods_that_cannot_share_noise_are_refused():
    methods = [samples.Method("a", smooth, (1, 8, 8)), samples.Method("b", smooth, (3, 8, 8))]
    with pytest.raises(ValueError, match="different shapes"):
        samples.shared_noise(methods, 2, 0)


def test_source_errors_name_the_file_and_the_remedy(tmp_path):
    with pytest.raises(ValueError, match="give NAME=PATH"):
        samples.load_method("just-a-path")
    with pytest.raises(ValueError, match=r"this one has \{nfe\}"):
        samples.load_method("A=x-{nfe}.npz")
    with pytest.raises(FileNotFoundError, match="no folder"):
        samples.load_method(f"A={tmp_path}/nothing")
    method = samples.load_method(f"A={tmp_path}/{{sampler}}-{{nfe}}.npz")
    with pytest.raises(FileNotFoundError, match=r"euler-7\.npz is missing: A's samples by euler"):
        method.draw(torch.zeros(2, 0), 7, "euler")


# ---------------------------------------------------------------- Fig. 1


def test_drift_is_the_mean_distance_to_the_finest():
    finest = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    coarse = finest + torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]])
    absolute, relative = teaser.drift([coarse, finest], lambda x: x)
    assert absolute == [2.0, 0.0]
    assert relative == [pytest.approx(2 / ((4 + 4 + 32**0.5) / 3)), 0.0]


def test_rows_are_checked_before_anything_is_sampled():
    methods = [samples.Method("A", smooth)]
    rows = teaser.parse_rows(["A:euler", "A:heun:3,5,9"], methods, NFES)
    assert [row.nfes for row in rows] == [NFES, (3, 5, 9)]
    for spec, message in (
        ("B:euler", "no --method 'B'"),
        ("A:heun", "nearest it can is 1 or 3"),
        ("A:euler:4,2,8", "ascend"),
        ("A:euler:2,4", "give 3 NFEs"),
        ("A:magic", "unknown sampler"),
    ):
        with pytest.raises(ValueError, match=message):
            teaser.parse_rows([spec], methods, NFES)


def test_teaser_from_files_of_another_backbone(files, tmp_path, capsys):
    out = tmp_path / "out"
    draw(out, "teaser", *methods_of(files), "--row", "Baseline:euler", "--row", "OGDM:euler",
         "--nfe", *NFES, "--drift-images", 6)  # fmt: skip
    rows = read_csv(out / "drift.csv")
    drift = {(r["method"], int(r["nfe"])): float(r["relative_drift"]) for r in rows}
    assert drift["Baseline", 8] == drift["OGDM", 8] == 0
    assert drift["Baseline", 2] > drift["Baseline", 4] > 0
    assert drift["OGDM", 2] == pytest.approx(drift["Baseline", 2] / 2, rel=0.05)
    assert "relative" in capsys.readouterr().out
    assert command_in(out / "fig1.png").startswith("run/figures.sh teaser --method 'Baseline=")


def test_teaser_of_two_models(model, tmp_path):
    draw(tmp_path, "teaser", "--method", f"Baseline={model}", "--method", f"OGDM={model}",
         "--nfe", 3, 5, "--drift-images", 4)  # fmt: skip
    rows = read_csv(tmp_path / "drift.csv")
    assert [(r["method"], r["sampler"]) for r in rows[::2]] == [
        ("Baseline", "euler"), ("OGDM", "euler"), ("Baseline", "s-pndm"), ("OGDM", "s-pndm"),
    ]  # fmt: skip
    assert rows[0]["drift"] == rows[2]["drift"] and float(rows[0]["drift"]) > 0
    assert (tmp_path / "fig1.png").stat().st_size < 300_000


def test_the_same_command_gives_the_same_file(files, tmp_path):
    words, seen = ["grid", *methods_of(files), "--sampler", "euler", "--nfe", 4, "--images", 6], []
    for _ in range(2):
        draw(tmp_path, *words)
        seen.append((tmp_path / "grid-nfe4.png").read_bytes())
    assert seen[0] == seen[1]


# ---------------------------------------------------------------- grids


ROWS = [
    {"method": "ogdm", "sampler": "euler", "nfe": 10, "fid": 7.0, "recall": 0.5, "seed": 0},
    {"method": "ogdm", "sampler": "euler", "nfe": 10, "fid": 9.0, "recall": 0.6, "seed": 1},
    {"method": "control", "sampler": "euler", "nfe": 10, "fid": 12.345, "recall": 0.4, "seed": 0},
]


def test_pairs_show_every_pixel_as_an_exact_square(files, tmp_path):
    methods = [
        word for name in ("base", "ogdm") for word in ("--method", f"{name}={tmp_path}/{name}/{{sampler}}-{{nfe}}.npz")
    ]
    real = ["--real", str(tmp_path / "base" / "euler-8.npz")]
    cells = ["--cells", "euler-2,euler-4", "--images", "3", "--out", str(tmp_path)]
    assert figures.main(["pairs", *methods, *real, *cells]) == 0
    with Image.open(tmp_path / "pairs.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    sampled = load_images(str(tmp_path / "ogdm" / "euler-4.npz"), 3)[1].permute(1, 2, 0).numpy()
    wanted = np.kron(sampled, np.ones((8, 8, 1), np.uint8))
    top, left = 4 * (64 + teaser.LINE), teaser.LABEL + 72  # the fifth row's second image, behind a gap of one pixel
    assert np.abs(pixels[top : top + 64, left : left + 64].astype(int) - wanted).max() <= 1


def test_captions_take_the_mean_over_seeds_and_say_what_is_missing():
    assert teaser.caption(ROWS, "OGDM", "euler", 10) == "(FID: 8.00 ± 1.41, recall: 0.550)"
    assert teaser.caption(ROWS, "control", "euler", 10) == "(FID: 12.35, recall: 0.400)"
    assert "not in the results file" in teaser.caption(ROWS, "control", "heun", 11)
    assert teaser.caption([], "control", "euler", 10) == ""


def test_grid_reads_a_results_file(files, tmp_path, monkeypatch):
    captions = []
    plain = teaser.caption
    monkeypatch.setattr(teaser, "caption", lambda *a: captions.append(plain(*a)) or captions[-1])
    rows = [row | {"nfe": 8} for row in ROWS]
    (tmp_path / "results.json").write_text(json.dumps({"rows": rows}))
    draw(tmp_path, "grid", *methods_of(files), "--sampler", "euler", "--nfe", 8, "--images", 6,
         "--columns", 3, "--results", tmp_path / "results.json")  # fmt: skip
    assert captions == ["(FID, recall: not in the results file)",
                        "(FID: 8.00 ± 1.41, recall: 0.550)"]  # fmt: skip
    assert "--results" in command_in(tmp_path / "grid-nfe8.png")


def test_captions_come_from_a_table_by_row_and_by_method(tmp_path):
    def row(name, dataset, method):
        cells = [{"nfe": 10, "fid": 11.5, "recall": 0.5}, {"nfe": 25, "fid": None, "recall": None}]
        return {"row": name, "dataset": dataset, "method": method, "sampler": "euler",
                "cells": cells}  # fmt: skip

    ours, other = (
        row("cifar10-edm-ogdm-ft", "a", "OGDM (ft)"),
        row("celeba64-adm-ogdm", "b", "OGDM"),
    )
    for rows, method, found in (
        ([ours], "OGDM (ft)", True), ([ours, other], "OGDM (ft)", False),
        ([ours, other], "cifar10-edm-ogdm-ft", True),
    ):  # fmt: skip
        (tmp_path / "table1.json").write_text(json.dumps({"rows": rows}))
        read = teaser.load_results(tmp_path / "table1.json")
        assert ("FID: 11.50" in teaser.caption(read, method, "euler", 10)) == found
        assert "not in the results file" in teaser.caption(read, method, "euler", 25)


def test_a_results_file_without_rows_is_refused(tmp_path, refused):
    (tmp_path / "results.json").write_text(json.dumps({"rows": [{"method": "a"}]}))
    with refused("needs rows, each with fid"):
        draw(tmp_path, "grid", "--method", "A=x/{sampler}-{nfe}", "--results",
             tmp_path / "results.json")  # fmt: skip


# ---------------------------------------------------------------- nearest neighbours


def test_leave_one_out_does_not_count_an_image_as_its_own_neighbour():
    train = torch.tensor([[0.0], [1.0], [5.0], [5.0], [5.0]])
    assert neighbours.leave_one_out(train).tolist() == [1, 1, 0, 0, 0]
    drawn = neighbours.leave_one_out(train, count=3)  # of many images, a part
    assert len(drawn) == 3 and set(drawn.tolist()) <= {0, 1}


def test_copies_stand_out_from_new_images():
    generator = torch.Generator().manual_seed(0)
    train, held_out, fresh = (torch.randn(300, 4, generator=generator) for _ in range(3))
    honest = neighbours.memorisation(fresh, train, held_out)
    assert honest.closer < 0.05 and honest.copies == 0
    assert honest.p_nearer == pytest.approx(0.5, abs=0.06)
    alone = neighbours.memorisation(fresh, train, None)
    assert alone.p_nearer == pytest.approx(0.5, abs=0.06)
    thief = neighbours.memorisation(train[:100], train, held_out)
    assert thief.closer == 1 and thief.copies == 100 and thief.p_nearer == 1
    near_copies = train[:100] + 1e-3
    assert neighbours.memorisation(near_copies, train, held_out).closer == 1


def test_neighbours_command_finds_planted_copies(tmp_path, capsys):
    generator = torch.Generator().manual_seed(0)
    train = torch.rand(40, 3, 8, 8, generator=generator) * 2 - 1
    write_npz(tmp_path / "train.npz", train)
    new = torch.rand(4, 3, 8, 8, generator=generator) * 2 - 1
    write_npz(tmp_path / "samples.npz", torch.cat([train[[7, 21]], new]))
    write_npz(tmp_path / "real.npz", torch.rand(30, 3, 8, 8, generator=generator) * 2 - 1)
    draw(tmp_path, "neighbours", "--train", tmp_path / "train.npz", "--samples",
         tmp_path / "samples.npz", "--held-out", tmp_path / "real.npz", "--images", 4)  # fmt: skip
    assert "exact copies: 2 of 6" in capsys.readouterr().out
    rows = read_csv(tmp_path / "neighbours.csv")
    assert len(rows) == 6 * 3
    assert [(r["train_index"], float(r["distance"])) for r in rows[::3]][:2] == [
        ("7", 0.0), ("21", 0.0),
    ]  # fmt: skip
    for name in ("neighbours.png", "memorisation.png"):
        assert command_in(tmp_path / name).startswith("run/figures.sh neighbours")


def test_neighbours_of_a_model(model, tmp_path):
    pytest.importorskip("sklearn")
    draw(tmp_path, "neighbours", "--train", "digits", "--method", f"OGDM={model}", "--nfe", 2,
         "--count", 5, "--images", 3, "--k", 2)  # fmt: skip
    assert len(read_csv(tmp_path / "neighbours.csv")) == 5 * 2


def test_neighbours_in_inceptions_features(tmp_path, capsys, monkeypatch, refused):
    """By one flag; the net stands in for Inception, whose weights are not at hand."""
    from run.evaluate import features

    batches = []

    def net(images):
        batches.append(len(images))
        return images.float().mean((2, 3))

    monkeypatch.setattr(features, "_inception", lambda weights, device: net)
    monkeypatch.setattr(features, "check_features", lambda spec, weights: None)
    (tmp_path / "weights.pth").write_bytes(b"")
    write_npz(tmp_path / "x.npz", torch.rand(150, 3, 8, 8) * 2 - 1)
    words = ["neighbours", "--train", tmp_path / "x.npz", "--samples", tmp_path / "x.npz",
             "--images", 3, "--weights"]  # fmt: skip
    draw(tmp_path, *words, tmp_path / "weights.pth")
    printed = capsys.readouterr()
    assert "exact copies: 150 of 150" in printed.out
    assert "is not the published file" in printed.err
    assert max(batches) == 64 and sum(batches) == 300
    monkeypatch.undo()
    with refused("absent.pth: no such file"):
        draw(tmp_path, *words, tmp_path / "absent.pth")


def test_colours_of_methods_differ_and_stay():
    colours = {style.method_colour(name) for name in ("control", "OGDM", "OGDM (ft)", "Baseline")}
    assert len(colours) == 4
    assert style.method_colour("ogdm") == style.method_colour("OGDM", index=5)
