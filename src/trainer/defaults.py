"""What `python -m trainer` and the library add to the core. A fork deletes a line here, and the folder that it names.

Of the core, only this module and the package itself name programs above it (tests/test_layering.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from collections.abc import Callable

  from trainer.cluster import Cluster
  from trainer.config import Config
  from trainer.run.plugins import Extensions


def extensions() -> Extensions:
  """Everything. Imports jax."""
  from trainer.report.report_plugin import Report
  from trainer.run.plugins import Extensions
  from trainer.services.services_plugin import Services
  from trainer.trust.receipt import ReceiptWriter
  from trainer.weights import sources
  from trainer.weights.sample import Sample
  from trainer.weights.tokenizers import KeepTokenizer

  plugins = (Services, ReceiptWriter, KeepTokenizer, Sample, Report)
  return Extensions(plugins, open_weights=sources.open_source, choose_remat=_choose_remat)


def _choose_remat(config: Config, cluster: Cluster, tell: Callable[[str], None]) -> tuple[Config, str]:
  from trainer.preflight import remat_choice  # reads compiled programs, so only if it is needed

  return remat_choice.resolve(config, cluster, tell)
