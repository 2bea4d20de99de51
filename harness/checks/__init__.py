"""Checks: pure functions of recordings. Each names the fault that it must catch and says how many facts it judged."""
