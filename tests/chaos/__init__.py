"""Trials: real `sender run` processes, a real PostgreSQL, a strict provider over real HTTP."""
