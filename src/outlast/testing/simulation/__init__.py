"""Deterministic simulation: the real worker, drive and store under one seed and a virtual clock."""
