"""Consistency distillation: f's boundary, one that learns, the students' files, wrong input."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers", reason="the diffusers extra is not installed")

from ogdm_core.images import digits  # noqa: E402
from ogdm_core.samplers import sample  # noqa: E402
from ogdm_core.schedule import DiscreteVP  # noqa: E402
from run.distil.__main__ import main  # noqa: E402
from run.distil.student import FLOOR, consistency, distil, draw  # noqa: E402
from run.evaluate.classifier import save_classifier, train_classifier  # noqa: E402
from run.sampling import Model  # noqa: E402

BASELINE = Path("run/quickstart/baseline-digits").absolute()


def test_f_is_its_input_at_the_data_and_the_networks_estimate_where_a_allows_it():
    schedule, x = DiscreteVP.linear(), torch.randn(3, 1, 4, 4)
    eps = torch.randn_like(x)
    f = consistency(lambda x, t: eps, schedule)
    assert torch.equal(f(x, torch.zeros(3, dtype=torch.long)), x)
    t = torch.tensor([1, 100, 300])
    a, b = (v.float().view(3, 1, 1, 1) for v in (schedule.a(t), schedule.b(t)))
    assert a.min() > FLOOR
    torch.testing.assert_close(f(x, t), (x - b * eps) / a, rtol=1e-4, atol=1e-4)
    at_T = f(x, torch.full((3,), schedule.T))
    assert (at_T - f(x, torch.full((3,), schedule.T - 1))).abs().max() < 0.1
    assert at_T.abs().max() < 2 / FLOOR * max(x.abs().max(), eps.abs().max())


def disagreement(student, teacher, times):
    """Mean squared distance of f's answers at neighbouring times of the teacher's path."""
    schedule = teacher.schedule
    noise = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    path = sample(teacher.eps_fn(None), noise, schedule, nfe=len(times) - 1,
                  discretisation="trailing", trajectory=True)  # fmt: skip
    f = consistency(student.eps_fn(None), schedule)
    with torch.no_grad():
        answers = [f(x, torch.full((64,), t)) for x, t in zip(path, times, strict=True)]
    return float(torch.stack(answers).diff(dim=0).square().mean())


def test_a_student_agrees_with_itself_along_the_teachers_path():
    teacher, times = Model(str(BASELINE), "cpu"), [1000, 750, 500, 250, 0]
    before = [p.clone() for p in teacher.unet.parameters()]
    first = disagreement(teacher, teacher, times)
    student = distil(teacher, digits(), steps=25, grid=4)
    assert disagreement(student, teacher, times) < 0.95 * first
    for p, q in zip(teacher.unet.parameters(), before, strict=True):
        assert torch.equal(p, q), "the teacher has changed"
    one, two = (distil(teacher, digits(), steps=2, grid=4).unet.parameters() for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(one, two, strict=True))


def test_every_fine_tune_gets_a_student_and_two_rows(tmp_path, capsys):
    quickstart, out = tmp_path / "q", tmp_path / "out"
    save_classifier(quickstart / "classifier-digits-0.pt", *train_classifier(digits(), epochs=1))
    (quickstart / "runs").mkdir()
    for name in ("control-seed0-ab", "ogdm-seed0-cd"):
        (quickstart / "runs" / name).symlink_to(BASELINE)
    words = [str(quickstart), "--output", str(out), "--steps", "1", "--samples", "100"]
    assert main(words) == 0
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [(r["method"], r["nfe"]) for r in rows] == [(m, n) for m in ("control", "ogdm") for n in (1, 2)]
    assert "| consistency 2 | ogdm | 2 |" in capsys.readouterr().out
    assert (out / "distil.png").stat().st_size > 1000
    x = draw(Model(str(out / "ogdm-seed0-cd")), torch.randn(5, 1, 8, 8), 18, 2)
    assert x.shape == (5, 1, 8, 8) and x.abs().max() <= 1


@pytest.mark.parametrize(("words", "said"), [
    (["nowhere"], "nowhere holds no fine-tunes on digits; run/quickstart.sh --data digits"),
    (["nowhere", "--grid", "1"], "--grid"),
    (["nowhere", "--steps", "0"], "--steps"),
    (["nowhere", "--data", "cats"], "--data"),
])  # fmt: skip
def test_wrong_input_ends_in_one_line(tmp_path, capsys, words, said):
    with pytest.raises(SystemExit):
        main([*words, "--output", f"{tmp_path}/a"])
    assert said in capsys.readouterr().err
