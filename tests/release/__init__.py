"""The parts of `make release`: what runs for hours before a version is given out, and the page of its figures."""
