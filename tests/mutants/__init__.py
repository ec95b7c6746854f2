"""Seeded privacy bugs, one small patch each, and the test that catches each of them: `python -m tests.mutants`."""
