"""What a recovery has cost."""

from __future__ import annotations

from types import SimpleNamespace

from trainer.elastic.recovery import RecoveryLog
from trainer.observe.events import EventLog
from trainer.observe.log import get


def test_a_hang_that_nobody_noticed_for_long_does_not_make_the_next_resize_expensive():
  now = [300.0]
  recovery = RecoveryLog(EventLog(None), get(None), SimpleNamespace(compilations=0), 1, lambda: now[0])
  recovery.begin("slice_down", [1], began=0.0, step=7, alive=3)  # noticed after 300 s
  now[0] += 20.0
  recovery.waited(20.0)
  now[0] += 1.0
  recovery.compiled(1.0)
  now[0] += 2.0
  recovery.restored(7, "snapshot", 2.0)
  now[0] += 1.0
  assert recovery.finish(3) == 3.0
