"""EDM2: what the patched NVlabs/edm2 calls."""
