"""Command lines that cannot work, as one table: refused before any work, with the flag and what to do."""

import importlib
from pathlib import Path

import numpy as np
import pytest

from run.benchmark import __main__ as benchmark
from run.quickstart import __main__ as quickstart
from run.quickstart import score
from run.toy import __main__ as toy

# In a folder with `file`, which is empty, and a.npz, which holds eight images of 4x4.
REFUSED = {
    "ogdm_core.diffusers --output out --channels 8,8": [
        ("--ogdm --ogdm-k 1.5", "--ogdm-k"),
        ("--ogdm --ogdm-gamma -1", "a number >= 0"),
        ("--ogdm --ogdm-k 0.0001", "smallest k that works is 0.001"),
        ("--model nowhere", "no folder 'nowhere'"),
        ("--model nowhere", "see python -m ogdm_core.diffusers --help"),
        ("--data nowhere", "no data at 'nowhere'"),
        ("--steps 0", "--steps: 0 is not allowed; give a whole number >= 1"),
        ("--ema nan", "--ema: nan is not allowed; give a number in [0, 1)"),
        ("--seed 1e3", "--seed: 1e3 is not allowed; give a whole number in [0, 2147483648)"),
        ("--lr 1e38", "--lr: 1e38 is not allowed; give a number in [0, 1e+37)"),
        ("--batch-size 100000000", "--batch-size: 100000000 is not allowed; give a whole number in [1, 1048576)"),
        ("--size 100000", "--size: 100000 is not allowed; give a whole number in [1, 32768)"),
        ("--channels 800000,8", "smaller --batch-size, --channels or --size"),
        ("--norm-groups 3", "--norm-groups: 3 does not divide [8, 8]"),
        ("--channels 8,x", "--channels: '8,x' is not allowed"),
        ("--output file", "--output: cannot write"),
        ("--output file/below", "is no writable folder"),
    ],
    "run.train": [
        ("cifar10-adm-ogdm-ft --data x", "--init ema_0.9999_NNNNNN.pt"),
        ("cifar10-adm-ogdm --data x --gpus 3", "3 does not divide"),
        ("cifar10-adm-ogdm --data x --gpus 4 --nodes 3", "3 does not divide --gpus 4"),
        ("cifar10-edm-baseline --data x --gpus 4 --nodes 2", "--rendezvous HOST:29400"),
        ("cifar10-adm-ogdm --data x --gpus 0", "0 is not allowed"),
        ("cifar10-adm-ogdm --data x --seed 1", "has none"),
        ("cifar10-adm-ogdm", "run/prepare_data.sh makes them"),
        ("lsun-church-ldm-baseline --data x", "run/prepare_data.sh lsun"),
        ("nope --data x", "use one of cifar10-adm-baseline"),
        ("cifar10-adm-ogdm --sample euler", "--sample needs --model"),
        ("cifar10-edm-ogdm-ft --sample heun --nfe 6 --model x", "nearest it can is 5 or 7"),
        ("cifar10-edm-ogdm-ft --sample hein --model x", "heun"),
        ("cifar10-edm-ogdm-ft --data c.zip --third-party nowhere", "run/setup.sh edm"),
    ],
    "run.tables 1": [
        ("--nfes ten", "--nfes"),
        ("--nfes 0", "--nfes"),
        ("--checkpoint row", "--checkpoint"),
        ("--set row", "is not ROW:--FLAG=VALUE"),
        ("--set row:--lr", "is not ROW:--FLAG=VALUE"),
        ("--set :--lr=1", "is not ROW:--FLAG=VALUE"),
        ("--set row:=1", "is not ROW:--FLAG=VALUE"),
        ("--set row:sample:--lr", "is not ROW:--FLAG=VALUE"),
        ("--images 3", "--images"),
        ("--jobs -1", "--jobs"),
        ("--gpus 0", "--gpus"),
        ("--seeds x", "--seeds"),
        ("--scale smoke --out file/x", "--out: "),
    ],
    "run.evaluate a.npz a.npz --features pixels": [
        (f"--seed {2**70}", "--seed"),
        ("--device nope", "nope: "),
        ("--cache file/x", "file"),
        ("--pr-images 3", "3 is not allowed; give a whole number >= 4"),
        ("--batch 0", "--batch: 0 is not allowed"),
        ("--json .", "is a folder"),
        ("--json file/out", "file"),
        ("--save-statistics .", "is a folder"),
        ("--save-statistics file/out", "file"),
        ("--evaluator adm", "--evaluator adm does not know --features"),
    ],
    "run.evaluate a.npz a.npz --evaluator adm": [
        ("--save-statistics s.npz", "--evaluator adm does not know --save-statistics"),
        ("--pr-images 9", "--evaluator adm does not know --pr-images"),
        ("--seed 1", "--evaluator adm does not know --seed"),
        ("--batch 2", "--evaluator adm does not know --batch"),
        ("--device cpu", "--evaluator adm does not know --device"),
    ],
    "run.quickstart": [
        (f"--seeds 0,{2**40}", "--seeds"),
        ("--seeds=-1", "--seeds"),
        ("--seeds a", "--seeds"),
        ("--seeds 1,0,1", "name each once"),
        ("--steps 0", "--steps"),
        ("--samples 9", "--samples"),
        ("--out file/x", "file"),
    ],
    "run.quickstart.score model": [
        ("--output file/x.json", "file"),
        ("--output x.json --discretisation cubic", "--discretisation"),
        ("--output x.json --discretisation euler-5=cubic", "--discretisation"),
        ("--output x.json --discretisation heun-4=linear", "--discretisation"),
        ("--output x.json --discretisation ddim-5=linear", "--discretisation"),
    ],
    "run.toy": [
        ("--out file/x", "file"),
        (f"--seed {2**70}", "--seed"),
    ],
    "run.sweep --out out": [
        ("--set k", "'k' is not NAME=V1,V2"),
        ("--set kk=1", "kk"),
        ("--set k=0.1,7", "7"),
        ("--jobs 0", "--jobs"),
        ("--cells heun-10", "heun cannot run in 10 network evaluations"),
        ("--cells heun-10", "such as euler-5,s-pndm-10"),
        ("--model absent", "no folder 'absent'"),
    ],
    "run.guidance": [
        ("sample nowhere --output a --nfe 10", "heun cannot run in 10 network evaluations"),
        ("sample nowhere --output a --sampler magic", "unknown sampler"),
        ("sample nowhere --output a --guide-weight=nan", "--guide-weight: nan is not allowed"),
        ("train --data digits --output a --samples no.npz", "no data at 'no.npz'"),
    ],
    "run.figures": [
        ("xi --out out --beta 1.5", "beta=1.5"),
        ("xi --mu two", "see run/analysis_xi.sh --help"),
        ("neighbours --train digits", "--samples"),
        ("neighbours --train digits --samples a.npz --method A=b", "--method"),
        (
            "teaser --method A=x-{nfe}-{sampler}.npz --row A:euler --nfe 2 4 --features inception",
            "FILE.pt, or MODULE:NAME",
        ),
    ],
    "run.benchmark": [
        ("--cases euler_exact,euler", "--cases: 'euler' is not allowed; give all, or some of"),
        ("--cases=", "--cases: '' is not allowed"),
        ("--repeats 0", "--repeats: 0 is not allowed; give a whole number >= 1"),
        ("--out speed.txt", "name a file that ends in .json"),
        ("--resolution 33", "33 is not a power of two from 8"),
        ("--channels 20", "20 is not a multiple of 16"),
        ("--device tpu", "--device: invalid choice: 'tpu'"),
    ],
}
ROWS = [(command, *row) for command, rows in REFUSED.items() for row in rows]


@pytest.mark.parametrize(("command", "flags", "says"), ROWS, ids=[f"{c} {f}" for c, f, _ in ROWS])
def test_flags_are_refused_before_any_work(tmp_path, monkeypatch, capsys, command, flags, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    np.savez("a.npz", arr_0=np.random.default_rng(0).integers(0, 256, (8, 4, 4, 3), dtype=np.uint8))
    monkeypatch.setattr(score, "check_model", lambda path: None)
    for place, name in ((toy, "train"), (quickstart, "work"), (benchmark, "edm")):
        monkeypatch.setattr(place, name, lambda *a, **k: pytest.fail("worked"))
    module, *words = command.split()
    path = module if module.endswith("score") else f"{module}.__main__"
    try:
        code = importlib.import_module(path).main([*words, *flags.split()])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert code in (1, 2) and said.startswith(("error: ", "Nothing was started")) and says in said
    assert said.count("\n") <= 2, "one line, and where to find help"
    assert sorted(p.name for p in Path().iterdir()) == ["a.npz", "file"]
