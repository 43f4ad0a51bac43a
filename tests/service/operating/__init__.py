"""The commands of docs/guides (`document.py`), run in an empty folder (`stage.py`)."""
