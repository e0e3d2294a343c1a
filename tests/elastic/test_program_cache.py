"""The cache of programs."""

from __future__ import annotations

from trainer.elastic.program_cache import CachedProgram, ProgramCache


def test_an_unexplained_error_drops_everything_that_was_compiled():
  cache = ProgramCache(None, None, None, None, None)
  cache.topologies[0, 1] = CachedProgram("program", step="step", evaluation="evaluation")
  cache.checks[1] = "what a witness has compiled"
  cache.forget_steps()
  assert cache.topologies[0, 1] == CachedProgram("program") and not cache.checks
