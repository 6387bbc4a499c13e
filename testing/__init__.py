"""Instruments that only tests and developers need. No file of the program imports them."""
