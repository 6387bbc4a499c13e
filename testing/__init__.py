"""Tools for tests and developers. No file of the program imports them."""
