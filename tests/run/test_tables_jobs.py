"""From the paper's rows to native commands, keys, and the list of problems."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from run import backbones
from run.evaluate import adm
from run.launch import Engine
from run.presets import PRESETS
from run.tables import __main__ as cli
from run.tables import baselines, check, flags, paper, plan, scale
from run.tables.jobs import Job, chain
from run.tables.rows import Options, Planner, Row, select_rows, without_gradients
from run.tables.scale import NAMES, get_scale

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = {"adm": "mpiexec -n", "edm": "torchrun --standalone", "ldm": "main.py --base",
             "edm2": "train_edm2.py --outdir", "sit": "train.py --data-path"}  # fmt: skip


@pytest.fixture
def options(tmp_path) -> Options:
    engine = Engine(third_party=tmp_path / "tp")
    return Options(1, out=tmp_path / "out", data=tmp_path / "data", engine=engine)


def rows(options: Options, *names: str, **more) -> list[Row]:
    return Planner(replace(options, rows=names, **more)).rows()


def commands(row: Row, kind: str) -> list[str]:
    return [str(job.command()) for job in row.chain() if job.kind == kind]


def keys(options: Options) -> dict[str, str]:
    return {job.name: job.key for row in rows(options) for job in row.chain()}


def problems(options: Options, *names: str, **more) -> str:
    asked = replace(options, rows=names, **more)
    return "\n".join(check.problems(asked, Planner(asked).rows()))


# ---- rows to commands ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", flags.REPRODUCED)
@pytest.mark.parametrize("name", NAMES)
def test_every_row_of_every_table_has_native_commands(options, number, name):
    scale = get_scale(name)
    controls = scale.controls
    found = rows(options, number=number, scale=scale)
    assert bool(found) == (number in scale.TABLES if controls else number != 10 or scale.small)
    for row in found:
        assert LAUNCHERS[row.preset.backbone] in commands(row, "train")[-1]
        samples = [str(job.command()) for job in row.samples.values()]
        reported = [n for n, cell in row.cells.items() if cell.fid is not None or controls or number == 10]
        assert list(row.samples) == reported and len(samples) == len(reported)
        for nfe, line in zip(reported, samples, strict=True):
            sampler, spent = without_gradients(row.sampler, nfe)
            assert re.search(rf"--nfe[ =]{spent}\b", line)
            assert re.search(rf"--sampler[ =]{sampler}\b", line)
            assert ("--guide=" in line) == (row.sampler == "dg")
        assert len(commands(row, "score")) == len(reported)


def test_a_guide_is_trained_on_samples_of_its_own_row(options):
    """Table 7: N steps with a guide cost 3N - 2; both rows of a model share its samples."""
    for row in rows(options, number=7):
        guides = [job for job in row.chain() if job.kind == "guide"]
        if row.sampler == "heun":
            assert not guides
            continue
        (guide,) = guides
        assert [cell.steps for cell in row.cells.values()] == [(nfe + 2) // 3 for nfe in row.cells]
        samples, reference = guide.needs
        assert samples.row == f"{row.preset.name}.heun-35" and reference.kind == "data"
        assert str(guide.output) in str(row.samples[37].command())
        assert "-m run.guidance train --kind paper" in str(guide.command())
    moved = rows(replace(options, out=options.out / "else"), number=7)
    assert [r.scores[37].key for r in moved if r.sampler == "dg"] == [
        r.scores[37].key for r in rows(options, number=7) if r.sampler == "dg"
    ]


def test_a_fine_tune_starts_from_its_own_baseline(options):
    for row in rows(options):
        if row.preset.baseline:
            (base,) = [job for job in row.train.needs if job.kind == "train"]
            assert base.row == row.preset.baseline
            assert str(base.output) in commands(row, "train")[-1]


def test_rows_and_tables_share_trainings(options):
    three = rows(options, number=3)
    jobs = [job for row in three for job in row.chain()]
    baselines = {job.key for job in jobs if job.name == "cifar10-adm-baseline.train"}
    assert baselines == {rows(options, "cifar10-adm-baseline")[0].train.key}


TRAINING = {  # what is changed -> whether the training is another one
    "threads, jobs, time limits": ({"engine": Engine(threads=3), "jobs": 3, "time_limit": 9}, False),
    "a flag that says where, set by hand": ({"sets": (("*edm*", "train", "--dump", "3"),)}, True),
    "a flag of sampling": ({"sets": (("*edm*", "sample", "--batch", "3"),)}, False),
    "the learning rate": ({"sets": (("*edm*", "train", "--lr", "3"),)}, True),
    "a setting of OGDM": ({"sets": (("*edm*", "train", "--ogdm-r1", "3"),)}, True),
    "the scale": ({"scale": get_scale("smoke")}, True),
}


@pytest.mark.parametrize("change", TRAINING)
def test_a_training_is_another_one_by_its_settings_alone(options, change):
    more, another = TRAINING[change]
    name = "cifar10-edm-ogdm-ft"
    before, after = (rows(o, name)[0].train.key for o in (options, replace(options, **more)))
    assert (before != after) == another


@pytest.mark.parametrize("field", ["batch", "images", "k", "gamma"])
def test_a_row_of_table_5_is_in_the_key(options, monkeypatch, field):
    name = "cifar10-edm-ogdm-ft"
    before = keys(options)
    monkeypatch.setitem(PRESETS, name, replace(PRESETS[name], **{field: 2 * getattr(PRESETS[name], field)}))
    after = keys(options)
    assert {job.split(".")[0] for job in before if before[job] != after[job]} == {name}


def test_settings_change_the_keys_that_rest_on_them(options):
    before = keys(options)

    def changed(**more) -> set[str]:
        after = keys(replace(options, **more))
        return {name.split(".")[-1] for name in before if before[name] != after[name]}

    assert changed(images=1000) == {"sample", "score"}
    assert changed(features="x:y") == {"score"}
    assert changed(seeds=(1,)) == {"train", "sample", "score"}
    assert changed(engine=Engine(8, 2, third_party=Path("/tp")), out=Path("/b"), data=Path("/c")) == set()


def test_scales_share_nothing(options):
    found = [set(keys(replace(options, scale=get_scale(name))).values()) for name in NAMES]
    assert sum(map(len, found)) == len(set().union(*found))


def test_commands_find_the_users_own_modules(options, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "nets")
    (row,) = rows(options, "cifar10-adm-baseline", nfes=(10,))
    home = options.engine.third_party / "guided-diffusion"
    for kind, first in (("train", home), ("score", ROOT)):
        (job,) = [job for job in row.chain() if job.kind == kind]
        paths = job.command().env["PYTHONPATH"].split(":")
        assert paths[0] == str(first) and paths[-1] == str(tmp_path / "nets")


def test_a_native_flag_reaches_the_commands_and_the_key_of_its_row_only(options):
    plain = keys(options)
    sets = (
        ("cifar10-adm-ogdm-ft", "train", "--num_heads", "4"),
        ("cifar10-adm-ogdm-ft", "train", "--lr", "5e-5"),
        ("cifar10-adm-ogdm-ft", "train", "--ogdm_r1", "0.5"),
        ("cifar10-adm-ogdm-ft", "sample", "--clip_denoised", "False"),
    )
    changed = keys(replace(options, sets=sets))
    differ = {name for name in plain if plain[name] != changed[name]}
    assert differ and all(name.startswith("cifar10-adm-ogdm-ft") for name in differ)
    (row,) = rows(options, "cifar10-adm-ogdm-ft", sets=sets)
    train, sample = commands(row, "train")[-1], commands(row, "sample")[-1]
    assert "--num_heads 4" in train and "--num_heads 4" in sample and "--num_heads 1" not in sample
    assert "--lr 5e-5" in train and "--lr" not in sample and "--ogdm_r1 0.5" in train
    assert "--clip_denoised False" in sample and "--clip_denoised" not in train
    assert "--set: Table 1 has no row 'no-*'" in problems(options, sets=(("no-*", "train", "--lr", "1"),))


def test_a_checkpoint_takes_the_place_of_training(options, tmp_path):
    weights = tmp_path / "base.pt"
    weights.write_text("x")
    given = (("cifar10-adm-baseline", str(weights)),)
    base, scratch, tuned = rows(options, "cifar10-adm-*", checkpoints=given)
    assert base.train is None and commands(base, "train") == []
    assert all(str(weights) in line for line in commands(base, "sample"))
    assert f"--init_checkpoint {weights}" in commands(tuned, "train")[-1]
    assert len(commands(tuned, "train")) == len(commands(scratch, "train")) == 1
    key = base.samples[10].key
    weights.write_text("y")
    assert rows(options, "cifar10-adm-*", checkpoints=given)[0].samples[10].key != key


def test_nfes_that_a_sampler_cannot_hit_are_left_out_and_said(options):
    by_name = {row.name: row for row in rows(options, number=3, nfes=(25, 10))}
    assert by_name["cifar10-adm-baseline-f-pndm"].others == [10]
    assert list(by_name["cifar10-adm-baseline-s-pndm"].samples) == [25, 10]


# ---- small networks on a CPU --------------------------------------------------------------------


def test_a_control_is_trained_like_its_fine_tune_but_for_ogdm(options):
    names = ("cifar10-edm-control", "cifar10-edm-ogdm-ft")
    control, tuned = rows(options, *names, scale=get_scale("cpu"))
    a, b = (row.train.command().flags for row in (control, tuned))
    differ = {n for n in a.keys() | b.keys() if a.get(n) != b.get(n)}
    assert differ == {"--outdir", *(n for n in b if n.startswith("--ogdm"))}
    assert control.train.needs[1].key == tuned.train.needs[1].key
    heun = rows(options, number=2, scale=get_scale("cpu"))
    assert heun[0].train.key == control.train.key  # a control serves every table
    assert heun[1].train.command().flags["--ogdm-projection"] == "heun"


def test_seeds_train_fine_tunes_anew_and_share_baseline_data_and_net(options):
    asked = replace(options, scale=get_scale("cpu"), seeds=(0, 1, 2), rows=("*-ogdm-ft",))
    found = Planner(asked).rows()
    assert [row.seed for row in found[:3]] == [0, 1, 2] and len(found) == 12
    for one, other in zip(found[0::3], found[1::3], strict=True):
        a, b = ({job.key: job.name for job in row.chain()} for row in (one, other))
        shared = {a[key] for key in a.keys() & b.keys()}
        base = [job.name for job in one.train.needs]
        assert one.train.key != other.train.key and {*base, "digits-classifier.data"} <= shared
        assert all(name in base or name.endswith(".data") for name in shared)


def test_shipped_weights_take_the_place_of_a_baselines_training(options, monkeypatch, tmp_path):
    cpu = get_scale("cpu")
    monkeypatch.setattr(scale, "SHIPPED", tmp_path)
    (tmp_path / "digits-adm.safetensors").write_text("x")
    (row,) = rows(options, "cifar10-adm-ogdm-ft", scale=cpu)
    base = row.train.needs[1]
    assert base.kind == "weights" and base.command().native[:2] == ("unpack", "adm")
    (row,) = rows(options, "cifar10-adm-ogdm-ft", scale=cpu, from_scratch=True)
    assert row.train.needs[1].kind == "train"


@pytest.mark.parametrize("backbone", ["adm", "ldm"])
def test_a_packed_baseline_is_the_ema_in_the_backbones_own_format(tmp_path, backbone, refused):
    weights = {"net.a.weight": torch.arange(6.0).view(3, 2), "net.b": torch.ones(4) / 4}
    native = tmp_path / "native.pt"
    if backbone == "ldm":
        raw = {f"model.{name}": torch.zeros_like(value) for name, value in weights.items()}
        ema = {f"model_ema.{name.replace('.', '')}": value for name, value in weights.items()}
        torch.save({"state_dict": raw | ema | {"betas": torch.ones(5)}}, native)
    else:
        torch.save(weights, native)
    packed, back = tmp_path / "x.safetensors", tmp_path / "back.pt"
    baselines.main(["pack", backbone, str(native), str(packed)])
    baselines.main(["unpack", backbone, str(packed), str(back)])
    for way, file in (("pack", native), ("unpack", packed)):
        (tmp_path / "cut").write_bytes(file.read_bytes()[:99])
        with refused("cut is "):
            baselines.main([way, backbone, str(tmp_path / "cut"), str(tmp_path / "none")])
    found = torch.load(back, weights_only=True)
    if backbone == "ldm":
        found = found["state_dict"]
        for name, value in ema.items():
            assert torch.equal(found.pop(name), value)
        assert "betas" not in found
        found = {name.removeprefix("model."): value for name, value in found.items()}
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(scale.SHIPPED.glob("*")), ids=lambda file: file.stem)
def test_a_shipped_baseline_becomes_a_checkpoint_and_the_same_file_again(file, tmp_path, request):
    backbone = next(part for part in file.stem.split("-") if part in backbones.NAMES)
    home = request.getfixturevalue("patched")("edm").parent if backbone == "edm" else tmp_path
    native, again = tmp_path / "native", tmp_path / "again"
    for words in (["unpack", backbone, file, native], ["pack", backbone, native, again]):
        argv = [sys.executable, "-m", "run.tables.baselines", *words, "--third-party", home]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert again.read_bytes() == file.read_bytes()


# ---- data ---------------------------------------------------------------------------------------


def data_of(options: Options, name: str) -> Job:
    return next(job for job in rows(options, name)[0].chain() if job.kind == "data")


def test_data_made_elsewhere_is_not_taken_for_ready(options, tmp_path):
    a, b = (data_of(replace(options, data=tmp_path / d), "cifar10-adm-baseline") for d in "ab")
    for job in (a, b):
        job.output.mkdir(parents=True)
    a.folder.mkdir(parents=True)
    a.marker.write_text(f'{{"output": "{a.output}"}}')
    assert a.key == b.key and a.record() and b.record() is None


def test_prepared_data_will_do_without_the_archive(options):
    def missing(backbone: str, training: bool = True) -> str:
        return check.missing("cifar10", backbones.get(backbone), options.data, training)

    assert "cifar-10-python.tar.gz" in missing("edm")
    assert "prepare_data.sh cifar10" in str(data_of(options, "cifar10-adm-baseline").command())
    (options.data / "cifar10").mkdir(parents=True)
    assert not missing("adm") and not missing("edm", training=False)
    assert "cifar10-32x32.zip" in missing("edm")
    (options.data / "cifar10-32x32.zip").touch()
    assert not missing("edm")
    assert data_of(options, "cifar10-adm-baseline").command() is None


def test_a_prepared_lsun_is_linked_where_upstream_looks(options):
    (options.data / "lsun").mkdir(parents=True)
    command = data_of(options, "lsun-church-ldm-baseline").command()
    place = options.engine.third_party / "latent-diffusion" / "data" / "lsun"
    assert command.argv == ["ln", "-sfn", str(options.data / "lsun"), str(place)]


# ---- wrong input --------------------------------------------------------------------------------


def test_rows_are_chosen_by_name_or_glob_in_the_tables_order():
    table = paper.table(1)
    names, wrong = select_rows(table, ("cifar10-edm-*", "cifar10-adm-ogdm"))
    assert names[0] == "cifar10-adm-ogdm" and len(names) == 5 and wrong == []
    names, wrong = select_rows(table, ("cifar10-adm-ogdm-f",))
    assert names == [] and "cifar10-adm-ogdm-ft" in wrong[0]
    assert select_rows(table, ())[0] == list(table.names)


def test_all_that_is_wrong_is_said_at_once(options):
    engine = replace(options.engine, gpus=5)
    given = (("cifar10-adm-ogdm", "absent.pt"), ("no-row", "x"),
             ("celeba64-adm-ogdm", "https://host/x.pt"))  # fmt: skip
    found = problems(options, "lsun*", engine=engine, weights="nowhere.pth",
                     checkpoints=given)  # fmt: skip
    for words in (
        "--gpus: 5 does not divide",
        "--weights nowhere.pth: no such file",
        "no file absent.pt",
        "no-row is no row of Table 1",
        "guided-diffusion's scripts read no URLs",
        "run/setup.sh latent-diffusion fetches it",
        "church_outdoor_train_lmdb.zip",
        "download_first_stages.sh",
    ):
        assert words in found, words


def test_unpatched_upstreams_full_disks_and_odd_nfes_are_said(options, monkeypatch):
    script = options.engine.third_party / "edm" / "train.py"
    script.parent.mkdir(parents=True)
    script.write_text("import torch\n")
    monkeypatch.setattr(check.shutil, "disk_usage", lambda place: type("Usage", (), {"free": 5e9}))
    found = problems(options, number=2, nfes=(12,), features="run.tables.stand_in:random_features")
    assert "is not patched; run/setup.sh edm" in found
    assert re.search(r"\d+ GB are needed, 5 GB are free", found)
    assert "--nfes: heun cannot spend exactly 12" in found
    assert "--weights" not in found


def test_what_the_evaluator_would_refuse_is_said_first(options, monkeypatch, tmp_path):
    def found(**more) -> str:
        return problems(options, "cifar10-edm-baseline", **more)

    assert "download Inception's weights" in found()
    assert "there is no module nosuch.nets" in found(features="nosuch.nets:x")
    assert "or MODULE:NAME such as" in found(features="run.tables.stand_in")
    assert "--features" not in found(features="run.tables.stand_in:random_features")
    assert "features" not in found(scale=get_scale("smoke"))
    assert "features" not in problems(options, scale=get_scale("cpu"))
    given = {"scale": get_scale("cpu"), "weights": __file__}
    assert "leave out --weights" in problems(options, **given)
    monkeypatch.setattr(adm, "EVALUATOR", tmp_path / "evaluator.py")
    assert "run/setup.sh guided-diffusion" in found(evaluator="adm")
    (tmp_path / "evaluator.py").touch()
    assert "--evaluator adm" not in found(evaluator="adm")
    assert "knows Inception only, not --features" in found(evaluator="adm", features="a:b")
    assert "knows Inception only, not --scale smoke" in found(evaluator="adm", scale=get_scale("smoke"))
    assert "reads classify_image_graph_def.pb" in found(evaluator="adm", weights="no.pb")


def test_disk_is_counted_by_the_cell_and_spared_by_prepared_sets(options, monkeypatch):
    cells = [cell for cell in paper.table(3).cells if cell.fid is not None]
    sizes = [50_000 * 3 * check.SOURCES[cell.dataset].size ** 2 / 1e9 for cell in cells]
    disk = check.disk_gb(options, rows(options, number=3))
    assert disk["samples"] == pytest.approx(sum(sizes) + max(sizes))
    monkeypatch.setattr(check.shutil, "disk_usage", lambda place: type("Usage", (), {"free": 0.0}))

    def needed() -> float:
        return float(re.search(r"(\d+) GB are needed", problems(options, number=3))[1])

    before = needed()
    for name in ("church_outdoor_train_lmdb.zip", "lsun/data.mdb"):
        file = options.data / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as f:
            f.truncate(9_000_000_000)  # sparse
        assert needed() == before - (9 if "lsun/" in name else 0)


def test_a_checkpoint_of_ldm_needs_its_config(options, tmp_path):
    (tmp_path / "model.ckpt").touch()
    given = (("lsun-church-ldm-baseline", str(tmp_path / "model.ckpt")),)
    assert "no config.yaml beside" in problems(options, checkpoints=given)
    (tmp_path / "config.yaml").touch()
    assert "no config.yaml beside" not in problems(options, checkpoints=given)


def test_a_checkpoint_spares_the_data_that_training_alone_needs(options, tmp_path):
    (tmp_path / "x.pkl").touch()
    (options.data / "cifar10").mkdir(parents=True)
    given = (("cifar10-edm-baseline", str(tmp_path / "x.pkl")),)
    assert "cifar10:" not in problems(options, "cifar10-edm-baseline", checkpoints=given)
    assert check.trained(rows(options, "cifar10-edm-baseline", checkpoints=given)) == []


def test_the_command_line_lists_and_refuses(options, capsys):
    assert cli.main(["9", "--list"]) == 0
    assert "celeba64-adm-ogdm  stochastic, NFE 50, 20, 10" in capsys.readouterr().out
    assert cli.main(["1", "--rows", "cifar10-edm-basline", "--out", str(options.out)]) == 2
    told = capsys.readouterr().err
    assert "Nothing was started" in told and "cifar10-edm-baseline" in told
    assert cli.main(["9", "--nodes", "2", "--gpus", "2", "--scale", "smoke"]) == 2
    assert "add --slurm" in capsys.readouterr().err
    assert not options.out.exists()


def test_a_dry_run_prints_commands_and_what_stands_in_the_way(options, capsys):
    third_party = str(options.engine.third_party)
    argv = ["2", "--dry-run", "--out", str(options.out), "--third-party", third_party]
    assert cli.main([*argv, "--data", str(options.data), "--gpus", "8"]) == 0
    out, err = capsys.readouterr()
    assert out.count("--nproc_per_node=8 generate.py") == 10
    assert "--ogdm-projection=heun" in out
    assert "Before this can run" in err and "run/setup.sh edm" in err
    assert not options.out.exists()


# ---- cost ---------------------------------------------------------------------------------------


def test_a_plan_counts_images_and_evaluations_once(options, capsys):
    first, second = rows(options, "cifar10-adm-baseline", "cifar10-adm-ogdm-ft")
    plan.print_plan(options, [first, second])
    told = capsys.readouterr().out
    assert re.search(r"cifar10-adm-baseline +38.4M images +4 x 50,000 +3.5M\n", told)
    assert re.search(r"cifar10-adm-ogdm-ft +1.92M images", told)  # the baseline is counted above
    assert "--checkpoint cifar10-adm-baseline=PATH would save the training: 38.4M images" in told


def test_a_scheduler_is_told_about_nodes(options):
    options = replace(options, engine=replace(options.engine, gpus=16, nodes=2))
    row, ldm = rows(options, "cifar10-edm-baseline", "lsun-church-ldm-baseline")
    told = plan.resources(options)(row.train)
    assert (told["gpu"], told["nodes"], told["tasks_per_node"]) == (16, 2, 8) and told["mpi"]
    told = plan.resources(options)(ldm.samples[10])  # upstream samples latents in one process
    assert (told["gpu"], told["nodes"]) == (1, 1) and "mpi" not in told
    data = next(job for job in row.chain() if job.kind == "data")
    assert "gpu" not in plan.resources(options)(data)
    assert plan.resources(replace(options, time_limit=90))(row.train)["runtime"] == 90


def test_a_plan_of_a_smoke_run_counts_commands(options, capsys):
    asked = replace(options, scale=get_scale("smoke"), rows=("cifar10-adm-*",))
    plan.print_plan(asked, Planner(asked).rows())
    jobs = chain(job for row in Planner(asked).rows() for job in row.scores.values())
    assert f"{len(jobs)} of {len(jobs)} commands left" in capsys.readouterr().out
