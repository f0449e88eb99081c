"""Training methods side by side; the door is `python -m src.bench`."""
