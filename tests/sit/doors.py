"""Every place of willisma/SiT's that may run what a file says; tests/faults/test_gate.py reads this."""

LOAD = "torch.load, whose weights_only is on by default; for a local file the patches call compat.find_model instead"
GUARDED = {"SiT": {"download.py: torch.load": LOAD}}
