"""The functions that stand in front of a kernel: what they are called, and what each is for.

Their texts are in templates/parts, but for those that a vendor's hardware has a word for: these are the target's
(`Spelling.functions`). What is made of such words stands here, beside its bound.

A special function is as exact near its zero as elsewhere, which the words are not: log_2 is off by 2^-22 where it is
next to nothing, 1 - e^x by half a place of 1. So each has two pieces, both of which are computed, and a selection, as
no warp's lanes would agree on a branch. A polynomial is the one whose largest error, of the result, is the least
(Lawson's algorithm, in double; its coefficients rounded); an error is counted in 2^-23 of the result, as `Op.ulps` is.

Each bound follows from the words' own, all errors pointing the same way (tests/language/test_special.py). Over all 2^32
inputs an H200 was off by less: log 2.38 ulp, log1p 3.00, tanh 3.09, erf 3.28, GELU 3.69 of x. Its kernels of one such
function over 16384 x 8192 halves run at the rate of a copy, where the compiler's functions left log at 77 %, erf at 75,
GELU at 74 and mish at 56 (tanh at 94); sums of them over rows of 16384 bf16, which move half as much an element, went
from 48 to 85 % for log, from 51 to 74 for erf, 43 to 90 for GELU, 70 to 76 for tanh, 33 to 86 for mish. So nothing here
is rounder than f32 for the sake of speed: tanh.approx, off by 2^-11, took 130.5 us where the tanh here took 131. A
power is the one that stays behind, at 83 % of the rate of a copy in bf16 (by powf 37), though at all of it in f32 (69).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusegen.language.types import LEAST_INT, DType, f8e4m3, f8e4m3fnuz, f8e5m2, f8e5m2fnuz, f8e8m0, i32

WORD_FUNCTIONS: Mapping[str, tuple[str, str, str]] = {  # what it is, its parameters, its result
    "larger": ("the larger of two; NaN wins", "float a, float b", "float"),
    "smaller": ("the smaller of two; NaN wins", "float a, float b", "float"),
    "power_of_2": ("2^x, within 2 ulp; below 2^-126 it is 0", "float x", "float"),
    "reciprocal": ("1 / x, within 1 ulp; above 2^126 it is 0", "float x", "float"),
    "log_2": ("log2(x) of no subnormal x: within 2^-22 from 1/2 to 2, within 2 ulp elsewhere", "float x", "float"),
    "to_int": ("x toward zero, the nearest int of what is beyond them, and 0 of NaN", "float x", "int"),
}


NEAR_0 = "0.45f"  # magnitudes below this have their tanh by a polynomial alone


@dataclass(frozen=True, slots=True)
class Special:
    """A function made of the words and of arithmetic: alike for every vendor."""

    what: str
    body: tuple[str, ...]
    needs: tuple[str, ...] = ()
    parameters: str = "float x"
    result: str = "float"


# ln x = (x - 1) y' / (e^y' - 1) with y' = ln x, and y' / (e^y' - 1) is smooth: 1 - y' / 2 and an even rest, so an error
# of y' there is halved. With y = log2 x from -0.9 to 0.9 the rest is known to 0.8 ulp by two terms, and there the
# product is within 2.9 ulp; beyond, where log_2 is off by 2^-22 / 0.9 of it at most, ln 2 y is. logf took 25
# instructions and this takes 12, of which 3 are for subnormals, which ln(1 + x) needs as little as what is none.
LOG_PIECES = (
    "const float w = y * y;",
    "const float near = {0} * fmaf(-0.34657359f, y, fmaf(fmaf(-0.000316441874f, w, 0.040036682f), w, 1.0f));",
    "return fabsf(y) < 0.9f ? near : 0.693147181f * y;",
)
LOG_OF_ANY = (  # y = log2 x, subnormals too, which log_2 has no value for; t is x, or a number of the same mantissa
    "const bool tiny = x < 1.17549435e-38f;",
    "const float t = tiny ? 16777216.0f * x : x;",
    "float y = log_2(t);",
    "if (tiny) y -= 24.0f;",
)


def eight_bits(dtype: DType, mantissa: int, bias: int, beyond: str) -> Mapping[str, Special]:
    """A number to its code of 8 bits, a code to its number, and both: integer arithmetic, which gives the bits that the
    instructions of some targets do. `mantissa` counts bits, `bias` is the exponent's, and `beyond` tells the codes that
    are no numbers.

    A number below the smallest normal one is added to a number whose last place is the step between subnormals: the sum
    is rounded to nearest even, and its last bits are the code. Others are rounded in place, at the last kept bit.
    """
    cut, exponents = 23 - mantissa, 127 - bias  # bits that go, and by how much exponents differ from an f32's
    step, normal = f"{dtype.tiny * 2.0**23!r}f", f"{2.0 ** (1 - bias)!r}f"
    fnuz = dtype in (f8e4m3fnuz, f8e5m2fnuz)
    signed = "code == 0u ? 0u : sign | code" if fnuz else "sign | code"
    return {
        f"to_{dtype}": Special(
            f"the nearest {dtype}, of two the even one, at most {dtype.largest:.0f} in magnitude; NaN stays NaN",
            (f"if (x != x) return {'0x80' if fnuz else '0x7f'};",
             "const unsigned sign = __float_as_uint(x) >> 24 & 0x80u;",
             f"const float size = fminf(fabsf(x), {dtype.largest!r}f);",
             "const unsigned bits = __float_as_uint(size);",
             f"const unsigned small = __float_as_uint(size + {step}) - __float_as_uint({step});",
             f"const unsigned even = bits + {(1 << (cut - 1)) - 1:#x}u + (bits >> {cut} & 1u);",
             f"constexpr unsigned rebias = {exponents << mantissa};",
             f"const unsigned code = size < {normal} ? small : (even >> {cut}) - rebias;",
             f"return static_cast<unsigned char>({signed});"), (), "float x", "unsigned char",
        ),
        f"{dtype}_value": Special(
            f"the number that an {dtype} is",
            ("const unsigned code = x & 0x7fu;",
             beyond,
             f"const float size = code < {1 << mantissa}u ? static_cast<float>(code) * {dtype.tiny!r}f",
             f"    : __uint_as_float((code << {cut}) + {exponents << 23:#x}u);",
             "return x < 0x80 ? size : -size;"), (), "unsigned char x",
        ),
        f"round_{dtype}": Special(
            f"x rounded to {dtype}, of two to the even one, at most {dtype.largest:.0f} in magnitude",
            (f"return {dtype}_value(to_{dtype}(x));",), (f"to_{dtype}", f"{dtype}_value"),
        ),
    }  # fmt: skip


def overflow(dtype: DType, within: str, beyond: str) -> Mapping[str, Special]:
    """A cast that does not saturate: `within` says of x that it rounds to a number of the type, which ends halfway to
    the number that would come next."""
    name = f"round_{dtype}"
    what = f"x rounded to {dtype}; {'an infinity' if 'INF' in beyond else 'NaN'} beyond its range"
    needs = (name, f"to_{dtype}", f"{dtype}_value")
    return {f"overflow_{dtype}": Special(what, (f"return {within} ? {name}(x) : {beyond};",), needs)}


PHILOX_ROUNDS = (
    "unsigned k0 = static_cast<unsigned>(seed), k1 = 0u;",
    "#pragma unroll",
    "for (int round = 0; round < 10; ++round) {",
    "  const unsigned a = __umulhi(0xD2511F53u, c0), b = __umulhi(0xCD9E8D57u, c2);",
    "  const unsigned next1 = 0xCD9E8D57u * c2, next3 = 0xD2511F53u * c0;",
    "  c0 = b ^ c1 ^ k0;",
    "  c2 = a ^ c3 ^ k1;",
    "  c1 = next1;",
    "  c3 = next3;",
    "  k0 += 0x9E3779B9u;",
    "  k1 += 0xBB67AE85u;",
    "}",
)

SPECIAL_FUNCTIONS: Mapping[str, Special] = {
    "number_in_order": Special(
        "the number whose place among all numbers is x; NaN of what is below and above all of them",
        ("return __uint_as_float(x >> 31 ? x ^ 0x80000000u : ~x);",), (), "unsigned x",
    ),
    "place_in_order": Special(
        "the place of x among all numbers: its bits, in their order; NaN is the last",
        ("const unsigned bits = __float_as_uint(x);",
         "const unsigned place = bits >> 31 ? ~bits : bits | 0x80000000u;",
         "return x != x ? 0xffffffffu : x == 0.0f ? 0x80000000u : place;"), (), "float x", "unsigned",
    ),
    "nearest_int": Special(
        "x, or the nearest int of what is beyond them",
        ("constexpr long long least = -2147483648LL, most = 2147483647LL;",
         "return static_cast<int>(x < least ? least : x > most ? most : x);"), (), "long long x", "int",
    ),
    "exponential": Special(
        "e^x as a power of 2: within 2 ulp and what rounding the product makes of x; below 2^-126 it is 0",
        ("return power_of_2(1.44269504f * x);",), ("power_of_2",),
    ),
    "log_of_normal": Special(
        "ln x of no subnormal x, within 3 ulp",
        ("const float y = log_2(x);", *(line.format("(x - 1.0f)") for line in LOG_PIECES)), ("log_2",),
    ),
    "natural_log": Special(
        "ln x, within 3 ulp",
        (*LOG_OF_ANY, *(line.format("(t - 1.0f)") for line in LOG_PIECES)), ("log_2",),
    ),
    "log_base_2": Special(
        "log2 x, within 4 ulp",
        (*LOG_OF_ANY, LOG_PIECES[0], LOG_PIECES[1].format("(t - 1.0f)"),
         "return fabsf(y) < 0.9f ? 1.44269504f * near : y;"), ("log_2",),
    ),
    "log_1_plus": Special(
        "ln(1 + x), within 4 ulp",
        ("const float y = log_2(1.0f + x);", *(line.format("x") for line in LOG_PIECES)), ("log_2",),
    ),
    # 2^(y log2 x) with x = m 2^k, m between the roots of 1/2 and 2. y k is taken apart to its last place: into an even
    # number, by a sum whose last place is 2, and what is left, at most 1, which y log2 m comes to, off by 4 * 2^-22.
    # powf takes 76 instructions, and this 24
    "small_power": Special(
        "x^y of a y that is no whole number and at most 4 in magnitude, within 16 ulp",
        ("const bool tiny = fabsf(x) < 1.17549435e-38f;",
         "const float t = fabsf(tiny ? 16777216.0f * x : x);",
         "const int bits = __float_as_int(t);",
         "const int exponent = (bits - 0x3f3504f3) & 0xff800000;",
         "const float step = 1.1920929e-07f * y;",
         "float k = static_cast<float>(exponent);",
         "if (tiny) k -= 201326592.0f;",
         "const float even = fmaf(step, k, 25165824.0f) - 25165824.0f;",
         "const float left = fmaf(y, log_2(__int_as_float(bits - exponent)), fmaf(step, k, -even));",
         "const float root = power_of_2(0.5f * even);",
         "float power = power_of_2(left) * root * root;",
         "if (!(x > 0.0f)) power = NAN;",
         "if (t == 0.0f || t == INFINITY) power = y > 0.0f ? t : t == 0.0f ? INFINITY : 0.0f;",
         "return power;"), ("power_of_2", "log_2"), "float x, float y",
    ),
    "tangent_near_0": Special(
        f"tanh x of magnitudes below {NEAR_0}, within 2.4 ulp",
        ("const float w = x * x;",
         "return x * fmaf(fmaf(fmaf(-0.0463219024f, w, 0.132466495f), w, -0.333304852f), w, 1.0f);"),
    ),
    # beyond the polynomial it is off by 4.5 ulp at 0.45, and by less further out
    "hyperbolic_tangent": Special(
        "tanh x, within 5 ulp",
        ("const float far = 1.0f - 2.0f * reciprocal(1.0f + power_of_2(2.88539008f * fabsf(x)));",
         f"return fabsf(x) < {NEAR_0} ? tangent_near_0(x) : copysignf(far, x);"),
        ("tangent_near_0", "power_of_2", "reciprocal"),
    ),
    # e^(2 ln(1 + x)) - 1 = x (x + 2), without an exponential or a logarithm; 1e9 is as good as any more, whose square
    # would have no reciprocal
    "tanh_of_log": Special(
        "tanh(ln(1 + x)), within 4 ulp",
        ("const float y = smaller(x, 1e9f);",
         "const float n = y * (y + 2.0f);",
         "return x < -1.0f ? NAN : n * reciprocal(n + 2.0f);"), ("smaller", "reciprocal"),
    ),
    # log2 of 1 - erf x by a polynomial: of the result it is off by 1.5 ulp at most, and falls for ever; the other piece
    # by 1.1 ulp
    "error_function": Special(
        "erf x, within 6 ulp",
        ("const float t = fabsf(x);",
         "const float w = t * t;",
         "const float near = t * fmaf(fmaf(fmaf(-0.0243893117f, w, 0.112456292f), w, -0.376107335f), w, 1.12837899f);",
         "float rest = fmaf(fmaf(-0.00246955547f, t, 0.0270251036f), t, -0.143506646f);",
         "rest = fmaf(fmaf(fmaf(rest, t, -0.92332983f), t, -1.62579215f), t, -0.000342250249f);",
         "const float far = 1.0f - power_of_2(rest);",
         "return copysignf(t < 0.5f ? near : far, x);"), ("power_of_2",),
    ),
    # C's own quotient goes toward zero, and has no value by 0 or where it is beyond int
    "floor_quotient": Special(
        "x / y downwards, 0 where y is 0, and modulo 2^32",
        ("if (y == 0) return 0;",
         "if (y == -1) return static_cast<int>(0u - x);",
         "const int q = x / y;",
         "return x % y != 0 && (x < 0) != (y < 0) ? q - 1 : q;"), (), "int x, int y", "int",
    ),
    "floor_remainder": Special(
        "the remainder of x / y downwards, of y's sign; 0 where y is 0",
        ("if (y == 0 || y == -1) return 0;",
         "const int r = x % y;",
         "return r != 0 && (r < 0) != (y < 0) ? r + y : r;"), (), "int x, int y", "int",
    ),
    "philox": Special(
        "32 random bits: word index mod 4 of Philox4x32-10 of the counter (index / 4, offset, 0) and the key (seed, 0)",
        ("const unsigned place = static_cast<unsigned>(low), above = static_cast<unsigned>(high);",
         "unsigned c0 = place >> 2 | above << 30, c1 = above >> 2, c2 = static_cast<unsigned>(offset), c3 = 0u;",
         *PHILOX_ROUNDS,
         "const unsigned even = place & 2u ? c2 : c0, odd = place & 2u ? c3 : c1;",
         "return static_cast<int>(place & 1u ? odd : even);"), (), "int low, int high, int offset, int seed", "int",
    ),
    "philox_words": Special(
        "random bits of four elements: the words of Philox4x32-10 of the counter (index / 4, offset, 0) and the key "
        "(seed, 0)",
        ("const unsigned long long four = static_cast<unsigned long long>(index) >> 2;",
         "unsigned c0 = static_cast<unsigned>(four), c1 = static_cast<unsigned>(four >> 32);",
         "unsigned c2 = static_cast<unsigned>(offset), c3 = 0u;",
         *PHILOX_ROUNDS,
         "words[0] = c0;",
         "words[1] = c1;",
         "words[2] = c2;",
         "words[3] = c3;"), (), "unsigned (&words)[4], long long index, int offset, int seed", "void",
    ),
    **eight_bits(f8e4m3, 3, 7, "if (code == 0x7fu) return NAN;"),
    **eight_bits(f8e5m2, 2, 15, "if (code >= 0x7cu) return code > 0x7cu ? NAN : x < 0x80 ? INFINITY : -INFINITY;"),
    **eight_bits(f8e4m3fnuz, 3, 8, "if (x == 0x80) return NAN;"),
    **eight_bits(f8e5m2fnuz, 2, 16, "if (x == 0x80) return NAN;"),
    "to_f8e8m0": Special(
        "the nearest power of 2 as its exponent, of two the larger one, from 2^-127 to 2^127; 0xff of NaN",
        ("if (x != x) return 0xff;",
         "const unsigned bits = __float_as_uint(fminf(fmaxf(x, 5.87747175e-39f), 1.70141183e+38f));",
         "return static_cast<unsigned char>(bits > 0x400000u ? (bits + 0x400000u) >> 23 : 0u);"),
        (), "float x", "unsigned char",
    ),
    "f8e8m0_value": Special(
        "the power of 2 that an f8e8m0 is: 0 is 2^-127, below a float's exponents, and what would be infinity NaN",
        ("const float power = fmaxf(__uint_as_float(static_cast<unsigned>(x) << 23), 5.87747175e-39f);",
         "return fmaf(power, 0.0f, power);"),
        (), "unsigned char x",
    ),
    "round_f8e8m0": Special(
        "x as the nearest power of 2, of two the larger one, from 2^-127 to 2^127",
        ("return f8e8m0_value(to_f8e8m0(x));",), ("to_f8e8m0", "f8e8m0_value"),
    ),
    **overflow(f8e4m3, "fabsf(x) <= 464.0f", "NAN"),
    **overflow(f8e5m2, "fabsf(x) < 61440.0f", "x * INFINITY"),
    **overflow(f8e4m3fnuz, "fabsf(x) < 248.0f", "NAN"),
    **overflow(f8e5m2fnuz, "fabsf(x) < 61440.0f", "NAN"),
    **overflow(f8e8m0, "x > 0.0f && x < 2.55211775e+38f", "NAN"),
    "to_f8e5m2_or_infinity": Special(
        "the code of a number of f8e5m2, or of an infinity",
        ("const unsigned char code = to_f8e5m2(x);",
         "return fabsf(x) == INFINITY ? static_cast<unsigned char>(code + 1) : code;"),  # 0x7b is the largest number's
        ("to_f8e5m2",), "float x", "unsigned char",
    ),
    "to_f4e2m1": Special(
        "the nibble of the nearest f4e2m1, of two the even one, at most 6 in magnitude; 7 of NaN",
        ("if (x != x) return 7;",
         "const unsigned sign = __float_as_uint(x) >> 28 & 8u;",
         "const float size = fminf(fabsf(x), 6.0f);",
         "const unsigned bits = __float_as_uint(size);",
         "const unsigned small = __float_as_uint(size + 4194304.0f) - __float_as_uint(4194304.0f);  // halves",
         "const unsigned even = bits + 0x1fffffu + (bits >> 22 & 1u);",
         "constexpr unsigned bias = 2 * 126;  // exponents of f32 are so much larger; a bit of the mantissa is below",
         "return static_cast<int>(sign | (size < 1.0f ? small : (even >> 22) - bias));"), (), "float x", "int",
    ),
    "f4e2m1_value": Special(
        "the number that a nibble is: its exponent and mantissa behind those of f32, which are 2^126 times as much",
        ("const float size = __uint_as_float((static_cast<unsigned>(x) & 7u) << 22) * 8.50705917e+37f;",
         "return x & 8 ? -size : size;"), (), "int x",
    ),
    "round_f4e2m1": Special(
        "x rounded to f4e2m1, of two the even one, at most 6 in magnitude; 6 of NaN",
        ("return f4e2m1_value(to_f4e2m1(x));",), ("to_f4e2m1", "f4e2m1_value"),
    ),
    "to_i4": Special(
        "the nearest whole number, of two the even one, from -8 to 7; 0 of NaN",
        ("return x != x ? 0 : static_cast<int>(rintf(fminf(fmaxf(x, -8.0f), 7.0f)));",), (), "float x", "int",
    ),
    "to_u4": Special(
        "the nearest whole number, of two the even one, from 0 to 15; 0 of NaN",
        ("return x != x ? 0 : static_cast<int>(rintf(fminf(fmaxf(x, 0.0f), 15.0f)));",), (), "float x", "int",
    ),
    "power_of_2_above": Special(
        "the least power of 2 from x on, within 2^-126 to 2^127; 2^127 of NaN",
        ("if (!(x < 1.70141183e+38f)) return 1.70141183e+38f;",
         "const unsigned up = __float_as_uint(x) + 0x7fffffu;",
         "return x <= 1.17549435e-38f ? 1.17549435e-38f : __uint_as_float(up & 0x7f800000u);"),
    ),
    "power_of_2_below": Special(
        "the largest power of 2 up to x, within 2^-126 to 2^127; 2^127 of NaN",
        ("if (!(x < 1.70141183e+38f)) return 1.70141183e+38f;",
         "return x <= 1.17549435e-38f ? 1.17549435e-38f : __uint_as_float(__float_as_uint(x) & 0x7f800000u);"),
    ),
    "to_i8": Special(
        "the nearest whole number, of two the even one, from -128 to 127; 0 of NaN",
        ("return x != x ? 0 : static_cast<int>(rintf(fminf(fmaxf(x, -128.0f), 127.0f)));",), (), "float x", "int",
    ),
    "to_unsigned": Special(
        "x toward zero, 0 of what is below it and of NaN, 4294967295 of what is beyond",
        ("if (!(x > 0.0f)) return 0u;", "return x < 4294967296.0f ? static_cast<unsigned>(x) : 4294967295u;"),
        (), "float x", "unsigned",
    ),
    "to_u8": Special(
        "the nearest whole number, of two the even one, from 0 to 255; 0 of NaN",
        ("return x != x ? 0 : static_cast<int>(rintf(fminf(fmaxf(x, 0.0f), 255.0f)));",), (), "float x", "int",
    ),
    # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)), with the factors -2 sqrt(2 / pi) log2(e) in the polynomial
    "gelu_by_tanh": Special(
        "x (1 + tanh u) / 2 as x / (1 + e^-2u), with -2u log2 e in one polynomial: u = sqrt(2 / pi) (x + 0.044715 x^3)",
        ("return x * reciprocal(1.0f + power_of_2(x * (-2.30220819f - 0.102943240f * x * x)));",),
        ("power_of_2", "reciprocal"),
    ),
    # log2 of Phi(-|x|) by a polynomial: Phi is off by 2.8 * 2^-23 at most, and down to -8 by 2^-11 of itself
    "normal_cdf": Special(
        "Phi(x), within 5 * 2^-23",
        ("const float t = fabsf(x);",
         "float tail = fmaf(fmaf(fmaf(-1.22736037e-06f, t, 4.89666163e-05f), t, -0.000833088707f), t, 0.00816331804f);",
         "tail = fmaf(fmaf(fmaf(fmaf(tail, t, -0.0533921272f), t, -0.458870947f), t, -1.15115058f), t, -0.999999046f);",
         "const float below = power_of_2(tail);",
         "return x < 0.0f ? below : 1.0f - below;"), ("power_of_2",),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reducer:
    """How one kind of reduction is finished across the threads of a row."""

    function: str
    what: str
    ctype: str
    start: str  # before the first value
    fields: tuple[str, ...]
    merge: str  # {0}, {1} ...: the other thread's fields
    needs: tuple[str, ...] = ()


REDUCERS: Mapping[str, Reducer] = {
    "sum": Reducer("row_sum", "the sum", "float", "0.0f", ("v",), "v += {0};"),
    "prod": Reducer("row_prod", "the product", "float", "1.0f", ("v",), "v *= {0};"),
    "max": Reducer("row_max", "the largest value", "float", "-INFINITY", ("v",), "v = larger(v, {0});", ("larger",)),
    "min": Reducer("row_min", "the smallest value", "float", "INFINITY", ("v",), "v = smaller(v, {0});", ("smaller",)),
    "softmax": Reducer("row_max_sum", "the largest value and the sum of exponentials below it", "MaxSum",
                       "{-INFINITY, 0.0f}", ("top", "total"), "v.merge({0}, {1});", ("MaxSum", "larger")),
    "welford": Reducer("row_welford", "the mean and the squared deviations from it", "Welford",
                       "{0.0f, 0.0f, 0.0f}", ("count", "mean", "deviations"), "v.merge({0}, {1}, {2});", ("Welford",)),
}  # fmt: skip
INT_REDUCERS: Mapping[str, Reducer] = {  # sums and products are of unsigned numbers, which wrap where an int may not
    "sum": Reducer("row_sum", "the sum, modulo 2^32,", "unsigned", "0u", ("v",), "v += {0};"),
    "prod": Reducer("row_prod", "the product, modulo 2^32,", "unsigned", "1u", ("v",), "v *= {0};"),
    "max": Reducer("row_max", "the largest integer", "int", LEAST_INT.strip("()"), ("v",), "v = max(v, {0});"),
    "min": Reducer("row_min", "the smallest integer", "int", "2147483647", ("v",), "v = min(v, {0});"),
}


def reducer_of(kind: str, dtype: DType) -> Reducer:
    """Of values of a type."""
    return (INT_REDUCERS if dtype is i32 else REDUCERS)[kind]
