"""What plug-ins may do to a run."""

from __future__ import annotations

import time

import pytest
from tests.run.test_session import KEYS

from trainer import app
from trainer import config as config_lib
from trainer.observe.events import read_events
from trainer.process.stop import Stop, StopRequested
from trainer.run.plugins import Extensions, Plugin


class Stopped(Plugin):
  """Must end before its work after the last step is done."""

  def completed(self, done):
    raise StopRequested


@pytest.mark.soak
def test_a_complete_run_that_must_end_is_still_complete(tmp_path):
  config = config_lib.load([*KEYS, f"base_output_directory={tmp_path}", "cluster=simulated"])
  ended = app.run(config, lambda: Extensions(plugins=(Stopped,)), Stop(), time.monotonic())
  assert ended.code == 0, ended.error
  assert "left out" in (tmp_path / "run" / "log.txt").read_text()
  assert read_events(str(tmp_path / "run"))[-1]["exit"] == 0
