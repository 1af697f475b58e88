"""Keeps LLM agents alive past the process they run in."""
