"""The cache of programs."""

from __future__ import annotations

import functools
import threading
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


def test_a_program_under_way_in_the_background_is_waited_for_and_nothing_follows_one_that_fails(capsys):
  begun, release, log = threading.Event(), threading.Event(), get(None)
  log.redirect(lambda line: None)
  cache = ProgramCache(None, None, EventLog(None), log, SimpleNamespace(compilations=0))
  compiled = []

  def slowly(what):
    begun.set()
    assert release.wait(30)
    compiled.append(what)
    return what

  def fail():
    raise ValueError("does not compile")

  others = {what: functools.partial(slowly, what) for what in ("first", "second")}
  cache.prepare([], others, lambda: True)
  assert begun.wait(30)
  cache.prepare([], others, lambda: True)  # the next attempt asks while the first program is compiled
  assert not cache.wait(0.0)
  threading.Timer(0.1, release.set).start()
  assert cache.kept("first", lambda: "again") == "first"
  assert cache.wait(30) and compiled == ["first", "second"]
  cache.prepare([], {"broken": fail, "third": functools.partial(slowly, "third")}, lambda: True)
  assert (
    cache.wait(30) and cache.kept("third", lambda: "now") == "now" and "does not compile" in capsys.readouterr().err
  )
  cache.close()
  assert cache.wait(0.0)
