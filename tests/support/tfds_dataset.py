"""A dataset that a local builder of TensorFlow Datasets prepares, without TensorFlow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

REASON = "tensorflow-datasets is not installed: it belongs to the extra tfds, which setup.sh --dev installs"


def prepare(folder: Path, texts: list[str], tokens: list[np.ndarray]) -> Path:
  """The folder of the prepared dataset: all documents in the split train, in two shards; the first three in held_out.

  Features: body (a text), ids (token ids), score (a number). Skips the test if the package is absent.
  """
  tfds = pytest.importorskip("tensorflow_datasets", reason=REASON)

  with tfds.core.registered.skip_registration():  # several tests define a builder of this name

    class Local(tfds.core.GeneratorBasedBuilder):
      VERSION = tfds.core.Version("1.0.0")
      pkg_dir_path = folder
      code_path = None  # where its source is: only for checksums of downloads

      def _info(self):
        features = {
          "body": tfds.features.Text(),
          "ids": tfds.features.Tensor(shape=(None,), dtype=np.int32),
          "score": tfds.features.Scalar(np.float32),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

      def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(len(texts)), "held_out": self._generate_examples(3)}

      def _generate_examples(self, count):
        for number in range(count):
          yield number, {"body": texts[number], "ids": tokens[number].astype(np.int32), "score": 0.5}

  builder = Local(data_dir=str(folder / "data"), file_format="array_record")
  builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=2))
  return Path(str(builder.data_path))
