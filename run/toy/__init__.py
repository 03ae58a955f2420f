"""OGDM on a spiral in two dimensions: what `run/toy.sh` runs."""
