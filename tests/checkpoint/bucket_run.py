"""Actions of one process on checkpoints in a bucket: ACTION ARGUMENT ... [; ACTION ARGUMENT ...]."""

from __future__ import annotations

import os
import sys

import jax
from tests.support import toy_state

from trainer import world as world_lib
from trainer.checkpoint.persistent import Persistent

CONFIG = {"checkpoint_period": 1, "max_num_checkpoints_to_keep": 3}


def save(directory: str, first: str, last: str) -> None:
  tiers = toy_state.backups(toy_state.config(**CONFIG), directory, world=world_lib.of_jax())
  for step in range(int(first), int(last) + 1):
    tiers.save(step, toy_state.state(step), {"tokens": step})
  tiers.close()


def die_in_save(directory: str, step: str) -> None:
  """Ends without cleanup, as after kill -9, between the last array of `step` and the commit."""
  Persistent._seal = lambda self: os._exit(9)  # type: ignore[method-assign]
  save(directory, step, step)


def die_before_commit(directory: str, step: str) -> None:
  """The same between the manifest of `step` and the commit."""
  seal = Persistent._seal
  Persistent._seal = lambda self: (seal(self), os._exit(9))  # type: ignore[method-assign]
  save(directory, step, step)


def restore(directory: str, step: str) -> None:
  recorder = toy_state.Recorder()
  restored = toy_state.backups(
    toy_state.config(**CONFIG), directory, recorder=recorder, world=world_lib.of_jax()
  ).restore_newest(toy_state.abstract(toy_state.values(), toy_state.mesh(1, 2)))
  print("\n".join(recorder.lines))
  assert restored is not None and restored.step == int(step), restored
  toy_state.assert_same_bits(restored.state, toy_state.values(int(step)))


def watch(directory: str) -> None:
  """What trainer.tools.watch reads of a run; then a record is added as another process does it, without fsspec."""
  import itertools
  import json
  import urllib.parse
  import urllib.request

  from tests.support import fake_run

  from trainer.observe.files import read_lines
  from trainer.report import live

  live._body = lambda runs: ""  # without pictures
  run = fake_run.FakeRun(directory, steps=9, slices=1)
  run.step(1)
  run.step(2)
  run.close()
  clock = itertools.count(2_000_000_000, 1000)  # no page is too young to be made again
  page = live.LivePage([directory], period=0.0, clock=lambda: next(clock))
  print(page.state().notice)
  *_, last = read_lines(directory, "metrics.jsonl")
  scheme, _, place = f"{directory}/metrics.jsonl.000001".partition("://")
  bucket, _, name = place.partition("/")
  if scheme == "gs":
    address = f"{os.environ['STORAGE_EMULATOR_HOST']}/upload/storage/v1/b/{bucket}/o?uploadType=media"
    method, address = "POST", f"{address}&name={urllib.parse.quote(name, safe='')}"
  else:
    method, address = "PUT", f"{os.environ['AWS_ENDPOINT_URL']}/{place}"
  record = json.dumps(json.loads(last) | {"step": 3}).encode()
  # With the type that urllib sends by itself, moto's server takes the bytes for a form, and stores none.
  request = urllib.request.Request(address, record, {"Content-Type": "application/octet-stream"}, method=method)
  urllib.request.urlopen(request, timeout=60)
  print(page.state().notice)


def files(directory: str) -> None:
  from input_pipeline import places
  from trainer.checkpoint import checksums

  print("\n".join(checksums.walk(places.at(directory))))


def list_checkpoints(directory: str) -> None:
  from trainer.tools import checkpoints

  assert checkpoints.main([directory, "--verify"]) == 0


def damage(path: str) -> None:
  from input_pipeline import places

  file = places.at(path)
  data = bytearray(file.read_bytes())
  data[len(data) // 2] ^= 1
  file.write_bytes(bytes(data))


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", 8)
  actions = " ".join(sys.argv[1:]).split(" ; ")
  for action, *arguments in map(str.split, actions):
    print(f"--- {action}")
    globals()[action](*arguments)
