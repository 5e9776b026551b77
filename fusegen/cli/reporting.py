"""`report`: all that is known of chains as one page, and two such pages' states side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusegen.cli.options import AsJson, Dtype, Sets, TargetName
from fusegen.cli.showing import pass_over, print_json, progress, say
from fusegen.errors import KernelError, RequestError, writing

if TYPE_CHECKING:
    from fusegen.language.spec import Chain
    from fusegen.reporting.comparing import Compared, Figure
    from fusegen.reporting.state import State
    from fusegen.targets import Target

PAGE = Path("report.html")


def report(
    given: Annotated[
        list[str],
        typer.Argument(metavar="SPEC", show_default=False,
                       help="As of compile; or a file that --save wrote, or two of them to compare."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page.")] = PAGE,
    save: Annotated[Path | None, typer.Option("--save", metavar="FILE.json", show_default=False,
                                              help="Keep what the page shows, to be compared later.")] = None,
    bench: Annotated[Path | None, typer.Option("--bench", metavar="FILE.json", show_default=False,
                                               help="Show what `fusegen bench --json` measured, too.")] = None,
    target: TargetName = None, sets: Sets = None, dtype: Dtype = None,
    on: Annotated[str, typer.Option("--on", metavar="auto|gpu|emulator", show_default=False,
                                    help="What validates it: auto is a matching GPU, else the emulator.")] = "auto",
    no_validate: Annotated[bool, typer.Option("--no-validate", help="Leave the validation out.")] = False,
    as_json: AsJson = False,
) -> int:  # fmt: skip
    """Write all that is known of chains as one page of HTML: graph, bytes, candidates, roofline, source, resources."""
    from fusegen.reporting.pages import page
    from fusegen.reporting.state import load

    check_out(out, save)
    states = saved_states(given)
    asked = {"--target": target, "--set": sets, "--dtype": dtype, "--bench": bench, "--no-validate": no_validate}
    if states and (unheard := [name for name, value in asked.items() if value]):
        raise RequestError(f"{unheard[0]} is for specs, and {states[0]} says already what was found")
    if len(states) == 2:
        if save is not None:
            raise RequestError("--save keeps one state, and here are two")
        compare(states, out, as_json)
        return 0
    if states:
        made = load(states[0])
    else:
        from fusegen.cli import asking

        chains, chosen = asking.ask_chains(given, sets or (), dtype), asking.ask_target(target)
        made = collected(chains, chosen, on, not no_validate, bench)
    size = write(out, page(made))
    if save is not None:
        made.save(save)
    wrong = [chain for chain in made.chains if chain.validation.ok is False]
    if as_json:
        print_json({"ok": not wrong, "out": str(out), "saved": str(save) if save else None, "state": made.to_json()})
        return 1 if wrong else 0
    for chain in made.chains:
        if chain.validation.ok is not True and not no_validate:
            say(f"{chain.name}: {'wrong: ' if chain in wrong else ''}{chain.validation.text}")
    say(*([f"wrote {save}"] if save else []), f"wrote {out}, {size:,} bytes")
    return 1 if wrong else 0


def saved_states(given: Sequence[str]) -> tuple[Path, ...]:
    """The states that were asked for in place of specs; none where they are specs. Raises RequestError for a mixture,
    and for more than two."""
    states = [name for name in given if name.endswith(".json")]
    if not states:
        return ()
    if len(states) < len(given):
        other = next(name for name in given if name not in states)
        raise RequestError(f"{states[0]} is a report's state, and {other} is none\n  name specs, or one state, or two")
    if len(states) > 2:
        raise RequestError(f"a report compares two states, and here are {len(states)}\n  name two of them")
    return tuple(map(Path, states))


def check_out(out: Path, save: Path | None) -> None:
    """Raises RequestError for a place where nothing can be written, before anything is built for it."""
    for file in filter(None, (out, save)):
        if file.is_dir():
            raise RequestError(f"{file} is a folder\n  name a file in it")
        if not file.resolve().parent.is_dir():
            raise RequestError(f"there is no folder {file.parent} to put {file.name} into")
    if save is not None and save.suffix != ".json":
        raise RequestError(f"--save {save}: a state's name ends in .json, by which `fusegen report` knows it again")


def collected(chains: Sequence[Chain], target: Target, on: str, validate: bool, bench: Path | None) -> State:
    """A state of these chains. Of several, those that can't be built are said and passed over."""
    from fusegen.reporting.benches import Benches
    from fusegen.reporting.collecting import collect, state

    benches = Benches.read(bench)
    found = []
    with progress(len(chains)) as bar:
        for chain in chains:
            bar.step(f"{chain.name} for {target}")
            try:
                found.append(collect(chain, target, on=on, validate=validate, benches=benches))
            except (KernelError, RequestError) as error:
                if len(chains) == 1:
                    raise
                pass_over(error)
    if not found:
        raise RequestError("there is nothing to report: none of these chains can be built")
    return state(found)


def write(out: Path, text: str) -> int:
    """Its size in bytes. Raises OutputError."""
    with writing(out, "name another file with --out"):
        out.write_text(text, encoding="utf-8")
    return len(text.encode())


# ---------------------------------------------------------------- two states


def compare(files: Sequence[Path], out: Path, as_json: bool) -> None:
    """Write the page that compares two states, and say what differs."""
    from fusegen.reporting.comparing import compared
    from fusegen.reporting.pages import page_of_two
    from fusegen.reporting.state import load

    before, after = map(load, files)
    stems = (files[0].stem, files[1].stem)
    names = stems if stems[0] != stems[1] else (str(files[0]), str(files[1]))
    size = write(out, page_of_two(before, after, names))
    found = compared(before, after)
    if as_json:
        print_json({"out": str(out), **comparison_facts(found)})
    else:
        say(*comparison_lines(found, names), f"wrote {out}, {size:,} bytes")


def comparison_facts(found: Compared) -> dict[str, Any]:
    both = [
        {
            "chain": one.name,
            "differs": one.differs,
            "figures": list(map(figure_facts, one.figures)),
            "kernels": [
                {"kernel": k.name, "differs": k.differs, "figures": list(map(figure_facts, k.figures))}
                for k in one.kernels
            ],
        }
        for one in found.both
    ]
    return {"both": both, "gone": list(found.gone), "new": list(found.new)}


def figure_facts(figure: Figure) -> dict[str, Any]:
    return {
        "name": figure.name, "unit": figure.kind, "before": figure.before, "after": figure.after,
        "change": figure.change,
    }  # fmt: skip


def comparison_lines(found: Compared, names: tuple[str, str]) -> list[str]:
    """A sentence for each chain."""
    lines = []
    for both in found.both:
        before, after = both.before.time_us, both.after.time_us
        if not both.differs:
            lines.append(f"{both.name}: the same")
        elif before == after:
            lines.append(f"{both.name}: differs, but not in its expected time of {after:.1f} us")
        else:
            lines.append(f"{both.name}: {before:.1f} us expected, then {after:.1f} us")
    lines += [f"{name}: only in {names[0]}" for name in found.gone]
    return lines + [f"{name}: only in {names[1]}" for name in found.new]
