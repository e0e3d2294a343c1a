"""receipt.jsonl: its chain finds every change, and each committed step has one line through every death."""

from __future__ import annotations

import threading
import types

import jax
import numpy as np
import pytest

from input_pipeline.batch import Example
from input_pipeline.loader import Loader
from input_pipeline.options import DataOptions
from input_pipeline.source import Source
from trainer.checkpoint.arrays import fingerprint
from trainer.config.schema import Config
from trainer.observe import events, files, metrics
from trainer.trust import receipt
from trainer.trust.receipt_lines import FILE, check, contradictions


class Fresh(Source):
  """Examples of one token, which counts how many were read."""

  name, read, changed = "fresh", 0, -1

  def example(self, index: int) -> Example:
    self.read += 1
    token = np.full(4, index % 7 + (index == self.changed), np.int32)
    return Example(token, token, np.ones(4, np.float32), np.arange(4, dtype=np.int32), np.ones(4, np.int32))

  def fingerprint(self) -> str:
    return "fresh"


def loader(source: Source | None = None):
  cfg = DataOptions(dataset_type="synthetic", max_target_length=4)
  return Loader(source or Fresh(), cfg, 4, "train")


class Process:
  """A process of a run: its metrics, with a receipt as their recorder."""

  def __init__(self, folder, is_primary=True, in_thread=False):
    self.folder = folder
    device = types.SimpleNamespace(platform="cpu", device_kind="cpu")
    cluster = types.SimpleNamespace(
      kind="simulated", num_slices=1, devices_per_slice=1, slices={0: (device,)}, recovers_in_process=True
    )
    log = events.EventLog(str(folder), "run", is_primary=is_primary)
    self.source = Fresh()
    data = types.SimpleNamespace(train=loader(self.source), identity={"data": "fresh", "global_batch_size": 4})
    config = Config().with_values(base_output_directory=str(folder.parent), run_name=folder.name)
    warnings = self.warnings = []
    run = types.SimpleNamespace(
      config=config,
      cluster=cluster,
      data=data,
      events=log,
      run_id="1",
      log=types.SimpleNamespace(warning=warnings.append),
      earlier_step=lambda: self.metrics.earlier_step,
    )
    recorders = lambda: [receipt.Writer(run)]
    self.metrics = metrics.Metrics(str(folder), log, is_primary=is_primary, recorders=recorders, in_thread=in_thread)

  def steps(self, *steps: int, loss: float = 2.5):
    for step in steps:
      proof = {"computed": {"0": [[0, 4]]}, "examples": "ab" * 16} | (
        {"state": {"params.w": "0" * 16}} if step % 3 == 0 else {}
      )
      record = metrics.StepRecord(step, 0.1, np.float32(loss + step), 1.5, 1e-3, 4 * step, 1, proof=proof)
      self.metrics.write(record)
    return self


def lines_of(folder) -> list[dict]:
  found, wrong = check(receipt.read(str(folder)))
  assert wrong == []
  return found


def steps_of(folder) -> list[int]:
  return [line["step"] for line in lines_of(folder) if "step" in line]


@pytest.fixture
def written(tmp_path):
  Process(tmp_path / "run").steps(1, 2, 3, 4).metrics.close()
  return tmp_path / "run"


def test_every_changed_byte_is_found(written):
  path = written / FILE
  whole = path.read_bytes()
  for at in range(len(whole)):
    damaged = bytearray(whole)
    damaged[at] ^= 1 << at % 8
    assert check(bytes(damaged).splitlines(keepends=True))[1], (at, whole[at : at + 40])


@pytest.mark.parametrize(
  "change",
  [
    lambda lines: [*lines[:2], *lines[3:]],
    lambda lines: lines[1:],
    lambda lines: [*lines[:3], lines[2], *lines[3:]],
    lambda lines: [*lines, lines[-1]],
    lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
    lambda lines: [lines[0], b"[1]\n", *lines[1:]],
    lambda lines: [lines[0], b"\xff\n", *lines[1:]],
  ],
)
def test_lines_that_are_removed_added_or_moved_are_found(written, change):
  lines = list(receipt.read(str(written)))
  assert check(lines)[1] == [] and check(change(lines))[1]


# ---- one line for each step


def test_a_kill_at_any_byte_leaves_a_receipt_that_goes_on(written):
  path = written / FILE
  whole = path.read_bytes()
  for at in range(0, len(whole), 97):
    path.write_bytes(whole[:at])
    Process(written).steps(5).metrics.close()
    steps = steps_of(written)
    assert steps == [*range(steps[0], 6)] and steps[0] in (1, 5), at  # 5: not even the first line was left


def test_what_is_missing_comes_from_the_metrics(written):
  """An object store had the newer metrics.jsonl when its process was lost."""
  files.cut_lines(str(written), FILE, lambda line: b'"step":3' not in line)
  Process(written).steps(5).metrics.close()
  assert steps_of(written) == [1, 2, 3, 4, 5]
  assert [line["step"] for line in lines_of(written) if "from" in line] == [3, 4]


def test_a_new_primary_adds_what_the_store_has_only_in_the_metrics(tmp_path):
  """Each file of lines of an object store is written on its own, so a kill may leave the metrics of the first steps
  without a receipt."""
  first, second = Process(tmp_path / "run"), Process(tmp_path / "run", is_primary=False)
  first.steps(1, 2, 3)
  second.steps(1, 2, 3, 4, 5)
  (tmp_path / "run" / FILE).unlink()
  second.metrics.take_over()
  second.metrics.flush()
  assert steps_of(tmp_path / "run") == [1, 2, 3, 4, 5] and lines_of(tmp_path / "run")[0]["after"] == 0
  first.metrics.close()
  second.metrics.close()
  (tmp_path / "run" / FILE).unlink()  # between two launches: nothing is made up
  third = Process(tmp_path / "run").steps(6)
  assert steps_of(tmp_path / "run") == [6]
  third.metrics.close()


def test_a_thread_writes_both_lines_in_their_order_and_is_waited_for(tmp_path):
  folder, gate = tmp_path / "run", threading.Event()
  process = Process(folder, in_thread=True)
  (writer,) = process.metrics._writers
  write = writer.write
  writer.write = lambda fields, line: gate.wait(60) and write(fields, line)
  process.steps(1)  # returns at once
  assert not (folder / FILE).exists() and (folder / "metrics.jsonl").read_text() == ""
  threading.Timer(0.05, gate.set).start()
  process.metrics.flush_pending()
  assert steps_of(folder) == [1] and len((folder / "metrics.jsonl").read_text().splitlines()) == 1
  process.steps(2, 3).metrics.hand_over()
  assert steps_of(folder) == [1, 2, 3]
  Process(folder, in_thread=True).steps(4).metrics.close()
  assert steps_of(folder) == [1, 2, 3, 4] and not [t for t in threading.enumerate() if t.name.startswith("records")]


def test_a_new_primary_goes_on_with_the_receipt(tmp_path):
  primary, other = Process(tmp_path / "run"), Process(tmp_path / "run", is_primary=False)
  for step in (1, 2, 3):
    primary.steps(step)
    other.steps(step)
  files.cut_lines(str(tmp_path / "run"), "metrics.jsonl", lambda line: b'"step": 3' not in line)
  other.metrics.take_over()  # the old one was killed between its two files
  other.steps(4).metrics.close()
  assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
  assert lines_of(tmp_path / "run")[-2]["state"]


def test_a_full_disk_costs_no_line_once_there_is_space(tmp_path, monkeypatch, capsys):

  def full(*_):
    raise OSError(28, "No space left on device")

  process = Process(tmp_path / "run").steps(1, 2)
  monkeypatch.setattr("os.write", full)
  process.steps(3, 4)
  monkeypatch.undo()
  process.steps(5).metrics.close()
  assert steps_of(tmp_path / "run") == [1, 2, 3, 4, 5]
  assert capsys.readouterr().err.count(FILE) == 1


# ---- digests


def test_two_readers_of_one_step_do_not_change_its_digest():
  """Before, each reader added to the digest of the loader, and a run was accused."""
  one = loader()
  expected = one.tally(3, hashes=True)
  one.batch(3)
  one.batch(3, np.array([2, -1, 0]))
  assert one.tally(3, hashes=True) == expected
  changed = Fresh()
  changed.changed = 14
  assert loader(changed).tally(3, hashes=True) != expected
  assert loader(changed).tally(2, hashes=True) == one.tally(2, hashes=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "uint8"])
@pytest.mark.parametrize("shape", [(), (5,), (3, 1025, 700)])
def test_numpy_computes_the_fingerprint_of_the_devices(dtype, shape):
  values = jax.numpy.asarray(np.random.default_rng(0).normal(size=shape) * 9, dtype)
  (expected,) = fingerprint.collect(fingerprint.dispatch({"x": values}))[0].values()
  assert fingerprint.of_host_array(np.asarray(values)) == expected


def test_the_lines_of_a_round_of_local_steps_have_the_same_weights_and_shares():
  config = {
    "steps": 8, "local_steps": 4, "shares_per_slice": 1, "receipt_state_period": 4, "checkpoint_period": 0,
    "enable_checkpointing": False, "witness_period": 0,
  }  # fmt: skip
  start = {"after": 0, "run_id": "", "config": config, "devices": {"slices": 2}, "computes": "shares"}
  dealt = {"0": [[0, 1]], "1": [[1, 2]]}

  def line(step: int, **changes) -> dict:
    state = {} if step % 4 else {"state": {"w": "0"}}
    weights = f"{(step - 1) // 4:08x}"
    return {"step": step, "examples": "0", "computed": dealt, "weights": weights, **state, **changes}

  good = [start, *map(line, range(1, 9))]
  assert [*contradictions(good)] == []
  assert [
    *contradictions(
      [*good[:5], line(5, computed={"0": [[0, 2]]}), *(line(n, computed={"0": [[0, 2]]}) for n in (6, 7, 8))]
    )
  ] == []
  for changes in ({"weights": "0000000f"}, {"computed": {"0": [[0, 2]]}}):
    found = [*contradictions([*good[:6], line(6, **changes), *good[7:]])]
    assert len(found) == 2 and "step 6: `weights` or `computed` differ from the line before" in found[0]
