"""lm-evaluation-harness scores an export with its model `hf`, as docs/library.md says."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import yaml
from tests.support import hf_folders

from input_pipeline.tokenizer import train_bpe
from trainer import Model
from trainer.config.schema import Config
from trainer.tools import export_hf

REASON = "the command of docs/library.md needs it: pip install lm_eval accelerate torch"
pytestmark = [pytest.mark.oldest, pytest.mark.slow, pytest.mark.timeout(600)]
ROWS = [{"text": "the quick brown", "last": "fox"}, {"text": "birds sing in old", "last": "trees"}]


def test_the_harness_gives_an_export_the_likelihoods_of_the_model(tmp_path):
  for package in ("torch", "accelerate", "lm_eval"):
    pytest.importorskip(package, reason=REASON)
  cfg = hf_folders.model("llama3.1", vocab_size=300)
  (tmp_path / "tokenizer.json").write_text(train_bpe([" ".join(map(" ".join, map(dict.values, ROWS)))] * 9, 300))
  data = {"tokenizer_type": "bpe", "tokenizer_path": str(tmp_path / "tokenizer.json")}
  hf_folders.write_run(tmp_path / "run", Config(model=cfg, data=data), hf_folders.random_params(cfg))
  assert export_hf.main([str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
  (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
  task = {
    "task": "last_word",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
    "test_split": "test",
    "output_type": "loglikelihood",
    "doc_to_text": "{{text}}",
    "doc_to_target": " {{last}}",
    "metric_list": [{"metric": "perplexity"}],
  }
  (tmp_path / "last_word.yaml").write_text(yaml.safe_dump(task))
  options = f"--model_args pretrained={tmp_path}/hf,dtype=float32 --device cpu --tasks last_word".split()
  places = ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "scores")]
  command = [sys.executable, "-m", "lm_eval", "--model", "hf", *options, *places]
  environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
  assert done.returncode == 0, done.stderr[-4000:]
  (scores,) = (tmp_path / "scores").rglob("results*.json")
  found = json.loads(scores.read_text())["results"]["last_word"]["perplexity,none"]
  assert found == pytest.approx(perplexity(Model.from_run(str(tmp_path / "run"))), rel=1e-4)


def perplexity(model: Model) -> float:
  """exp(-mean log-likelihood of the last words) by our own logits."""
  likelihoods = []
  for row in ROWS:
    context, ids = model.encode(row["text"]), model.encode(f"{row['text']} {row['last']}")
    logits = model.logits(ids).astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    likelihoods.append(sum(logs[i - 1, ids[i]] for i in range(len(context), len(ids))))
  return math.exp(-np.mean(likelihoods))
