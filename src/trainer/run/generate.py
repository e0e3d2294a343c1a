"""The sample at the end of a run, for a person to read."""

from __future__ import annotations

import functools
import time

import jax

from input_pipeline import tokenizer as tokenizer_lib
from input_pipeline.tokenizer import Tokenizer
from trainer.config.schema import Config
from trainer.elastic.hang import Waiter
from trainer.models import generation
from trainer.models.decoder import DecoderFunctions, Params
from trainer.models.generation import Sampling
from trainer.process.signals import StopRequested
from trainer.program.program import Program
from trainer.run.session import Session


def continue_text(
  model: DecoderFunctions, params: Params, tokenizer: Tokenizer, prompt: str, *, tokens: int, seed: int = 0
) -> str:
  """The text of `tokens` tokens sampled after `prompt`. `params` must be on one device. Deterministic."""
  ids = [tokenizer_lib.prompt(tokenizer, prompt)]
  steps = generation.stream(model, params, ids, tokens, vocab_size=tokenizer.vocab_size, sampling=Sampling(seed=seed))
  return tokenizer.decode(id for (id,) in steps if id is not None)


def sample(config: Config, session: Session, prog: Program, params: Params, step: int) -> None:
  """Prints the trained model's continuation of sample_prompt. If one device cannot hold the model, prints a warning."""
  tokenizer = session.data.train.tokenizer
  if not config.observe.sample_prompt or not session.cluster.coordination.saves_in_storage():
    return
  if tokenizer is None or session.cluster.world.size > 1:
    reason = "the data have no tokenizer" if tokenizer is None else "the weights are spread over processes"
    session.log.warning(f"no sample is made of sample_prompt: {reason}")
    return
  prompt = config.observe.sample_prompt
  if prompt.strip() and not tokenizer.encode(prompt):
    session.log.warning("no sample is made of sample_prompt: the tokenizer has no token for it")
    return
  session.log.line("Compiling what samples from the model ...")
  start = time.monotonic()
  work = functools.partial(
    continue_text,
    prog.model,
    jax.device_put(params, prog.mesh.devices.flat[0]),
    tokenizer,
    config.observe.sample_prompt,
    tokens=config.observe.sample_tokens,
    seed=config.run.init_weights_seed,
  )
  try:
    with session.watchdog.during("sample"):
      text = Waiter(work, "the sample").unless(lambda: session.preemption.noticed)
  except StopRequested:
    session.log.line("No sample is made of sample_prompt: the process must end, and everything is saved.")
    return
  except jax.errors.JaxRuntimeError as error:
    session.log.warning(f"no sample is made of sample_prompt, one device must hold the whole model for it: {error}")
    return
  session.log.line(f"--- sample after step {step} ---\n{config.observe.sample_prompt}{text}\n--- end of sample ---")
  session.events.emit(
    "sample", step=step, seconds=time.monotonic() - start, prompt=config.observe.sample_prompt, text=text
  )
