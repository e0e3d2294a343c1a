"""A run resumes only from a checkpoint of the same model and data, and logs the other differences."""

from __future__ import annotations

import pytest

from trainer.checkpoint import meta
from trainer.checkpoint.checkpoint_errors import ConfigMismatch
from trainer.config import resume
from trainer.config.schema import Config

IDENTITY = {"data": "abc", "global_batch_size": 8}


def saved(**changes):
  config = Config().flat() | changes
  return meta.build(tokens=1, cursor={}, config=config, identity=IDENTITY) | {"step": 3}


def test_every_key_is_classified_once():
  sets = [resume.CHANGES_STATE, resume.CHANGES_MODEL, resume.CHANGES_DATA_ORDER, frozenset(resume.JUDGED_BY)]
  sets.append(resume.FREE)
  judged = {*Config().model.model_dump(), *Config().data.model_dump(), *Config().optimizer.model_dump()}
  everywhere = judged | {"init_weights_seed"}
  assert set().union(*sets) == everywhere
  assert sum(map(len, sets)) == len(everywhere)


@pytest.mark.parametrize("key", sorted(resume.CHANGES_MODEL | resume.CHANGES_DATA_ORDER))
def test_each_key_that_matters_is_refused_and_can_be_allowed(key):
  other = saved(**{key: "other"})
  with pytest.raises(
    ConfigMismatch, match=rf"step 3(.|\n)*{key} +'other' -> .*changes the (model|data order)"
  ) as caught:
    meta.check_config(other, Config().flat(), IDENTITY)
  assert str(caught.value).endswith(f"allow_config_change={key}")
  assert len(meta.check_config(other, Config().flat(), IDENTITY, f" {key}, data")) == 1


@pytest.mark.parametrize("key", sorted(resume.CHANGES_STATE))
def test_a_key_that_changes_the_arrays_is_refused_and_cannot_be_allowed(key):
  for allowed in ("", key):
    with pytest.raises(ConfigMismatch, match=rf"{key} +'other' -> .*changes the model") as caught:
      meta.check_config(saved(**{key: "other", "dtype": "other"}), Config().flat(), IDENTITY, allowed)
    remedy = str(caught.value).splitlines()[-1]
    assert "choose another run_name for a new run" in remedy and "allow_config_change" not in remedy
    assert ("load_parameters_path" in remedy) == (key == "scan_layers")


def test_changed_files_are_named_as_the_cause():
  """Unless a changed key explains the difference."""
  for changes, said in (({}, True), ({"dataset_path": "other"}, False), ({"tokenizer_type": "bpe"}, False)):
    with pytest.raises(ConfigMismatch) as caught:
      meta.check_config(saved(**changes), Config().flat(), IDENTITY | {"data": "def"})
    assert ("changes the data order: the keys are the same, so the files have changed" in str(caught.value)) == said


@pytest.mark.parametrize("written", [None, meta.FORMAT + 1])
def test_a_checkpoint_of_another_format_is_refused(written):
  other = saved() | {"format": written}
  with pytest.raises(ConfigMismatch, match=f"step 3 has the format {written}, and this version reads the format"):
    meta.check_config(other, Config().flat(), IDENTITY)
