"""Runs a patched clone's generate.py several times in one process.

    python edm_generate.py CLONE CASES.json

A case is a list of generate.py's own arguments.
"""

import json
import sys
from pathlib import Path


def main(clone: str, cases: str) -> None:
    """All cases of a JSON file, in order."""
    sys.path.insert(0, clone)
    import generate
    from torch_utils import distributed

    distributed.init()
    distributed.init = lambda: None  # once is enough for all cases
    for case in json.loads(Path(cases).read_text()):
        generate.main(case, standalone_mode=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
