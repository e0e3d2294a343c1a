"""A trained model as one object: its logits, and text that it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from input_pipeline import tokenizer as tokenizer_lib
from input_pipeline.conversations import ChatTokenizer
from input_pipeline.input_errors import shorten
from input_pipeline.tokenizer import Tokenizer
from trainer.config.errors import ConfigError
from trainer.config.schema import ModelSection, RematPolicy
from trainer.kernels import grouped_matmul, projection
from trainer.kernels.attention_xla import dot_product
from trainer.models.decoder import DecoderFunctions, Params
from trainer.models.layers import Kernels
from trainer.weights import generation, sources, tokenizers
from trainer.weights.generation import DEFAULT, Sampling
from trainer.weights.sources import WeightSource


@dataclass(frozen=True)
class Model:
  """A model on one device. stop: the ids that end a text. longest: tokens of the texts that it was made for.
  tokenizer_folder: with the files of the tokenizer, and a chat template if the model can talk."""

  functions: DecoderFunctions
  params: Params
  tokenizer: Tokenizer
  stop: frozenset[int]
  longest: int
  tokenizer_folder: str

  @classmethod
  def from_run(cls, place: str, dtype: str = "") -> Model:
    """The model in RUN_DIR, RUN_DIR@STEP or a Hugging Face folder.

    dtype: float32 or bfloat16, in which it computes and holds its matrices; "": as the run. Raises ConfigError.
    """

    def work(source: WeightSource) -> Model:
      cfg, tokenizer = source.model, tokenizers.of_source(source)
      cfg = cfg.model_copy(update={"dtype": dtype or cfg.dtype, "scan_layers": False})
      folder, device = source.tokenizer_folder, jax.devices()[0]
      return cls.on_one_device(cfg, source.load, tokenizer, folder, device, source.longest)

    return sources.use(place, work)

  @classmethod
  def on_one_device(
    cls,
    cfg: ModelSection,
    load: Callable[[Params], Params],
    tokenizer: Tokenizer,
    tokenizer_folder: str,
    device: jax.Device,
    longest: int,
  ) -> Model:
    """A model of `cfg` that holds its matrices in the type in which it computes.

    load: returns the parameters with the shapes, types and shardings of its argument. tokenizer_folder: may name more
    ids that end a text.
    """
    cfg = cfg.model_copy(update={"weight_dtype": cfg.dtype, "remat_policy": RematPolicy.NONE})
    project = projection.choose(device.platform, cfg.quantization)
    multiply = grouped_matmul.choose(device.platform).function
    functions = DecoderFunctions(cfg, Kernels(dot_product, grouped_matmul=multiply, project=project))
    one = jax.sharding.SingleDeviceSharding(device)
    on_device = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one)
    params = load(jax.tree.map(on_device, functions.abstract()))
    stop = tokenizers.stop_ids(tokenizer_folder, tokenizer)
    return cls(functions, params, tokenizer, stop, longest, tokenizer_folder)

  def encode(self, text: str) -> list[int]:
    """The ids of the beginning of a document. Raises ConfigError if the tokenizer has no token for the text."""
    if text.strip() and not self.tokenizer.encode(text):
      raise ConfigError(f"{shorten(text)!r}: the tokenizer of the model has no token for it. Give another text.")
    return tokenizer_lib.prompt(self.tokenizer, text)

  def for_chats(self) -> tuple[Model, ChatTokenizer]:
    """The model that also stops where the assistant's turn ends, and what makes prompts of messages.

    Raises ConfigError if the model has no chat template.
    """
    chat = tokenizers.of_chats(self.tokenizer_folder, self.tokenizer)
    end = chat.turn_end()
    return replace(self, stop=self.stop | ({end} if end is not None else set())), chat

  def logits(self, ids: Sequence[int]) -> np.ndarray:
    """The logits [T, V], float32, after each of the T ids."""
    tokens = jnp.asarray([ids], jnp.int32)
    positions = jnp.arange(len(ids), dtype=jnp.int32)[None]
    run = jax.jit(lambda params: self.functions.merge(params).logits(tokens, positions, jnp.ones_like(tokens)))
    return np.asarray(run(self.params)[0])

  def stream(
    self, prompts: Sequence[Sequence[int]], tokens: int, sampling: Sampling = DEFAULT
  ) -> Iterator[list[int | None]]:
    """As `generation.stream`, up to a token that ends a text. Raises ConfigError if a text would become too long."""
    longest, limit = max(map(len, prompts)) + tokens, self.functions.cfg.max_position_embeddings
    if longest > limit:
      raise ConfigError(f"{longest} tokens are more than max_position_embeddings={limit}. Ask for fewer.")
    size = min(self.tokenizer.vocab_size, self.functions.cfg.vocab_size)
    return generation.stream(
      self.functions, self.params, prompts, tokens, vocab_size=size, stop=self.stop, sampling=sampling
    )

  def generate(self, prompts: Sequence[str], tokens: int = 128, sampling: Sampling = DEFAULT) -> list[str]:
    if isinstance(prompts, str):
      raise TypeError(f"generate takes a list of prompts, such as [{prompts[:20]!r}]")
    encoded = [self.encode(prompt) for prompt in prompts]
    steps = list(self.stream(encoded, tokens, sampling))
    rows = [[id for step in steps if (id := step[i]) is not None] for i in range(len(prompts))]
    return [tokenizer_lib.continuation(self.tokenizer, before, row) for before, row in zip(encoded, rows)]
