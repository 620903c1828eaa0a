"""Helpers for tests of code that uses flexcp, and of flexcp itself."""
