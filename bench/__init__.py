"""Measurements beside what people would use instead; `python -m bench` lists them."""
