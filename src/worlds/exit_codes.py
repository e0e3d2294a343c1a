"""The exit codes of all processes of a run, which schedulers read. README.md says what a scheduler should do."""

COMPLETE = 0
FAILED = 1  # the run cannot go on, or storage does not answer
BAD_INPUT = 2
PREEMPTED = 42  # a signal has ended the run, and everything is committed
INTERRUPTED = 130  # Ctrl-C
HUNG = 134  # the watchdog has ended the process: 128 + SIGABRT, what schedulers show for an aborted process
