"""Do two checkouts print the same native commands? Every table, scale and preset, by --dry-run.

    python tests/run/compare_commands.py OLD NEW [--show]

Paths of the checkouts and keys in folders' names are made equal first. Ends with
status 1, and prints the lines that differ, if any command does; says how many keys changed.
"""

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

TABLES, SCALES = (1, 2, 3, 7, 9), ("paper", "smoke", "cpu", "cpu-mnist")
NETWORKS = ("cifar10-adm", "cifar10-edm", "cifar10-edm-cond", "celeba64-adm", "lsun-church-ldm")


def lines(root: Path) -> dict[str, list[str]]:
    """What each dry run prints, by its command line."""
    asked = [f"run.tables {n} --scale {s} --dry-run" for n in TABLES for s in SCALES]
    asked += ["run.tables 1 --dry-run --gpus 16 --nodes 2 --slurm --seeds 0,1"]
    asked += ["run.tables 3 --dry-run --scale cpu --from-scratch --seeds 0,1"]
    asked += ["run.tables 1 --dry-run --set cifar10-adm-*:--num_heads=4 --set *edm*:sample:--batch=7"]
    for network in NETWORKS:
        data = "" if "ldm" in network else "--data images"
        adm = "--init weights.pt" if "adm" in network else ""
        heun = ["ogdm-ft-heun"] if network == "cifar10-edm" else []
        for kind in ("baseline", "control", "ogdm-ft", *heun, *(["ogdm"] if "adm" in network else [])):
            init = adm if kind not in ("baseline", "ogdm") else ""
            asked += [f"run.train {network}-{kind} {data} {init} --gpus 2 --dry-run -- --own flag"]
        for sampler in ("euler", "s-pndm", "f-pndm"):
            asked += [f"run.train {network}-ogdm-ft --sample {sampler} --nfe 15 --model m.pt --seed 3 --dry-run"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", CODE, json.dumps(asked)], cwd=root, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode().replace(str(root), "ROOT")
    return {words: lines.splitlines() for words, lines in json.loads(text).items()}


CODE = """
import contextlib, importlib, io, json, os, sys
found = {}
for words in json.loads(sys.argv[1]):
    module, *argv = words.split()
    if module == "run.tables":
        argv[1:1] = ["--out", os.path.abspath("none"), "--data", os.path.abspath("data")]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            status = importlib.import_module(f"{module}.__main__").main(argv)
        except SystemExit as end:
            status = end.code
    found[words] = f"{out.getvalue()}\\n# status {status}"
print(json.dumps(found))
"""


def main() -> int:
    """Compares; exit status 0 if the commands are the same."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("old", type=Path)
    p.add_argument("new", type=Path)
    p.add_argument("--show", action="store_true", help="print every command of NEW, too")
    args = p.parse_args()
    old, new = lines(args.old.resolve()), lines(args.new.resolve())
    key = re.compile(r"(?<=-)[0-9a-f]{10}(?=/| |$|-)")
    count = keys = wrong = 0
    for words, before in old.items():
        after = new[words]
        count += sum(not line.startswith("#") for line in before)
        keys += sum(a != b for a, b in zip(before, after, strict=False))
        plain = [[key.sub("KEY", line) for line in text] for text in (before, after)]
        if args.show:
            print(f"## {words}", *after, sep="\n")
        if plain[0] != plain[1]:
            wrong += 1
            print(f"differs: {words}", *difflib.unified_diff(*plain, "old", "new", lineterm="", n=0), sep="\n")
    print(f"{count} commands of {len(old)} dry runs, {wrong} dry runs differ; {keys} lines differ by keys or more")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
