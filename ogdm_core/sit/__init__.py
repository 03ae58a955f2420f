"""SiT: what the patched willisma/SiT calls."""
