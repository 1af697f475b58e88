"""Stores: one folder each, the same query names in each `queries.sql`, all behind `base.Store`."""
