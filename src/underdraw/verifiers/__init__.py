"""Verifiers: which path of a draft tree the target agrees with."""
