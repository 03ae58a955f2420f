"""FID, precision and recall of image files: what `run/evaluate.sh` runs."""
