"""A folder with a project in it and things around it that no command may touch, and what every command must keep to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.fuzz.zygote import Ended, Zygote

CANARY = "PWNED"
_SECONDS = 60.0
"""Of one command, on a machine that does much else."""
_PEAK = 2 << 30
_LARGEST = 1 << 20


class World:
    """Everything lies under `root`: `cwd`, where commands run, with the project `cwd/p`; `outside`, the victims.

    Args:
        root: an empty folder.
        zygote: runs the commands.
    """

    def __init__(self, root: Path, zygote: Zygote) -> None:
        self.root, self.cwd, self.project = root, root / "cwd", root / "cwd" / "p"
        self._zygote = zygote
        for name in ("cwd", "tmp", "home", "outside"):
            (root / name).mkdir(parents=True)
        for name in ("victim", "victim.json", "victim.py", "victim.onnx"):
            (root / "outside" / name).write_text("mine")
        (root / "outside" / "link").symlink_to(root / "outside" / "victim")
        (root / "victim").write_text("mine")
        self._before = self._around()

    def _around(self) -> dict[str, tuple[int, int, int]]:
        """What lies outside of the project, with its times: a file that was written again is another."""
        places = [self.root, *(self.root / "outside").rglob("*"), *(self.root / "home").rglob("*")]
        places += [self.root / "victim", self.root / "tmp", *self.cwd.iterdir()]
        mine = [p for p in places if p not in (self.root, self.root / "tmp", self.project)]
        return {str(p): (s.st_size, s.st_mtime_ns, s.st_ino) for p in mine for s in [os.lstat(p)]}

    def given(self, name: str, content: bytes) -> Path:
        """A file of somebody else's, in the folder where commands run."""
        path = self.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self._before = self._around()
        return path

    def start_from(self, project: Path) -> None:
        """A copy of a project that has run."""
        shutil.copytree(project, self.project, symlinks=True)
        (self.project / "link").symlink_to(self.root / "outside")

    def pipe(self, *arguments: str) -> Ended:
        """Runs a command and checks all that holds for every one of them."""
        ended = self._zygote.run(self.cwd, arguments, _SECONDS)
        if ended.code is None or ended.code < 0:  # the zygote has no process between; the real command has
            ended = self._really(arguments)
        how = f"{ended.code} in {ended.seconds:.1f} s, {ended.peak >> 20} MB"
        told = f"pipe {' '.join(arguments)} -> {how}\n{ended.out}{ended.err}"
        assert ended.code in (0, 1, 2, 3), told
        said = ended.out + ended.err
        assert "internal error" not in said and "Traceback" not in said and "SyntaxWarning" not in said, told
        assert len(said) < _LARGEST, told[:10_000]
        assert said.replace("\n", "").isprintable(), repr(said)
        assert ended.peak < _PEAK, told
        if ended.code:
            assert ended.err.strip() or ended.out.strip(), told
        if "--json" in arguments:
            json.loads(ended.out)
        self._untouched(told)
        return ended

    def _untouched(self, told: str) -> None:
        now, before = self._around(), self._before
        strange = {p for p in now.keys() | before.keys() if now.get(p) != before.get(p)}
        assert not strange, f"{strange}\n{told}"
        assert not list(self.root.rglob(CANARY)), told
        left = [p.name for p in (self.root / "tmp").iterdir()]
        assert not left, f"left in the temporary folder: {left}\n{told}"

    def _really(self, arguments: tuple[str, ...]) -> Ended:
        """The command in a process of its own, with the process between that bounds what a model takes."""
        env = {**os.environ, "TMPDIR": str(self.root / "tmp"), "HOME": str(self.root / "home"), "NO_COLOR": "1"}
        command = [sys.executable, "-m", "layerline", *arguments]
        try:
            done = subprocess.run(
                command, cwd=self.cwd, env=env, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return Ended(None, "", "it hangs", _SECONDS, 0)
        return Ended(done.returncode, done.stdout, done.stderr, 0, 0)
