/* The one product that all of these kernels are made of, in registers:
 *
 *     y[r][c] = start[r][c] + sum over k of x[r][k] * w[k][c]          r < MAX_ROWS, c < PANEL
 *
 * w lies in panels of PANEL columns, row after row. Each sum runs over k in order in one fused multiply-add after
 * another, however many rows there are: a row's result is the same bits alone and beside others.
 * (The register blocking of GotoBLAS and BLIS: Goto and van de Geijn, TOMS 2008; Van Zee and van de Geijn, TOMS 2015.)
 */
#ifndef TILE_H
#define TILE_H

#include "real.h"

#if LANES == 16
#define MAX_ROWS 12 /* 2 x 12 sums, 2 weights, 1 input of 32 registers */
#else
#define MAX_ROWS 6 /* 2 x 6 sums, 2 weights, 1 input of 16 registers */
#endif
#define PANEL (2 * LANES)

/* How the rows of a panel are stored. PAIRS: bfloat16, column c in the low half of word c, column c + LANES in the high.
 * DEPTH_PAIRS: bfloat16, word c has column c of row k in its low half and of row k + 1 in its high half; the tile takes
 * row k + 1 first, and wants its x in that order. */
enum { FLOATS, PAIRS, DEPTH_PAIRS, BFLOAT16S, NIBBLES, BYTES, FLOAT8S }; /* the last three: see codes.h */

ALWAYS void panel_row(const int form, const void *w, int64_t k, const int next, int64_t stride, vec *low, vec *high) {
    if (form == DEPTH_PAIRS) {
        const uint32_t *row = (const uint32_t *)w + k / 2 * stride;
        const bits left = *(const bits *)row, right = *(const bits *)(row + LANES);
        if (next) *low = (vec)(left << 16), *high = (vec)(right << 16);
        else *low = (vec)(left & 0xffff0000u), *high = (vec)(right & 0xffff0000u);
    } else if (form == PAIRS) {
        const bits pair = *(const bits *)((const uint32_t *)w + k * stride);
        *low = (vec)(pair << 16);
        *high = (vec)(pair & 0xffff0000u);
    } else if (form == FLOATS) {
        *low = load((const float *)w + k * stride);
        *high = load((const float *)w + k * stride + LANES);
    } else {
        *low = load_bfloat16((const uint16_t *)w + k * stride);
        *high = load_bfloat16((const uint16_t *)w + k * stride + LANES);
    }
}

/* `panels` neighbouring panels (w_step elements apart), `rows` rows; y holds the start of the sums and then the sums. */
ALWAYS void tile(const int form, const int rows, const int panels, const float *x, int64_t x_stride, const void *w,
                 int64_t w_stride, int64_t w_step, int64_t depth, float *y, int64_t y_stride) {
    vec sum[MAX_ROWS][8];
    const int64_t word = form == BFLOAT16S ? 2 : 4;
    const int at_once = form == DEPTH_PAIRS ? 2 : 1;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < 2 * panels; v++) sum[r][v] = load(y + r * y_stride + v * LANES);
    for (int64_t k = 0; k < depth; k += at_once)
        UNROLL for (int i = 0; i < at_once * panels; i++) {
            const int p = i % panels, next = i / panels;
            vec low, high;
            panel_row(form, (const char *)w + p * w_step * word, k, next, w_stride, &low, &high);
            UNROLL for (int r = 0; r < rows; r++) {
                const vec input = splat(x[r * x_stride + k + next]);
                sum[r][2 * p] += input * low;
                sum[r][2 * p + 1] += input * high;
            }
        }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < 2 * panels; v++) store(y + r * y_stride + v * LANES, sum[r][v]);
}

#define TILE_CASE(form, n)                                                     \
    case n:                                                                    \
        tile(form, n, 1, x, x_stride, w, w_stride, 0, depth, y, y_stride);     \
        return;

/* Not made anew for the strides of one caller: at 256 rows GCC's copies for these took 1.2 to 1.28 times as long. */
#ifdef __clang__
#define APART __attribute__((unused, noinline))
#else
#define APART __attribute__((unused, noinline, noclone))
#endif

/* One panel; any number of rows up to MAX_ROWS. */
#define DEFINE_ROWS(name, form)                                                                                    \
    APART static void name(int64_t rows, const float *x, int64_t x_stride, const void *w,                             \
                           int64_t w_stride, int64_t depth, float *y, int64_t y_stride) {                          \
        switch (rows) {                                                                                            \
            TILE_CASE(form, 1) TILE_CASE(form, 2) TILE_CASE(form, 3) TILE_CASE(form, 4) TILE_CASE(form, 5)         \
            TILE_CASE(form, 6) MORE_ROWS(form)                                                                     \
        }                                                                                                          \
    }

#if MAX_ROWS == 12
#define MORE_ROWS(form)                                                                              \
    TILE_CASE(form, 7) TILE_CASE(form, 8) TILE_CASE(form, 9) TILE_CASE(form, 10) TILE_CASE(form, 11) \
    TILE_CASE(form, 12)
#else
#define MORE_ROWS(form)
#endif

DEFINE_ROWS(rows_of_floats, FLOATS)
DEFINE_ROWS(rows_of_pairs, PAIRS)
DEFINE_ROWS(rows_of_depth_pairs, DEPTH_PAIRS)
DEFINE_ROWS(rows_of_bfloat16s, BFLOAT16S)

#endif
