"""transformers loads our export: the same logits, the same greedy text, and the same first loss after an import."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support import hf_folders
from tests.support.seeds import few

from trainer.config.schema import Config
from trainer.tools import export_hf
from trainer.weights.generation import Sampling
from trainer.weights.model import Model

torch = pytest.importorskip("torch", reason="the oracle needs torch (CPU)")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
pytestmark = pytest.mark.oldest


@pytest.mark.parametrize("name", few(["qwen3-moe", "llama3.1"], ["qwen3-tied", "qwen3-moe", "llama3.1"]))
def test_logits_and_greedy_text_of_an_export(tmp_path, name):
  cfg = hf_folders.model(name, vocab_size=258)
  hf_folders.write_run(tmp_path / "run", Config(model=cfg), hf_folders.random_params(cfg))
  assert export_hf.main([str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
  theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
  ours = Model.from_run(str(tmp_path / "run"))
  prompt = list(b"the first words of a text")
  with torch.no_grad():
    expected = theirs(torch.tensor([prompt])).logits[0].numpy()
    text = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=50, eos_token_id=None)
  found = ours.logits(prompt)
  assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
  steps = list(ours.stream([prompt], 50, Sampling(temperature=0)))
  stop = text[0, len(prompt) :].tolist()
  assert [id for (id,) in steps] == stop[: len(steps)]
  assert len(steps) == 50 or stop[len(steps)] in ours.stop
