"""The meta of a checkpoint: facts about the run that wrote it, and the check whether a run may resume from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.checkpoint.checkpoint_errors import ConfigMismatch, Rejected
from trainer.config.resume import ALLOWABLE, CHANGES_DATA_ORDER, CHANGES_STATE, JUDGED_BY
from trainer.config.schema import FOLLOWING, listed

FORMAT = 1  # of the meta and of what it describes. A commit that reads older checkpoints differently raises it
OPTIMIZER = "optimizer"  # in `identity`: {array: kind} of the state of an optimizer that a program has given


def build(
  *, tokens: int, cursor: Mapping[str, Any], config: Mapping[str, Any], identity: Mapping[str, Any]
) -> dict[str, Any]:
  """The meta of a save. The tiers add step, versions and the arrays with their fingerprints.

  tokens: seen by the whole run; cursor: Loader.cursor(step); config: Config.flat(); identity: values of the names in
  JUDGED_BY, {"data": Loader.fingerprint(), "global_batch_size": examples per step}, and OPTIMIZER.
  """
  fields = {"cursor": dict(cursor), "config": dict(config), "identity": dict(identity)}
  return {"format": FORMAT, "tokens": tokens, **fields}


def check_meta(meta: Mapping[str, Any]) -> None:
  """Raises Rejected if the meta lacks the step, or shape, dtype or fingerprint of an array: a restore reads these."""
  arrays = meta.get("arrays")
  if not isinstance(meta.get("step"), int) or not isinstance(arrays, dict):
    raise Rejected("its meta has no step or no arrays")
  for name, x in arrays.items():
    if not isinstance(x, dict) or not {"shape", "dtype", "fingerprint"} <= x.keys():
      raise Rejected(f"its meta does not describe the array {name}")


def check_config(
  saved: Mapping[str, Any], config: Mapping[str, Any], identity: Mapping[str, Any], allow_config_change: str = ""
) -> list[str]:
  """Lines that name the harmless differences between a checkpoint's meta and the present run.

  Raises ConfigMismatch with a table if a difference changes the model or the data order and its key is not in
  allow_config_change. Arrays of other shapes are never allowed.
  """
  if saved.get("format") != FORMAT:
    raise ConfigMismatch(
      f"the checkpoint of step {saved.get('step')} has the format {saved.get('format')}, and this version reads the "
      f"format {FORMAT}. Continue the run with the version that wrote it, or choose another run_name"
    )
  if missing := [key for key in ("tokens", "cursor", "config", "identity") if key not in saved]:
    raise Rejected(f"its meta lacks {', '.join(missing)}")
  compared = CHANGES_STATE | {OPTIMIZER} | (ALLOWABLE - set(listed(allow_config_change)))
  before = saved["config"]  # what follows has no effect
  pairs = {key: (before[key], config[key]) for key in before if key in config and key not in FOLLOWING}
  pairs |= {key: (saved["identity"].get(key), identity.get(key)) for key in sorted({*saved["identity"], *identity})}
  differences = {key: (old, new) for key, (old, new) in pairs.items() if old != new}
  if refused := {key: pair for key, pair in differences.items() if key in compared}:
    raise ConfigMismatch(_message(saved, refused, differences))
  return [f"{key}: {old!r} in the checkpoint, now {new!r}" for key, (old, new) in differences.items()]


def _message(
  saved: Mapping[str, Any], refused: Mapping[str, tuple[Any, Any]], differences: Mapping[str, tuple[Any, Any]]
) -> str:
  rows: list[tuple[str, str, str, str]] = []
  for key, (old, new) in refused.items():
    if key == OPTIMIZER:
      rows += _arrays(old, new)
      continue
    order = key in CHANGES_DATA_ORDER or key in JUDGED_BY.values()
    what = "changes the data order" if order else "changes the model"
    causes = [cause for cause, judge in JUDGED_BY.items() if judge == key and cause in differences]
    explained = causes or differences.keys() & (CHANGES_DATA_ORDER | CHANGES_STATE)
    if key == JUDGED_BY["dataset_path"] and not explained:
      what += ": the keys are the same, so the files have changed"
    rows.append((key, _short(old), _short(new), what))
    rows += [(cause, _short(differences[cause][0]), _short(differences[cause][1]), "a cause") for cause in causes]
  widths = [max(len(row[column]) for row in rows) for column in range(3)]
  table = [f"  {key:{widths[0]}}  {old:>{widths[1]}} -> {new:{widths[2]}}  {why}" for key, old, new, why in rows]
  remedy = "Set them back, or choose another run_name for a new run"
  if "scan_layers" in refused:
    remedy += ", which can start from the parameters of this run with load_parameters_path"
  if not refused.keys() & (CHANGES_STATE | {OPTIMIZER}):  # other arrays would not fit the state
    remedy += f", or, if you want this change, allow_config_change={','.join(refused)}"
  return "\n".join([
    f"the checkpoint of step {saved.get('step')} was made with other values (checkpoint -> now):",
    *table,
    remedy,
  ])  # fmt: skip


def _arrays(old: Mapping[str, str] | None, new: Mapping[str, str] | None) -> list[tuple[str, str, str, str]]:
  """Rows about the first arrays of two optimizers that differ. None: the optimizer is opt_type."""
  if old is None or new is None:
    names = ["opt_type" if kinds is None else "a program's" for kinds in (old, new)]
    return [("optimizer", *names, "give the optimizer of the run to trainer.Run, or none")]  # type: ignore[list-item]
  differ = [name for name in {**old, **new} if old.get(name) != new.get(name)]
  return [(f"optimizer: {name}", old.get(name, "-"), new.get(name, "-"), "its state") for name in differ[:6]]


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 40 else f"{text[:18]}...{text[-18:]}"
