"""`python -m trainer.tools.accept OUT`: shows on the machines at hand that the promises hold (docs/accept.md)."""
