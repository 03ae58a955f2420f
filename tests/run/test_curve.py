"""run/evaluate.sh --curve: every snapshot's number, once."""

import json

import numpy as np
import pytest
from PIL import Image

from run.evaluate import curve, torch_evaluator
from run.evaluate.__main__ import main
from run.export.card import scores_table
from run.provenance import ROOT


@pytest.fixture
def run_folder(tmp_path):
    """Samples of three snapshots, farther from the reference the later they are, and the reference.

    Named as EDM2's, whose names end with the length of the average.
    """
    draw = np.random.default_rng(0)
    for number, level in ((0, 0), (20, 60), (100, 120)):
        images = draw.integers(0, 100, (16, 8, 8, 3)) + level
        np.savez(tmp_path / f"run2-snapshot-{number}-0.100.npz", images.astype(np.uint8))
    np.savez(tmp_path / "real.npz", draw.integers(0, 100, (40, 8, 8, 3)).astype(np.uint8))
    return tmp_path


def test_snapshots_are_scored_in_the_order_of_their_numbers_and_once(run_folder, monkeypatch, capsys):
    argv = [str(run_folder / "real.npz"), str(run_folder / "*snapshot*"), "--features", "pixels",
            "--cache", str(run_folder / "cache"), "--curve", str(run_folder / "fid.png"),
            "--json", str(run_folder / "fid.json")]  # fmt: skip
    assert main(argv) == 0
    first = json.loads((run_folder / "fid.json").read_text())["points"]
    assert [point["number"] for point in first] == [0, 20, 100]
    assert first[0]["fid"] < first[1]["fid"] < first[2]["fid"]
    assert "run.evaluate" in Image.open(run_folder / "fid.png").text["Command"]
    scored, evaluate = [], torch_evaluator.evaluate
    monkeypatch.setattr(
        torch_evaluator,
        "evaluate",
        lambda real, fake, args: scored.append(fake.path.name) or evaluate(real, fake, args),
    )
    np.savez(
        run_folder / "run2-snapshot-101.npz", np.zeros((16, 8, 8, 3), np.uint8) + np.arange(8, dtype=np.uint8)[:, None]
    )
    assert main(argv) == 0 and scored == ["run2-snapshot-101.npz"]
    again = json.loads((run_folder / "fid.json").read_text())["points"]
    assert again[:3] == first and len(again) == 4
    assert main([*argv, "--nfe", "9", "--no-cache"]) == 0 and len(scored) == 5
    monkeypatch.setattr(torch_evaluator, "key", lambda args: ["another net under the same name"])
    assert main(argv) == 0 and len(scored) == 9
    assert main([*argv, "--floor", "--count", "16"]) == 0
    written = json.loads((run_folder / "fid.json").read_text())
    assert all(point["floor"] > 0 for point in written["points"]) and written["versions"]["torch"]
    assert scores_table([run_folder / "fid.json"]).count("| pixels | 16 |") == 4  # on a model card
    capsys.readouterr()


def test_a_snapshot_of_another_size_is_refused_before_it_is_drawn(run_folder, capsys):
    pytest.importorskip("diffusers")
    (run_folder / "small-1").symlink_to(ROOT / "run" / "quickstart" / "baseline-digits")
    np.savez(run_folder / "large.npz", np.zeros((16, 16, 16, 3), np.uint8))
    argv = [str(run_folder / "large.npz"), str(run_folder / "small-*"), "--features", "pixels", "--count", "8"]
    with pytest.raises(SystemExit):
        main([*argv, "--no-cache", "--curve", str(run_folder / "fid.png")])
    said = capsys.readouterr()
    assert "give a reference at the samples' size" in said.err and "wrote" not in said.out


def test_a_name_that_lightning_found_taken_keeps_its_number(tmp_path):
    for name in ("epoch=000012.ckpt", "epoch=000003-v1.ckpt", "epoch=000003.ckpt"):
        (tmp_path / name).touch()
    assert [number for number, _ in curve.snapshots(tmp_path / "*.ckpt")] == [3, 3, 12]


def test_statistics_are_not_saved_from_a_curve(capsys):
    with pytest.raises(SystemExit):
        main(["real", "run*", "--curve", "fid.png", "--save-statistics", "real.npz"])
    assert "leave out it or --curve" in capsys.readouterr().err


def test_what_is_no_snapshot_is_named(run_folder, capsys):
    def said(pattern):
        argv = [str(run_folder / "real.npz"), str(run_folder / pattern), "--features", "pixels", "--curve", "fid.png"]
        with pytest.raises(SystemExit):
            main(argv)
        return capsys.readouterr().err

    assert "nothing matches" in said("none*")
    assert "real.npz has no number in its name" in said("real*")
    for name in ("last-v1.ckpt", "epoch=000003.previous.ckpt"):  # copies of others
        (run_folder / name).write_text("")
    assert "nothing matches" in said("*.ckpt")
    (run_folder / "notes-1.txt").write_text("")
    assert "notes-1.txt is no model: give a folder in diffusers' format, or a file of weights: adm's .pt" in said("n*")
    (run_folder / "ema_0.9_000001.pt").write_text("")
    message = said("ema*")  # of ADM, whose network is not in its file
    assert "there is no flags.json beside it" in message or "run/setup.sh guided-diffusion" in message
