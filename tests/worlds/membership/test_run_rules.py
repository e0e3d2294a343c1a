"""What a supervisor takes from the configuration, and a run that is not elastic."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json

import pytest

from trainer.cluster.launched import check, run_rules
from trainer.config import ConfigError, load
from trainer.config.shares import resolve
from worlds.membership.coordinator import Coordinator
from worlds.membership.effects import Send
from worlds.membership.run_rules import RunRules

KEYS = ["configs/base.yml", "cluster=multiprocess", "num_slices=3", "dataset_type=synthetic"]


@pytest.mark.parametrize(
  ("keys", "minimum", "shares"),
  [
    (["elastic_enabled=true"], 3, 3),
    (["elastic_enabled=true", "elastic_min_slice_count=1"], 1, 3),
    (["elastic_enabled=false"], 3, 3),
    (["elastic_enabled=true", "gradient_accumulation_steps=4"], 3, 3),
    (["elastic_enabled=true", "gradient_accumulation_steps=4", "shares_per_slice=4"], 3, 12),
  ],
)
def test_rules_of_a_configuration(keys, minimum, shares):
  rules = run_rules(resolve(load([*KEYS, *keys, "max_target_length=16"])))
  assert (rules.slices, rules.minimum, rules.shares, rules.attempts) == (3, minimum, shares, 10)
  assert RunRules(**json.loads(json.dumps(dataclasses.asdict(rules)))) == rules


def training(rules: RunRules, members: int) -> Coordinator:
  """A run that trains."""
  run = Coordinator(rules, run_id="id", expected=members)
  for member in range(members):
    (welcome,) = run.hello(member, 0, 1, "")
    assert isinstance(welcome, Send) and welcome.message["run_id"] == "id"
  assert run.phase == "gathering"
  for member in range(members):
    assert run.phase == "gathering"
    run.ready(member, 0, 0)
  run.restored(0, 0, run.epoch, 0)
  assert run.phase == "running"
  return run


def test_a_start_waits_for_the_expected_members_only():
  """As with a group of torchrun that has fewer nodes than slices: they compute all shares."""
  run = training(RunRules(3, 1, 3, 300.0, 0.0, True), members=2)
  assert run.active == {0, 1} and sorted(itertools.chain(*run._dealing.dealt.values())) == [0, 1, 2]


def test_the_loss_of_a_member_ends_a_run_that_is_not_elastic():
  run = training(RunRules(2, 2, 2, 300.0, 0.0, False), members=2)
  effects = run.lost(1, "killed by SIGKILL")
  assert run.code == 1
  ends = [effect.message for effect in effects if isinstance(effect, Send)]
  assert [(end["kind"], end["reason"]) for end in ends] == [
    ("end", "Member 1 is lost (killed by SIGKILL), and elastic_enabled=false.")
  ]


def test_sigterm_to_one_member_is_a_request_to_all_in_a_run_that_is_not_elastic():
  run = training(RunRules(2, 2, 2, 300.0, 0.0, False), members=2)
  assert run.leave(1) == [] and run.stopping
  run.done(0, 0, run.epoch, "step 1", 0)
  commits = [effect.message for effect in run.done(1, 0, run.epoch, "step 1", 0) if isinstance(effect, Send)]
  assert [(commit["stop"], commit["leave"]) for commit in commits] == [(True, []), (True, [])]


@pytest.mark.parametrize(
  ("slices", "shares", "lanes", "text"),
  [
    (4096, 4096, 1, ""),
    (4097, 4097, 1, r"num_slices=4097: .* at most 4096 slices of 1 processes.*\nMake the slices larger"),
    (656, 656, 8, r"num_slices=656: .* at most 655 slices of 8 processes"),
    (2, 200_000, 1, ""),
    (2, 1 << 21, 1, r"= 2097152 shares .* at most 1048576 are possible\.\nLower shares_per_slice"),
  ],
)
def test_sizes_that_no_message_has_room_for_are_refused_before_a_start(slices, shares, lanes, text):
  rules = RunRules(slices, 1, shares, 300.0, 0.0, True)
  with pytest.raises(ConfigError, match=text) if text else contextlib.nullcontext():
    check(rules, lanes)
