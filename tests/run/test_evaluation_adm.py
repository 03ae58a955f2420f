"""ADM's own evaluator behind our command line."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from run.evaluate import __main__ as cli
from run.evaluate import adm
from run.evaluate.sources import open_source

LIMIT = 300  # seconds; TensorFlow's import is most of the few that it takes
# A graph with the names that upstream asks Inception's for, small and random. Upstream wants 2,048
# features; all but 8 are zero, as the square root of a full 2,048 x 2,048 matrix takes minutes.
STAND_IN = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf

rng = np.random.default_rng(0)
weights = lambda *shape: tf.constant(rng.normal(size=shape).astype("float32"))
graph = tf.Graph()
with graph.as_default():
    x = tf.placeholder(tf.float32, [1, None, None, 3], name="ExpandDims")
    small = tf.image.resize(x / 128.0 - 1.0, [3, 3])
    spatial = tf.nn.relu(tf.nn.conv2d(small, weights(3, 3, 3, 8), 1, "SAME"), name="mixed_6/conv")
    pooled = tf.reduce_mean(tf.reshape(spatial, [-1, 3 * 3, 8]), 1)
    pool = tf.pad(pooled, [[0, 0], [0, 2040]])
    pool = tf.reshape(pool, [-1, 1, 1, 2048], name="pool_3")
    flat = tf.reshape(pool, [-1, 2048])
    tf.matmul(flat, 0.02 * weights(2048, 1008), name="softmax/logits/MatMul")
with open(sys.argv[1], "wb") as file:
    file.write(graph.as_graph_def().SerializeToString())
"""


def images(file, n, top, seed, channels=3):
    rng = np.random.default_rng(seed)
    shape = (n, 8, 8, channels)
    np.savez(file, arr_0=rng.integers(0, top, shape, dtype=np.uint8))
    return open_source(file)


@pytest.fixture
def sets(tmp_path):
    return images(tmp_path / "ref.npz", 60, 256, 0), images(tmp_path / "fake.npz", 50, 200, 1)


def test_upstreams_lines_are_read():
    lines = [
        "warming up TensorFlow...",
        "Inception Score: 9.5",
        "FID: 3.25",
        "sFID: 1e-05",
        "Precision: 0.625",
        "Recall: 0.5",
        "numpy version: 2.2.6",
    ]
    expected = {"fid": 3.25, "sfid": 1e-5, "precision": 0.625, "recall": 0.5}
    more = {"inception_score": 9.5, "versions": {"numpy": "2.2.6"}}
    assert adm.parse(lines) == expected | more
    with pytest.raises(OSError, match="did not print"):
        adm.parse(lines[:3])


def weights(file=None):
    return SimpleNamespace(weights=file)


def test_what_is_wrong_is_known_before_an_environment_is_made(sets, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no such file.*classify_image_graph_def.pb"):
        adm.check(*sets, weights(tmp_path / "none.pb"))
    np.savez(tmp_path / "stats.npz", mu=np.zeros(2), sigma=np.eye(2))
    monkeypatch.setattr(adm, "EVALUATOR", tmp_path / "stats.npz")  # any file that is there
    with pytest.raises(ValueError, match="statistics only"):
        adm.check(open_source(tmp_path / "stats.npz"), sets[1], weights())
    monkeypatch.setattr(adm, "EVALUATOR", tmp_path / "none.py")
    with pytest.raises(ValueError, match="run/setup.sh guided-diffusion"):
        adm.check(*sets, weights())


def test_what_upstream_cannot_read_is_written_for_it(tmp_path):
    grey = images(tmp_path / "grey.npz", 7, 256, 0, channels=1)
    assert adm._as_npz(images(tmp_path / "rgb.npz", 7, 256, 0), None) == (tmp_path / "rgb.npz")
    file = adm._as_npz(grey, tmp_path / "made.npz")
    with np.load(file) as made:
        rgb = grey.images.pixels(torch.arange(7)).permute(0, 2, 3, 1).repeat(1, 1, 1, 3)
        np.testing.assert_array_equal(made["arr_0"], rgb.numpy())


FAKE = """
import sys
print("Inception Score: 1.0\\nFID:", len(open("classify_image_graph_def.pb").read()))
print("sFID: 2.0\\nPrecision: 0.5\\nRecall: 0.25")
if "bad" in sys.argv[1]: sys.exit(3)
"""


def test_upstream_runs_beside_a_link_to_the_graph(sets, tmp_path, monkeypatch, capfd):
    """With a stand-in for upstream and for its three packages: what goes in, what comes out."""
    (tmp_path / "evaluator.py").write_text(FAKE)
    (tmp_path / "graph.pb").write_text("12345")
    for name in ("numpy", "scipy", "tensorflow"):
        (tmp_path / "fakes").mkdir(exist_ok=True)
        (tmp_path / "fakes" / f"{name}.py").write_text("__version__ = 'x'\nbool = bool\n")
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "fakes"} exec {sys.executable} -S "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("OGDM_ADM_PYTHON", str(wrapper))
    monkeypatch.setattr(adm, "EVALUATOR", tmp_path / "evaluator.py")
    found = adm.evaluate(*sets, weights(tmp_path / "graph.pb"))
    assert (found["fid"], found["sfid"], found["precision"], found["recall"]) == (5, 2, 0.5, 0.25)
    assert (found["reference_images"], found["sample_images"]) == (60, 50)
    assert found["versions"] == {"numpy": "x", "scipy": "x", "tensorflow": "x"}
    assert "FID: 5" in capfd.readouterr().err
    with pytest.raises(OSError, match="(?s)code 3.*--weights FILE"):
        adm.evaluate(images(tmp_path / "bad.npz", 9, 9, 0), sets[1],
                     weights(tmp_path / "graph.pb"))  # fmt: skip
    monkeypatch.setenv("OGDM_ADM_PYTHON", "no-such-python")
    with pytest.raises(OSError, match="OGDM_ADM_PYTHON=no-such-python"):
        adm.evaluate(*sets, weights(tmp_path / "graph.pb"))


def test_untouched_upstream_with_tensorflow(sets, tmp_path, pristine, monkeypatch, capsys):
    """The real evaluator in the real environment; only the graph is a stand-in."""
    python = os.environ.get("OGDM_ADM_PYTHON") or adm.ENVIRONMENT / "bin" / "python"
    ready = "OGDM_ADM_PYTHON" in os.environ or adm.ready().is_file()
    if not (ready and os.path.exists(python)):
        pytest.skip("no TensorFlow environment; run/evaluate.sh --evaluator adm makes it")
    monkeypatch.setattr(adm, "EVALUATOR", pristine("guided-diffusion") / "evaluations/evaluator.py")
    monkeypatch.setattr(adm, "ensure_environment", lambda: python)
    (tmp_path / "make.py").write_text(STAND_IN)
    quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    made = [python, tmp_path / "make.py", tmp_path / "g.pb"]
    subprocess.run(made, check=True, env=quiet, timeout=LIMIT)
    names = [str(tmp_path / name) for name in ("ref.npz", "fake.npz")]
    flags = ["--evaluator", "adm", "--weights", str(tmp_path / "g.pb")]
    assert cli.main([*names, *flags, "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["fid"] > 0 and found["sfid"] > 0
    assert 0 <= found["recall"] <= 1 and 0 <= found["precision"] <= 1
    assert found["versions"]["tensorflow"].startswith("2.")
    assert "FID" in capsys.readouterr().out


@pytest.mark.slow
def test_the_environment_is_made_once(tmp_path, monkeypatch, capfd):
    """With a stand-in for its requirements: an empty list, then one that cannot be installed."""
    monkeypatch.delenv("OGDM_ADM_PYTHON", raising=False)
    monkeypatch.setattr(adm, "ENVIRONMENT", tmp_path / "setup" / "env")
    monkeypatch.setattr(adm, "REQUIREMENTS", tmp_path / "requirements.txt")
    adm.REQUIREMENTS.write_text("")
    python = adm.ensure_environment()
    assert subprocess.run([python, "-c", ""]).returncode == 0
    assert "Making" in capfd.readouterr().err
    assert adm.ensure_environment() == python and "Making" not in capfd.readouterr().err
    adm.REQUIREMENTS.write_text(f"{tmp_path}/no-such-package\n")
    with pytest.raises(OSError, match="OGDM_ADM_PYTHON"):
        adm.ensure_environment()
    adm.REQUIREMENTS.write_text("")
    assert not adm.ready().exists()  # so that it is made again
