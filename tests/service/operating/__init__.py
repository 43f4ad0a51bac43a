"""docs/operating.md, run: its commands (`document.py`) in a folder of its own (`stage.py`)."""
