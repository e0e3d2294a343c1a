"""Options of xpk, gcluster, torchrun and Ray Train: the answer to a user who gives one of them to this program."""

from __future__ import annotations

_OUTSIDE = "Give it to {launcher}, outside the command that starts this program."
_XPK = _OUTSIDE.format(launcher="xpk")
_GCLUSTER = _OUTSIDE.format(launcher="gcluster")
_TORCHRUN = "Give it to torchrun, before `-m trainer`."
_RAMDISK = (
  "Give it to xpk or gcluster, outside the command. Here, set local_checkpoint_directory to the ramdisk's mount point."
)
_ELASTIC = (
  "Give it to xpk or gcluster, outside the command. Here, set elastic_enabled=true, and elastic_min_slice_count to "
  "the number of slices that training needs."
)
_DEVICES = "JAX finds the devices by itself. To compile for a TPU that is not there, use compile_topology."
_RAY_WORKERS = (
  "Ray counts hosts, and this program slices. Give --min-slices and --max-slices to `python -m trainer.launch.ray`."
)
_RAY_OPTION = "Give it to Ray's launcher: `python -m trainer.launch.ray --topology 2x4 ... CONFIG.yml key=value`."
_RAY_OBJECT = "`python -m trainer.launch.ray` sets up Ray Train. Keys here are flat: key=value."

# (names with _ for -, what the names are, what to do)
_TABLE: tuple[tuple[str, str, str], ...] = (
  ("elastic_slices max_slice_restarts", "an option of xpk", _ELASTIC),
  ("pathways_elastic_slices pathways_max_slice_restarts", "an option of gcluster", _ELASTIC),
  ("ramdisk_directory mtc_ramdisk_size", "an option of xpk", _RAMDISK),
  ("gke_mtc_ramdisk_dir", "an option of gcluster", _RAMDISK),
  (
    "enable_mtc mtc_enabled mtc_gcs_bucket mtc_toleration_key",
    "an option of xpk",
    "Give it to xpk, outside the command. Here, set enable_emergency_checkpoint=true, local_checkpoint_directory and "
    "local_checkpoint_period.",
  ),
  (
    "workload command force project zone tpu_type device_type docker_image docker_name base_docker_image script_dir "
    "cluster_cpu_machine_type custom_pathways_proxy_server_args custom_pathways_server_args "
    "custom_pathways_worker_args enable_gcsfuse_csi_driver gke_version env env_file priority scheduler "
    "termination_grace_period_seconds server_image proxy_server_image colocated_python_sidecar_image headless "
    "use_pathways",
    "an option of xpk",
    _XPK,
  ),
  ("location", "an option of gcloud and xpk", _XPK),
  (
    "grace_period",
    "an option of kubectl and gcluster",
    "Here, set autocheckpoint_grace_seconds to the time from SIGTERM to SIGKILL.",
  ),
  ("name", "an option of gcluster and a setting of Ray's RunConfig", "Here, set run_name."),
  ("restarts", "an option of gcluster", _GCLUSTER),
  (
    "image base_image build_context compute_type restart_on_exit_codes mount dry_run_out gke_mtc_enabled pathways "
    "pathways_gcs_location pathways_colocated_python_sidecar_image pathways_head_np",
    "an option of gcluster",
    _GCLUSTER,
  ),
  (
    "nnodes nproc_per_node",
    "an option of torchrun",
    _TORCHRUN + " Each of its workers is a slice: set num_slices to the most workers, and elastic_min_slice_count for "
    "the minimum.",
  ),
  (
    "max_restarts",
    "an option of torchrun",
    _TORCHRUN + " It limits the restarts of each node's workers.",
  ),
  (
    "rdzv_id rdzv_backend rdzv_endpoint rdzv_conf node_rank master_addr master_port local_addr standalone start_method "
    "role log_dir redirects tee no_python run_path monitor_interval",
    "an option of torchrun",
    _TORCHRUN,
  ),
  ("num_workers min_workers max_workers", "a setting of Ray's ScalingConfig", _RAY_WORKERS),
  (
    "use_tpu use_gpu",
    "a setting of Ray's ScalingConfig",
    _DEVICES + " To force a platform, set the environment variable JAX_PLATFORMS.",
  ),
  ("topology accelerator_type", "a setting of Ray's ScalingConfig", _RAY_OPTION),
  ("min_slices max_slices gpus_per_slice replace_lost", "an option of trainer.launch.ray", _RAY_OPTION),
  (
    "resources_per_worker placement_strategy label_selector trainer_resources",
    "a setting of Ray's ScalingConfig",
    _RAY_OBJECT,
  ),
  (
    "max_failures controller_failure_limit preemption_grace_s",
    "a setting of Ray's FailureConfig",
    "Here, elastic_max_retries limits the recoveries without progress, and autocheckpoint_grace_seconds is the time "
    "from SIGTERM to SIGKILL.",
  ),
  ("num_to_keep", "a setting of Ray's CheckpointConfig", "Here, set max_num_checkpoints_to_keep."),
  (
    "checkpoint_score_attribute checkpoint_score_order",
    "a setting of Ray's CheckpointConfig",
    "Here, checkpoint_keep_best keeps the checkpoints with the lowest evaluation loss.",
  ),
  ("storage_path", "a setting of Ray's RunConfig", "Here, set base_output_directory."),
  (
    "ScalingConfig FailureConfig RunConfig CheckpointConfig JaxConfig JaxTrainer TorchTrainer scaling_config "
    "failure_config run_config checkpoint_config backend_config train_loop_config train_loop_per_worker",
    "part of Ray Train's Python API",
    _RAY_OBJECT,
  ),
)

# Keys of this program that are options of a launcher too, with other values.
_VALUES = {"cluster": "If this is the name of a GKE cluster, give it to xpk or gcluster, outside the command.\n"}

# Prefixes of the names above, for options that newer versions add.
_PREFIXES: tuple[tuple[str, str, str], ...] = (
  ("mtc_", "an option of xpk", _RAMDISK),
  ("gke_mtc_", "an option of gcluster", _RAMDISK),
  ("rdzv_", "an option of torchrun", _TORCHRUN),
)


def answer(name: str) -> tuple[str, str] | None:
  """(what `name` is, what to do), or None if it is not an option of a launcher. `name` has _ for -."""
  for names, what, remedy in _TABLE:
    if name in names.split():
      return what, remedy
  return next(((what, remedy) for prefix, what, remedy in _PREFIXES if name.startswith(prefix)), None)


def hint_for_value(name: str) -> str:
  """What an unknown value of the key `name` may have been meant for, as a line of a message; empty if nothing."""
  return _VALUES.get(name, "")
