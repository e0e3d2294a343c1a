"""The environment that a launcher gives to every process of a run with several worlds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config.errors import ConfigError

SUPERVISOR = "TRAINER_SUPERVISOR"
TOKEN = "TRAINER_TOKEN"
MEMBER = "TRAINER_MEMBER"
LANE = "TRAINER_LANE"
LANES = "TRAINER_LANES"
HOST = "TRAINER_HOST"
SLICE_COORDINATOR = "TRAINER_SLICE_COORDINATOR"
RUN_ID = "TRAINER_RUN_ID"


@dataclass(frozen=True)
class Place:
  """Where the run is, and who this process is in it."""

  supervisor: str  # host:port
  token: bytes  # of the job: whoever has it may join
  member: int  # number of the slice, from 0
  run_id: str  # of a run whose folder does not exist yet: the same for all members
  lane: int = 0  # number of the process within its slice
  lanes: int = 1  # processes of a slice
  host: str = "127.0.0.1"  # address of this host, where the other members connect to
  slice_coordinator: str = ""  # host:port of jax.distributed within the slice; "" with one process per slice

  def environment(self) -> dict[str, str]:
    """The variables that `read` turns into this place."""
    return {
      SUPERVISOR: self.supervisor,
      TOKEN: self.token.hex(),
      MEMBER: str(self.member),
      LANE: str(self.lane),
      LANES: str(self.lanes),
      HOST: self.host,
      RUN_ID: self.run_id,
      SLICE_COORDINATOR: self.slice_coordinator,
    }

  @classmethod
  def read(cls, environment: Mapping[str, str]) -> Place:
    """The place that the environment describes. Raises ConfigError if it describes none."""
    needed = (SUPERVISOR, TOKEN, MEMBER, RUN_ID)
    missing = [name for name in needed if not environment.get(name)]
    if missing:
      raise ConfigError(
        f"cluster=multiprocess: the environment lacks {', '.join(missing)}, which a launcher sets.\n"
        "Start the run with `python -m trainer.launch.local --slices N config.yml key=value`."
      )
    try:
      place = cls(
        environment[SUPERVISOR],
        bytes.fromhex(environment[TOKEN]),
        int(environment[MEMBER]),
        environment[RUN_ID],
        int(environment.get(LANE) or 0),
        int(environment.get(LANES) or 1),
        environment.get(HOST) or "127.0.0.1",
        environment.get(SLICE_COORDINATOR, ""),
      )
    except ValueError as error:
      given = {name: environment.get(name) for name in (MEMBER, LANE, LANES)}
      raise ConfigError(f"the environment has {given}: {error}.\nThese are numbers that a launcher sets.") from error
    if place.member < 0 or not 0 <= place.lane < place.lanes or (place.lanes > 1) != bool(place.slice_coordinator):
      raise ConfigError(
        f"the environment names member {place.member}, lane {place.lane} of {place.lanes} and the slice's coordinator "
        f"{place.slice_coordinator!r}.\nLanes count from 0, and only a slice of several processes has a coordinator."
      )
    return place
