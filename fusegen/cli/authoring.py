"""`new`, `diff` and `watch`: a spec to start from, how its kernel changed, and both at each save.

Kernels are those of the planner's first choice, as in `generated/`: what was measured here has no say.
"""

from __future__ import annotations

import difflib
import keyword
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from fusegen.cli.options import AsJson, Dtype, Sets, Spec, TargetName
from fusegen.cli.showing import complain, print_json, progress, prose, say, show_code
from fusegen.errors import FusegenError, MissingError, RequestError, writing

if TYPE_CHECKING:
    from fusegen.language.spec import Chain
    from fusegen.targets import Target

TAKEN = frozenset({"F", "M", "N", "bf16", "chain", "dims", "gain", "x"})  # names that the spec below has
POLL_S = 0.2  # between looks at a file that is watched
TEMPLATE = '''"""Say here what {name} is for."""

from fusegen import bf16, chain, dims
from fusegen import ops as F

M, N = dims("M N")  # rows, and the length of each


@chain(M=8192, N=4096)  # default sizes; --set N=5120 asks for others
def {name}(x: bf16[M, N], gain: bf16[N]) -> bf16[M, N]:
    """rmsnorm(x) * gain."""
    return F.rmsnorm(x, gain)
'''


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the chain; the file is NAME.py.")],
    folder: Annotated[Path, typer.Option("--in", metavar="FOLDER", help="Where the file goes.")] = Path(),
) -> None:
    """Write a spec to start from."""
    if not name.isidentifier() or keyword.iskeyword(name) or name in TAKEN:
        raise RequestError(f"{name!r} can't be a chain's name: write a name that is free in Python, as in my_norm")
    path = folder / f"{name}.py"
    with writing(str(path), "name another folder with --in"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(TEMPLATE.format(name=name))
        except FileExistsError:
            raise RequestError(f"{path} is there already; give another name, or remove it") from None
    say(f"wrote {path}", "", f"fusegen watch {path}", f"fusegen plan {path}", f"fusegen validate {path}")


def diff(
    spec: Spec,
    target: TargetName = None,
    against: Annotated[str | None, typer.Option("--against", metavar="TARGET", help="Another target.")] = None,
    revision: Annotated[str | None, typer.Option("--from", metavar="REV", help="The spec at a git revision.")] = None,
    sets: Sets = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Show how a kernel changed: from a revision of its spec, or against another target."""
    from fusegen.cli import asking

    if (against is None) == (revision is None):
        raise RequestError("diff compares with one thing: --against TARGET, or --from REV")
    chain, chosen = asking.ask_chain(spec, sets or (), dtype), asking.ask_target(target)
    now = kernels(chain, chosen)
    if against is not None:
        other = asking.ask_target(against)
        before, names = kernels(chain, other), (chosen.name, other.name)
        text = changes(now, before, *names)
    else:
        assert revision is not None
        before, names = kernels(at_revision(chain, revision, sets or (), dtype), chosen), (revision, "now")
        text = changes(before, now, *names)
    if as_json:
        print_json({"chain": chain.name, "target": chosen.name, "from": names[0], "to": names[1], "diff": text})
    elif text:
        show_code(text, "diff")
    else:
        say(f"the kernels of {names[0]} and {names[1]} are the same")


def watch(
    spec: Spec,
    target: TargetName = None,
    on: Annotated[str, typer.Option("--on", metavar="auto|gpu|emulator", help="What runs the kernel.")] = "auto",
    sets: Sets = None,
    dtype: Dtype = None,
) -> None:
    """At each save of a spec: plan and validate it, and show what changed in its kernel. Ctrl-C ends it."""
    from fusegen.cli import asking
    from fusegen.runtime.finding import find

    chosen = asking.ask_target(target)
    find(chosen, on)  # says at once when there is no such device
    path = Path(spec.partition(".py:")[0] + ".py" if ".py:" in spec else spec)
    before: Mapping[str, str] | None = None
    try:
        for _ in saves(path):
            try:
                chain = asking.ask_chain(spec, sets or (), dtype)
                now = kernels(chain, chosen)
            except FusegenError as error:
                complain(f"{error}\n")
                continue
            if before is not None and (text := changes(before, now, "before", "now")):
                show_code(text, "diff")
            before = now
            validated(chain, chosen, on)
            sys.stdout.flush()
    except KeyboardInterrupt:
        complain("\n")


def validated(chain: Chain, target: Target, on: str) -> None:
    """The verdict on a kernel, in a line, and its cost."""
    from fusegen import pipeline
    from fusegen.cli import builds, programs

    try:
        with progress(1) as bar:
            bar.step(f"{chain.name} for {target}")
            builds.show_validation(bar, chain, target, builds.validate_one(chain, target, on, 0, True), every=False)
        program = programs.program_of(chain, target)
        estimate = pipeline.plan(chain, target).cost.time_us if program is None else program.time_us
    except FusegenError as error:
        complain(f"{error}\n")
    else:
        say(prose(f"      {estimate:.1f} us by the cost model"))


def saves(path: Path) -> Iterator[None]:
    """Now, and whenever the file has changed since. An editor may take it away for a moment."""
    seen: object = None
    while True:
        try:
            facts = path.stat()
        except FileNotFoundError:
            if seen is None:
                raise RequestError(f"{path} is no file that can be watched") from None
        else:
            state = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
            if state != seen:
                seen = state
                yield
        time.sleep(POLL_S)


def kernels(chain: Chain, target: Target) -> Mapping[str, str]:
    """The text of each kernel, by its name. Raises NoPlan."""
    from fusegen.emitting.golden import emitted

    texts = {file.path: file.text for file in emitted(chain, target)}
    return {path.stem: text for path, text in texts.items() if path.suffix not in (".py", ".txt")}


def changes(before: Mapping[str, str], now: Mapping[str, str], old: str, new: str) -> str:
    """A unified diff of all kernels; empty where they are the same."""
    found: list[str] = []
    for name in {**before, **now}:
        first, last = (texts.get(name, "").splitlines(keepends=True) for texts in (before, now))
        found += difflib.unified_diff(first, last, f"{name} ({old})", f"{name} ({new})")
    return "".join(found)


def at_revision(chain: Chain, revision: str, sets: tuple[str, ...] | list[str], dtype: str | None) -> Chain:
    """The chain as its file had it at a revision of the repository that the file lies in."""
    from fusegen.cli import asking

    path = Path(chain.graph.where.file).resolve()
    command = ["git", "-C", str(path.parent), "show", f"{revision}:./{path.name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise MissingError("--from asks git, which is not installed here") from None
    if done.returncode:
        raise RequestError(f"git has no {path.name} at {revision}: {done.stderr.strip().splitlines()[-1]}")
    with TemporaryDirectory() as folder:
        old = Path(folder) / path.name
        old.write_text(done.stdout, encoding="utf-8")
        return asking.ask_chain(f"{old}:{chain.name}", sets, dtype)
