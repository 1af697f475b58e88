"""Public test helpers."""
