"""The torch evaluator from its command line, with a small feature net made on the spot."""

import json
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from ogdm_core.files import write_json
from run import provenance as origin
from run.evaluate import __main__ as cli
from run.evaluate import extract, metrics, nets
from run.evaluate.lock import alone
from run.evaluate.sources import open_source

pytest.importorskip("rich")

NET = """
import torch
from torch import nn

calls = []

def flat(images):
    calls.append(len(images))
    assert images.dtype == torch.uint8 and images.shape[1] == 3
    return images.float().flatten(1)[:, :6] / 64

def both(images):
    x = images.float().flatten(1) / 64
    return x[:, :6], x[:, 6:10]

def diverging(images):
    return images.float().flatten(1)[:, :6].log()

def wrong(images):
    return images.float()

class Net(nn.Module):
    def __init__(self, cache):
        super().__init__()
        self.where = cache
        self.scale = nn.Parameter(torch.ones(6))
    def forward(self, images):
        assert not self.training
        return images.float().flatten(1)[:, :6] * self.scale

number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with reference, samples and the module `smallnet`."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "ref.npz", arr_0=rng.integers(0, 256, (90, 4, 4, 3), dtype=np.uint8))
    np.savez(tmp_path / "fake.npz", arr_0=rng.integers(0, 220, (70, 4, 4, 3), dtype=np.uint8))
    (tmp_path / "smallnet.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(nets.sys.modules, "smallnet", raising=False)
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


def features(name):
    with np.load(name) as archive:
        images = torch.from_numpy(archive["arr_0"]).permute(0, 3, 1, 2)
    return images.float().flatten(1)[:, :6] / 64


def test_numbers_are_those_of_the_metrics(folder, capsys):
    found = run("--batch", "16")
    real, fake = features("ref.npz"), features("fake.npz")
    assert found["fid"] == pytest.approx(metrics.fid(real, fake), rel=1e-9)
    assert (found["precision"], found["recall"]) == metrics.precision_recall(real, fake)
    assert found["sfid"] is None
    assert (found["reference_images"], found["sample_images"]) == (90, 70)
    assert found["evaluator"] == "torch" and found["features"] == "smallnet:flat"
    assert "ref.npz fake.npz" in found["command"] and found["versions"]["torch"]
    shown = capsys.readouterr().out
    assert f"{found['fid']:.4f}" in shown and "90 reference, 70 samples" in shown


def test_sfid_where_the_net_has_spatial_features(folder):
    assert run(net="smallnet:both")["sfid"] > 0


def test_reference_features_are_cached_by_content(folder):
    first = run()
    import smallnet

    assert sum(smallnet.calls) == 90 + 70
    assert run()["fid"] == pytest.approx(first["fid"], rel=1e-12)
    assert sum(smallnet.calls) == 90 + 70 + 70
    (folder / "ref.npz").rename(folder / "other.npz")
    run(reference="other.npz")
    assert sum(smallnet.calls) == 90 + 3 * 70
    np.savez(folder / "ref.npz", arr_0=np.load("other.npz")["arr_0"][::-1])
    run()
    assert sum(smallnet.calls) == 2 * 90 + 4 * 70
    assert len(list((folder / "out/evaluation-cache").iterdir())) == 2  # and nothing unfinished


def test_no_cache_keeps_nothing(folder):
    run("--no-cache")
    assert not (folder / "out/evaluation-cache").exists()


def test_a_stopped_run_goes_on_behind_the_last_chunk(folder, monkeypatch):
    monkeypatch.setattr(extract, "CHUNK", 20)
    whole = run("--no-cache")
    import smallnet

    smallnet.calls.clear()
    source, done = open_source("ref.npz"), []
    net = nets.imported("smallnet:flat", "cpu", None)

    def stop(images):
        done.append(images)
        if images > 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract.features_of(source, net, keep=50_000, batch=10, cache=folder / "c", progress=stop)
    before = sum(smallnet.calls)
    again = run("--cache", "c")
    assert before == 70 and sum(smallnet.calls) == 70 + 30 + 70
    assert again["fid"] == pytest.approx(whole["fid"], rel=1e-12)
    assert again["recall"] == whole["recall"]


def test_two_evaluations_at_once_compute_a_reference_once(folder, capsys):
    source, going, go = open_source("ref.npz"), threading.Event(), threading.Event()
    seen = []

    def call(images):
        seen.append(len(images))
        going.set()
        assert go.wait(60)
        return images.float().flatten(1)[:, :6]

    def one():
        return extract.features_of(source, net, keep=50, cache=folder / "c")

    net = nets.Net("slow", "slow", call)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(one)
        assert going.wait(60)
        second = pool.submit(one)
        said = ""
        for _ in range(600):  # until it waits for the first, or computes by itself
            said += capsys.readouterr().err
            if said or len(seen) > 1:
                break
            time.sleep(0.1)
        go.set()
        a, b = first.result(60), second.result(60)
    assert sum(seen) == 90 and "waiting: another process is computing the features of" in said
    assert torch.equal(a.features, b.features)
    np.testing.assert_array_equal(a.statistics.sigma, b.statistics.sigma)
    assert [file.suffix for file in (folder / "c").iterdir()] == [".npz"]


def test_a_lock_admits_one_at_a_time(tmp_path):
    inside, most = [], []

    def work(number):
        with alone(tmp_path / "a.lock", "working"):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.001)
            inside.remove(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(100)))
    assert len(most) == 100 and max(most) == 1
    assert not any(tmp_path.iterdir())


def test_precision_and_recall_may_use_fewer_images_than_fid(folder):
    found = run("--pr-images", "40", "--seed", "3")
    assert found["precision_recall_images"] == [40, 40]
    assert found["fid"] == pytest.approx(run()["fid"], rel=1e-12)
    drawn = torch.randperm(90, generator=torch.Generator().manual_seed(3))[:40].sort().values
    also = torch.randperm(70, generator=torch.Generator().manual_seed(3))[:40].sort().values
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
    assert "are of smallnet:flat" in fails(capsys, reference="stats.npz", net="smallnet:both")
    text = fails(capsys, "--save-statistics", "more.npz", reference="stats.npz")
    assert "stats.npz is statistics already" in text and not (folder / "more.npz").exists()


def test_statistics_of_adms_batches_count_only_for_inception(folder):
    images = np.load("ref.npz")["arr_0"]
    np.savez("batch.npz", arr_0=images, mu=np.zeros(2048), sigma=np.eye(2048))
    assert run(reference="batch.npz")["fid"] == pytest.approx(run()["fid"], rel=1e-12)


def test_singular_covariances_are_noted(folder):
    np.savez("few.npz", arr_0=np.load("fake.npz")["arr_0"][:5])
    notes = run(samples="few.npz")["notes"]
    assert any("singular" in note for note in notes)


def test_a_module_class_is_built_with_the_cache(folder):
    net = nets.imported("smallnet:Net", "cpu", folder)
    assert net.call.where == folder
    key = net.key
    assert nets.imported("smallnet:Net", "cpu", None).key == key
    assert run(net="smallnet:Net")["fid"] > 0


def test_the_embedded_classifier_is_a_net(folder):
    (folder / "digits.py").write_text(
        "from run.evaluate.classifier import Classifier\nnet = Classifier(1, 10)\n"
    )
    net = nets.imported("digits:net", "cpu", None)
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    assert net.call(images).shape == (3, 64)


def test_errors_come_before_anything_is_computed(folder, capsys):
    text = fails(capsys, net=None)
    assert nets.URL in text and "--weights FILE" in text and "--features" in text
    assert "no such file" in fails(capsys, "--weights", "none.pth", net=None)
    assert "leave it out" in fails(capsys, "--weights", "none.pth")
    assert "MODULE:NAME" in fails(capsys, net="smallnet")
    assert "cannot be imported" in fails(capsys, net="smallnet:nothing")
    assert "cannot be called" in fails(capsys, net="smallnet:number")
    assert "does not exist" in fails(capsys, samples="none.npz")
    if not torch.cuda.is_available():
        assert "--device cpu" in fails(capsys, "--device", "cuda")
    np.savez("large.npz", arr_0=np.zeros((9, 8, 8, 3), np.uint8))
    assert "4x4" in fails(capsys, samples="large.npz")
    np.savez("three.npz", arr_0=np.zeros((3, 4, 4, 3), np.uint8))
    assert "give 4 at least" in fails(capsys, samples="three.npz")
    assert "--pr-images at least 4" in fails(capsys, "--pr-images", "3")
    assert not (folder / "out.json").exists()
    import smallnet

    assert smallnet.calls == []


def test_bad_features_name_the_image(folder, capsys):
    assert "must give [64, D]" in fails(capsys, net="smallnet:wrong")
    images = np.full((30, 4, 4, 3), 9, np.uint8)
    images[21] = 0
    np.savez("dark.npz", arr_0=images)
    text = fails(capsys, "--batch", "8", reference="dark.npz", net="smallnet:diverging")
    assert "dark.npz: the features of image 21 hold NaN or infinity" in text


def test_weights_of_another_kind_are_refused(folder, capsys):
    if nets.importlib.util.find_spec("torch_fidelity") is None:
        pytest.skip("torch-fidelity is not installed")
    torch.save({"a": torch.zeros(1)}, "other.pth")
    assert "not torch-fidelity's Inception" in fails(capsys, "--weights", "other.pth", net=None)
    (folder / "text.pth").write_text("hello")
    assert "not torch-fidelity's Inception" in fails(capsys, "--weights", "text.pth", net=None)


def test_weights_that_are_not_the_published_ones_are_noted(folder, monkeypatch):
    monkeypatch.setattr(nets, "check", lambda weights, features: None)
    monkeypatch.setattr(nets, "Inception", lambda weights: torch.nn.Flatten())
    (folder / "mine.pth").write_bytes(b"mine")
    digest = nets.file_digest(folder / "mine.pth")
    assert run("--weights", "mine.pth", net=None)["notes"][0].startswith(
        f"mine.pth is not the published file: its SHA-256 begins with {digest[:8]}, not 6726825d"
    )
    monkeypatch.setattr(nets, "PUBLISHED", digest[:8])
    assert not any("mine.pth" in note for note in run("--weights", "mine.pth", net=None)["notes"])


def test_a_result_names_the_commit_it_was_made_with(tmp_path, monkeypatch):
    def git(*words):
        name = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        done = subprocess.run(["git", *name, *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    monkeypatch.setattr(origin, "ROOT", tmp_path)
    assert origin.commit() == "unknown"
    git("init", "-q")
    assert origin.commit() == "unknown"  # nothing committed
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-q", "-m", "a")
    head = git("rev-parse", "HEAD")
    assert origin.commit() == head
    (tmp_path / "file").write_text("b")
    assert origin.commit() == head + "+"
    (tmp_path / "inner").mkdir()
    monkeypatch.setattr(origin, "ROOT", tmp_path / "inner")
    assert origin.commit() == "unknown"  # a copy in somebody else's repository
    monkeypatch.setattr(origin, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", "")
    assert origin.commit() == "unknown"


def test_versions_and_json_say_what_is_absent_and_leave_nothing_half_written(tmp_path):
    found = origin.versions(["numpy", "no-such-package"])
    assert found["numpy"] == np.__version__ and found["no-such-package"] == "not installed"
    file = tmp_path / "deep" / "out.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert json.loads(file.read_text()) == {"a": 1}
    assert list(file.parent.iterdir()) == [file]


def test_inception_gives_adms_two_sets_of_features(folder):
    """With random weights: shapes, and that the spatial ones are the branch that ADM's reads."""
    if nets.importlib.util.find_spec("torch_fidelity") is None:
        pytest.skip("torch-fidelity is not installed")
    port = nets._port()
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        torch.manual_seed(0)
        patch.setattr(port, "load_state_dict", lambda self, state: None)
        patch.setattr(nets, "_port", lambda: port)
        patch.setattr(torch, "load", lambda *a, **k: {})
        net = nets.Inception(folder / "any.pth")
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    pooled, spatial = net(images)
    assert pooled.shape == (2, 2048) and spatial.shape == (2, 17 * 17 * 7)
    kept = []
    net.net.Mixed_6d.branch1x1.register_forward_hook(lambda m, i, out: kept.append(out))
    net(images)
    assert torch.equal(spatial.view(2, 17, 17, 7)[1, 3, 5], kept[0][1, :7, 3, 5])
