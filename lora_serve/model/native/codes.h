/* Weights as checkpoints pack them, in panels: y[r][c] = sum over g of scale[g][c] * (sum over k of g of
 * x[r][k] * code[k][c] - zero[g][c] * sum over k of g of x[r][k]).
 *
 * Each group of depth (a piece of one, where it is long) is summed from 0 in the order of the variant's products, as
 * codes are exact in bfloat16, and then added to y. In a panel lie the codes of all depth, then each group's scales
 * [PANEL], then its zeros [PANEL] int8, if there are any. Codes by form:
 *
 *     NIBBLES  [depth / 8][PANEL] words: number 2 i of eight in bits 4 i, number 2 i + 1 in bits 16 + 4 i
 *     BYTES    [depth][PANEL] int8
 *     FLOAT8S  [depth / 2][PANEL][2] e4m3, none of them NaN
 */
#ifndef CODES_H
#define CODES_H

#include "real.h"

#define CODE_DEPTH 1024 /* of a group at most, and of the groups that are multiplied in turn */
#define FORM(kind) ((kind) & 15)
#define SCALES(kind) ((kind) >> 4 & 3)
#define HAS_ZEROS(kind) ((kind) >> 6 & 1)
#define IS_CODES(kind) (FORM(kind) >= NIBBLES)
enum { HALVES, BFLOAT16_SCALES, FLOAT_SCALES };

typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

/* By the instruction, which GCC 12 does not find. */
ALWAYS ints load_bytes(const int8_t *p) {
#if defined(__AVX512F__) && LANES == 16
    return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__) && LANES == 8
    return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    return __builtin_convertvector(*(const bytes *)p, ints);
#endif
}

ALWAYS int64_t code_words(int64_t kind, int64_t depth) { return depth * PANEL / (FORM(kind) == NIBBLES ? 8 : 4); }
ALWAYS int64_t scale_bytes(int64_t kind) { return SCALES(kind) == FLOAT_SCALES ? 4 : 2; }
/* In whole cache lines. */
ALWAYS int64_t coded_panel_words(int64_t kind, int64_t depth, int64_t group) {
    const int64_t groups = (depth + group - 1) / group, beside = groups * PANEL * (scale_bytes(kind) + HAS_ZEROS(kind));
    return (code_words(kind, depth) + beside / 4 + 15) / 16 * 16;
}

/* IEEE half precision, exactly, also where denormal numbers are taken as 0: those of halves are none of floats. */
ALWAYS vec load_halves(const uint16_t *p) {
#if defined(__AVX512F__) && LANES == 16
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__) && LANES == 8
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    const bits raw = __builtin_convertvector(*(const halves *)p, bits), size = (raw & 0x7fffu) << 13;
    const vec small = (vec)(size + (113u << 23)) - splat(0x1p-14f);
    const vec found = choose((ints)(size < (1u << 23)), small, (vec)(size + (112u << 23)));
    return (vec)((bits)found | (raw & 0x8000u) << 16);
#endif
}

ALWAYS vec load_scales(int64_t kind, const char *p) {
    if (SCALES(kind) == HALVES) return load_halves((const uint16_t *)p);
    return SCALES(kind) == FLOAT_SCALES ? load((const float *)p) : load_bfloat16((const uint16_t *)p);
}

/* Numbers of e4m3, in the lowest byte of each word, exactly. */
ALWAYS vec floats_of_float8s(bits raw) {
    const bits size = (raw & 0x7fu) << 20;
    const vec small = (vec)(size + (121u << 23)) - splat(0x1p-6f);
    const vec found = choose((ints)(size < (1u << 23)), small, (vec)(size + (120u << 23)));
    return (vec)((bits)found | (raw & 0x80u) << 24);
}

/* LANES codes of row k, from column `from` of the panel on; `next`: k % 8, known when it is compiled. */
ALWAYS vec code_row(const int form, const uint32_t *w, int64_t k, const int next, const int from) {
    if (form == BYTES) return __builtin_convertvector(load_bytes((const int8_t *)w + k * PANEL + from), vec);
    if (form == FLOAT8S) {
        const halves pairs = *(const halves *)((const uint16_t *)w + k / 2 * PANEL + from);
        return floats_of_float8s(__builtin_convertvector(pairs, bits) >> (next % 2 * 8));
    }
    const bits words = *(const bits *)(w + k / 8 * PANEL + from);
    const int place = next / 2 * 4 + next % 2 * 16;
#if defined(__AVX512F__) && LANES == 16
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    return (vec)_mm512_permutexvar_ps((__m512i)(words >> place), numbers);
#else
    return __builtin_convertvector((ints)(words << (28 - place)) >> 28, vec);
#endif
}

ALWAYS vec any_code_row(int64_t kind, const uint32_t *w, int64_t k, const int next, const int from) {
    if (FORM(kind) == NIBBLES) return code_row(NIBBLES, w, k + next, next, from);
    return FORM(kind) == BYTES ? code_row(BYTES, w, k + next, next, from) : code_row(FLOAT8S, w, k + next, next, from);
}

/* Codes as panels of DEPTH_PAIRS, in which they are exact. */
static __attribute__((unused, noinline)) void expand_codes(int64_t kind, const uint32_t *w, int64_t depth, uint32_t *to) {
    for (int64_t k = 0; k < depth; k += 8, to += 4 * PANEL)
        UNROLL for (int next = 0; next < 8; next += 2)
            UNROLL for (int from = 0; from < PANEL; from += LANES) {
                const bits low = (bits)any_code_row(kind, w, k, next, from);
                const bits high = (bits)any_code_row(kind, w, k, next + 1, from);
                *(bits *)(to + next / 2 * PANEL + from) = low >> 16 | high;
            }
}

typedef struct { /* the numbers beside the codes of some groups; `step`: bytes to the same of the next panel */
    int64_t kind, step, group; /* group: rows of each, the last may have fewer */
    const char *scales;
    const int8_t *zeros;
    const float *totals; /* of each row's x, rows `total_step` apart */
    int64_t total_step;
} Beside;

/* y += the sums of group i as its scales and zeros have them. */
ALWAYS void add_group(const Beside *b, int64_t i, const int rows, const int panels, vec (*sum)[8], float *y, int64_t y_stride) {
    const char *scales = b->scales + i * PANEL * scale_bytes(b->kind);
    UNROLL for (int v = 0; v < 2 * panels; v++) {
        const int64_t panel = v / 2 * b->step, lane = v % 2 * LANES;
        const vec scale = load_scales(b->kind, scales + panel + lane * scale_bytes(b->kind));
        vec zero = {};
        if (HAS_ZEROS(b->kind)) zero = __builtin_convertvector(load_bytes(b->zeros + i * PANEL + panel + lane), vec);
        UNROLL for (int r = 0; r < rows; r++) {
            if (HAS_ZEROS(b->kind)) sum[r][v] -= zero * splat(b->totals[r * b->total_step + i]);
            store(y + r * y_stride + v * LANES, load(y + r * y_stride + v * LANES) + scale * sum[r][v]);
        }
    }
}

/* For each group: the rows of depth from k to end. */
#define EACH_GROUP(b, depth)                                                                               \
    for (int64_t i = 0, k = 0, end; k < depth && (end = k + (b)->group < depth ? k + (b)->group : depth, 1); i++)

/* `tile` by groups of codes; odd_first: x has the second number of each pair first, and so come the weights. */
ALWAYS void code_tile(const int form, const int rows, const int panels, const int odd_first, const float *x,
                      int64_t x_stride, const uint32_t *w, int64_t w_step, int64_t depth, const Beside *b, float *y,
                      int64_t y_stride) {
    vec sum[MAX_ROWS][8];
    const int at_once = form == NIBBLES ? 8 : 2;
    EACH_GROUP(b, depth) {
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < 2 * panels; v++) sum[r][v] = (vec){};
        for (; k < end; k += at_once)
            UNROLL for (int v = 0; v < 2 * panels; v++)
                UNROLL for (int next = 0; next < at_once; next++) {
                    const int own = next ^ odd_first;
                    const vec codes = code_row(form, w + v / 2 * w_step, k + own, own, v % 2 * LANES);
                    UNROLL for (int r = 0; r < rows; r++) sum[r][v] += splat(x[r * x_stride + k + next]) * codes;
                }
        add_group(b, i, rows, panels, sum, y, y_stride);
    }
}

/* The sum of x in one order on every processor. */
static float total_of(const real *x, int64_t size) {
    sums found = {};
    int64_t i = 0;
    for (; i + SUM_LANES <= size; i += SUM_LANES)
        UNROLL for (int v = 0; v < SUM_VECTORS; v++) found.part[v] += load_real(x + i + v * LANES);
    float sum = add_sums(found);
    for (; i < size; i++) sum += float_of(x[i]);
    return sum;
}

#endif
