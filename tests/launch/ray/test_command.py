"""The command `python -m trainer.launch.ray`: what it refuses before it looks for a Ray cluster."""

from __future__ import annotations

import signal
import sys
import threading
import time
import types

import pytest

from trainer.launch.ray import job
from trainer.launch.ray.__main__ import main
from worlds import interruptions

TPU = "--topology 2x4 --accelerator-type TPU-V6E"
SLICES = "--min-slices 1 --max-slices 3"
CONFIG = "configs/base.yml run_name=x"
WRONG = {
  "no slices": (f"--min-slices 0 --max-slices 3 {CONFIG}", "--min-slices: 0 must be a whole number of at least 1"),
  "maximum below minimum": (f"--min-slices 3 --max-slices 2 {CONFIG}", "--max-slices 2: it must be at least"),
  "another number of slices": (f"{SLICES} {CONFIG} num_slices=4", "num_slices=4: trainer.launch.ray sets num_slices=3"),
  "Pathways": (f"{SLICES} {CONFIG} enable_single_controller=true", "contradicts cluster=multiprocess"),
  "restarts without checkpoints": (f"{SLICES} {CONFIG} enable_checkpointing=false", "would begin at step 0"),
  "a rehearsed hang": (f"{SLICES} {CONFIG} fault_injection=hang@5:1", "Use only slice_down@STEP:SLICE"),
  "a rehearsed return": (f"{SLICES} {CONFIG} fault_injection=slice_down@5:1/3", "Ray decides when a lost slice"),
  "an option of Ray that is none here": (
    f"{SLICES} {CONFIG} --num-workers 4",
    "num-workers (command line): there is no such key",
  ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name, capsys):
  arguments, message = WRONG[name]
  assert main(arguments.split()) == 2
  printed = capsys.readouterr()
  assert printed.out == "" and printed.err.startswith("error: ") and message in printed.err


def test_without_the_package_ray_the_command_says_how_to_install_it(capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, "ray", None)
  assert main(f"{SLICES} {TPU} {CONFIG}".split()) == 2
  assert "bash setup.sh --ray in a clone" in capsys.readouterr().err


def test_a_second_signal_ends_the_job_at_once(monkeypatch):
  stopped = threading.Event()
  supervisor = types.SimpleNamespace(stop=types.SimpleNamespace(remote=stopped.set))
  monkeypatch.setattr(interruptions, "SAME_SIGNAL_SECONDS", 0.0)
  repeats = interruptions.Repeats()
  job._stop(supervisor, repeats, signal.SIGTERM, None)
  assert stopped.wait(5)
  time.sleep(0.01)
  with pytest.raises(SystemExit) as ended:
    job._stop(supervisor, repeats, signal.SIGTERM, None)
  assert ended.value.code == 143
