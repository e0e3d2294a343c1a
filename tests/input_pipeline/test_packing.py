"""Packing of whole documents: nothing is lost or cut, windows are full, and the loss is that of the documents alone."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from input_pipeline import best_fit, windows
from input_pipeline.batch import Batch, empty_example, stack
from trainer.config.schema import Config
from trainer.program import program, step

# The first token of a document is its number, and the others are unique in the document: every pair names its document.
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def documents(sizes: list[int]) -> list[np.ndarray]:
  return [1000 * number + np.arange(size, dtype=np.int32) for number, size in enumerate(sizes)]


def packed(sizes: list[int], length: int, group: int = 7) -> list[windows.Window]:
  docs = documents(sizes)
  return list(best_fit.pack([docs[i : i + group] for i in range(0, len(docs), group)], length))


def pairs(window: windows.Window, length: int) -> list[tuple[int, int]]:
  example = windows.example(window, length)
  counted = example.weights > 0
  return list(zip(example.tokens[counted].tolist(), example.targets[counted].tolist()))


@settings(deadline=None, max_examples=40)
@given(sizes=lengths, length=st.integers(1, 24))
def test_each_pair_of_tokens_is_trained_on_exactly_once(sizes, length):
  found = Counter(pair for window in packed(sizes, length) for pair in pairs(window, length))
  assert found == Counter((a, a + 1) for doc in documents(sizes) for a in doc[:-1].tolist())


@settings(deadline=None, max_examples=40)
@given(sizes=lengths, length=st.integers(1, 24))
def test_documents_that_fit_are_whole_and_others_are_cut_at_full_windows(sizes, length):
  pieces = []
  for window in packed(sizes, length):
    assert 2 <= len(window.tokens) <= length + 1
    pieces += np.split(window.tokens, window.starts)
  for number, doc in enumerate(documents(sizes)):
    own = sorted((piece for piece in pieces if piece[0] // 1000 == number), key=lambda piece: piece[0])
    assert [len(piece) for piece in own[:-1]] == [length + 1] * (len(own) - 1)
    if 2 <= len(doc) <= length + 1:
      (whole,) = own
      np.testing.assert_array_equal(whole, doc)


def test_best_fit_by_hand():
  # Capacity 10. 7 and 6 open windows; 4 fits best with 6, and 3 with 7; 2 opens a third window.
  tokens = [
    [int(start) // 1000 for start in window.tokens[[0, *window.starts]]] for window in packed([3, 6, 7, 2, 4], 9)
  ]
  assert tokens == [[0, 2], [1, 4], [3]]


def test_windows_are_nearly_full_and_rounds_bound_the_memory(monkeypatch):
  """Lengths like those of web pages: many short documents, few long ones."""
  monkeypatch.setattr(best_fit, "_ROUND", 40_000)
  rng = np.random.default_rng(0)
  sizes = np.minimum(rng.lognormal(5.0, 1.0, 3000), 3000).astype(int) + 2
  length = 512
  rounds = []
  pack_round = best_fit.pack_round
  monkeypatch.setattr(
    best_fit, "pack_round", lambda pieces, size: rounds.append(sum(map(len, pieces))) or pack_round(pieces, size)
  )
  made = packed(sizes.tolist(), length)
  targets = sum(len(pairs(window, length)) for window in made)
  assert targets / (len(made) * length) > 0.96
  assert len(rounds) > 10 and max(rounds) < 40_000 + 3 * 4000


def test_the_loss_of_packed_documents_is_that_of_the_documents_alone():
  """Sums of loss, weights and gradients; relative tolerance 1e-5: sums in another order, in float32."""
  length, vocab = 32, 64
  model = dict.fromkeys(["base_emb_dim", "base_mlp_dim"], 16)
  model |= dict.fromkeys(["base_num_decoder_layers", "base_num_query_heads", "base_num_kv_heads"], 2) | {"head_dim": 8}
  model |= {"vocab_size": vocab, "dtype": "float32", "attention": "dot_product", "initializer_range": 0.2}
  cfg = Config.model_validate({"model": model, "data": {"max_target_length": length}})
  rng = np.random.default_rng(0)
  docs = [rng.integers(1, vocab, size).astype(np.int32) for size in (20, 12, 9, 33, 5, 2, 17, 28, 4)]
  prog = program.build(cfg, [jax.devices()[:1]], 1)
  params = prog.init(jax.random.key(3)).params
  sums = jax.jit(functools.partial(step.loss_and_grads, prog.model, cfg.optimizer))

  def total(cut: list[windows.Window]) -> step.Sums:
    rows = [windows.example(window, length) for window in cut]
    rows += [empty_example(length)] * (12 - len(rows))
    return sums(params, Batch(*(field[None] for field in stack(rows))))

  made = list(best_fit.pack([docs], length))
  together, alone = total(made), total(list(windows.single([docs], length)))
  assert len(made) == 4  # 130 tokens in windows of 33
  assert float(together.weight) == float(alone.weight) == sum(map(len, docs)) - len(docs)
  np.testing.assert_allclose(together.loss, alone.loss, rtol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max())),
    together.grads,
    alone.grads,
  )
