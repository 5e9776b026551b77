"""Which generated kernels have other machine code than at another revision: `python benchmarks/machine_code.py REV`.

A change of names, comments or code that is to leave speed alone is shown to do so without a GPU: kernels whose machine
code is the same, those of programs too, need no measurement, and the others are listed. Compiles what differs of
`generated/cuda-*` at both revisions by NVRTC; the exit status is 1 where machine code does.
Run from the repository root.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from pathlib import Path

from elftools.elf.elffile import ELFFile
from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fusegen.compiling import compile_source  # noqa: E402
from fusegen.targets import GOLDEN_TARGETS, Target  # noqa: E402


def git(*words: str) -> str:
    """What git says; empty where it has nothing to say, as of a file that a revision lacks."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout


def machine_code(text: str, name: str, target: Target) -> bytes:
    """The instructions of a kernel, without what stands around them in its binary."""
    binary = compile_source(text, name, target, filename=f"{name}.cu", threads=1)
    sections = ELFFile(io.BytesIO(binary.code)).iter_sections()
    return b"".join(section.data() for section in sections if section.name.startswith(".text."))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", metavar="REV", help="what the files here are compared with, as HEAD~10")
    revision = parser.parse_args().revision
    if not git("rev-parse", "--verify", f"{revision}^{{commit}}"):
        parser.error(f"{revision} is no revision of this repository")
    same, other, gone = 0, [], []
    pairs = [
        (target, path)
        for target in GOLDEN_TARGETS
        if target.vendor == "cuda"
        for path in git("ls-tree", "-r", "--name-only", revision, f"generated/{target.folder}/").split()
        if path.endswith(".cu")
    ]
    for target, path in track(pairs, description="compiling"):
        here = ROOT / path
        if not here.is_file():
            gone.append(path)
            continue
        texts = git("show", f"{revision}:{path}"), here.read_text(encoding="utf-8")
        if texts[0] == texts[1]:
            same += 1
            continue
        before, now = (machine_code(text, here.stem, target) for text in texts)
        if before == now:
            same += 1
        else:
            other.append(f"{path}: {len(before)} bytes, now {len(now)}")
    print(f"{same} of {len(pairs)} kernels have the same machine code as at {revision}")
    for line in (*other, *(f"{path}: is no more" for path in gone)):
        print(f"  {line}")
    return 1 if other or gone else 0


if __name__ == "__main__":
    raise SystemExit(main())
