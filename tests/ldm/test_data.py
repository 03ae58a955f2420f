"""LSUN-Church from LSUN's archives to upstream's layout."""

import hashlib
import io
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from run.data import lsun

lmdb = pytest.importorskip("lmdb")


@pytest.fixture
def archive(tmp_path) -> Path:
    """Twelve webp images as LSUN packs them: an LMDB, keyed by hash, in a zip."""
    folder = tmp_path / "church_outdoor_train_lmdb"
    with lmdb.open(str(folder), map_size=1 << 24) as env, env.begin(write=True) as transaction:
        for i in range(12):
            image = io.BytesIO()
            Image.new("RGB", (40, 30), (20 * i, 0, 255 - 20 * i)).save(image, "WEBP")
            key = hashlib.sha1(image.getvalue()).hexdigest().encode()
            transaction.put(key, image.getvalue())
    with zipfile.ZipFile(tmp_path / "church.zip", "w") as z:
        z.write(folder / "data.mdb", "church_outdoor_train_lmdb/data.mdb")
    return tmp_path / "church.zip"


def lines(out: Path, split: str) -> list[str]:
    return (out / f"church_outdoor_{split}.txt").read_text().splitlines()


def test_images_leave_the_archive_byte_for_byte(archive, tmp_path):
    out = tmp_path / "out"
    assert lsun.prepare(archive, out, expect=12) == (12, 12)
    for line in lines(out, "train"):
        path = out / "churches" / line
        assert hashlib.sha1(path.read_bytes()).hexdigest() == path.stem
    assert sorted(p.name for p in out.iterdir()) == ["church_outdoor_train.txt", "church_outdoor_val.txt", "churches"]


def test_a_second_run_continues(archive, tmp_path):
    out = tmp_path / "out"
    lsun.prepare(archive, out, expect=12)
    first, second, *_ = sorted((out / "churches").rglob("*.webp"))
    whole, kept = first.read_bytes(), second.stat().st_mtime_ns
    first.write_bytes(whole[:10])
    lsun.prepare(archive, out, expect=12)
    assert first.read_bytes() == whole and second.stat().st_mtime_ns == kept


def test_a_wrong_count_is_refused_before_lists_are_written(archive, tmp_path):
    with pytest.raises(ValueError, match=r"12 images, not 126,227.*--count"):
        lsun.prepare(archive, tmp_path / "out")
    assert not (tmp_path / "out" / "church_outdoor_train.txt").exists()


@pytest.mark.parametrize("key", [b"../../escaped", b"/escaped", b"a/b", b"..", b"a.b", b"\xff"])
def test_a_key_that_is_no_plain_name_writes_nothing(tmp_path, key):
    with lmdb.open(str(tmp_path / "db"), map_size=1 << 20) as env, env.begin(write=True) as t:
        t.put(key, b"RIFF")
    with pytest.raises(ValueError, match="not a plain name; the archive is damaged"):
        lsun.prepare(tmp_path / "db", tmp_path / "a" / "b" / "out", expect=None)
    assert not [p for p in tmp_path.rglob("*") if p.suffix == ".webp"]


def test_a_folder_of_images_is_used_where_it_is(archive, tmp_path):
    lsun.prepare(archive, tmp_path / "out", expect=12)
    images = tmp_path / "out" / "churches" / "train"
    out = tmp_path / "again"
    assert lsun.prepare(images, out, val=archive, expect=None) == (12, 12)
    assert (out / "churches" / "train").is_symlink()
    for split in ("train", "val"):
        assert all(line.startswith(f"{split}/") for line in lines(out, split))
        assert all((out / "churches" / line).is_file() for line in lines(out, split))


@pytest.mark.parametrize("content", [None, b"no zip", b""])
def test_bad_sources_say_what_to_do(tmp_path, content):
    source = tmp_path / "source.zip"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(ValueError, match="fyu/lsun|download it again"):
        lsun.prepare(source, tmp_path / "out")


def test_upstreams_folder_is_linked_and_never_overwritten(tmp_path):
    upstream, out = tmp_path / "upstream", tmp_path / "out"
    out.mkdir()
    assert not lsun.link(out, upstream)
    (upstream / "data").mkdir(parents=True)
    assert lsun.link(out, upstream) and lsun.link(out, upstream)
    assert (upstream / "data" / "lsun").resolve() == out.resolve()
    assert not lsun.link(tmp_path / "other", upstream)
