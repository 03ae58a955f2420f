"""EDM: what the patched NVlabs/edm calls."""
