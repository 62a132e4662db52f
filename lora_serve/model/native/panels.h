/* Matrices that are laid out in panels as they are used: keys and values, and adapters' A and B; products by them. */
#ifndef PANELS_H
#define PANELS_H

#include "order.h"

#define IS_BFLOAT16 (sizeof(real) == 2)
#define WORDS (LANES * 4 / (int64_t)sizeof(real)) /* numbers of `real` in a vector */

static inline int64_t up_to(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

/* LANES rows of LANES words turned round: to[w * PANEL + r] = from[r][w]. They are exchanged between rows ever farther
 * apart (Eklundh, 1972); a word is a float, or a pair of neighbours in bfloat16. */
static void turn(const real *const *from, int64_t d, uint32_t *to) {
    vec a[LANES];
    UNROLL for (int r = 0; r < LANES; r++) a[r] = load((const float *)(from[r] + d));
#define EXCHANGE(step, firsts, seconds)                                                   \
    UNROLL for (int r = 0; r < LANES; r++) if (!(r & step)) {                             \
        const vec one = a[r], other = a[r + step];                                        \
        a[r] = SHUFFLE(one, other, firsts), a[r + step] = SHUFFLE(one, other, seconds);   \
    }
    TURNS
#undef EXCHANGE
    UNROLL for (int w = 0; w < LANES; w++) store((float *)(to + w * PANEL), a[w]);
}

/* Up to `most` numbers of a row from d on, zeros after its end. */
static void cut_out(const real *row, int64_t d, int64_t size, int64_t most, real *to) {
    const int64_t count = d < size ? least(most, size - d) : 0;
    memcpy(to, row + d, count * sizeof(real));
    memset(to + count, 0, (most - count) * sizeof(real));
}

/* LANES rows of `size` numbers, of which those from d on are turned, `depth` of them with the zeros after their end. */
static inline void turn_rows(const real *const *rows, int64_t d, int64_t size, int64_t depth, uint32_t *to) {
    const real *ends[LANES];
    real end[LANES][WORDS];
    for (const int64_t stop = d + depth; d < stop; d += WORDS, to += LANES * PANEL) {
        const int is_whole = d + WORDS <= size;
        for (int64_t r = 0; !is_whole && r < LANES; r++) ends[r] = end[r] - d, cut_out(rows[r], d, size, WORDS, end[r]);
        turn(is_whole ? rows : ends, d, to);
    }
}

/* y [rows][panels][PANEL] = start + x times `panels` panels; start NULL: y goes on. */
static void multiply_by(const input *x, int64_t x_stride, int64_t rows, const void *w, int64_t w_row, int64_t w_step,
                        int64_t panels, int64_t depth, const float *start, float *y, int64_t y_stride) {
    const int64_t wide = panels_at_once(rows);
    for (int64_t p = 0, taken; p < panels; p += taken) {
        taken = p + wide <= panels ? wide : 1;
        Group g = {.kind = IS_BFLOAT16 ? DEPTH_PAIRS : FLOATS, .panels = taken, .x = x, .x_stride = x_stride,
                   .w = (const uint32_t *)w + p * w_step, .w_row = w_row, .w_step = w_step, .depth = depth, .start = start,
                   .y = y + p * PANEL, .y_stride = y_stride};
        for (int64_t done = 0; done < rows; done += g.rows, g.x += g.rows * x_stride, g.y += g.rows * y_stride) {
            g.rows = rows_at_once(rows - done);
            multiply(&g);
        }
    }
}

/* PANEL columns of two rows of bfloat16 as pairs: those at even places, and those at odd places. */
ALWAYS void pair_columns(const real *one, const real *other, bits *even, bits *odd) {
    const bits a = *(const bits *)one, b = *(const bits *)other;
    *even = (a & 0xffffu) | (b << 16);
    *odd = (a >> 16) | (b & 0xffff0000u);
}

#ifdef REAL_IS_BFLOAT16

/* The columns of one panel of B [rank, out] from `column` on, as products have them; zeros after its ends. */
static void pair_panel(const real *b, int64_t rank, int64_t out, int64_t column, uint32_t *to) {
    real end[2][PANEL] = {};
    const int is_whole = column + PANEL <= out;
    for (int64_t j = 0; j < up_to(rank, DEPTH_UNIT); j += 2, to += PANEL) {
        const real *rows[2] = {end[0], end[1]};
        for (int64_t i = 0; i < 2; i++)
            if (j + i >= rank) memset(end[i], 0, sizeof end[i]);
            else if (is_whole) rows[i] = b + (j + i) * out + column;
            else cut_out(b + (j + i) * out, column, out, PANEL, end[i]);
        bits even, odd;
        pair_columns(rows[0], rows[1], &even, &odd);
        ZIP((vec)even, (vec)odd, low, high);
        store((float *)to, low);
        store((float *)to + LANES, high);
    }
}

#endif

#endif
