"""What threads are doing can be asked at any time."""

import subprocess
from collections.abc import Callable

from tests.workers.waiting import PATIENCE_SECONDS


def test_it_can_be_asked_while_garbage_waits_to_be_collected(
    start_program: Callable[..., "subprocess.Popen[str]"],
) -> None:
    """In a program of its own: where it hangs, all threads do, and not even a timeout would come."""
    program = start_program(
        """
        import gc, threading
        from headrace.workers.stacks import current_frames

        gc.set_threshold(1)
        for _ in range(100):
            cycle = [threading.local()]
            cycle[0].x = 1
            cycle.append(cycle)
            del cycle
            assert threading.main_thread().ident in current_frames()
        assert gc.isenabled()
        """
    )
    assert program.communicate(timeout=PATIENCE_SECONDS) == ("", "")
    assert program.returncode == 0
