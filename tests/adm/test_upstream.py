"""guided-diffusion's own scripts, pristine and patched, at a tiny size.

Run as a script this file is the worker that the tests start: `drive` runs upstream's scripts with
seeded generators (upstream seeds none), `parallel` trains on given batches, times and noise.
"""

import argparse
import contextlib
import csv
import io
import itertools
import json
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.core.toys import differences

ROOT = Path(__file__).resolve().parents[2]
NAME = "guided-diffusion"
pytest.importorskip("mpi4py", reason="guided-diffusion's dependencies are in the [adm] extra")
pytest.importorskip("blobfile", reason="guided-diffusion's dependencies are in the [adm] extra")


def words(text: str) -> list[str]:
    return text.split()


MODEL = words("""--image_size 16 --num_channels 32 --num_res_blocks 1 --channel_mult 1,1
    --attention_resolutions 8 --num_heads 1 --diffusion_steps 100""")
TRAIN = words("--batch_size 4 --save_interval 2 --log_interval 1 --lr_anneal_steps 3 --lr 1e-3")
OGDM = words("--ogdm True --ogdm_d_width 0.1 --ogdm_r1_every 2")


# ---- the worker -------------------------------------------------------------------------------


def drive(runs: list[dict]) -> None:
    """Runs scripts one after the other, each from a seed of its own and of its rank."""
    for run in runs:
        seed = run["seed"] + 1000 * int(os.environ.get("PMI_RANK", 0))
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        os.environ["OPENAI_LOGDIR"] = run["out"]
        sys.argv = [run["script"], *run["argv"]]
        runpy.run_path(f"scripts/{run['script']}", run_name="__main__")
        assert "--ogdm" not in run["argv"] or hasattr(sys.stdout, "outlives")  # a lost reader ends no run


def parallel(job: dict) -> None:
    """Three updates on fixed batches, times, noise and lookaheads, shared out over the ranks."""
    from guided_diffusion import dist_util, logger
    from torch.nn.parallel import DistributedDataParallel

    import ogdm_core

    script = runpy.run_path("scripts/image_train.py", run_name="upstream")
    dist_util.setup_dist()
    logger.configure(job["out"], format_strs=["log"])
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = slice(rank * 8 // world, (rank + 1) * 8 // world)
    results = {}
    for case, (flags, ddp) in job["cases"].items():
        args = script["create_argparser"]().parse_args(MODEL + TRAIN + OGDM + flags)
        torch.manual_seed(rank)  # rank 0's weights must reach the others
        keys = script["model_and_diffusion_defaults"]().keys()
        kwargs = script["args_to_dict"](args, keys)
        model, diffusion = script["create_model_and_diffusion"](**kwargs)
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.05)  # upstream's zeros have next to no gradients
        g = torch.Generator().manual_seed(1)
        given = {name: [] for name in ("t", "s", "noise")}
        sampler = argparse.Namespace(sample=lambda n, device, g=given: (g["t"].pop(0)[:n], torch.ones(n)))
        torch.randn_like = lambda x, g=given: g["noise"].pop(0)
        ogdm_core.DiscreteVP.sample_lookahead = lambda *args, g=given: g["s"].pop(0)
        loop = script["TrainLoop"](
            model=model, diffusion=diffusion, data=itertools.repeat(None), batch_size=8 // world,
            microbatch=args.microbatch, lr=1e-3, ema_rate="0.5", log_interval=1, save_interval=1,
            resume_checkpoint="", schedule_sampler=sampler, lr_anneal_steps=10, flags=args,
        )  # fmt: skip
        D = loop.observer.D if loop.observer else torch.nn.Identity()
        for optimizer in (loop.opt, *([loop.observer.optimizer] if loop.observer else [])):
            for group in optimizer.param_groups:
                group["eps"] = 1e-3  # Adam would blow rounding errors of tiny gradients up to lr
        if ddp:
            loop.ddp_model = DistributedDataParallel(model)
            loop.use_ddp, loop.averages = True, False
        for loop.step in range(3):
            x_0 = torch.randn(8, 3, 16, 16, generator=g)[mine]
            noise = torch.randn(8, 3, 16, 16, generator=g)[mine]
            t = torch.randint(20, 100, (8,), generator=g)[mine]
            s = torch.randint(1, 20, (8,), generator=g)[mine]
            for i in range(0, len(t), loop.microbatch):
                rows = slice(i, i + loop.microbatch)
                given["t"].append(t[rows])
                given["s"].append(s[rows])
                given["noise"].append(noise[rows])
            loop.run_step(x_0, {})
        results[case] = {
            "model": torch.cat([p.detach().flatten() for p in model.parameters()]),
            "ema": torch.cat([p.detach().flatten() for p in loop.ema_params[0]]),
            "d": torch.cat([torch.zeros(1), *(p.detach().flatten() for p in D.parameters())]),
        }
    torch.save(results, f"{job['out']}/rank{rank}.pt")


def fail_on_rank_1(job: dict) -> None:
    """Rank 1 raises in its second update, while rank 0 waits for its gradients."""
    if os.environ["PMI_RANK"] == "1":
        draw, calls = torch.randn_like, []

        def randn_like(x):
            calls.append(1)
            if len(calls) == 2:
                raise ZeroDivisionError("as if the GPU had fallen off the bus")
            return draw(x)

        torch.randn_like = randn_like
    drive([job])


def other_settings(job: dict) -> None:
    """Rank 1 has another gamma."""
    drive([job | {"argv": [*job["argv"], "--ogdm_gamma", f"0.{os.environ['PMI_RANK']}"]}])


def two_hosts(job: dict) -> None:
    """Ranks that believe to be on different machines meet at the first one's name."""
    from guided_diffusion import dist_util
    from mpi4py import MPI

    MPI.Get_processor_name = lambda: ["localhost", "127.0.0.1"][MPI.COMM_WORLD.rank]
    os.environ.pop("MASTER_ADDR", None)
    dist_util.setup_dist()
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    assert total == 2 and "MASTER_ADDR" not in os.environ  # upstream's own way was not taken


def errors(runs: list[dict]) -> None:
    """Each run must fail; its message goes to `out`/error.txt."""
    for run in runs:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stderr(printed):
                drive([run])
        except (ValueError, RuntimeError, FileNotFoundError, SystemExit) as error:
            Path(run["out"]).mkdir(exist_ok=True)
            Path(run["out"], "error.txt").write_text(f"{error}\n{printed.getvalue()}")


def eps_agrees(runs: list[list[str]]) -> None:
    """What the observer is told of the trainer's pass is what eps_fn answers, for any model."""
    from guided_diffusion import dist_util
    from guided_diffusion.gaussian_diffusion import ModelMeanType

    from ogdm_core.adm import train

    script = runpy.run_path("scripts/image_train.py", run_name="upstream")
    dist_util.setup_dist()
    for flags in runs:
        previous = "--predict_previous" in flags
        args = script["create_argparser"]().parse_args(MODEL + [f for f in flags if f != "--predict_previous"])
        keys = script["model_and_diffusion_defaults"]().keys()
        kwargs = script["args_to_dict"](args, keys)
        model, diffusion = script["create_model_and_diffusion"](**kwargs)
        if previous:
            diffusion.model_mean_type = ModelMeanType.PREVIOUS_X
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.05)
        seen = {}

        class Watch:
            """In the observer's place: keeps what it is told."""

            def observe(self, seen=seen, **told):
                seen.update(told)
                return torch.full((4,), 7.0)

        x_0, t = torch.randn(4, 3, 16, 16), torch.arange(4) * 3
        cond = {"y": torch.arange(4)} if args.class_cond else {}
        observed = train.ObservedDiffusion(diffusion, Watch(), argparse.Namespace(count=lambda loss: None))
        torch.manual_seed(3)
        with_term = observed.training_losses(model, x_0, t, model_kwargs=cond)
        torch.manual_seed(3)
        without = diffusion.training_losses(model, x_0, t, model_kwargs=cond)
        torch.testing.assert_close(with_term["loss"], without["loss"] + 7, rtol=0, atol=0)
        torch.set_rng_state(*seen["rng"])
        again = seen["eps_fn"](seen["x_t"], seen["t"], seen["cond"])  # with the dropout of the trainer's pass
        torch.testing.assert_close(seen["eps_t"], again, rtol=0, atol=0)
        assert seen["eps_t"].requires_grad and torch.equal(seen["t"], t + 1)
        x_t = diffusion.q_sample(x_0, t, noise=seen["eps"])
        torch.testing.assert_close(seen["x_t"], x_t, rtol=0, atol=0)
        torch.set_rng_state(*seen["rng"])
        out = diffusion.p_mean_variance(model, x_t, t, clip_denoised=False, model_kwargs=cond)
        eps = diffusion._predict_eps_from_xstart(x_t, t, out["pred_xstart"])
        torch.testing.assert_close(seen["eps_t"], eps, rtol=1e-3, atol=1e-3)


# ---- starting it ------------------------------------------------------------------------------


def work(where: Path, function: str, job, ranks: int = 0, timeout: float = 900, check: bool = True):
    """Starts this file in the codebase at `where`, under mpiexec if `ranks` is given."""
    command = [sys.executable, __file__, function, json.dumps(job)]
    if ranks:
        beside = Path(sys.executable).with_name("mpiexec")
        command = [str(beside) if beside.exists() else "mpiexec", "-n", str(ranks), *command]
    env = os.environ | {"PYTHONPATH": f"{where}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, timeout=timeout)
    if check and done.returncode:
        raise AssertionError(done.stdout[-2000:] + done.stderr[-6000:])
    return done


def training(out, data, *flags, seed=1):
    argv = [*MODEL, *TRAIN, "--data_dir", str(data), *map(str, flags)]
    return {"script": "image_train.py", "seed": seed, "out": str(out), "argv": argv}


def sampling(out, model, *flags, seed=1):
    argv = [*MODEL, "--model_path", str(model), "--num_samples", "8", "--batch_size", "4"]
    argv += map(str, flags)
    return {"script": "image_sample.py", "seed": seed, "out": str(out), "argv": argv}


def load(path: Path):
    return torch.load(path, weights_only=True)


def same_files(a: Path, b: Path, *patterns: str) -> None:
    for pattern in patterns:
        names = sorted(p.name for p in a.glob(pattern))
        assert names and names == sorted(p.name for p in b.glob(pattern)), pattern
        for name in names:
            assert not differences(load(a / name), load(b / name), name)


def log_of(out: Path) -> list[dict[str, str]]:
    """The rows of progress.csv, without the cells that a row has no value for."""
    rows = csv.DictReader((out / "progress.csv").open())
    return [{key: value for key, value in row.items() if value} for row in rows]


def images_of(out: Path, shape="8x16x16x3") -> np.ndarray:
    return np.load(out / f"samples_{shape}.npz")["arr_0"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """24 images of three classes."""
    from PIL import Image

    folder, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for i in range(24):
        blocks = draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(blocks).resize((16, 16)).save(folder / f"class{i % 3}_{i:02d}.png")
    return folder


ODD = words("--class_cond True --learn_sigma True --microbatch 2 --dropout 0.1 --use_fp16 True")
SAMPLERS = {"euler": 5, "heun": 5, "s-pndm": 6, "f-pndm": 13, "dpmpp-2m": 5, "unipc": 5, "stochastic": 5,
            "dpm-2": 5, "dpmpp-3m": 5, "unipc-3": 5, "ipndm": 5, "deis": 5}  # fmt: skip
LONGER = words("--lr_anneal_steps 60 --lr 3e-3 --ema_rate 0.9 --save_interval 99 --log_interval 99")
RESUMED = words("""--class_cond True --dropout 0.1 --lr_anneal_steps 8 --use_fp16 True --ogdm_k 0.7
    --schedule_sampler loss-second-moment --noise_schedule cosine --diffusion_steps 3
    --save_interval 4""")
S_PNDM = words("--sampler s-pndm --nfe 6 --seed 3")


@pytest.fixture(scope="module")
def theirs(pristine, data, tmp_path_factory):
    """What the untouched codebase makes: two trainings, and samples of the first."""
    out = tmp_path_factory.mktemp("upstream")
    model, ema = out / "plain/model000002.pt", out / "plain/ema_0.9999_000002.pt"
    work(pristine(NAME), "drive", [
        training(out / "plain", data),
        training(out / "odd", data, *ODD),
        sampling(out / "ddpm", ema, "--timestep_respacing", 5),
        sampling(out / "ddim", model, *words("--use_ddim True --timestep_respacing ddim5")),
        sampling(out / "ddim-all", model, "--use_ddim", True),
    ])  # fmt: skip
    return out


@pytest.fixture(scope="module")
def ours(patched, data, theirs, tmp_path_factory):
    """What the patched codebase makes on one rank."""
    out = tmp_path_factory.mktemp("ours")
    model, ema = theirs / "plain/model000002.pt", theirs / "plain/ema_0.9999_000002.pt"
    at_32 = training(out / "32", data, *OGDM, "--image_size", 32, "--lr_anneal_steps", 4)
    at = at_32["argv"].index("--channel_mult")
    del at_32["argv"][at : at + 2]
    cond = words("--class_cond True --num_classes 3 --seed 5 --discretization quadratic")
    work(patched(NAME), "drive", [
        training(out / "plain", data),
        training(out / "odd", data, *ODD),
        sampling(out / "ddpm", ema, "--timestep_respacing", 5),
        sampling(out / "ddim", model, *words("--use_ddim True --timestep_respacing ddim5")),

        training(out / "no-weight", data, *OGDM, "--ogdm_gamma", 0),
        training(out / "weight", data, *OGDM, "--ogdm_gamma", 0.1),
        training(out / "grids", data, *OGDM, "--ogdm_gamma", 0.1, "--grid_interval", 2, "--grid_nfe", 3),
        sampling(out / "ours", out / "weight/ema_0.9999_000002.pt", "--timestep_respacing", 5),
        at_32,

        training(out / "from-ema", data, *OGDM, "--init_checkpoint", ema, "--lr", 0),
        training(out / "from-model", data, "--init_checkpoint", model, "--lr", 0),
        training(out / "base", data, "--class_cond", True, *LONGER),
        training(out / "tuned", data, *OGDM, *words("--class_cond True --ogdm_projection heun"),
                 "--ema_rate", 0.5, "--init_checkpoint", out / "base/ema_0.9_000060.pt"),

        *[sampling(out / name, out / "tuned/ema_0.5_000002.pt", "--sampler", name, "--nfe", nfe,
                   *cond) for name, nfe in SAMPLERS.items()],
        sampling(out / "clip", model, *words("--sampler euler --nfe 100")),
        sampling(out / "no-clip", model, *words("--sampler euler --nfe 100 --clip_denoised False")),
        sampling(out / "one-rank", model, *S_PNDM),
    ])  # fmt: skip
    return out


@pytest.fixture(scope="module")
def ours_on_two_ranks(patched, data, theirs, tmp_path_factory):
    out = tmp_path_factory.mktemp("two")
    flags = [*OGDM, *RESUMED]
    work(patched(NAME), "drive", [
        training(out / "plain", data),
        training(out / "whole", data, *flags),
        training(out / "rest", data, *flags,
                 "--resume_checkpoint", out / "whole/model000004.pt", seed=99),
        sampling(out / "two-ranks", theirs / "plain/model000002.pt", *S_PNDM,
                 "--batch_size", 2, seed=7),
    ], ranks=2)  # fmt: skip
    return out


# ---- training ---------------------------------------------------------------------------------


def test_flags_off_is_upstream_bit_for_bit(theirs, ours):
    for name in ("plain", "odd"):
        same_files(theirs / name, ours / name, "model*.pt", "ema*.pt", "opt*.pt")
        assert log_of(theirs / name) == log_of(ours / name)
        assert not list((ours / name).glob("ogdm*"))
    for name in ("ddpm", "ddim"):
        assert np.array_equal(images_of(theirs / name), images_of(ours / name))


def test_only_gamma_matters(theirs, ours):
    """The observer leaves the trainer's data, times, noise and dropout alone."""
    same_files(theirs / "plain", ours / "no-weight", "model*.pt", "ema*.pt", "opt*.pt")
    with pytest.raises(AssertionError, match="model000002.pt"):
        same_files(theirs / "plain", ours / "weight", "model000002.pt")


def test_flags_off_on_two_ranks_is_upstream_too(pristine, data, ours_on_two_ranks, tmp_path):
    work(pristine(NAME), "drive", [training(tmp_path, data)], ranks=2)
    same_files(tmp_path, ours_on_two_ranks / "plain", "model*.pt", "ema*.pt", "opt*.pt")


def test_two_ranks_are_one_with_the_whole_batch(patched, tmp_path):
    cases = {
        "euler": (["--ogdm_gamma", "0.5"], False),
        "heun": (["--ogdm_gamma", "0.5", "--ogdm_projection", "heun"], False),
        "plain": (["--ogdm", "False", "--sync_gradients", "True"], False),
    }
    micro = ["--ogdm_gamma", "0.5", "--ogdm_projection", "heun", "--microbatch", "2"]
    more = {"micro": (micro, False), "ddp": (micro, True)}
    for ranks, these in ((1, cases), (2, cases | more)):
        (tmp_path / str(ranks)).mkdir()
        work(patched(NAME), "parallel", {"out": str(tmp_path / str(ranks)), "cases": these}, ranks)
    one = load(tmp_path / "1/rank0.pt")
    two, other = load(tmp_path / "2/rank0.pt"), load(tmp_path / "2/rank1.pt")
    assert not differences(two, other)
    for case in cases:
        for part in ("model", "ema", "d"):
            torch.testing.assert_close(two[case][part], one[case][part], rtol=1e-4, atol=1e-6)
    for part in ("model", "ema", "d"):  # torch's DDP, as on GPUs, against our averaging
        torch.testing.assert_close(two["micro"][part], two["ddp"][part], rtol=1e-4, atol=1e-6)


def test_stop_and_resume_is_never_stopped(ours_on_two_ranks):
    """Two ranks, in a third pass over the data, with all that upstream forgets on the way."""
    whole, rest = ours_on_two_ranks / "whole", ours_on_two_ranks / "rest"
    same_files(whole, rest, "model000008.pt", "ema_0.9999_000008.pt", "opt000008.pt", "ogdm000008.pt")
    assert not (rest / "model000004.pt").exists()
    assert log_of(whole)[5:] == log_of(rest)
    state = load(whole / "ogdm000008.pt")
    assert (state["updates"], state["observer"]["steps"], len(state["ranks"])) == (8, 8, 2)
    assert state["schedule_sampler"]["_loss_counts"].sum() == 30  # the history was full, and used


def test_fine_tunes_upstreams_checkpoints_from_step_zero(theirs, ours):
    for name, source in (("from-ema", "ema_0.9999_000002.pt"), ("from-model", "model000002.pt")):
        assert [row["step"] for row in log_of(ours / name)] == ["0", "1", "2"]
        source = load(theirs / "plain" / source)  # at lr 0 the weights stay what they were
        assert not differences(load(ours / name / "model000002.pt"), source)
        ema = load(ours / name / "ema_0.9999_000002.pt")
        for key, value in source.items():
            torch.testing.assert_close(ema[key], value, rtol=1e-6, atol=1e-7)
    base, tuned = load(ours / "base/ema_0.9_000060.pt"), load(ours / "tuned/model000002.pt")
    assert any(not torch.equal(tuned[key], value) for key, value in base.items())


def test_checkpoints_sample_in_an_untouched_clone(pristine, ours, tmp_path):
    run = sampling(tmp_path, ours / "weight/ema_0.9999_000002.pt", "--timestep_respacing", 5)
    work(pristine(NAME), "drive", [run])
    assert np.array_equal(images_of(tmp_path), images_of(ours / "ours"))


def test_every_kind_of_model_is_observed_as_it_is(patched):
    work(patched(NAME), "eps_agrees", [
        [],
        words("--learn_sigma True --rescale_learned_sigmas True --class_cond True"),
        words("--learn_sigma True --use_kl True --use_checkpoint True --dropout 0.3"),
        words("--predict_xstart True --timestep_respacing 20 --rescale_timesteps True"),
        ["--predict_previous"],
    ])  # fmt: skip


def test_the_log_has_the_observer_by_quartile_and_32_needs_no_multiplier(ours):
    *rows, plain = log_of(ours / "32")  # the end of a run is plain
    assert "emission" not in plain and plain["loss"] == plain["mse"]
    for key in ("emission", "d_loss", "d_real_acc", "d_fake_acc"):
        assert all(float(row[key]) >= 0 for row in rows)
        parts = {k for row in rows for k in row if k.startswith(f"{key}_q")}
        assert len(parts) > 1 and parts <= {f"{key}_q{i}" for i in range(4)}
    assert ["r1" in row for row in rows] == [True, False, True]
    assert all(float(row["loss"]) > float(row["mse"]) for row in rows)
    assert "1,2,2,2 for 32x32" in (ours / "32/log.txt").read_text()
    rates = load(ours / "32/ogdm000002.pt")["observer"]["optimizer"]["param_groups"][0]["lr"]
    assert rates == pytest.approx(1e-3 * 0.75)  # D's third step, annealed as the model's


def test_a_rank_that_dies_ends_the_job(patched, data, tmp_path):
    job = training(tmp_path, data, *OGDM)
    done = work(patched(NAME), "fail_on_rank_1", job, ranks=2, timeout=300, check=False)
    assert done.returncode != 0
    assert "fallen off the bus" in done.stderr and "rank 1 failed" in done.stderr


def test_ranks_with_other_settings_end_together(patched, data, tmp_path):
    done = work(patched(NAME), "other_settings", training(tmp_path, data, *OGDM), ranks=2, timeout=300, check=False)
    words = "error: rank 1 has other settings than rank 0: ogdm_gamma: 0.0 there, 0.1 here; give all ranks"
    assert done.returncode == 1 and words in done.stderr and not list(tmp_path.glob("*.pt")), done.stderr[-2000:]


def test_cpu_ranks_find_each_other_across_hosts(patched):
    work(patched(NAME), "two_hosts", {}, ranks=2)


def test_grids_of_samples_leave_the_training_as_it_was(ours):
    from PIL import Image

    same_files(ours / "weight", ours / "grids", "model*.pt", "ema*.pt", "opt*.pt", "ogdm*.pt")
    assert log_of(ours / "weight") == log_of(ours / "grids")
    found = sorted((ours / "grids/grids").iterdir())
    assert [p.name for p in found] == ["000000.png", "000002.png"]
    assert Image.open(found[0]).size == (64, 64) and found[0].read_bytes() != found[1].read_bytes()


def test_flags_beside_the_weights_refuse_others(patched, data, ours, tmp_path):
    """Two heads in place of one load without an error."""
    kept = json.loads((ours / "plain/flags.json").read_text())
    assert kept["num_heads"] == 1 and kept["num_channels"] == 32 and "dropout" not in kept
    weights = ours / "weight/model000002.pt"
    runs = {
        "--init_checkpoint": training(tmp_path / "1", data, "--init_checkpoint", weights, "--num_heads", 2),
        "--resume_checkpoint": training(tmp_path / "2", data, *OGDM, "--resume_checkpoint", weights, "--num_heads", 2),
        "--model_path": sampling(tmp_path / "3", weights, *words("--sampler euler --nfe 5 --num_heads"), 2),
    }
    work(patched(NAME), "errors", list(runs.values()))
    for flag, run in runs.items():
        said = Path(run["out"], "error.txt").read_text()
        assert (
            f"{flag}: {weights} was trained with other flags (num_heads: 1 there, 2 here); give --num_heads 1" in said
        )


def test_flags_that_are_not_given_are_those_beside_the_weights(patched, data, ours, tmp_path):
    def bare(run):
        return run | {"argv": run["argv"][len(MODEL) :]}

    tuned, cell = ours / "tuned/ema_0.5_000002.pt", words("--sampler s-pndm --nfe 6 --seed 5 --grid quadratic")
    work(patched(NAME), "drive", [
        bare(sampling(tmp_path / "1", tuned, *cell)),
        bare(training(tmp_path / "3", data, "--init_checkpoint", tuned)),
        bare(training(tmp_path / "4", data, *OGDM, "--resume_checkpoint", tuned.with_name("model000002.pt"),
                      *words("--ogdm_projection heun --ema_rate 0.5 --lr_anneal_steps 4"))),
    ])  # fmt: skip
    with np.load(tmp_path / "1/samples_8x16x16x3.npz") as mine, np.load(ours / "s-pndm/samples_8x16x16x3.npz") as given:
        assert all(np.array_equal(mine[name], given[name]) for name in ("arr_0", "arr_1"))
    for name in ("3", "4"):
        assert (tmp_path / name / "flags.json").read_text() == (ours / "tuned/flags.json").read_text()
        assert (
            f"model flags that are not given are those of {ours}/tuned/flags.json"
            in (tmp_path / name / "log.txt").read_text()
        )


def test_without_our_flags_the_defaults_are_upstreams(patched, data, ours, tmp_path):
    """Which the files beside the weights do not change."""
    weights = ours / "weight/model000002.pt"
    runs = [sampling(tmp_path / "1", weights), training(tmp_path / "2", data, "--resume_checkpoint", weights)]
    work(patched(NAME), "errors", [run | {"argv": run["argv"][len(MODEL) :]} for run in runs])
    for run in runs:
        assert "size mismatch" in Path(run["out"], "error.txt").read_text()


def test_errors_say_what_to_do(patched, data, theirs, tmp_path):
    model = theirs / "plain/model000002.pt"
    runs = {
        "does not fit the model": training(
            tmp_path / "1", data, "--init_checkpoint", model, "--num_channels", 64),
        "no file nowhere.pt": training(tmp_path / "2", data, "--init_checkpoint", "nowhere.pt"),
        "--nfe: 101 steps do not fit on a grid of T = 100; give a lower": sampling(
            tmp_path / "5", model, "--sampler", "euler", "--nfe", 101),
        "--save_interval: 0 is not allowed; give a whole number >= 1": training(
            tmp_path / "6", data, "--save_interval", 0),
        "--timestep_respacing steers upstream's own sampler": sampling(
            tmp_path / "4", model, "--sampler", "euler", "--timestep_respacing", 5),
    }  # fmt: skip
    work(patched(NAME), "errors", list(runs.values()))
    for message, run in runs.items():
        assert message in Path(run["out"], "error.txt").read_text()


# ---- sampling ---------------------------------------------------------------------------------


def test_samplers_write_upstreams_npz(ours):
    """Of a class-conditional model that was trained, then fine-tuned with Heun's projection."""
    made = {name: np.load(ours / name / "samples_8x16x16x3.npz") for name in SAMPLERS}
    for name, npz in made.items():
        assert npz["arr_0"].dtype == np.uint8 and npz["arr_0"].std() > 1, name
        assert npz["arr_1"].shape == (8,) and set(npz["arr_1"]) <= {0, 1, 2}
        assert np.array_equal(npz["arr_1"], made["euler"]["arr_1"])
    assert len({npz["arr_0"].tobytes() for npz in made.values()}) == len(made)


def test_euler_over_every_step_is_upstreams_ddim(theirs, ours):
    first = slice(4)  # upstream draws noise that it never uses: its second batch starts elsewhere
    ddim = images_of(theirs / "ddim-all")[first].astype(int)
    assert np.abs(images_of(ours / "clip")[first] - ddim).max() <= 1
    assert np.abs(images_of(ours / "no-clip")[first] - ddim).max() > 1


def test_seeded_samples_do_not_depend_on_the_ranks(ours, ours_on_two_ranks):
    one, two = images_of(ours / "one-rank"), images_of(ours_on_two_ranks / "two-ranks")
    assert np.abs(one.astype(int) - two).max() <= 1


if __name__ == "__main__":
    workers = {f.__name__: f for f in (drive, parallel, fail_on_rank_1, other_settings, two_hosts, errors, eps_agrees)}
    workers[sys.argv[1]](json.loads(sys.argv[2]))
