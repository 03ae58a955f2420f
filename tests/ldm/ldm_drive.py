"""Runs upstream's scripts one after the other in one process: their imports take seconds.

usage: ldm_drive.py STEPS.json LOGDIR, in the folder of a patched latent-diffusion

A step is {"name", "argv"} and, to continue another run, {"copy"}: its folder is copied first; with
{"exit"}, it must end with that status, message or error.
"{NAME}" in an argument stands for the folder of the run of that name, and "{rank}" for the rank's number.
"""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path


def main() -> None:
    steps, logdir = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    sys.path.insert(0, os.getcwd())
    runs = {"rank": os.environ.get("RANK", "0")}
    for step in steps:
        name = step["name"]
        if "copy" in step:
            runs[name] = logdir / f"copy_{name}"
            if runs["rank"] == "0":
                shutil.copytree(runs[step["copy"]], runs[name])
                (runs[name] / "checkpoints" / "last.ckpt").unlink()
            _barrier()
        sys.argv = [argument.format(**runs) for argument in step["argv"]]
        print(f"@@@@@ {name}: {' '.join(sys.argv)}", flush=True)
        sys.modules.pop("main", None)
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except BaseException as error:
            code = str(getattr(error, "code", repr(error)))
            if "exit" not in step or not code.startswith(step["exit"]):
                raise
            print(code, flush=True)
        _barrier()
        for found in logdir.glob(f"20*_{name}"):
            runs[name] = found
    print(f"@@@@@ done; outlives its output: {hasattr(sys.stdout, 'outlives')}", flush=True)


def _barrier() -> None:
    from torch import distributed as dist

    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    main()
