"""Random chains, compiled, run in the emulator, and judged by an evaluation of their own.

    python -m tests.fuzzing --seeds 0-2000           many seeds, with progress and a summary by class
    python -m tests.fuzzing --seeds 1290 --show      one seed: its text, target, sizes and what came of it

A seed draws a chain as the text that a user could have written, and beside each line its meaning. The meaning is
evaluated in float64 with a bound of what f32 arithmetic may add. Every element of the kernel's result has to lie
between the roundings of (value - bound) and (value + bound). Where no bound can be given, as beside a comparison that
is too close to call, an element is not judged, and the share of those is told. Nothing here imports the generated
reference or the derived tolerances: this is the second opinion on both.

Meaning, from the value up:

    bounded     values with a bound of their error
    arithmetic  elementwise ops, comparisons, masks, integers, casts
    rows        reductions of a row, and what is made of them
    choosing    the k largest of a row
    products    matrix products

Drawing, by `random.Random` alone, so that a seed is the same chain with every version of Python and numpy:

    names       names of operands and values, awkward ones among them
    draft       a spec under construction: operands, lines, outputs
    drawing_rows, drawing_choices, drawing_integers, drawing_products
    operands    how a call's operands are filled and laid out
    seeds       what a seed stands for: its chain, target, sizes, operands

Running:

    judging     what of a result is wrong
    trial       one seed from text to verdict
    workers     processes that run seeds, with a time limit; one that dies costs its seed alone
    report      progress, a line of JSON a seed, the summary
"""
