"""Runs examples as scripts, each in a fork of this process, which has imported the modules of its command line.

A line of standard input is {"code": ..., "folder": ..., "said": ...}: the script, where it runs, and the file that gets
what it prints. The answer is a line with its exit code. Started by test_docs.py; imports nothing of the tests.
"""

import importlib
import json
import os
import sys
import types


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        example = json.loads(line)
        child = os.fork()
        if not child:
            run(**example)
            # The fork ends as any script does, with all that an interpreter does at its end.
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def run(code: str, folder: str, said: str) -> None:
    os.chdir(folder)
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # As in `python -c`: a main module without a file, that holds nothing but the script's own names.
    script = types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = script, ["-c"]
    exec(compile(code, "<example>", "exec"), vars(script))


if __name__ == "__main__":
    main()
