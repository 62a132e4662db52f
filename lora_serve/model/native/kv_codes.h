/* K and V in one byte a number. The row of a token and head holds its codes, in whole words, and then their scale, a float:
 *
 *     x[i] = scale * code[i]      INT8: whole numbers, scale = max |x| / 127
 *                                 FLOAT8: numbers of e4m3 (arXiv 2209.05433), scale = max |x| / 448
 *
 * Codes are exact in bfloat16, so products take them as they are, and scales meet their sums. No code of FLOAT8 is a
 * denormal number: a number that would be one becomes 0 or the smallest normal one. A row with a number that is not
 * finite has a scale that is none. The row of a type of `real` (PLAIN) is its numbers alone.
 */
#ifndef KV_CODES_H
#define KV_CODES_H

#include <math.h>

#include "panels.h"

enum { PLAIN, INT8, FLOAT8 };

typedef uint16_t shorts __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int16_t signed_shorts __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint8_t unsigned_bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

#define CODES_AT_ONCE (4 * LANES)   /* in a vector of words */
#define VECTORS ((int)sizeof(real)) /* that these become: of floats, or of pairs of bfloat16 */
#define LARGEST_CODE(stored) ((stored) == INT8 ? 127.0f : 448.0f)
#define SMALLEST_ROW 1e-30f /* one of no larger numbers is zero */

/* Of `real`, in which pools are counted: those that codes take, and those from row to row. */
ALWAYS int64_t code_reals(int64_t size) { return up_to(size, 4) / (int64_t)sizeof(real); }
ALWAYS int64_t row_reals(int64_t stored, int64_t size) {
    return stored == PLAIN ? size : code_reals(size) + (int64_t)(sizeof(float) / sizeof(real));
}

/* What a widened code is to be multiplied by. */
ALWAYS float step_of_codes(int64_t stored) { return stored == INT8 ? 0x1p-24f : 1.0f; }

ALWAYS vec widen_int8(bits top) { return __builtin_convertvector((ints)(top & 0xff000000u), vec); }
ALWAYS vec widen_float8(bits top) { /* the exponent's bias becomes 127 */
    const bits number = (bits)((ints)top >> 4) & 0x87f00000u;
    return (vec)(number + ((bits)(number + number != 0u) & (120u << 23)));
}
ALWAYS bits widen_pairs(shorts top) { /* likewise, of bfloat16 */
    const shorts number = (shorts)((signed_shorts)top >> 4) & 0x87f0u;
    return (bits)(number + ((shorts)(number + number != 0u) & (120u << 7)));
}

/* Words of four codes as VECTORS, `step` words apart: floats, or pairs of bfloat16, those at bytes 0 and 2 and those at
 * bytes 1 and 3. */
ALWAYS void widen(const int stored, bits words, uint32_t *to, int64_t step) {
    if (VECTORS == 4 && stored == INT8)
        UNROLL for (int i = 0; i < 4; i++) store((float *)(to + i * step), widen_int8(words << (24 - 8 * i)));
    else if (VECTORS == 4)
        UNROLL for (int i = 0; i < 4; i++) store((float *)(to + i * step), widen_float8(words << (24 - 8 * i)));
    else if (stored == INT8) {
        *(bits *)to = (bits)widen_int8(words << 24) >> 16 | (bits)widen_int8(words << 8);
        *(bits *)(to + step) = (bits)widen_int8(words << 16) >> 16 | (bits)widen_int8(words);
    } else {
        *(bits *)to = widen_pairs((shorts)words << 8);
        *(bits *)(to + step) = widen_pairs((shorts)words);
    }
}

/* Where number i of a query stands, so that neighbours in memory meet the pairs above. */
ALWAYS int64_t place_in_pairs(int64_t i) { return VECTORS == 4 ? i : (i & ~3) | (i & 1) << 1 | (i >> 1 & 1); }

ALWAYS bits absolute(vec x) { return (bits)x & 0x7fffffffu; }

ALWAYS bits code_of(const int stored, vec x) { /* in the lowest byte, rounded to the nearest, ties to even */
    if (stored == INT8) return (bits)(x + splat(0x1.8p23f));
    const bits raw = absolute(x), rounded = ((raw + 0x7ffffu + (raw >> 20 & 1u)) >> 20) - (120u << 3);
    const ints is_small = (vec)raw < splat(0x1p-6f), is_some = (vec)raw > splat(0x1p-7f);
    return ((bits)x >> 24 & 0x80u) | ((bits)is_small & (bits)is_some & 8u) | (~(bits)is_small & rounded);
}

ALWAYS void write_codes(const int stored, const float *x, int64_t size, uint8_t *to) {
    float end[LANES] = {0.0f};
    const int64_t whole = size / LANES * LANES;
    memcpy(end, x + whole, (size - whole) * sizeof(float));
    vec tops = (vec)absolute(load(end)), none = load(end) - load(end);
    for (int64_t i = 0; i < whole; i += LANES)
        tops = larger((vec)absolute(load(x + i)), tops), none += load(x + i) - load(x + i);
    float top = 0.0f;
    UNROLL for (int i = 0; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
    const float scale = add_lanes(none) != 0.0f ? NAN : top > SMALLEST_ROW ? top / LARGEST_CODE(stored) : 1.0f;
    for (int64_t i = 0; i < whole; i += LANES)
        *(unsigned_bytes *)(to + i) = __builtin_convertvector(code_of(stored, load(x + i) / splat(scale)), unsigned_bytes);
    if (whole < size) {
        const unsigned_bytes last = __builtin_convertvector(code_of(stored, load(end) / splat(scale)), unsigned_bytes);
        memcpy(to + whole, &last, up_to(size, 4) - whole);
    }
    memcpy(to + up_to(size, 4), &scale, sizeof scale);
}

/* `count` rows, one after the other, of K or V. */
ALWAYS void store_rows(int64_t stored, const float *x, int64_t count, int64_t size, real *to) {
    if (stored == PLAIN) round_row(x, count * size, to);
    for (int64_t r = 0; stored != PLAIN && r < count; r++, x += size, to += row_reals(stored, size))
        if (stored == INT8) write_codes(INT8, x, size, (uint8_t *)to);
        else write_codes(FLOAT8, x, size, (uint8_t *)to);
}

#endif
