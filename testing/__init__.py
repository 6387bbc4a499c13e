"""Tools for tests and developers. No file of the program imports them.

PYTEST_DONT_REWRITE: pytest's plugin `judging` imports this file before conftest.py.
"""
