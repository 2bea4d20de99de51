"""Runs scripts in the stacks' environments, on the CPU. To import torch and Transformers takes longer than most scripts."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from harness import PROJECT
from harness.machine import environments
from harness.machine.targets import known

REFERENCE = str(known("reference").environment)
DEADLINE_S = 600
VARIABLES = {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
"""Tiny models gain nothing from more threads, and threads that wait for each other keep the other cores from work."""
FORKS = f"""
import json, os, signal, sys
import backends.oracle.rounding
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM
for line in sys.stdin:
    script, arguments, said = json.loads(line)
    if (child := os.fork()) == 0:
        signal.alarm({DEADLINE_S})
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        sys.argv[1:] = arguments
        exec(script, {{"__name__": "__main__"}})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Scripts:
    """Runs scripts under an environment's interpreter. It forks for each script, after the imports."""

    def __init__(self, environment: str, scratch: Path) -> None:
        self._said, self._complained = scratch / f"{environment}.out", scratch / f"{environment}.err"
        with self._complained.open("w") as complained:
            self._process = subprocess.Popen(
                [interpreter(environment), "-c", FORKS], cwd=PROJECT, env=os.environ | VARIABLES,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complained, text=True,
            )  # fmt: skip

    def run(self, script: str, *arguments: object) -> Any:
        """The JSON in the last line that the script prints."""
        print(
            json.dumps([script, [str(one) for one in arguments], str(self._said)]), file=self._process.stdin, flush=True
        )
        assert self._process.stdout.readline() == "0\n", self._complained.read_text()[-3000:]
        return json.loads(self._said.read_text().splitlines()[-1])

    def end(self) -> None:
        self._process.communicate()


@cache
def interpreter(environment: str = REFERENCE) -> Path:
    return environments.ensure(environment, "cpu", root=PROJECT)
