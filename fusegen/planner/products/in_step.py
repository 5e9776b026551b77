"""Blocks of a long launch of grouped products that wait for one another, so that they share lines in the L2 cache.

Persistent blocks with tiles of groups drift apart, and share fewer lines the longer they run. TFLOP/s where they wait
before each tile, before each 16th, and never; 256 experts whose groups have 0.7 to 1.3 of the mean rows, on one H200 or
two (docs/grouped.md, "How it runs"), and slices of 128 x 256 that a block brings:

    rows an expert, N, K                              each   16th   never    slices of 128 x 256
     8192, 4096, 6144, cooperative 128 x 256          665    658     622        190000
     4096, 4096, 6144, SwiGLU                         656    656     646         95000
     8192, 6144, 2048                                 646    650     647         95000
     2048, 4096, 6144                                 639    641     628         48000
     2048, 4096, 6144, SwiGLU                         643    644     640         48000
     1024, 16384, 5120, SwiGLU, 128 experts           610    616     610         40000
     2048, 6144, 2048                                 618    620     627         24000
     1024, 4096, 6144                                 602    615     618         24000
     1024, 6144, 2048                                 603    612     614         12000
     8192, 6144, 2048, ping-pong 128 x 128                   636     621         95000
     4096, 6144, 2048, ping-pong 128 x 128                   626     630         48000
     2048, 6144, 2048, ping-pong 128 x 128                   618     629         24000

Left to themselves, ping-pong blocks of the last but one took up to a tenth longer beside other kernels: 573.
"""

TILES, LEAST_SLICES = 16, 1 << 15
WIDEST = 256  # columns of the tiles whose slices are counted
MOST_LOOKS = 512  # at how many tiles have begun, some 0.1 ms; then a block waits no more for others, which may lack SMs


def tiles_in_step(columns: int) -> int:
    """After how many tiles blocks wait where each brings slices of so many columns in all; 0: they don't."""
    return TILES if columns // WIDEST >= LEAST_SLICES else 0


def said(tiles: int) -> str:
    """The same, as plans say it."""
    return f", in step after each {tiles} tiles" if tiles else ""
