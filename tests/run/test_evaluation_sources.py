"""What can be read: the one reader of images, for trainer and evaluator, and saved statistics."""

import numpy as np
import pytest
import torch

from ogdm_core.images import load
from run.evaluate.sources import open_source

Image = pytest.importorskip("PIL.Image")


def pixels(n=5, height=4, width=6, channels=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, height, width, channels), dtype=np.uint8)


def everything(source, index=None):
    """Images as [N, H, W, C]."""
    index = torch.arange(source.count) if index is None else torch.tensor(index)
    return source.images.pixels(index).permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", [np.ascontiguousarray, np.asfortranarray])
def test_an_npz_is_mapped(tmp_path, save, order):
    images = pixels()
    save(tmp_path / "a.npz", order(images), np.arange(5))  # labels, as ADM's sampler adds them
    source = open_source(tmp_path / "a.npz")
    assert (source.count, source.images.shape, source.statistics) == (5, (3, 4, 6), None)
    assert isinstance(source.images.array, np.memmap)
    np.testing.assert_array_equal(everything(source), images)
    np.testing.assert_array_equal(everything(source, [3, 1]), images[[3, 1]])
    assert source.images.labels.tolist() == [0, 1, 2, 3, 4]


def test_grey_images_may_lack_their_channel(tmp_path):
    grey = pixels(channels=1)
    np.savez(tmp_path / "nhwc.npz", arr_0=grey)
    np.savez(tmp_path / "nhw.npz", arr_0=grey[..., 0])
    for name in ("nhwc", "nhw"):
        np.testing.assert_array_equal(everything(open_source(tmp_path / f"{name}.npz")), grey)


def test_a_folder_is_read_by_name_with_what_is_below(tmp_path):
    images = pixels()
    names = ["a/1.png", "a/2.png", "b.png", "c.PNG", "z/0.png"]
    for name, image in zip(names, images, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(tmp_path / name)
    (tmp_path / "dataset.json").write_text("{}")
    source = open_source(tmp_path)
    assert (source.count, source.images.shape) == (5, (3, 4, 6))
    np.testing.assert_array_equal(everything(source), images)
    np.testing.assert_array_equal(everything(source, [2, 3]), images[2:4])
    square = load(str(tmp_path), size=2)  # the trainer's: cropped and scaled
    assert square.shape == (3, 2, 2) and square.classes == 3


def test_the_evaluator_knows_the_built_in_sets():
    assert open_source("digits").images.shape == (1, 8, 8)


def test_digests_follow_the_content(tmp_path):
    images = pixels()
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", arr_0=images)
        (tmp_path / name).mkdir()
        Image.fromarray(images[0]).save(tmp_path / name / "0.png")
    a, b, folder_a, folder_b = (open_source(tmp_path / n).digest() for n in ("a.npz", "b.npz", "a", "b"))
    assert a == b and folder_a == folder_b
    images[0, 2, 1, 0] ^= 1
    np.savez(tmp_path / "b.npz", arr_0=images)
    Image.fromarray(images[0]).save(tmp_path / "b" / "0.png")
    assert open_source(tmp_path / "b.npz").digest() != a
    assert open_source(tmp_path / "b").digest() != folder_a


def test_statistics_come_with_or_without_images(tmp_path):
    more = {"mu": np.zeros(3), "sigma": np.eye(3), "mu_s": np.ones(2)}
    np.savez(tmp_path / "alone.npz", **more)
    alone = open_source(tmp_path / "alone.npz")
    assert (alone.count, alone.images) == (0, None)
    np.savez(tmp_path / "batch.npz", arr_0=pixels(), **more)
    batch = open_source(tmp_path / "batch.npz")
    assert batch.count == 5 and batch.statistics.sigma.shape == (3, 3)


def test_errors_say_what_to_do(tmp_path):
    """Damaged and wrong arrays: tests/faults/test_run_data.py."""
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "empty").mkdir()
    for name, says in (("none.npz", "does not exist"), ("a.txt", "give an .npz"), ("empty", "no image files")):
        with pytest.raises((ValueError, FileNotFoundError), match=says):
            open_source(tmp_path / name)
    np.savez(tmp_path / "wide.npz", arr_0=pixels())
    with pytest.raises(ValueError, match="must be square"):
        load(str(tmp_path / "wide.npz"))


def test_images_of_other_sizes_are_named(tmp_path):
    Image.fromarray(pixels()[0]).save(tmp_path / "0.png")
    Image.fromarray(pixels(height=5)[0]).save(tmp_path / "1.png")
    with pytest.raises(ValueError, match="1.png is 6x5.*0.png is 6x4"):
        everything(open_source(tmp_path))
