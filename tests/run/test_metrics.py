import importlib.util
import math
import sys
import types
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from run.evaluate import metrics


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


# ---------------------------------------------------------------- Frechet distance


def test_frechet_distance_of_non_commuting_gaussians_matches_the_matrix_square_root(generator):
    scipy_linalg = pytest.importorskip("scipy.linalg")
    a, b = (torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    c1, c2 = a @ a.T, b @ b.T
    trace = np.trace(scipy_linalg.sqrtm((c1 @ c2).numpy())).real
    expected = float(c1.trace() + c2.trace()) - 2 * trace
    got = metrics.frechet_distance(torch.zeros(8), c1, torch.zeros(8), c2)
    assert got == pytest.approx(expected, rel=1e-9)


def test_fid_of_one_feature_is_the_difference_of_means_and_deviations():
    a, b = torch.tensor([[0.0], [2.0]]), torch.tensor([[3.0], [7.0]])
    # Means 1 and 5; variances with N - 1: 2 and 8.
    assert metrics.fid(a, b) == pytest.approx(16 + (math.sqrt(8) - math.sqrt(2)) ** 2, rel=1e-12)


def test_fid_is_zero_on_itself_symmetric_and_blind_to_order(generator):
    a = torch.randn(300, 10, generator=generator)
    b = torch.randn(200, 10, generator=generator) * 2 + 1
    assert metrics.fid(a, a) == pytest.approx(0, abs=1e-9)
    assert metrics.fid(a, b) == pytest.approx(metrics.fid(b, a), rel=1e-10)
    assert metrics.fid(a.flip(0), b) == pytest.approx(metrics.fid(a, b), rel=1e-10)


def test_statistics_are_numpys_and_do_not_lose_digits_to_a_large_mean(generator, monkeypatch):
    x = torch.randn(101, 5, generator=generator) + 1000
    monkeypatch.setattr(metrics, "ADM_TILE", 17)
    mean, cov = metrics.statistics(x)
    assert mean.dtype == cov.dtype == torch.float64
    np.testing.assert_allclose(mean.numpy(), x.double().numpy().mean(0), rtol=1e-14)
    np.testing.assert_allclose(cov.numpy(), np.cov(x.double().numpy(), rowvar=False), rtol=1e-10)


def test_singular_covariances_are_said_and_give_the_limit_of_regular_ones(generator):
    a = torch.randn(10, 20, generator=generator, dtype=torch.float64)
    b = torch.randn(10, 20, generator=generator, dtype=torch.float64) + 1
    with pytest.warns(RuntimeWarning, match="of 20 features"):
        singular = metrics.fid(a, b)
    (m1, c1), (m2, c2) = metrics.statistics(a), metrics.statistics(b)
    tiny = 1e-12 * torch.eye(20, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        regular = metrics.frechet_distance(m1, c1 + tiny, m2, c2 + tiny)
    assert singular == pytest.approx(regular, rel=1e-5)


def test_regular_covariances_do_not_warn(generator):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics.fid(torch.randn(100, 5, generator=generator), torch.rand(100, 5))


# ---------------------------------------------------------------- precision and recall

LINE = torch.tensor([[0.0], [1.0], [2.0], [3.0], [10.0]])


@pytest.mark.parametrize(("k", "expected"), [(1, [1, 1, 1, 1, 49]), (3, [9, 4, 4, 9, 81])])
def test_radii_of_points_on_a_line(k, expected):
    assert metrics.manifold_radii(LINE, k).tolist() == expected


def test_duplicates_count_as_neighbours():
    twins = torch.tensor([[0.0], [0.0], [5.0], [9.0]])
    assert metrics.manifold_radii(twins, 1).tolist() == [0, 0, 16, 16]


def test_precision_and_recall_of_hand_made_sets():
    reference = torch.tensor([[0.0], [1.0], [2.0], [100.0]])  # radii, k = 1: 1, 1, 1, 98^2
    samples = torch.tensor([[0.5], [3.0], [3.5], [300.0]])  # radii, k = 1: 6.25, .25, .25, 296.5^2
    # 0.5 and 3.0 lie within 1 of a reference point, 3.5 within 98 of 100, 300 within nothing.
    # 0, 1, 2 lie within 2.5 of 0.5; 100 lies within 296.5 of 300.
    precision, recall = metrics.precision_recall(reference, samples, 1)
    assert (precision, recall) == (0.75, 1.0)
    assert metrics.precision_recall(samples, reference, 1) == (1.0, 0.75)


def test_the_boundary_belongs_to_the_manifold():
    reference = torch.tensor([[0.0], [2.0]])  # radii 4
    assert metrics.precision_recall(reference, torch.tensor([[4.0], [4.5]]), 1)[0] == 0.5


def test_one_mode_of_two_has_full_precision_and_half_the_recall(generator):
    modes = torch.tensor([[-9.0, 0.0], [9.0, 0.0]]).repeat_interleave(200, 0)
    reference = modes + torch.rand(400, 2, generator=generator)
    precision, recall = metrics.precision_recall(reference, reference[:200])
    assert (precision, recall) == (1.0, 0.5)


def test_memory_stays_tiled_and_the_answer_does_not_depend_on_the_tile(generator, monkeypatch):
    x = torch.randn(157, 12, generator=generator)
    y = torch.randn(91, 12, generator=generator) * 1.3
    largest, plain = [], metrics._squared_distances

    def spy(u, v):
        largest.append(max(len(u), len(v)))
        return plain(u, v)

    monkeypatch.setattr(metrics, "_squared_distances", spy)
    whole = metrics.precision_recall(x, y)
    assert 0 < whole[0] < 1 and 0 < whole[1] < 1
    for tile in (3, 23, 90):
        largest.clear()
        monkeypatch.setattr(metrics, "TILE", tile)
        assert metrics.precision_recall(x, y) == whole
        assert max(largest) == tile


@pytest.mark.parametrize("power", [-3, 20, 48, 84, 110])
def test_large_features_are_scaled_and_not_all_equally_far(generator, power):
    x, y = torch.randn(157, 12, generator=generator), torch.randn(91, 12, generator=generator) * 1.3
    scaled = metrics.precision_recall(x * 2.0**power, y * 2.0**power)
    assert scaled == pytest.approx(metrics.precision_recall(x, y), abs=0.03) and 0 < scaled[0] < 1


def test_distances_lost_to_rounding_are_never_negative():
    # |u|^2 - 2uv + |v|^2 = (u - v)^2 is far below the last digit of u^2, so only rounding is left.
    for u in (torch.linspace(100, 100.001, 64)[:, None], torch.linspace(3e3, 3e3 + 1, 64)[:, None]):
        assert bool((metrics._squared_distances(u, u.flip(0)) >= 0).all())


# ---------------------------------------------------------------- nearest neighbours


def test_nearest_neighbours_match_brute_force_and_find_exact_copies(generator):
    pytest.importorskip("sklearn")
    reference = torch.randn(60, 5, generator=generator) + 50
    queries = torch.cat([reference[[4, 31]], torch.randn(9, 5, generator=generator) + 50])
    distances, indices = metrics.nearest_neighbours(queries, reference, k=3)
    brute, order = torch.cdist(queries.double(), reference.double()).sort(dim=1)
    assert torch.equal(indices, order[:, :3])
    torch.testing.assert_close(distances.double(), brute[:, :3], rtol=1e-5, atol=1e-5)
    assert distances[:2, 0].tolist() == [0, 0]


# ---------------------------------------------------------------- errors


def test_errors_say_what_is_wrong_and_what_to_do():
    good = torch.randn(10, 4)
    bad = good.clone()
    bad[3, 1] = math.nan
    bad[7, 0] = math.inf
    with pytest.raises(ValueError, match=r"features_b: 2 of 10 rows.*first is row 3"):
        metrics.fid(good, bad)
    with pytest.raises(ValueError, match="samples: 2 of 10 rows"):
        metrics.precision_recall(good, bad)
    with pytest.raises(ValueError, match="different feature nets: 4 against 3"):
        metrics.fid(good, good[:, :3])
    with pytest.raises(ValueError, match="at least 2 images"):
        metrics.fid(good, good[:1])
    with pytest.raises(ValueError, match="at least 4 images, but there are 3"):
        metrics.precision_recall(good, good[:3])


# ---------------------------------------------------------------- against ADM's own evaluator


class Node:
    """A lazily evaluated value: what is left of a TensorFlow 1 graph in this stand-in."""

    def __init__(self, run=None):
        self.run = run or (lambda feed: feed[self])

    def __getitem__(self, index):
        return Node(lambda feed: self.run(feed)[index])

    def __add__(self, other):
        return apply(np.add, self, other)

    def __sub__(self, other):
        return apply(np.subtract, self, other)

    def __rmul__(self, factor):
        return Node(lambda feed: self.run(feed) * self.run(feed).dtype.type(factor))

    def __le__(self, other):
        return apply(np.less_equal, self, other)


def apply(function, *nodes):
    return Node(lambda feed: function(*(node.run(feed) for node in nodes)))


def rounded(function):
    """Half precision as GPUs do it: accumulate in single, round once."""

    def call(*arrays):
        single = function(*(a.astype(np.float32) for a in arrays))
        return single.astype(arrays[0].dtype)

    return call


def stand_in_for_tensorflow():
    @contextmanager
    def variable_scope(_):
        yield

    tf = types.ModuleType("tensorflow.compat.v1")
    tf.float16, tf.float32 = np.float16, np.float32
    tf.placeholder = lambda dtype, shape: Node()
    tf.cast = lambda x, dtype: Node(lambda feed: x.run(feed).astype(dtype))
    tf.square = lambda x: apply(np.square, x)
    tf.reduce_sum = lambda x, axis: apply(rounded(lambda a: a.sum(axis)), x)
    tf.reshape = lambda x, shape: apply(lambda a: a.reshape(shape), x)
    tf.matmul = lambda u, v, _, transpose_v: apply(rounded(lambda a, b: a @ b.T), u, v)
    tf.maximum = lambda x, floor: Node(lambda feed: np.maximum(x.run(feed), np.float16(floor)))
    tf.reduce_all = lambda x: apply(np.all, x)
    tf.cond = lambda test, yes, no: Node(lambda f: (yes() if test.run(f) else no()).run(f))
    tf.math = types.SimpleNamespace(
        is_finite=lambda x: apply(np.isfinite, x),
        reduce_any=lambda x, axis: apply(lambda a: a.any(axis), x),
    )
    tf.variable_scope = variable_scope
    return tf


class Session:
    """Feeds placeholders and evaluates; knows nothing else."""

    @property
    def graph(self):
        @contextmanager
        def as_default():
            yield

        return types.SimpleNamespace(as_default=as_default)

    def run(self, fetches, feed_dict):
        with np.errstate(over="ignore", invalid="ignore"):
            if isinstance(fetches, list):
                return [fetch.run(feed_dict) for fetch in fetches]
            return fetches.run(feed_dict)


@pytest.fixture
def adm_evaluator(pristine, monkeypatch):
    """guided-diffusion's evaluations/evaluator.py, imported from its submodule."""
    pytest.importorskip("scipy")
    pytest.importorskip("tqdm")
    folder = pristine("guided-diffusion")
    tf = stand_in_for_tensorflow()
    for name, module in {
        "tensorflow": types.ModuleType("tensorflow"),
        "tensorflow.compat": types.ModuleType("tensorflow.compat"),
        "tensorflow.compat.v1": tf,
        "requests": types.ModuleType("requests"),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["tensorflow.compat"].v1 = tf
    path = folder / "evaluations" / "evaluator.py"
    spec = importlib.util.spec_from_file_location("adm_evaluator", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inception_like(n, scale, generator, size=256):
    """Non-negative, sparse, sharing directions: like pooled ReLU features."""
    codes = torch.randn(n, 16, generator=generator) * scale
    mixing = torch.randn(16, size, generator=torch.Generator().manual_seed(1)) / 4
    noise = torch.randn(n, size, generator=generator) / 4
    return (codes @ mixing + noise).clamp(min=0)


@pytest.mark.parametrize("tile", [100, 256])
@pytest.mark.parametrize(
    ("magnitude", "outlier"),
    [(1, 1), (40, 1), (1, 30)],
    ids=["half", "all overflow", "one overflows"],
)
def test_precision_and_recall_are_exactly_adms(adm_evaluator, generator, monkeypatch, magnitude, outlier, tile):
    monkeypatch.setattr(metrics, "TILE", tile)
    monkeypatch.setattr(metrics, "ADM_TILE", 256)
    x = inception_like(700, 1.0, generator) * magnitude
    y = inception_like(600, 0.8, generator) * magnitude
    x[300] *= outlier
    y[20] *= outlier
    estimator = adm_evaluator.ManifoldEstimator(Session(), row_batch_size=256, col_batch_size=256)
    a, b = x.numpy(), y.numpy()
    precision, recall = estimator.evaluate_pr(a, estimator.manifold_radii(a), b, estimator.manifold_radii(b))
    ours = metrics.precision_recall(x, y, k=3)
    assert ours == (float(precision[0]), float(recall[0]))
    assert 0.05 < ours[0] < 0.95 or 0.05 < ours[1] < 0.95


def test_default_tiles_are_adms(adm_evaluator):
    estimator = adm_evaluator.ManifoldEstimator(Session())
    assert estimator.row_batch_size == estimator.col_batch_size == metrics.ADM_TILE


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("images", "dead"), [(900, []), (200, []), (900, [3, 4])], ids=["full", "few", "dead features"]
)
def test_fid_is_adms(adm_evaluator, generator, images, dead):
    x, y = (inception_like(images, scale, generator) for scale in (1.0, 0.8))
    x[:, dead] = y[:, dead] = 0
    theirs = [adm_evaluator.FIDStatistics(np.mean(a, axis=0), np.cov(a, rowvar=False)) for a in (x.numpy(), y.numpy())]
    assert metrics.fid(x, y) == pytest.approx(theirs[0].frechet_distance(theirs[1]), rel=1e-5)
