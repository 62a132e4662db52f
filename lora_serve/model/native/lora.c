/* The LoRA delta of a ragged batch: tokens in segments, every segment with an adapter of its own,
 *
 *     y[i] = gain[s] * y[i] + t * (shift[s] + scale[s] * (x[i] A[s]^T) B[s])      for i in a segment of slot s
 *
 * x [tokens, in] is `real`, y [tokens, out] float32, with the given row strides. Slot s of a module has A [rank, in] and
 * B [rank, out] (transposed, so that the expand runs along contiguous outputs), both row-major and of one type, and
 * perhaps float32 vectors gain and shift [out]; all are found through tables of addresses: an adapter is read where it
 * lies, at its true rank, and nothing is copied, padded or multiplied by zero. Tokens of a segment share what is read
 * of A and B, a few at a time; no token touches another's sums, and each is computed in one order however many there
 * are. (SGMV and BGMV of Punica: Chen et al., MLSys 2024.)
 *
 * Sums are float32 multiply-adds; but where x, A and B are all bfloat16, x A^T is rounded to bfloat16, as an input of a
 * product is, and both products are those of the variant (lora_<order>.h): by its instructions, or by the same
 * arithmetic. In a decoder layer, long segments of such adapters go on with the base's sums while these are at hand.
 */
#include <math.h>

#include "panels.h"
#include "threads.h"

#define RANKS 512  /* at a time: what the sums of a chunk take on the stack; converted adapters have any rank */
#define CHUNK 32   /* the most tokens of a segment that one thread takes at a time */
#define STREAMS 4  /* rows of A or B that one token reads side by side, while the next ones are fetched */
#define TOKENS 3   /* x TOGETHER sums of the shrink in registers */
#define TOGETHER 4

ALWAYS float load_one(const int form, const void *p, int64_t i) {
    return form == FLOATS ? ((const float *)p)[i] : float_of_bfloat16(((const uint16_t *)p)[i]);
}

/* PANEL numbers of a row, before they are read. */
ALWAYS void fetch(const int form, const char *p) {
    const int bytes = PANEL * (form == FLOATS ? 4 : 2);
    UNROLL for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

/* PANEL numbers of x, in order or, as load_pairs has them, those at even and those at odd places. */
ALWAYS void load_x(const int in_pairs, const real *p, vec *first, vec *second) {
#ifdef REAL_IS_BFLOAT16
    if (in_pairs) {
        load_pairs(p, first, second);
        return;
    }
#endif
    *first = load_real(p), *second = load_real(p + LANES);
    if (in_pairs) {
        UNZIP(*first, *second, even, odd);
        *first = even, *second = odd;
    }
}

/* h[t][j] = scale * x[t] . A[j] for `tokens` tokens and `ranks` rows of A. One token: as many bytes from `next` on are
 * fetched meanwhile, as rows are too short for the processor to foresee them by itself. */
ALWAYS void shrink_block(const int form, const int tokens, const int ranks, const real *x, int64_t x_stride,
                         const void *a, int64_t j, int64_t in, float scale, float *h, int64_t h_stride,
                         const char *next) {
    const int64_t word = form == FLOATS ? 4 : 2;
    const char *rows = (const char *)a + j * in * word;
    vec sum[TOKENS][STREAMS];
    UNROLL for (int t = 0; t < tokens; t++) UNROLL for (int r = 0; r < ranks; r++) sum[t][r] = (vec){};
    int64_t k = 0;
    for (; k + PANEL <= in; k += PANEL) {
        vec first[TOKENS], second[TOKENS];
        UNROLL for (int t = 0; t < tokens; t++)
            load_x(form == BFLOAT16S, x + t * x_stride + k, first + t, second + t);
        UNROLL for (int r = 0; r < ranks; r++) {
            const void *own = rows + (r * in + k) * word;
            if (tokens == 1) fetch(form, next + (r * in + k) * word);
            vec one, other;
            if (form == FLOATS) one = load(own), other = load((const float *)own + LANES);
            else load_pairs(own, &one, &other);
            UNROLL for (int t = 0; t < tokens; t++) {
                sum[t][r] += first[t] * one;
                sum[t][r] += second[t] * other;
            }
        }
    }
    UNROLL for (int t = 0; t < tokens; t++) UNROLL for (int r = 0; r < ranks; r++) {
        float total = add_lanes(sum[t][r]);
        for (int64_t i = k; i < in; i++) /* said, as compilers fuse in one loop and not in another */
            total = fmaf(float_of(x[t * x_stride + i]), load_one(form, a, (j + r) * in + i), total);
        h[t * h_stride + j + r] = scale * total;
    }
}

ALWAYS void shrink(const int form, int64_t tokens, const real *x, int64_t x_stride, const void *a, int64_t rank,
                   int64_t in, float scale, float *h, const void *after) {
    const int64_t word = form == FLOATS ? 4 : 2;
    int64_t t = 0;
    for (; t + TOKENS <= tokens; t += TOKENS) {
        int64_t j = 0;
        for (; j + TOGETHER <= rank; j += TOGETHER)
            shrink_block(form, TOKENS, TOGETHER, x + t * x_stride, x_stride, a, j, in, scale, h + t * rank, rank,
                         NULL);
        for (; j < rank; j++)
            shrink_block(form, TOKENS, 1, x + t * x_stride, x_stride, a, j, in, scale, h + t * rank, rank, NULL);
    }
    for (; t < tokens; t++) {
        int64_t j = 0;
        for (; j + STREAMS <= rank; j += STREAMS)
            shrink_block(form, 1, STREAMS, x + t * x_stride, x_stride, a, j, in, scale, h + t * rank, rank,
                         j + STREAMS < rank ? (const char *)a + (j + STREAMS) * in * word : after);
        for (; j < rank; j++)
            shrink_block(form, 1, 1, x + t * x_stride, x_stride, a, j, in, scale, h + t * rank, rank,
                         j + 1 < rank ? (const char *)a + (j + 1) * in * word : after);
    }
}

/* y[o] += h[j] B[j][o] for `ranks` rows of B, one after another; `next` as above. */
ALWAYS void expand_streams(const int form, const int ranks, const float *h, const void *b, int64_t j, int64_t out,
                           float *y, const char *next) {
    const int64_t word = form == FLOATS ? 4 : 2;
    const char *rows = (const char *)b + j * out * word;
    int64_t o = 0;
    for (; o + PANEL <= out; o += PANEL) {
        vec first = load(y + o), second = load(y + o + LANES);
        if (form == BFLOAT16S) {
            UNZIP(first, second, even, odd);
            first = even, second = odd;
        }
        UNROLL for (int r = 0; r < ranks; r++) {
            const void *own = rows + (r * out + o) * word;
            fetch(form, next + (r * out + o) * word);
            vec one, other;
            if (form == FLOATS) one = load(own), other = load((const float *)own + LANES);
            else load_pairs(own, &one, &other);
            first += splat(h[j + r]) * one;
            second += splat(h[j + r]) * other;
        }
        if (form == BFLOAT16S) {
            ZIP(first, second, low, high);
            first = low, second = high;
        }
        store(y + o, first);
        store(y + o + LANES, second);
    }
    for (; o < out; o++)
        for (int r = 0; r < ranks; r++) y[o] = fmaf(h[j + r], load_one(form, b, (j + r) * out + o), y[o]);
}

ALWAYS void expand(const int form, int64_t tokens, const float *h, int64_t rank, const void *b, int64_t out, float *y,
                   int64_t y_stride, const void *after) {
    if (tokens == 1) {
        const int64_t row = out * (form == FLOATS ? 4 : 2);
        int64_t j = 0;
        for (; j + STREAMS <= rank; j += STREAMS)
            expand_streams(form, STREAMS, h, b, j, out, y,
                           j + STREAMS < rank ? (const char *)b + (j + STREAMS) * row : after);
        for (; j < rank; j++)
            expand_streams(form, 1, h, b, j, out, y, j + 1 < rank ? (const char *)b + (j + 1) * row : after);
        return;
    }
    const int64_t groups = (tokens + MAX_ROWS - 1) / MAX_ROWS, whole = out / PANEL * PANEL, size = form == FLOATS ? 4 : 2;
    for (int64_t o = 0; o < whole; o += PANEL)
        for (int64_t g = 0; g < groups; g++) {
            const int64_t t = tokens * g / groups, end = tokens * (g + 1) / groups;
            (form == FLOATS ? rows_of_floats : rows_of_bfloat16s)(
                end - t, h + t * rank, rank, (const char *)b + o * size, out, rank, y + t * y_stride + o, y_stride);
        }
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t j = 0; j < rank; j++)
            for (int64_t o = whole; o < out; o++)
                y[t * y_stride + o] = fmaf(h[t * rank + j], load_one(form, b, j * out + o), y[t * y_stride + o]);
}

#ifdef REAL_IS_BFLOAT16

typedef struct { /* an adapter of one linear layer, and where scale * x A^T goes: [tokens] of s_stride numbers */
    const real *a;
    int64_t rank;
    float scale;
    real *s;
    int64_t s_stride;
} Shrink;

#if DEPTH_UNIT == 32
#include "lora_blocks.h"
#else
#include "lora_dot.h"
#endif

/* y += s B; s [tokens][up_to(rank, DEPTH_UNIT)] with zeros after the last rank. */
static void expand_together(int64_t tokens, const real *s, const real *b, int64_t rank, int64_t out, float *y,
                            int64_t y_stride) {
    uint32_t panel[RANKS / 2 * PANEL];
    input room[CHUNK * RANKS];
    float ends[CHUNK * PANEL];
    const int64_t depth = up_to(rank, DEPTH_UNIT);
    int64_t s_stride = depth;
    const input *from = sizeof(input) == sizeof(real) ? (const input *)s : prepared(s, &s_stride, tokens, depth, room);
    for (int64_t o = 0; o < out; o += PANEL) {
        const int64_t width = least(PANEL, out - o);
        pair_panel(b, rank, out, o, panel);
        if (width == PANEL) multiply_by(from, s_stride, tokens, panel, PANEL, 0, 1, depth, NULL, y + o, y_stride);
        else {
            for (int64_t t = 0; t < tokens; t++) {
                memset(ends + t * PANEL, 0, PANEL * sizeof(float));
                memcpy(ends + t * PANEL, y + t * y_stride + o, width * sizeof(float));
            }
            multiply_by(from, s_stride, tokens, panel, PANEL, 0, 1, depth, NULL, ends, PANEL);
            for (int64_t t = 0; t < tokens; t++)
                memcpy(y + t * y_stride + o, ends + t * PANEL, width * sizeof(float));
        }
    }
}

/* What a piece's tokens get of an adapter of bfloat16, as every number of tokens has it. */
static void add_rounded(int64_t tokens, const real *x, int64_t x_stride, const real *a, const real *b, int64_t rank,
                        int64_t in, int64_t out, float scale, float *y, int64_t y_stride, const void *after) {
    real s[CHUNK * RANKS];
    for (int64_t j = 0, ranks; j < rank; j += ranks) {
        ranks = least(RANKS, rank - j);
        const real *own = b + j * out;
        const Shrink shrinking = {a + j * in, ranks, scale, s, up_to(ranks, DEPTH_UNIT)};
        memset(s, 0, tokens * shrinking.s_stride * sizeof(real));
        shrink_piece(&shrinking, tokens, x, x_stride, in, own, out);
        if (tokens == 1) expand_one(s, own, ranks, out, y, after ? (const real *)after : own, in);
        else expand_together(tokens, s, own, ranks, out, y, y_stride);
    }
}

#endif

static void rescale(float *y, int64_t out, const float *gain, const float *shift, float t) {
    if (gain)
        for (int64_t o = 0; o < out; o++) y[o] *= gain[o];
    if (shift)
        for (int64_t o = 0; o < out; o++) y[o] += t * shift[o];
}

#define DELTA(form)                                                                                     \
    for (int64_t j = 0; j < rank[s]; j += RANKS) {                                                      \
        const int64_t ranks = rank[s] - j < RANKS ? rank[s] - j : RANKS, size = form == FLOATS ? 4 : 2; \
        const char *aj = (const char *)a[s] + j * in * size, *bj = (const char *)b[s] + j * out * size; \
        shrink(form, tokens, xi, x_stride, aj, ranks, in, t * scale[s], h, bj);                         \
        expand(form, tokens, h, ranks, bj, out, yi, y_stride, after ? after : bj);                       \
    }

/* One piece: [first token, number of tokens (CHUNK at most), slot]. The tables are one module's, indexed by slot; an
 * address of 0: the slot has no such thing. `after`: what is read next, perhaps. */
static void add_piece(const real *x, int64_t x_stride, float *y, int64_t y_stride, int64_t in, int64_t out,
                      const int32_t *piece, float t, const int64_t *a, const int64_t *b, const int64_t *gain,
                      const int64_t *shift, const int32_t *rank, const float *scale, const int32_t *is_bfloat16,
                      const void *after) {
    const int32_t first = piece[0], tokens = piece[1], s = piece[2];
    const real *xi = x + first * x_stride;
    float *yi = y + first * y_stride, h[CHUNK * RANKS];
    for (int32_t n = 0; n < tokens; n++)
        rescale(yi + n * y_stride, out, (const float *)gain[s], (const float *)shift[s], t);
    if (a[s] == 0) return;
#ifdef REAL_IS_BFLOAT16
    if (is_bfloat16[s])
        add_rounded(tokens, xi, x_stride, (const real *)a[s], (const real *)b[s], rank[s], in, out, t * scale[s], yi,
                    y_stride, after);
#else
    if (is_bfloat16[s]) DELTA(BFLOAT16S)
#endif
    else DELTA(FLOATS)
}

/* weights: t of each piece, or NULL where all are 1. */
void lora_add(const real *x, int64_t x_stride, float *y, int64_t y_stride, int64_t in, int64_t out,
              const int32_t *pieces, int64_t num_pieces, const float *weights, const int64_t *a, const int64_t *b,
              const int64_t *gain, const int64_t *shift, const int32_t *rank, const float *scale,
              const int32_t *is_bfloat16) {
#pragma omp parallel if (num_pieces > 1)
    {
        const uint64_t before = begin_products();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_pieces; i++) {
            const int64_t later = i + omp_get_num_threads();
            add_piece(x, x_stride, y, y_stride, in, out, pieces + 3 * i, weights ? weights[i] : 1.0f, a, b, gain, shift,
                      rank, scale, is_bfloat16, later < num_pieces ? (const void *)a[pieces[3 * later + 2]] : NULL);
        }
        end_products(before);
    }
}
