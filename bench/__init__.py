"""Measurements of nanoparallel and of its alternatives; `python -m bench` lists them."""
