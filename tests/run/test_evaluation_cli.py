"""The torch evaluator from its command line, with a small feature net made on the spot."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from ogdm_core.random import generator_of
from run import provenance
from run.evaluate import __main__ as cli
from run.evaluate import extract, metrics
from run.evaluate.classifier import Classifier, save_classifier
from run.evaluate.features import Features, load_features
from run.evaluate.sources import open_source
from run.sampling import shape_of

NET = """
import torch

calls = []

def flat(images):
    calls.append(len(images))
    return images.float().flatten(1)[:, :6] / 64

def other(images):
    return images.float().flatten(1)[:, :6]

def diverging(images):
    return images.float().flatten(1)[:, :6].log()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with reference, samples and the module `smallnet`."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "ref.npz", arr_0=rng.integers(0, 256, (90, 4, 4, 3), dtype=np.uint8))
    np.savez(tmp_path / "fake.npz", arr_0=rng.integers(0, 220, (70, 4, 4, 3), dtype=np.uint8))
    np.savez(tmp_path / "part.npz", arr_0=rng.integers(0, 220, (40, 4, 4, 3), dtype=np.uint8))
    (tmp_path / "smallnet.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "smallnet", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*flags, reference="ref.npz", samples="fake.npz", net="smallnet:flat"):
    given = ["--features", net] if net else []
    code = cli.main([reference, samples, *given, "--device", "cpu", "--json", "out.json", *flags])
    assert code == 0
    with open("out.json") as file:
        return json.load(file)


def fails(capsys, *flags, **kwargs):
    with pytest.raises(SystemExit) as caught:
        run(*flags, **kwargs)
    assert caught.value.code == 2
    return capsys.readouterr().err


def calls():
    """How many images `smallnet:flat` has seen."""
    return sum(sys.modules["smallnet"].calls)


def features(name):
    with np.load(name) as archive:
        images = torch.from_numpy(archive["arr_0"]).permute(0, 3, 1, 2)
    return images.float().flatten(1)[:, :6] / 64


def test_a_classifier_of_grey_images_takes_no_reference_in_colours(folder, capsys):
    """Samples may have some: networks of three channels learn grey images nearly."""
    save_classifier(folder / "c.pt", Classifier(1, 10, 4).eval(), 0.9)
    grey = np.random.default_rng(0).integers(0, 256, (90, 4, 4, 1), dtype=np.uint8)
    np.savez(folder / "grey.npz", arr_0=grey.repeat(3, 3))
    assert run(reference="grey.npz", net="c.pt")["fid"] > 0
    assert "c.pt was made for grey images, ref.npz has colours; take one" in fails(capsys, net="c.pt")


def test_a_model_is_sampled_first(folder, capsys):
    pytest.importorskip("diffusers")
    flags = ["--sampler", "heun", "--nfe", "3", "--count", "20"]
    model = str(provenance.ROOT / "run" / "quickstart" / "baseline-digits")
    found = run(*flags, reference="digits", samples=model, net="pixels")
    assert found["sample_images"] == 20 and found["samples"] == model and found["fid"] > 0
    assert "--sampler heun --nfe 3" in found["command"]
    flags += ["--discretisation", "quadratic"]
    other = run(*flags, reference="digits", samples=model, net="pixels")
    assert other["fid"] != found["fid"]
    said = fails(capsys, "--sampler", "heun", "--nfe", "4", reference="digits", samples=model)
    assert "heun cannot run in 4 network evaluations" in said
    said = fails(capsys, "--count", "4", samples=model)  # before anything is drawn
    assert "images of 4x4" in said and "of 8x8" in said and "euler" not in said
    assert "--nfe is for a model; fake.npz is none" in fails(capsys, "--nfe", "4")


@pytest.mark.parametrize(("config", "shape"), [
    ({"in_channels": 1, "sample_size": 8}, (1, 8, 8)),
    ({"in_channels": 3, "sample_size": [8, 4]}, (3, 8, 4)),
    ({"sample_size": 8}, None),
    ({"in_channels": 1, "sample_size": None}, None),
    ({"in_channels": 1, "sample_size": [8]}, None),
])  # fmt: skip
def test_a_models_config_gives_the_shape_of_its_images(config, shape):
    if shape:
        assert shape_of(config, "config.json") == shape
    else:
        with pytest.raises(ValueError, match=r"config.json has in_channels .* whole number"):
            shape_of(config, "config.json")


def test_numbers_are_those_of_the_metrics(folder, capsys):
    found = run("--batch", "16")
    real, fake = features("ref.npz"), features("fake.npz")
    assert found["fid"] == pytest.approx(metrics.fid(real, fake), rel=1e-9)
    assert (found["precision"], found["recall"]) == metrics.precision_recall(real, fake)
    assert (found["reference_images"], found["sample_images"]) == (90, 70)
    assert found["evaluator"] == "torch" and found["features"] == "smallnet:flat"
    assert "ref.npz fake.npz" in found["command"] and found["versions"]["torch"]
    shown = capsys.readouterr().out
    assert f"{found['fid']:.4f}" in shown and "90 reference, 70 samples" in shown


def test_several_nets_the_floor_and_the_spectrum(folder, capsys):
    found = run("--floor", samples="part.npz", net="smallnet:flat,smallnet:other")
    assert found["features"] == "smallnet:flat" and [net["features"] for net in found["also"]] == ["smallnet:other"]
    assert found["also"][0]["fid"] == pytest.approx(64**2 * found["fid"], rel=1e-6)
    shown = capsys.readouterr().out
    assert f"{found['fid']:.4f}" in shown and f"{found['also'][0]['fid']:.4f}" in shown and "spectrum" in shown

    real = features("ref.npz")
    order = torch.randperm(90, generator=generator_of(0, "floor"))
    assert found["floor"] == pytest.approx(metrics.fid(real[order[:40]], real[order[40:]]), rel=1e-6)
    images = [np.load(name)["arr_0"] / 127.5 - 1 for name in ("part.npz", "ref.npz")]
    power = [(np.abs(np.fft.fft2(x, axes=(1, 2))) ** 2).mean((0, 3)) for x in images]
    radius = np.hypot(np.fft.fftfreq(4)[:, None], np.fft.fftfreq(4))
    band = (radius >= 0.4) & (radius < 0.8)
    assert found["spectrum"][3] == pytest.approx(power[0][band].sum() / power[1][band].sum())


def test_the_references_statistics_are_kept_and_read(folder, monkeypatch):
    first, added = run(), []
    add = extract.RunningStatistics.add
    monkeypatch.setattr(extract.RunningStatistics, "add", lambda self, x: (added.append(len(x)), add(self, x)))
    assert run()["fid"] == first["fid"] and sum(added) == 70  # the samples' only


def test_a_floor_needs_twice_as_many_images(folder, capsys):
    assert "--floor compares 70 images" in fails(capsys, "--floor")


def test_reference_features_are_cached_by_content(folder):
    first = run()
    assert calls() == 90 + 70
    assert run("--seed", "1")["fid"] == pytest.approx(first["fid"], rel=1e-12)
    assert calls() == 90 + 70 + 70
    (folder / "ref.npz").rename(folder / "other.npz")
    run(reference="other.npz")
    assert calls() == 90 + 3 * 70
    np.savez(folder / "ref.npz", arr_0=np.load("other.npz")["arr_0"][::-1])
    run()
    assert calls() == 2 * 90 + 4 * 70
    cached = [f for f in (folder / "out/evaluation-cache").iterdir() if f.is_dir()]
    assert len(cached) == 2  # the two references: nothing unfinished, no samples


def test_no_cache_keeps_nothing(folder):
    run("--no-cache")
    assert not (folder / "out/evaluation-cache").exists()


def test_a_stopped_run_goes_on_behind_the_last_chunk(folder, monkeypatch):
    monkeypatch.setattr(extract, "CHUNK", 20)
    whole = run("--no-cache")
    before = calls()

    net = load_features("smallnet:flat")

    def stop(images):
        if calls() - before == 60:
            raise KeyboardInterrupt
        return net.net(images)

    with pytest.raises(KeyboardInterrupt):
        stopped = replace(net, net=stop)
        extract.features_of(open_source("ref.npz"), stopped, keep=50, batch=10, cache=folder / "c")
    assert calls() - before == 60
    again = run("--cache", "c")
    assert calls() - before == 60 + 30 + 70
    assert again["fid"] == pytest.approx(whole["fid"], rel=1e-12)
    assert again["recall"] == whole["recall"]


@pytest.mark.parametrize("damage", [b"", b"PK no", None])
def test_a_damaged_cache_entry_is_made_again(folder, monkeypatch, damage):
    monkeypatch.setattr(extract, "CHUNK", 40)
    first = run()
    file = next((folder / "out/evaluation-cache").glob("*/00000040.npz"))
    if damage is None:  # one bit
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        damage = bytes(data)
    file.write_bytes(damage)
    assert run()["fid"] == pytest.approx(first["fid"], rel=1e-12)
    assert calls() == 90 + 70 + 40 + 70


def test_two_evaluations_at_once_compute_a_reference_once(folder, capsys):
    source, going, go = open_source("ref.npz"), threading.Event(), threading.Event()
    seen = []

    def call(images):
        seen.append(len(images))
        going.set()
        assert go.wait(60)
        return images.float().flatten(1)[:, :6]

    def one():
        return extract.features_of(source, Features("slow", "slow", call), keep=50, cache=folder)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(one)
        assert going.wait(60)
        second = pool.submit(one)
        said = ""
        for _ in range(600):  # until it waits for the first, or computes by itself
            said += capsys.readouterr().err
            if "is computing" in said or len(seen) > 1:
                break
            time.sleep(0.1)
        go.set()
        (a, stats), (b, others) = first.result(60), second.result(60)
    assert sum(seen) == 90 and "is computing the features of" in said
    assert torch.equal(a, b)
    np.testing.assert_array_equal(stats.sigma, others.sigma)


def test_precision_and_recall_may_use_fewer_images_than_fid(folder):
    found = run("--pr-images", "40", "--seed", "3")
    assert found["precision_recall_images"] == [40, 40]
    assert found["fid"] == pytest.approx(run()["fid"], rel=1e-12)
    drawn, also = (torch.randperm(n, generator=torch.Generator().manual_seed(3))[:40] for n in (90, 70))
    expected = metrics.precision_recall(features("ref.npz")[drawn], features("fake.npz")[also])
    assert (found["precision"], found["recall"]) == expected


def test_saved_statistics_give_the_same_fid(folder, capsys):
    whole = run("--save-statistics", "stats.npz")
    saved = run(reference="stats.npz")
    assert saved["fid"] == pytest.approx(whole["fid"], rel=1e-12)
    assert saved["recall"] is None and saved["precision"] is None
    assert saved["reference_images"] == 90
    assert "need the images" in capsys.readouterr().err
    assert run(reference="stats.npz", samples="stats.npz", net=None)["fid"] == pytest.approx(0)
    assert "are of smallnet:flat" in fails(capsys, reference="stats.npz", net="smallnet:other")
    text = fails(capsys, "--save-statistics", "more.npz", reference="stats.npz")
    assert "stats.npz is statistics already" in text and not (folder / "more.npz").exists()


def test_statistics_of_adms_batches_count_only_for_inception(folder):
    images = np.load("ref.npz")["arr_0"]
    np.savez("batch.npz", arr_0=images, mu=np.zeros(2048), sigma=np.eye(2048))
    assert run(reference="batch.npz")["fid"] == pytest.approx(run()["fid"], rel=1e-12)


def test_singular_covariances_are_noted(folder):
    np.savez("few.npz", arr_0=np.load("fake.npz")["arr_0"][:5])
    assert any("singular" in note for note in run(samples="few.npz")["notes"])


def test_errors_come_before_anything_is_computed(folder, capsys):
    assert "--weights FILE" in fails(capsys, net=None)
    assert "MODULE:NAME" in fails(capsys, net="smallnet")
    assert "does not exist" in fails(capsys, samples="none.npz")
    if not torch.cuda.is_available():
        assert "--device cpu" in fails(capsys, "--device", "cuda")
    np.savez("large.npz", arr_0=np.zeros((9, 8, 8, 3), np.uint8))
    assert "4x4" in fails(capsys, samples="large.npz")
    np.savez("three.npz", arr_0=np.zeros((3, 4, 4, 3), np.uint8))
    assert "give 4 at least" in fails(capsys, samples="three.npz")
    assert not (folder / "out.json").exists() and "smallnet" not in sys.modules


def test_bad_features_name_the_image(folder, capsys):
    images = np.full((30, 4, 4, 3), 9, np.uint8)
    images[21] = 0
    np.savez("dark.npz", arr_0=images)
    text = fails(capsys, "--batch", "8", reference="dark.npz", net="smallnet:diverging")
    assert "dark.npz: the features of image 21 hold NaN or infinity" in text


def test_numbers_are_shown_even_if_they_cannot_be_written(folder, capsys, monkeypatch):
    def full(*args):
        raise OSError("disk full")

    monkeypatch.setattr(cli, "write_json", full)
    assert cli.main(["ref.npz", "fake.npz", "--features", "smallnet:flat", "--json", "out.json"]) == 2
    said = capsys.readouterr()
    assert "recall" in said.out and "numbers above could not be written to out.json" in said.err


def test_a_result_names_the_commit_it_was_made_with(tmp_path, monkeypatch):
    def git(*words):
        name = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        done = subprocess.run(["git", *name, *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.commit() == "unknown"
    git("init", "-q")
    assert provenance.commit() == "unknown"  # nothing committed
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-q", "-m", "a")
    head = git("rev-parse", "HEAD")
    assert provenance.commit() == head
    (tmp_path / "file").write_text("b")
    assert provenance.commit() == head + "+"
    (tmp_path / "inner").mkdir()
    monkeypatch.setattr(provenance, "ROOT", tmp_path / "inner")
    assert provenance.commit() == "unknown"  # a copy in somebody else's repository
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() == "unknown"


def test_versions_say_what_is_absent():
    found = provenance.versions(["numpy", "no-such-package"])
    assert found["numpy"] == np.__version__ and found["no-such-package"] == "not installed"
