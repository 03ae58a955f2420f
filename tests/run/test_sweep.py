"""run/sweep.sh: which fine-tunes it makes, what it makes of their scores, and one small sweep."""

import json

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("diffusers")

from PIL import Image  # noqa: E402

from run.sweep import __main__ as sweep  # noqa: E402
from run.sweep import report  # noqa: E402
from run.sweep.flags import parse  # noqa: E402

SMALL = ["--steps", "2", "--samples", "100", "--cells", "euler-2"]


def jobs_of(argv, tmp_path):
    args = parse([*argv, "--out", str(tmp_path)])
    classifier = tmp_path / "classifier.pt"
    classifier.touch()
    return args, args.arms, [sweep.score_job(args, arm, {"classifier": classifier}) for arm in args.arms]


def test_the_fine_tunes_are_those_of_the_datas_quickstart(tmp_path):
    args, arms, jobs = jobs_of(["--data", "mnist", "--set", "k=0.1"], tmp_path)
    assert arms[-1].config.k == 0.1 and args.model.endswith("baseline-mnist")
    assert all("--lr 0.0004 " in str(job.needs[0].command()) for job in jobs)


def test_on_data_of_ones_own_the_fine_tunes_have_the_trainers_defaults(tmp_path):
    *_, jobs = jobs_of(["--data", str(tmp_path), "--set", "k=0.4", "--set", "rho=20", "--steps", "9"], tmp_path)
    control, ogdm = (str(job.needs[0].command()) for job in jobs)
    assert "--lr" not in control and "--ema" not in control
    assert ogdm.partition(" --output")[0] == control.partition(" --output")[0] + " --ogdm"


def test_a_value_that_its_own_flag_gives_is_not_swept(tmp_path):
    args, arms, _ = jobs_of(["--ogdm_k", "0.15", "--set", "rho=1,2"], tmp_path)
    assert args.grid == {"k": ["0.15"], "rho": ["1", "2"]}
    assert [arm.config.k for arm in arms[1:]] == [0.15, 0.15]


def test_the_grid_is_every_combination_and_a_control_per_seed(tmp_path):
    args, arms, jobs = jobs_of(["--set", "k=0.1,0.2", "--set", "r1=0,1", "--set", "rho=7",
                                "--seeds", "0,1", "--ogdm-d-kind", "light"], tmp_path)  # fmt: skip
    assert list(args.grid) == ["k", "rho", "r1"] and len(arms) == 2 + 2 * 2 * 2
    assert [arm.config for arm in arms[:2]] == [None, None]
    assert {(a.config.k, a.config.rho, a.config.r1, a.seed) for a in arms[2:]} == {
        (k, 7.0, r1, seed) for k in (0.1, 0.2) for r1 in (0.0, 1.0) for seed in (0, 1)
    }
    assert len({job.folder for job in jobs}) == len(jobs)
    assert "--ogdm" not in str(jobs[0].needs[0].command())
    assert "--ogdm-k 0.1 " in str(jobs[2].needs[0].command())


def test_a_changed_setting_makes_new_folders_for_what_it_changes_only(tmp_path):
    def folders(*argv):
        _, _, jobs = jobs_of(["--set", "k=0.1,0.2", "--set", "rho=7", *argv], tmp_path)
        return [(job.needs[0].folder, job.folder) for job in jobs]

    plain = folders()
    assert folders("--jobs", "2") == plain  # how it is run is not in the key
    more = folders("--set", "k=0.1,0.2,0.3")
    assert more[:3] == plain and len(more) == 4
    other = folders("--ogdm-r1", "0.5")
    assert other[0] == plain[0] and not set(other[1:]) & set(plain)  # the control stays
    scored = folders("--cells", "euler-5")
    assert [train for train, _ in scored] == [train for train, _ in plain]
    assert not {score for _, score in scored} & {score for _, score in plain}


def test_the_report_compares_each_seed_with_its_own_control(tmp_path):
    args, arms, jobs = jobs_of(["--set", "k=0.1,0.2", "--set", "rho=1,2", "--seeds",
                                "0,1"], tmp_path)  # fmt: skip
    for i, (arm, job) in enumerate(zip(arms, jobs, strict=True)):
        if i == len(jobs) - 1:
            continue  # seed 1 of the last combination is not done
        job.folder.mkdir(parents=True)
        fid = 2.0 + arm.seed if arm.config is None else (1.0 + arm.seed) * arm.config.k * 10
        rows = [{"sampler": "euler", "nfe": 5, "fid": fid, "recall": 0.5}]
        job.output.write_text(json.dumps({"rows": rows}))
        job.marker.write_text(json.dumps({"output": str(job.output)}))
    results = report.collect(args, zip(arms, jobs, strict=True), "run/sweep.sh x")
    first, *_, last = results["rows"]
    assert (first["control"], first["fid"], first["seeds"]) == (2.5, 1.5, 2)
    assert first["change"] == pytest.approx(-40)
    assert (last["control"], last["fid"], last["seeds"]) == (2.0, 2.0, 1)
    files = report.write(results, tmp_path)
    assert [file.name for file in files] == ["sweep.json", "sweep.md", "sweep.png"]
    assert "| 0.1 | 1 | 1.50 (-40 %) |" in files[1].read_text()
    results["rows"].remove(first)
    assert "| 0.1 | 1 | – |" in report.to_markdown(results)
    assert report.plot(results, files[2]).stat().st_size > 5_000


@pytest.mark.slow
def test_a_small_sweep_runs_and_a_second_time_does_nothing(tmp_path, capfd):
    pytest.importorskip("snakemake", reason="pip install -e '.[tables]' brings snakemake")
    argv = [*SMALL, "--set", "k=0.2", "--set", "rho=2", "--out", str(tmp_path)]
    assert sweep.main(argv) == 0
    printed = capfd.readouterr()
    assert "4 jobs, 4 to do" in printed.err and "| 0.2 | 2 |" in printed.out
    assert (tmp_path / "sweep.png").is_file()
    assert sweep.main(argv) == 0
    assert "4 jobs, 0 to do" in capfd.readouterr().err


@pytest.mark.slow
def test_a_feature_net_scores_images_without_labels(tmp_path, capfd):
    pytest.importorskip("snakemake", reason="pip install -e '.[tables]' brings snakemake")
    pictures, out = tmp_path / "pictures", tmp_path / "out"
    pictures.mkdir()
    for i in range(80):
        Image.effect_noise((8, 8), 20 + i).save(pictures / f"{i}.png")
    argv = [*SMALL, "--data", str(pictures), "--set", "k=0.2", "--set", "rho=2", "--out", str(out)]
    with pytest.raises(SystemExit):
        sweep.main(argv)
    assert "no labels" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        sweep.main([*argv, "--features", "nowhere:net"])
    assert "there is no module nowhere" in capfd.readouterr().err
    assert sweep.main([*argv, "--features", "pixels"]) == 0
    (row,) = json.loads((out / "sweep.json").read_text())["rows"]
    assert row["fid"] > 0 and not list(out.glob("classifier*"))
