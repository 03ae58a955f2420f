"""Starts the diffusers trainer again and again, and sends it a signal each time. torch is imported once.

    python kill_loop.py SIGNAL TIMES SEED FOLDER FLAG...

Each start is a fork. After TIMES signals at random moments the last start goes on to the end of the run. Prints how
many starts found a checkpoint.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from ogdm_core.diffusers import __main__ as trainer
from ogdm_core.diffusers import train as train  # imports torch before the first fork

PEEK = os.WEXITED | os.WNOHANG | os.WNOWAIT


def start(argv: list[str], log: Path) -> int:
    """The process of one more trainer."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = trainer.main(argv)
    except SystemExit as end:
        print(end.code, file=sys.stderr)
    finally:
        sys.stdout.flush()
        os._exit(code)


def main(name: str, times: str, seed: str, folder: str, *flags: str) -> None:
    """Ends with an error where a start fails, or does not end within a minute of its signal."""
    number, draw, out = getattr(signal, name), random.Random(int(seed)), Path(folder)
    argv, log = ["--output", folder, *flags], out.with_suffix(".log")
    log.touch()
    continued = 0
    for _ in range(int(times)):
        seen = log.read_text().count("\nstep ")
        pid = start(argv, log)
        if draw.random() < 0.2 and continued:  # while it starts
            time.sleep(draw.uniform(0.2, 2))
        else:
            while log.read_text().count("\nstep ") == seen and not os.waitid(os.P_PID, pid, PEEK):
                time.sleep(0.02)
            time.sleep(draw.uniform(0, 1))
        os.kill(pid, number)
        deadline = time.monotonic() + 60
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            assert time.monotonic() < deadline, "does not end"
            time.sleep(0.02)
        code = os.waitstatus_to_exitcode(ended[1])
        assert code in (-number, 0, 130), log.read_text()[-2000:]
        continued += (out / "checkpoint.pt").exists()
    code = os.waitstatus_to_exitcode(os.waitpid(start(argv, log), 0)[1])
    assert code == 0, log.read_text()[-2000:]
    print(continued)


if __name__ == "__main__":
    main(*sys.argv[1:])
