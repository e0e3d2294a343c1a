"""Random values for random keys: the configuration loads, or raises ConfigError within two seconds."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trainer.config import Config, ConfigError, load
from trainer.config.cli import print_config
from trainer.config.keys import all_keys

SECONDS = 2.0
SENTINELS = "None none null ~ -1 0 1 true False nan inf -inf [] {} ['a'] 1e400 -1e400 2000000000 1e-320 0x10".split()
SENTINELS += "1_000 .. / ~nobody/x gs:// /dev/null a=b -- ${X?} <USER> fp8 flash 1:2".split()
SENTINELS += ["", " 5 ", "9" * 5000, "a\x00b", "\ud800", "\u0661", "x" * 5000]
OTHER_NAMES = ["elastic_slices", "model.head_dim", "a.b.c", ".", "", "run", "base_config", "print_config", "\x00"]

names = st.sampled_from([*all_keys(), *OTHER_NAMES]) | st.text(max_size=12)
values = (
  st.sampled_from(SENTINELS)
  | st.sampled_from(sorted({choice for key in all_keys().values() for choice in key.choices}))
  | st.integers(-(2**70), 2**70).map(str)
  | st.floats().map(str)
  | st.text(max_size=30)
)
lines = st.tuples(st.sampled_from(list(all_keys())), st.sampled_from(SENTINELS) | st.integers().map(str))


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)


def loads_or_refuses(argv: list[str]) -> None:
  """Loads the configuration, with the time limit; what loads can be printed and loaded again."""
  start = time.process_time()
  try:
    config = load(argv)
  except ConfigError as error:
    assert len(str(error).splitlines()) >= 2, "value, rule and remedy"
    assert len(str(error)) < 20_000
  else:
    assert isinstance(config, Config)
    assert print_config(config)
  assert time.process_time() - start < SECONDS


@given(st.lists(st.tuples(names, values), min_size=1, max_size=5))
@example([("base_emb_dim", "2000000000")])
@example([("model_name", "a\x00b")])
@example([("model_name", "\ud800")])
@example([("elastic_enabled", "true"), ("fault_injection", "slice_down@1:" + "9" * 5000)])
@example([("elastic_enabled", "true"), ("fault_injection", "random:seed=" + "9" * 5000 + ",rate=0.5")])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_arguments_load_or_are_refused(pairs):
  loads_or_refuses(["configs/base.yml", *(f"{name}={value}" for name, value in pairs)])


@given(pairs=st.lists(lines, min_size=1, max_size=5))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_yaml_loads_or_is_refused(pairs, tmp_path):
  text = "".join(f"{name}: {value}\n" for name, value in pairs)
  (tmp_path / "c.yml").write_bytes(text.encode("utf-8", "surrogatepass"))
  loads_or_refuses(["c.yml"])


@pytest.mark.parametrize("name", [name for name, key in all_keys().items() if key.kind in (int, float)])
def test_every_number_is_bounded(name):
  """A count or a size without an upper limit can occupy the machine before anything fails."""
  key = all_keys()[name]
  if key.kind is int or name.endswith(("_seconds", "_size")):
    assert {rule for rule, _ in key.limits} & {"le", "lt"}, name
