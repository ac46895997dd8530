"""`python -m headrace`."""

import os
import sys


def _main() -> int:
    if os.environ.get("HEADRACE__RUNNER"):
        from headrace.models.process_child import run_runner

        return run_runner()
    # A child of `up` has all its settings in the environment and no need of a command line: it is started again and
    # again, so it should start quickly.
    if os.environ.get("HEADRACE__INSTANCE") and len(sys.argv) > 1:
        from headrace.assembly.child import run_child

        return run_child(sys.argv[1], sys.argv[2:])
    from headrace.cli import main

    return main()


if __name__ == "__main__":
    code = _main()
    sys.stdout.flush()
    # A thread that a model left behind must not keep the process from ending.
    os._exit(code)
