"""The preflight command on a tiny model, for its tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from trainer.preflight import analysis

TINY = (
  "configs/base.yml run_name=t base_output_directory=unused dataset_type=synthetic base_emb_dim=128 "
  "base_num_decoder_layers=2 base_num_query_heads=2 base_num_kv_heads=1 base_mlp_dim=256 head_dim=128 vocab_size=512 "
  "max_target_length=128 per_device_batch_size=1"
).split()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, "-m", "trainer.tools.preflight", *TINY, *arguments],
    capture_output=True,
    text=True,
    timeout=500,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
  )


def compile_once(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int, int], analysis.Finding]:
  """Makes preflight compile equal steps once. It compiles the step that remat_policy=auto has chosen a second time.

  Returns {(configuration, slices, all slices): the step}, which preflight fills.
  """
  analyse: Callable[..., analysis.Finding] = analysis.analyse
  findings: dict[tuple[str, int, int], analysis.Finding] = {}

  def once(config, slices, total):
    key = config.model_dump_json(), len(slices), total
    if key not in findings:
      findings[key] = analyse(config, slices, total)
    return findings[key]

  monkeypatch.setattr(analysis, "analyse", once)
  return findings
