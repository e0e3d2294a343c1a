"""Trains with this project: the library, in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import yaml
from end_to_end.four_programs import common

import trainer
from trainer.weights import hf_config


def main(folder: Path) -> None:
  """Leaves trainer/curve.csv and trainer/model in `folder`."""
  work = common.read(folder)
  model = hf_config.keys(common.config_of(folder), str(folder / "model"))
  (folder / "trainer.yml").write_text(yaml.safe_dump(model))
  config = trainer.load(
    "configs/base.yml",
    model_name=str(folder / "trainer.yml"),
    run_name="trainer",
    base_output_directory=str(folder),
    load_parameters_path=str(folder / "model"),
    dtype="float32",
    max_target_length=work.length,
    per_device_batch_size=work.rows,
    steps=work.steps,
    learning_rate=work.peak,
    learning_rate_schedule_steps=work.schedule_steps,
    warmup_steps_fraction=work.warmup / work.schedule_steps,
    learning_rate_final_fraction=work.final,
    adam_weight_decay=work.decay,
    adam_b1=work.b1,
    adam_b2=work.b2,
    adam_eps=work.epsilon,
    gradient_clipping_threshold=work.clip,
    checkpoint_period=work.steps,
    eval_steps=0,
    sample_prompt="",
    enable_report=False,
    devices_per_slice=1,
    num_slices=1,
  )
  rows = [{"tokens": row[:-1], "targets": row[1:]} for row in np.load(folder / "tokens.npy")]
  run, curve = trainer.Run(config, source=rows), []
  assert run.train([lambda record: curve.append((record.loss, record.grad_norm))]), "the run did not complete"
  common.write_curve(folder / "trainer" / "curve.csv", curve)
  trainer.export_run(run.directory, str(folder / "trainer" / "model"))


if __name__ == "__main__":
  main(Path(sys.argv[1]))
