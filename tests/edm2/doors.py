"""Every place of NVlabs/edm2's that may run what a file says; tests/faults/test_gate.py reads this."""

SCRIPT = "upstream's script, not patched, as docs/reliability.md says"
GUARDED = {
    "edm2": {
        "generate_images.py: pickle.load": "the patch rebinds pickle to compat.careful_pickle",
        "torch_utils/distributed.py: torch.load": "compat.install replaces torch.load",
        "torch_utils/persistence.py: exec": "compat never calls the function that leads there",
        "calculate_metrics.py: pickle.load": SCRIPT,
        "count_flops.py: pickle.load": SCRIPT,
        "reconstruct_phema.py: pickle.load": SCRIPT,
        "toy_example.py: pickle.load": SCRIPT,
    },
}
