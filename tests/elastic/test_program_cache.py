"""The cache of programs."""

from __future__ import annotations

from types import SimpleNamespace

from trainer.elastic.program_cache import CachedProgram, ProgramCache
from trainer.observe.events import EventLog
from trainer.observe.log import get


def test_an_unexplained_error_drops_everything_that_was_compiled():
  cache = ProgramCache(None, None, None, None, None)
  cache.topologies[0, 1] = CachedProgram("program", step="step")
  cache.others["witness on slice 1"] = "what a witness has compiled"
  cache.forget_steps()
  assert cache.topologies[0, 1] == CachedProgram("program") and not cache.others


def test_a_log_says_that_it_waits_for_a_compilation():
  """A large model compiles for minutes, without any other line."""
  lines = []
  log = get(None)
  log.redirect(lines.append)
  counter, view = SimpleNamespace(compilations=0), SimpleNamespace(slices=(0, 2))
  cache = ProgramCache(lambda view: "program", lambda program: len(lines), EventLog(None), log, counter)
  assert cache.step(view) == 1 and "Compiling for slices [0, 2] ..." in lines[0]
  assert (
    cache.kept("evaluation on slices [0, 2]", lambda: len(lines)) == 2 and "evaluation on slices [0, 2] ..." in lines[1]
  )
  assert cache.step(view) == 1 and len(lines) == 2
