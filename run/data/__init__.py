"""Data sets, from the archives people have to the folder of images that trainers read: `run/prepare_data.sh`."""
