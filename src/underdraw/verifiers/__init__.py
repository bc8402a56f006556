"""Verifiers: which path of a draft tree the target accepts."""
