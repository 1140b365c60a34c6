"""Runs scripts, each in a fork of this process, which has imported the modules of its command line.

A line of standard input is {"code": ..., "arguments": [...], "folder": ..., "stdout": ..., "stderr": ...}: the script's
text, or its path as the first argument; where it runs; and the files that get what it prints. The answer is a line with
its exit code. Started by scripts.py; imports nothing of the tests.
"""

import importlib
import json
import os
import runpy
import sys
import types


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        script = json.loads(line)
        child = os.fork()
        if not child:
            run(**script)
            # The fork ends as any script does, with all that an interpreter does at its end.
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def run(code: str | None, arguments: list[str], folder: str, stdout: str, stderr: str) -> None:
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(stdout, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    sys.argv = arguments
    if code is None:
        # As `python path` does: modules beside the script are found first.
        sys.path[0] = os.path.dirname(arguments[0])
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        # As `python -c` does: a main module without a file, that holds nothing but the script's own names.
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        sys.path[0] = ""
        exec(compile(code, "<string>", "exec"), vars(main))


if __name__ == "__main__":
    main()
