"""Data sets of the papers and of the demo, each in one short file; ``python -m tasks.run NAME``."""
