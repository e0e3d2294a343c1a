"""Local copies of slices that are JAX worlds of their own, each on its own host: what a restore borrows from others."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
from tests.support import toy_state

from trainer.checkpoint import checksums
from trainer.checkpoint.errors import LenderLost
from trainer.checkpoint.local_copies import box_of
from trainer.checkpoint.tiers import Tiers
from trainer.world import SingleWorld

ID = "0123"  # of the run
STEPS = (1, 2)


class Host:
  """A process that is the world of one slice, with a folder of its own. It has saved the steps."""

  def __init__(self, path, member, steps=STEPS, run_id=ID):
    self.member, self.mesh = member, toy_state.mesh(1, 4, first=4 * member)
    self.recorder = toy_state.Recorder()
    cfg = toy_state.config(
      enable_emergency_checkpoint=True,
      local_checkpoint_directory=str(path / f"host{member}"),
      local_checkpoint_period=1,
      checkpoint_period=10,
    )
    slices = {member: jax.devices()[4 * member : 4 * member + 4]}
    self.tiers = Tiers(cfg, str(path / "run"), world=SingleWorld(), run_id=run_id, slices=slices,
                       log=self.recorder.log, emit=self.recorder.emit)  # fmt: skip
    self.root = self.tiers._emergency.root
    for step in steps:
      self.tiers.maybe_save(step, toy_state.state(step, self.mesh), {"tokens": step})
    self.tiers.wait()

  def file(self, step, kind):
    return self.root / f"{step}.s{self.member}.p0.{kind}"

  def index(self, step):
    return checksums.parse(self.file(step, "json").read_bytes(), "")

  def damage(self, step, which):
    """Flips a bit in every part of the copy for which which(part) is true."""
    data = bytearray(self.file(step, "bin").read_bytes())
    parts = [part for part in self.index(step)["parts"] if which(part)]
    assert parts
    for part in parts:
      data[part["offset"]] ^= 16
    self.file(step, "bin").write_bytes(data)

  def restore(self, *others, lost_after=10**9):
    """(step, tier) of what the host restores with the help of the others; None: no state."""
    self.link = Link(others, lost_after)
    with self.tiers.borrowing(self.link):
      restored = self.tiers.restore_newest(toy_state.abstract(toy_state.values(), self.mesh))
    if restored is None:
      return None
    toy_state.assert_same_bits(restored.state, toy_state.values(restored.step))
    assert restored.meta["tokens"] == restored.step
    return restored.step, restored.tier

  def logged(self, text):
    return any(text in line for line in self.recorder.lines)


class Link:
  """Lenders that are asked as over a network: questions and answers are JSON, and arrays are bytes."""

  def __init__(self, hosts, lost_after):
    self._lenders = {host.member: host.tiers.lender() for host in hosts}
    self.members = sorted(self._lenders)
    self._left, self.bytes = lost_after, 0

  def ask(self, member, question, allocate):
    self._left -= 1
    if self._left < 0:
      raise LenderLost(f"lost the connection to member {member}")
    answer, arrays = self._lenders[member].answer(json.loads(json.dumps(question)))
    answer = json.loads(json.dumps(answer))
    buffers = allocate(answer)
    assert len(buffers) == len(arrays)
    for buffer, array in zip(buffers, arrays, strict=True):
      assert buffer.dtype == array.dtype and buffer.shape == array.shape
      buffer[...] = array
      self.bytes += array.nbytes
    return answer, buffers


def lower_half(part):
  """Whether the part is of the first two devices, as of the first of two processes."""
  return not part["box"] or part["box"][0][0] == 0


@pytest.fixture
def hosts(tmp_path):
  return Host(tmp_path, 0), Host(tmp_path, 1)


def test_a_host_that_lacks_nothing_borrows_nothing(hosts):
  assert hosts[0].restore(hosts[1]) == (2, "emergency")
  assert hosts[0].link.bytes == 0


def test_a_wiped_host_borrows_everything(hosts):
  shutil.rmtree(hosts[0].root)
  hosts[0].root.mkdir()
  assert hosts[0].restore() is None
  assert hosts[0].restore(hosts[1]) == (2, "emergency")
  assert hosts[0].link.bytes == sum(np.asarray(x).nbytes for x in jax.tree.leaves(toy_state.values()))


def test_halves_that_are_left_on_different_hosts_are_put_together(hosts):
  hosts[0].damage(2, lower_half)
  hosts[1].damage(2, lambda part: not lower_half(part))
  assert hosts[0].restore(hosts[1]) == (2, "emergency")
  assert hosts[0].logged("is damaged") and hosts[0].logged("Parts of local copies that come from other slices: ")
  assert not hosts[0].logged("is not used")


def damage_both(hosts, step):
  """The first part is damaged on both hosts, so the step is lost."""
  for host in hosts:
    host.damage(step, lambda part: part["array"] == "big" and lower_half(part))


@pytest.mark.parametrize("kind", ["bit", "truncated", "no bin", "no json", "json", "other run", "other step", "folder"])
def test_a_copy_that_is_no_good_is_not_borrowed_and_the_next_older_step_is_restored(hosts, kind):
  """The host has lost all its copies of step 2."""
  ours, other = hosts
  ours.file(2, "json").unlink()
  data, index = other.file(2, "bin"), other.file(2, "json")
  if kind == "bit":
    other.damage(2, lambda part: part["array"] == "flags")
  elif kind == "truncated":
    data.write_bytes(data.read_bytes()[:-1])
  elif kind == "no bin":
    data.unlink()
  elif kind == "no json":
    index.unlink()
  elif kind == "json":
    index.write_bytes(index.read_bytes().replace(b'"tokens": 2', b'"tokens": 3'))
  elif kind == "other run":
    index.write_bytes(checksums.dump(other.index(2) | {"run": "another"}))
  elif kind == "other step":
    index.write_bytes(checksums.dump(other.index(1)))
  else:
    data.unlink()
    data.mkdir()
  assert ours.restore(other) == (1, "emergency")
  if kind in ("bit", "truncated", "no bin", "folder"):
    assert ours.logged("Member 1: Emergency checkpoint ") and ours.logged("is damaged: ")
    assert ours.logged("Checkpoint of step 2 (emergency, ")
  if kind == "json":
    assert ours.logged("2.s1.p0.json is damaged: its checksum does not match")


def test_the_same_part_damaged_everywhere_leaves_the_next_older_step(hosts):
  damage_both(hosts, 2)
  assert hosts[0].restore(hosts[1]) == (1, "emergency")
  assert hosts[0].logged("a part of big is damaged or missing in every copy.")


def test_nothing_good_anywhere_is_no_state(hosts):
  for step in STEPS:
    damage_both(hosts, step)
  assert hosts[0].restore(hosts[1]) is None


def test_the_newest_step_of_any_host_is_restored(tmp_path):
  hosts = [Host(tmp_path, 0, (1, 2)), Host(tmp_path, 1, (2, 3))]
  assert [host.tiers.newest() for host in hosts] == [2, 3]
  assert hosts[0].restore(hosts[1]) == (3, "emergency")


def test_copies_of_different_results_are_not_mixed(tmp_path):
  """The hosts have different results of step 2, each with another part damaged."""
  hosts = [Host(tmp_path, 0), Host(tmp_path, 1)]
  hosts[1].tiers.maybe_save(2, toy_state.state(7, hosts[1].mesh), {"tokens": 2})
  hosts[1].tiers.wait()
  hosts[0].damage(2, lower_half)
  hosts[1].damage(2, lambda part: not lower_half(part))
  assert hosts[0].restore(hosts[1]) == (1, "emergency")


def test_a_part_that_two_hosts_have_is_borrowed_from_the_one_where_it_is_good(tmp_path):
  ours, *others = (Host(tmp_path, member) for member in (0, 1))
  third = Host(tmp_path / "third", 1)
  third.member = 2  # only for the link: a third host
  for step in STEPS:
    ours.file(step, "json").unlink()
  others[0].damage(2, lower_half)
  assert ours.restore(others[0], third) == (2, "emergency")


@pytest.mark.parametrize("questions", [0, 1, 2, 3])
def test_a_lender_that_is_lost_ends_the_restore_and_changes_nothing(hosts, questions):
  """What the host could restore without the lender is older: the supervisor waits for the lender."""
  hosts[0].damage(2, lower_half)
  if questions < 3:
    with pytest.raises(LenderLost, match="lost the connection to member 1"):
      hosts[0].restore(hosts[1], lost_after=questions)
  assert hosts[0].restore(hosts[1]) == (2, "emergency")


def test_a_lender_sends_only_what_it_has_checked(hosts):
  lender = hosts[1].tiers.lender()
  (part, *_) = hosts[1].index(2)["parts"]
  save = [2, hosts[1].index(2)["digest"]]
  with pytest.raises(AssertionError):
    lender.answer({"ask": "send", "save": save, "parts": [[part["array"], part["box"]]]})
  checked, _ = lender.answer({"ask": "check", "save": save, "parts": [[part["array"], part["box"]]]})
  assert [(name, box_of(box)) for name, box in checked["good"]] == [(part["array"], box_of(part["box"]))]


def test_a_copy_without_parts_is_not_a_save(tmp_path):
  """A process writes such a copy if other processes of its slice hold all arrays."""
  host = Host(tmp_path, 0)
  for step in STEPS:
    host.file(step, "json").write_bytes(checksums.dump(host.index(step) | {"parts": []}))
  assert host.restore() is None
