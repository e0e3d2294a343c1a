"""tools.verify on runs of a tiny model: what it accepts, and what it finds."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import trainer
from input_pipeline.synthetic import SyntheticSource
from trainer.config.errors import ConfigError
from trainer.tools import verify
from trainer.trust import replay
from trainer.trust.receipt_lines import FILE

CHANGED = 7  # the step with one changed example


class OneChanged:
  """The examples of the run, but for one."""

  def __init__(self):
    self._source = SyntheticSource(vocab_size=64, length=16, seed=0, stream=0)

  def __len__(self):
    return 4 * 100

  def __getitem__(self, index):
    found = self._source.example(index)
    return found._replace(tokens=(found.tokens + 1) % 64 if index == 4 * CHANGED - 2 else found.tokens)._asdict()


@pytest.fixture(scope="module")
def runs(trained, config, once):
  """(the folder of a run, of the same with one changed example)."""
  changed = once("changed", lambda folder: trainer.Run(config(folder, "run_name=b"), OneChanged()).train())
  return trained, changed / "b"


@pytest.fixture
def run(runs, tmp_path):
  """A copy of the run, to be damaged."""
  return shutil.copytree(runs[0], tmp_path / "a")


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
  """Replays run here."""

  def run(command, log):
    config = trainer.load(*command[3:])
    assert command[2] == "trainer" and trainer.Run(config).train()

  monkeypatch.setattr(replay, "_run", run)


def ended(capsys, *arguments) -> tuple[int, str]:
  """(exit code, what was printed)."""
  code = verify.main(list(map(str, arguments)))
  printed = capsys.readouterr()
  return code, printed.out + printed.err


def test_an_undamaged_run_is_accepted(runs, capsys):
  code, printed = ended(capsys, runs[0])
  assert code == 0, printed
  assert "steps 1 to 12" in printed and "12 steps compared" in printed
  assert printed.count("arrays as in the receipt") == 3


def test_steps_that_are_computed_again_have_the_same_bits(runs, capsys):
  code, printed = ended(capsys, runs[0], "--replay", "6:9")
  assert code == 0 and "Computing steps 5 to 9 again" in printed, printed
  assert "5 steps have the same bits" in printed and "the state at 2 of them" in printed


def test_other_slices_compute_losses_within_the_tolerance(runs, capsys):
  code, printed = ended(capsys, runs[0], "--replay", "5:6", "num_slices=1")
  assert code == 0 and "agree within 1e-05" in printed and "Equal bits are not promised: slices 2 and now 1" in printed


def test_what_differs_from_the_receipt_is_named(run, capsys):
  path = run / "metrics.jsonl"
  records = [json.loads(line) for line in path.read_text().splitlines()]
  records[4]["loss"] = float(np.nextafter(np.float32(records[4]["loss"]), np.float32(9)))
  path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
  shutil.rmtree(run / "checkpoints" / "8")
  shutil.copytree(run / "checkpoints" / "4", run / "checkpoints" / "8")
  code, printed = ended(capsys, run)
  assert code == 1 and "step 5: loss 4." in printed and "checkpoint 8: it is of step 4" in printed, printed
  lines = (run / FILE).read_text().splitlines()
  lines[12] = lines[12].replace('"step":12', '"step":13')
  (run / FILE).write_text("\n".join(lines) + "\n")
  code, printed = ended(capsys, run)
  assert code == 1 and "line 13: it was changed" in printed


def test_two_runs_differ_first_at_the_step_with_the_changed_example(runs, capsys):
  code, printed = ended(capsys, runs[0], "--against", runs[1])
  assert code == 1 and f"The runs differ first at step {CHANGED}: examples, loss, grad_norm" in printed, printed
  assert ended(capsys, runs[0], "--against", runs[0])[0] == 0


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["{run}/checkpoints"], "has no receipt.jsonl. Runs write it unless receipt_state_period=0"),
    (["{run}", "num_slices=1"], "keys belong to a replay.\nAdd --replay"),
    (["{run}", "--replay", "3"], "is not FROM:TO"),
    (["{run}", "--replay", "4:3"], "is not FROM:TO"),
    (["{run}", "--replay", "9:13"], "no step 13, but 1 to 12"),
    (["{run}", "--replay", "9:12", "nun_slices=1"], "nun_slices"),
    (["{run}", "--replay", "9:12", "num_slices=x"], "num_slices must be a whole number"),
    (["ftp://host/run"], "must be gs://BUCKET/FOLDER"),
    (["{run}/config.yml"], "has no receipt.jsonl"),
  ],
)
def test_wrong_input_is_refused(runs, capsys, arguments, message):
  code, printed = ended(capsys, *(text.format(run=runs[0]) for text in arguments))
  assert code == 2 and message in printed, printed


def test_a_replay_of_steps_with_another_batch_is_refused():
  """The run was resumed after step 4 with allow_config_change=global_batch_size."""
  start = lambda after, batch: {"after": after, "config": {}, "data": {"global_batch_size": batch}}
  lines = [start(0, 4), start(4, 8), start(6, 8)]
  for base, last, after in ((0, 4, 0), (4, 9, 4)):
    assert replay._start(lines, base, last)["after"] == after
  with pytest.raises(ConfigError, match=r"--replay ...:5: global_batch_size changed after step 4"):
    replay._start(lines, 0, 5)


def test_a_replay_needs_a_checkpoint_before_it(run, capsys):
  shutil.rmtree(run / "checkpoints" / "4")
  code, printed = ended(capsys, run, "--replay", "6:7")
  assert code == 2 and "needs a committed checkpoint of step 5 or before" in printed and "[8, 12]" in printed
