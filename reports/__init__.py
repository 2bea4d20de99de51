"""Renderers: terminal, JSON, JUnit, Markdown, HTML. They read verdicts and recordings, never a live stack."""
