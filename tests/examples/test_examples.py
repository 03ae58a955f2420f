"""Every example: what it imports, a run of a few steps, its --help. And what distillation promises."""

import ast
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ogdm_core import DiscreteVP, sample
from ogdm_core.images import digits

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BASELINE = ROOT / "run" / "quickstart" / "baseline-digits"


def example(name):
    """The example as a module; skips the test if it needs a package that is not installed."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if error.name not in ("accelerate", "diffusers", "peft", "sklearn"):
            raise
        pytest.skip(f"{error.name} is not installed")
    return module


@pytest.mark.slow
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_import_the_core_and_nothing_else_of_ours(file):
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    allowed = {
        "ogdm_core",
        "torch",
        "numpy",
        "PIL",
        "tqdm",
        "diffusers",
        "accelerate",
        "peft",
        *sys.stdlib_module_names,
    }
    assert {name.partition(".")[0] for name in names} <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_explain_themselves(file, capsys):
    with pytest.raises(SystemExit, match="0"):
        example(file.stem).main(["--help"])
    assert "(default: " in capsys.readouterr().out


@pytest.mark.slow
def test_a_plain_loop(tmp_path, capsys):
    torch.save(torch.rand(9, 3, 8, 8) * 2 - 1, tmp_path / "images.pt")
    for flags, mode in (([], "L"), (["--data", str(tmp_path / "images.pt")], "RGB")):
        example("loop").main([*flags, "--steps", "2", "--batch", "4", "--output", str(tmp_path / "a" / "out.png")])
        with Image.open(tmp_path / "a" / "out.png") as picture:
            assert picture.size == (600, 240) and picture.mode == mode
    assert "10 network evaluations" in capsys.readouterr().out


@pytest.mark.slow
def test_the_plain_loop_learns_and_updates_d(monkeypatch, tmp_path, capsys):
    loop = example("loop")
    observers, build = [], loop.Observer
    monkeypatch.setattr(loop, "Observer", lambda *a, **k: observers.append(build(*a, **k)) or observers[-1])
    loop.main(["--steps", "200", "--batch", "16", "--output", str(tmp_path / "out.png")])
    first, last = (float(line.split()[3].rstrip(",")) for line in capsys.readouterr().out.splitlines()[:2])
    assert last < 0.5 and first < 1  # the variance of the noise, which a network that knows nothing is left with
    assert observers[0].steps == 200


@pytest.mark.slow
def test_flow_matching(tmp_path, capsys):
    example("flow_matching").main(["--steps", "2", "--batch", "4", "--output", str(tmp_path / "out.png")])
    with Image.open(tmp_path / "out.png") as picture:
        assert picture.size == (600, 240) and len(picture.getcolors()) > 20


@pytest.mark.slow
def test_flow_matchings_eps_is_the_noise_behind_x_t():
    module = example("flow_matching")
    schedule, t = module.RectifiedFlow(), torch.tensor([0.01, 0.5, 0.99])
    x_0, eps = torch.randn(2, 3, 1, 8, 8)
    found = module.to_eps(eps - x_0, schedule.diffuse(x_0, eps, t), t, schedule)
    torch.testing.assert_close(found, eps)


@pytest.mark.slow
def test_diffusers_unconditional_example(tmp_path):
    np.savez(tmp_path / "images.npz", arr_0=np.random.default_rng(0).integers(0, 256, (8, 8, 8, 1), dtype=np.uint8))
    flags = ["--data", str(tmp_path / "images.npz"), "--output", str(tmp_path / "out"), "--epochs", "2"]
    module = example("diffusers_unconditional")
    module.main([*flags, "--batch-size", "4"])
    assert module.DDIMPipeline.from_pretrained(tmp_path / "out").unet.config.sample_size == 8
    with Image.open(tmp_path / "out" / "samples.png") as picture:
        assert picture.size == (320, 128)


# ---------------------------------------------------------------- distillation


@pytest.mark.slow
def test_f_is_its_input_at_the_data_and_the_networks_estimate_where_a_allows_it():
    distil = example("distil")
    schedule, x = DiscreteVP.linear(), torch.randn(3, 1, 4, 4)
    eps = torch.randn_like(x)

    def f(t):
        return distil.consistency(lambda x, t: eps, schedule, x, torch.as_tensor(t).expand(3))

    assert torch.equal(f(0), x)
    t = torch.tensor([1, 100, 300])
    a, b = (v.float().view(3, 1, 1, 1) for v in (schedule.a(t), schedule.b(t)))
    assert a.min() > distil.FLOOR
    torch.testing.assert_close(f(t), (x - b * eps) / a, rtol=1e-4, atol=1e-4)
    assert (f(schedule.T) - f(schedule.T - 1)).abs().max() < 0.1
    assert f(schedule.T).abs().max() < 2 / distil.FLOOR * max(x.abs().max(), eps.abs().max())


def disagreement(student, teacher, times):
    """Mean squared distance of f's answers at neighbouring times of the teacher's path."""
    noise = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        path = sample(
            lambda x, t: teacher.eps(x, t, None), noise, teacher.schedule, nfe=len(times) - 1,
            discretisation="trailing", trajectory=True,
        )  # fmt: skip
        answers = [student.f(x, torch.full((64,), t)) for x, t in zip(path, times, strict=True)]
    return float(torch.stack(answers).diff(dim=0).square().mean())


@pytest.mark.slow
def test_a_student_agrees_with_itself_along_the_teachers_path():
    distil = example("distil")
    teacher, times = distil.Model(str(BASELINE)), [1000, 750, 500, 250, 0]
    before = [p.clone() for p in teacher.unet.parameters()]
    first = disagreement(teacher, teacher, times)
    student = distil.distil(teacher, digits(), steps=25, grid=4)
    assert disagreement(student, teacher, times) < 0.95 * first
    for p, q in zip(teacher.unet.parameters(), before, strict=True):
        assert torch.equal(p, q), "the teacher has changed"


@pytest.mark.slow
def test_a_student_and_its_samples_are_written_and_repeatable(tmp_path):
    distil, found = example("distil"), []
    for out in (tmp_path / "a", tmp_path / "b"):
        distil.main([str(BASELINE), "--output", str(out), "--steps", "1", "--samples", "20"])
        found.append([np.load(out / f"samples-{steps}.npz")["arr_0"] for steps in (1, 2)])
        assert distil.Model(str(out)).schedule.T == 1000
    assert all(x.shape == (20, 8, 8, 1) and x.dtype == np.uint8 for x in found[0])
    assert all(np.array_equal(x, y) for x, y in zip(*found, strict=True)) and (found[0][0] != found[0][1]).any()


@pytest.mark.slow
def test_a_teacher_that_is_not_there_is_named(tmp_path, refused):
    with refused("no folder .*nowhere"):
        example("distil").main([f"{tmp_path}/nowhere/a/b"])
