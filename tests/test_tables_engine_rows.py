"""From the paper's rows to native commands, the list of problems, and the files of a table."""

import csv
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from run.tables import __main__ as cli
from run.tables import check, measure, paper, plan, reference, render, smoke
from run.tables.engine import Engine, Outcome
from run.tables.experiments import Builder, Options, select_rows
from run.tables.recipes import override
from run.tables.results import collect
from run.tables.sources import missing
from run.train.presets import PRESETS

ROOT = Path(__file__).resolve().parents[1]
LAUNCHERS = {"adm": "mpiexec -n", "edm": "torchrun --standalone", "ldm": "main.py --base"}


@pytest.fixture
def options(tmp_path) -> Options:
    return Options(1, out=tmp_path / "out", data=tmp_path / "data", third_party=tmp_path / "tp")


def experiments(options: Options) -> list:
    builder = Builder(options)
    names, problems = select_rows(builder.table, options.rows)
    assert problems == []
    return [builder.experiment(name) for name in names]


def commands(experiment, kind: str) -> list[str]:
    return [str(c) for s in experiment.stages if s.kind == kind for c in s.build(s.folder)]


def keys(options: Options) -> dict[str, str]:
    return {s.name: s.key for e in experiments(options) for s in e.stages}


# ---- rows to commands ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", cli.REPRODUCED)
@pytest.mark.parametrize("smoke", [False, True], ids=["paper", "smoke"])
def test_every_row_of_every_table_has_native_commands(options, number, smoke):
    for e in experiments(replace(options, number=number, smoke=smoke)):
        train, *_ = commands(e, "train")[::-1]
        assert LAUNCHERS[e.preset.backbone] in train
        samples = commands(e, "sample")
        reported = [nfe for nfe, row in e.cells.items() if row.fid is not None]
        assert list(e.samples) == reported and len(samples) == len(reported)
        for nfe, line in zip(reported, samples, strict=True):
            assert re.search(rf"--nfe[ =]{nfe}\b", line)
            assert re.search(rf"--sampler[ =]{e.sampler}\b", line)
        assert len(commands(e, "evaluate")) == len(reported)


def test_training_follows_table_5_and_sampling_table_6(options):
    by_name = {e.name: e for e in experiments(options)}
    line = commands(by_name["cifar10-adm-ogdm"], "train")[-1]
    assert "--ogdm_k 0.1 --ogdm_gamma 0.01" in line and "--lr_anneal_steps 300000" in line
    assert "--discretization quadratic" in commands(by_name["cifar10-adm-ogdm"], "sample")[0]
    line = commands(by_name["cifar10-edm-cond-ogdm-ft"], "train")[-1]
    for word in ("--cond=1", "--duration=20", "--ogdm-k=0.2", "--ogdm-gamma=0.025"):
        assert word in line
    assert "--seeds=0-49999" in commands(by_name["cifar10-edm-baseline"], "sample")[0]
    assert " -n 50000 " in commands(by_name["lsun-church-ldm-baseline"], "sample")[0]


def test_a_fine_tune_starts_from_its_own_baseline(options):
    for e in experiments(options):
        if e.preset.training != "finetune":
            continue
        base = next(
            s for s in e.stages if s.name == f"{e.preset.name.split('-ogdm')[0]}-baseline/train"
        )
        assert base in e.train.needs
        assert str(base.output) in commands(e, "train")[-1]


def test_rows_share_trainings_and_data(options):
    three = experiments(replace(options, number=3))
    baselines = {s.key for e in three for s in e.stages if s.name == "cifar10-adm-baseline/train"}
    assert len(baselines) == 1
    one = {e.name: e for e in experiments(options)}
    assert one["cifar10-adm-baseline"].train.key in baselines  # and so do tables in one folder


def test_more_gpus_and_other_folders_change_no_key(options, tmp_path):
    other = replace(options, gpus=4, out=tmp_path / "b", data=tmp_path / "c", third_party=tmp_path)
    assert keys(options) == keys(other)


def test_settings_change_the_keys_that_rest_on_them(options):
    before = keys(options)

    def changed(**more) -> set[str]:
        after = keys(replace(options, **more))
        return {name.split("/")[-1] for name in before if before[name] != after[name]}

    assert changed(images=1000) == {"sample", "evaluate"}
    assert changed(features="x:y") == {"evaluate"}
    assert changed(seed=1) >= {"train", "sample", "evaluate"}
    assert "data" not in changed(seed=1)


def test_a_changed_preset_retrains_that_row_only(options, monkeypatch):
    before = keys(options)
    name = "cifar10-edm-ogdm-ft"
    other = replace(PRESETS[name], k=0.15)
    monkeypatch.setitem(PRESETS, name, other)
    after = keys(options)
    assert {stage.split("/")[0] for stage in before if before[stage] != after[stage]} == {name}


def test_keys_hold_what_rows_set_and_no_defaults(options):
    (e,) = experiments(replace(options, rows=("cifar10-edm-ogdm-ft",)))
    ours = {word for word in e.train.settings if word.startswith("--ogdm")}
    assert ours == {"--ogdm", "--ogdm-projection=euler", "--ogdm-k=0.2", "--ogdm-gamma=0.025"}
    assert "--ogdm-d-lr=0.001" in commands(e, "train")[-1]
    (e,) = experiments(replace(options, rows=("cifar10-edm-ogdm-ft",), smoke=True))
    assert "--ogdm-d-width=0.02" in e.train.settings


def test_commands_find_the_users_own_modules(options, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "nets")
    (e,) = experiments(replace(options, rows=("cifar10-adm-baseline",), nfes=(10,)))
    for kind, first in (("train", options.third_party / "guided-diffusion"), ("evaluate", ROOT)):
        (stage,) = [s for s in e.stages if s.kind == kind]
        paths = dict(stage.build(stage.folder)[0].env)["PYTHONPATH"].split(":")
        assert paths[0] == str(first) and paths[-1] == str(tmp_path / "nets")


def test_data_made_elsewhere_is_not_taken_for_ready(options, tmp_path):
    def data(folder: Path):
        rows = experiments(replace(options, data=folder, rows=("cifar10-adm-baseline",)))
        return next(s for s in rows[0].stages if s.kind == "data")

    a, b = data(tmp_path / "a"), data(tmp_path / "b")
    a.output.mkdir(parents=True)
    b.output.mkdir(parents=True)
    a.folder.mkdir(parents=True)
    a.finish([], "now", 1.0)
    assert a.record() and a.key == b.key and b.record() is None


def test_a_checkpoint_takes_the_place_of_training(options, tmp_path):
    weights = tmp_path / "base.pt"
    weights.write_text("x")
    given = replace(options, rows=("cifar10-adm-*",),
                    checkpoints=(("cifar10-adm-baseline", str(weights)),))  # fmt: skip
    base, scratch, tuned = experiments(given)
    assert base.train is None and commands(base, "train") == []
    assert all(str(weights) in line for line in commands(base, "sample"))
    assert f"--init_checkpoint {weights}" in commands(tuned, "train")[-1]
    assert len(commands(tuned, "train")) == len(commands(scratch, "train")) == 1
    key = base.samples[10].key
    weights.write_text("y")
    assert experiments(given)[0].samples[10].key != key


def test_a_stopped_training_is_resumed_by_the_backbones_own_means(options):
    by_name = {e.name: e for e in experiments(replace(options, smoke=True))}

    def touch(e, *names: str) -> str:
        for name in names:
            path = e.train.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(path, "w") as archive:  # torch's files are zips
                archive.writestr("x", "x")
        return str(e.train.build(e.train.folder)[0])

    e = by_name["cifar10-adm-ogdm"]
    line = touch(e, "model000100.pt", "opt000100.pt")
    assert line.endswith(f"--resume_checkpoint {e.train.folder}/model000100.pt")
    (e.train.folder / "opt000200.pt").write_text("cut off")
    assert "model000100.pt" in str(e.train.build(e.train.folder)[0])
    e = by_name["cifar10-edm-ogdm-ft"]
    line = touch(e, "training-state-000500.pt")
    assert f"--resume={e.train.folder}/training-state-000500.pt" in line
    assert "--transfer" not in line and "--ogdm " in line
    e = by_name["lsun-church-ldm-ogdm-ft"]
    last = "runs/2024-01-01_x/checkpoints/last.ckpt"
    line = touch(e, last)
    assert f"main.py -r {e.train.folder}/{last} -t True --gpus 0, --scale_lr False" in line
    assert "--base" not in line
    more = experiments(replace(options, smoke=True, gpus=2, seed=0, rows=(e.name,)))[0]
    words = more.train.build(e.train.folder)[0].argv
    assert words[words.index("--gpus") + 1] == "0,1,"
    assert "data.params.batch_size=4" in words and words[-2:] == ("-s", "0")


def test_override_puts_values_in_place_or_at_the_end():
    assert override(["x.py", "--a", "1", "--b", "2"], "--a", "3", "--c", "4") == [
        "x.py", "--a", "3", "--b", "2", "--c", "4"
    ]  # fmt: skip


def test_nfes_that_a_sampler_cannot_hit_are_left_out_and_said(options):
    by_name = {e.name: e for e in experiments(replace(options, number=3, nfes=(10, 25)))}
    assert by_name["cifar10-adm-baseline-f-pndm"].others == [10]
    assert list(by_name["cifar10-adm-baseline-s-pndm"].samples) == [10, 25]


# ---- wrong input --------------------------------------------------------------------------------


def test_rows_are_chosen_by_name_or_glob_in_the_tables_order():
    table = paper.table(1)
    names, problems = select_rows(table, ("cifar10-edm-*", "cifar10-adm-ogdm"))
    assert names[0] == "cifar10-adm-ogdm" and len(names) == 5 and problems == []
    names, problems = select_rows(table, ("cifar10-adm-ogdm-f",))
    assert names == [] and "cifar10-adm-ogdm-ft" in problems[0]
    assert select_rows(table, ())[0] == list(table.names)


def test_all_that_is_wrong_is_said_at_once(options, tmp_path):
    found = "\n".join(check.problems(replace(
        options, rows=("cifar10-adm-basline", "lsun*"), gpus=5, images=3, jobs=-1,
        weights="nowhere.pth",
        checkpoints=(("cifar10-adm-ogdm", "absent.pt"), ("no-row", "x"),
                     ("celeba64-adm-ogdm", "https://host/x.pt")),
    )))  # fmt: skip
    for words in (
        "no row 'cifar10-adm-basline'; near are cifar10-adm-baseline",
        "--images: 3; FID and recall need 4",
        "--gpus: 5 does not divide",
        "--jobs: -1",
        "--weights nowhere.pth: no such file",
        "no file absent.pt",
        "no-row is no row of Table 1",
        "only EDM's scripts read URLs",
        "run/setup.sh latent-diffusion fetches it",
        "church_outdoor_train_lmdb.zip",
        "download_first_stages.sh",
    ):
        assert words in found, words


def test_unpatched_upstreams_full_disks_and_odd_nfes_are_said(options, monkeypatch):
    script = options.third_party / "edm" / "train.py"
    script.parent.mkdir(parents=True)
    script.write_text("import torch\n")
    usage = type("Usage", (), {"free": 5e9})
    monkeypatch.setattr(check.shutil, "disk_usage", lambda place: usage)
    options = replace(options, number=2, nfes=(12,), features="run.tables.smoke:features")
    found = "\n".join(check.problems(options))
    assert "is not patched; run/setup.sh edm" in found
    assert re.search(r"\d+ GB are needed, 5 GB are free", found)
    assert "--nfes: heun cannot spend exactly 12" in found
    assert "--weights" not in found


def test_what_the_evaluator_would_refuse_is_said_first(options, monkeypatch, tmp_path):
    def found(**more) -> str:
        return "\n".join(check.problems(replace(options, rows=("cifar10-edm-baseline",), **more)))

    assert "download Inception's weights" in found()
    assert "there is no module nosuch.nets" in found(features="nosuch.nets:x")
    assert "give MODULE:NAME" in found(features="run.tables.smoke")
    assert "--features" not in found(features="run.tables.smoke:features")
    assert "features" not in found(smoke=True)
    monkeypatch.setattr(check.adm, "EVALUATOR", tmp_path / "evaluator.py")
    assert "run/setup.sh guided-diffusion" in found(evaluator="adm")
    (tmp_path / "evaluator.py").touch()
    assert "--evaluator adm" not in found(evaluator="adm")
    assert "knows Inception only, not --features" in found(evaluator="adm", features="a:b")
    assert "knows Inception only, not --scale smoke" in found(evaluator="adm", smoke=True)
    assert "reads classify_image_graph_def.pb" in found(evaluator="adm", weights="no.pb")


def test_disk_is_counted_by_the_cell_and_spared_by_prepared_sets(options, monkeypatch):
    table, options = paper.table(3), replace(options, number=3)
    presets = check.needed(options, list(table.names))
    cells = [row for row in table.rows if row.fid is not None]
    sizes = [50_000 * 3 * check.SOURCES[row.dataset].size ** 2 / 1e9 for row in cells]
    disk = check.disk_gb(options, presets, list(table.names))
    assert disk["samples"] == pytest.approx(sum(sizes) + max(sizes))

    def needed() -> float:
        usage = type("Usage", (), {"free": 0.0})
        monkeypatch.setattr(check.shutil, "disk_usage", lambda place: usage)
        text = "".join(check._disk(options, presets, list(table.names)))
        return float(re.search(r"(\d+) GB are needed", text)[1])

    before = needed()
    for name in ("church_outdoor_train_lmdb.zip", "lsun/data.mdb"):
        file = options.data / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as f:
            f.truncate(9_000_000_000)  # sparse
        assert needed() == before - (9 if "lsun/" in name else 0)


def test_prepared_data_will_do_without_the_archive(options):
    assert "cifar-10-python.tar.gz" in missing("cifar10", "edm", options.data, training=True)
    (options.data / "cifar10").mkdir(parents=True)
    assert missing("cifar10", "adm", options.data, training=True) is None
    assert "cifar10-32x32.zip" in missing("cifar10", "edm", options.data, training=True)
    assert missing("cifar10", "edm", options.data, training=False) is None
    (options.data / "cifar10-32x32.zip").touch()
    assert missing("cifar10", "edm", options.data, training=True) is None
    data = next(s for e in experiments(replace(options, rows=("cifar10-adm-baseline",)))
                for s in e.stages if s.kind == "data")  # fmt: skip
    assert data.build(data.folder) == []


def test_a_checkpoint_of_ldm_needs_its_config(options, tmp_path):
    path = tmp_path / "model.ckpt"
    path.touch()
    given = replace(options, checkpoints=(("lsun-church-ldm-baseline", str(path)),))
    assert any("no config.yaml beside" in problem for problem in check.problems(given))
    (tmp_path / "config.yaml").touch()
    assert not any("no config.yaml beside" in problem for problem in check.problems(given))


def test_a_prepared_lsun_is_linked_where_upstream_looks(options):
    (options.data / "lsun").mkdir(parents=True)
    rows = experiments(replace(options, rows=("lsun-church-ldm-baseline",)))
    data = next(s for s in rows[0].stages if s.name == "lsun-church/data")
    (command,) = data.build(data.folder)
    place = options.third_party / "latent-diffusion" / "data" / "lsun"
    assert command.argv == ("ln", "-sfn", str(options.data / "lsun"), str(place))


def test_a_checkpoint_spares_the_data_that_training_alone_needs(options, tmp_path):
    (tmp_path / "x.pkl").touch()
    (options.data / "cifar10").mkdir(parents=True)
    given = replace(options, rows=("cifar10-edm-baseline",),
                    checkpoints=(("cifar10-edm-baseline", str(tmp_path / "x.pkl")),))  # fmt: skip
    assert not [p for p in check.problems(given) if "cifar10:" in p]
    assert check.needed(given, ["cifar10-edm-baseline"])["train"] == []


@pytest.mark.parametrize("words", [["--nfes", "ten"], ["--nfes", "0"], ["--checkpoint", "row"]])
def test_bad_syntax_is_refused_with_the_flag(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["1", *words])
    assert stop.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_the_command_line_lists_and_refuses(options, capsys):
    assert cli.main(["9", "--list"]) == 0
    assert "celeba64-adm-ogdm  stochastic, NFE 50, 20, 10" in capsys.readouterr().out
    assert cli.main(["1", "--rows", "cifar10-edm-basline", "--out", str(options.out)]) == 2
    told = capsys.readouterr().err
    assert "Nothing was started" in told and "cifar10-edm-baseline" in told
    assert not options.out.exists()


def test_a_dry_run_prints_commands_and_what_stands_in_the_way(options, capsys):
    argv = ["2", "--dry-run", "--out", str(options.out), "--third-party", str(options.third_party)]
    assert cli.main([*argv, "--data", str(options.data), "--gpus", "8"]) == 0
    out, err = capsys.readouterr()
    assert out.count("--nproc_per_node=8 generate.py") == 10
    assert "--ogdm-projection=heun" in out
    assert "Before this can run" in err and "run/setup.sh edm" in err
    assert not options.out.exists()


# ---- images ----


def test_digits_carry_their_labels_in_both_ways(tmp_path):
    smoke.write_digits(tmp_path / "images", count=20)
    labels = dict(json.loads((tmp_path / "images" / "dataset.json").read_text())["labels"])
    files = sorted(p.name for p in (tmp_path / "images").glob("*.png"))
    assert sorted(labels) == files and len(files) == 20
    assert all(int(name.split("_")[0]) == label for name, label in labels.items())
    image = smoke.Digits(str(tmp_path / "images"), count=3)[0]["image"]
    assert image.shape == (32, 32, 3) and image.min() >= -1 and 0 < image.max() <= 1
    images = torch.from_numpy(((image + 1) * 127.5).round().astype("uint8")).permute(2, 0, 1)
    features = smoke.features(torch.stack([images, 255 - images]))
    assert features.shape == (2, 8) and not torch.allclose(features[0], features[1])
    assert torch.equal(features, smoke.features(torch.stack([images, 255 - images])))


def test_reference_images_are_central_squares(tmp_path):
    pixels = np.zeros((20, 41, 3), dtype=np.uint8)
    pixels[:, 10:30] = 200
    (tmp_path / "lsun" / "churches").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "lsun" / "churches" / "a.png")
    (tmp_path / "lsun" / reference.LIST).write_text("a.png\n")
    reference.main([str(tmp_path / "lsun"), str(tmp_path / "out"), "--size", "10"])
    with Image.open(tmp_path / "out" / "000000.png") as image:
        assert image.size == (10, 10) and np.asarray(image).min() == 200
    with pytest.raises(SystemExit, match="church_outdoor_train.txt"):
        reference.main([str(tmp_path), str(tmp_path / "out")])


# ---- plan ---------------------------------------------------------------------------------------


def test_a_plan_multiplies_measured_steps_out(options, monkeypatch):
    options = replace(options, gpus=2, rows=("cifar10-adm-baseline", "cifar10-adm-ogdm-ft"))
    first, second = plan.work_left(experiments(options))
    assert [p.name for p in first.trained()] == ["cifar10-adm-baseline"]
    assert [p.name for p in second.trained()] == ["cifar10-adm-ogdm-ft"]  # the baseline is counted
    steps = {"train": {"none": 0.01, "euler": 0.02}, "evaluate": 0.001, "encode": 0, "decode": 0}
    steps |= {"device": "some GPU", "threads": 1}
    measured = {("cifar10", "adm", False): steps}
    training, sampling = plan.seconds(options, first, measured)
    assert training == pytest.approx(38_400_000 * 0.01 / 2)
    assert sampling == pytest.approx(50_000 * (25 + 20 + 15 + 10) * 0.001 / 2)
    assert plan.seconds(options, second, measured)[0] == pytest.approx(1_920_000 * 0.02 / 2)
    assert plan.seconds(options, first, {("cifar10", "adm", False): "not measured"}) is None
    monkeypatch.setattr(plan.os, "cpu_count", lambda: 1)
    slow = {("cifar10", "adm", False): steps | {"device": "cpu"}}
    assert plan.seconds(options, first, slow)[0] == pytest.approx(2 * training)


@pytest.mark.parametrize("projection", [None, "euler", "heun"])
def test_a_measured_step_is_a_whole_training_step(projection, monkeypatch):
    net, calls = torch.nn.Conv2d(3, 3, 1), []

    def eps(x, t):
        calls.append(len(x))
        return net(x)

    config = measure.OGDMConfig
    monkeypatch.setattr(measure, "OGDMConfig", lambda **more: config(d_width=0.02, **more))
    schedule = measure.DiscreteVP.linear()
    network = measure.Network(net, eps, schedule, torch.tensor([500]), 3, 8)
    before = net.weight.clone()
    step = measure.training_step(network, 2, torch.device("cpu"), projection)
    assert measure.timed(step, 2, torch.device("cpu")) > 0
    assert not torch.equal(net.weight, before)
    passes = 2 if projection == "heun" else 1
    assert calls == [2] * (3 * passes)  # one step to warm up, two that count


# ---- the table's files --------------------------------------------------------------------------


def finished(options: Options, stop: str = "") -> tuple[list, Engine]:
    """Rows as if they had run, but for the stage called `stop`."""
    rows = experiments(options)
    engine = Engine({e.name: e.stages for e in rows}, options.work)
    for i, stage in enumerate(engine.stages):
        if stage.name == stop:
            engine.outcomes[stage.key] = Outcome("failed", "exit status 9")
        if stage.name == stop or any(engine.outcome(n).status != "done" for n in stage.needs):
            continue
        made = stage.folder / (stage.found.replace("*", "1") or stage.product)
        made.parent.mkdir(parents=True, exist_ok=True)
        scores = {"fid": 10 + i / 7, "recall": 0.5 + i / 1000, "sample_images": 50_000}
        made.write_text(json.dumps(scores))
        stage.finish([], "now", 1.0)
        engine.outcomes[stage.key] = Outcome("done")
    return rows, engine


def results(options: Options, stop: str = "") -> dict:
    rows, engine = finished(options, stop)
    table = paper.table(options.number)
    return collect(table, options, rows, engine, "run/reproduce_table1.sh --rows x")


@pytest.mark.parametrize("number", cli.REPRODUCED)
def test_every_table_is_written_in_every_format(options, number, tmp_path):
    found = results(replace(options, number=number, data=tmp_path / "data"))
    files = render.write_all(found, options.out)
    assert [file.suffix for file in files] == [".json", ".csv", ".md", ".tex", ".png"]
    cells = [cell for row in found["rows"] for cell in row["cells"]]
    lines = list(csv.DictReader((options.out / f"table{number}.csv").open()))
    assert len(lines) == len(cells) == len(paper.table(number).rows)
    for row, line in zip(paper.table(number).rows, lines, strict=True):
        assert (line["row"], line["nfe"], line["paper_fid"]) == (
            row.row, str(row.nfe), row.fid_text or "")  # fmt: skip
        assert (line["status"] == "done") == (row.fid is not None)
    markdown = files[2].read_text()
    assert sum(line.startswith("|") for line in markdown.splitlines()) == 2 + len(found["rows"])
    assert "run/reproduce_table1.sh --rows x" in markdown and found["commit"] in markdown
    assert files[4].read_bytes().startswith(b"\x89PNG") and files[4].stat().st_size > 10_000
    assert json.loads(files[0].read_text())["rows"] == found["rows"]
    balanced(files[3].read_text(), len(found["rows"]))


def balanced(tex: str, rows: int) -> None:
    text = re.sub(r"(?m)^%.*$", "", tex)
    assert text.count("{") == text.count("}")
    assert text.count(r"\begin{") == text.count(r"\end{") == 2
    spec = re.search(r"\\begin\{tabular\}\{(\w+)\}", text)[1]
    body = [line for line in text.splitlines() if line.rstrip().endswith(r"\\")]
    assert len(body) == 2 + 2 * rows
    for line in body[1:]:
        assert line.count("&") == len(spec) - 1, line
    assert text.count(r"\multirow") >= 1 and r"\bottomrule" in text


def test_latex_is_bold_where_ours_is_best(options):
    found = results(replace(options, number=2))
    tex = render.to_latex(found)
    fids = [row["cells"][0]["fid"] for row in found["rows"]]
    assert rf"\textbf{{{min(fids):.2f}}}" in tex and rf"\textbf{{{max(fids):.2f}}}" not in tex
    assert r"\textcolor{gray}{2.07}" in tex


def test_a_failed_stage_is_named_in_the_table(options):
    found = results(replace(options, rows=("cifar10-adm-*",)), "cifar10-adm-ogdm/train")
    failed = {row["row"]: row["failed"] for row in found["rows"]}
    assert failed["cifar10-adm-ogdm"]["stage"] == "cifar10-adm-ogdm/train"
    assert failed["cifar10-adm-baseline"] is None
    for text in (render.to_markdown(found, "x.png"), render.to_latex(found), render.to_csv(found)):
        assert "cifar10-adm-ogdm/train" in text
    assert "exit status 9" in render.to_markdown(found, "x.png")
    assert "OGDM (stopped)" in render.to_markdown(found, "x.png")


def test_a_table_is_written_without_samples_that_were_deleted(options):
    options = replace(options, rows=("cifar10-adm-baseline",), nfes=(10,))
    rows, engine = finished(options)
    rows[0].samples[10].output.unlink()
    found = collect(paper.table(1), options, rows, engine, "x")
    (cell,) = [cell for cell in found["rows"][0]["cells"] if cell["nfe"] == 10]
    assert cell["status"] == "done" and cell["commands"] == []
    (work,) = plan.work_left(rows)
    assert work.cells == [] and work.trainings == []


def test_a_smoke_table_says_what_its_numbers_are_worth(options):
    found = results(replace(options, smoke=True, rows=("cifar10-adm-baseline",)))
    assert "mean nothing" in found["title"]
    for text in (render.to_markdown(found, "x"), render.to_latex(found), render.to_csv(found)):
        assert "mean nothing" in text


@pytest.mark.parametrize("number", cli.REPRODUCED)
def test_scripts_document_every_option(number):
    text = (ROOT / "run" / f"reproduce_table{number}.sh").read_text()
    flags = {flag for action in cli.parser()._actions for flag in action.option_strings}
    assert [flag for flag in flags - {"-h", "--help"} if flag not in text] == []
    done = subprocess.run([sys.executable, "-m", "run.tables", "4"], cwd=ROOT,
                          capture_output=True, text=True) if number == 1 else None  # fmt: skip
    assert done is None or (done.returncode == 2 and "choose from" in done.stderr)
