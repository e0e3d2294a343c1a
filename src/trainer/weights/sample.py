"""The sample at the end of a run, for a person to read."""

from __future__ import annotations

import functools
import time

import jax

from input_pipeline import tokenizer as tokenizer_lib
from input_pipeline.tokenizer import Tokenizer
from trainer.models.decoder import DecoderFunctions, Params
from trainer.process.stop import StopRequested
from trainer.run.plugins import Completed, Plugin
from trainer.weights import generation
from trainer.weights.generation import Sampling

_TOKENS = 64  # of a sample


def continue_text(
  model: DecoderFunctions, params: Params, tokenizer: Tokenizer, prompt: str, *, tokens: int, seed: int = 0
) -> str:
  """The text of `tokens` tokens sampled after `prompt`. `params` must be on one device. Deterministic."""
  ids = tokenizer_lib.prompt(tokenizer, prompt)
  steps = generation.stream(model, params, [ids], tokens, vocab_size=tokenizer.vocab_size, sampling=Sampling(seed=seed))
  return tokenizer_lib.continuation(tokenizer, ids, [id for (id,) in steps if id is not None])


class Sample(Plugin):
  """Prints the trained model's continuation of sample_prompt. If one device cannot hold the model, prints a warning."""

  def completed(self, done: Completed) -> None:
    run, config, prog, prompt = self.run, self.config, done.program, self.config.observe.sample_prompt
    if not prompt or not run.cluster.saves_in_storage():
      return
    tokenizer = self.data.train.tokenizer
    if tokenizer is None or run.cluster.world.size > 1:
      reason = "the data have no tokenizer" if tokenizer is None else "the weights are spread over processes"
      run.log.warning(f"no sample is made of sample_prompt: {reason}")
      return
    if prompt.strip() and not tokenizer.encode(prompt):
      run.log.warning("no sample is made of sample_prompt: the tokenizer has no token for it")
      return
    run.log.line("Compiling what samples from the model ...")
    start, params = time.monotonic(), jax.device_put(done.params, prog.mesh.devices.flat[0])
    seed = config.run.init_weights_seed
    work = functools.partial(continue_text, prog.model, params, tokenizer, prompt, tokens=_TOKENS, seed=seed)
    try:
      text = done.unless_ending(work, "sample")
    except StopRequested:
      run.log.line("No sample is made of sample_prompt: the process must end, and everything is saved.")
      return
    except jax.errors.JaxRuntimeError as error:
      run.log.warning(f"no sample is made of sample_prompt, one device must hold the whole model for it: {error}")
      return
    run.log.line(f"--- sample after step {done.step} ---\n{prompt}{text}\n--- end of sample ---")
    run.events.emit("sample", step=done.step, seconds=time.monotonic() - start, prompt=prompt, text=text)
