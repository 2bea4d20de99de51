"""The contract: what every stack is asked, what it may be able to do, and what can go wrong. Imports nothing of the harness."""
