/* Products of bfloat16 inputs by panels of DEPTH_PAIRS, in the order of VDPBF16PS: for each pair, odd one first,
 *
 *     sum = fma(x[k + 1], w[k + 1], sum), sum = fma(x[k], w[k], sum)
 *
 * each rounded once to the nearest, denormal numbers taken as 0 going in and coming out. With the instruction, or by
 * the same arithmetic on widened numbers. After an odd `in` comes a 0, of x and of w.
 */
#ifdef __AVX512BF16__
typedef real input;
#else
typedef float input;
#endif
#include "flushing.h"
#include "product.h"

#define DEPTH_UNIT 2
#define DEPTH_BLOCK 1024
#define MOST_PANELS 4
#define PANELS_IN_TURN (INT64_MAX / 2) /* x is prepared once */
#define MOST_ROWS MAX_ROWS

ALWAYS int64_t panel_words(int64_t kind, int64_t in) { return (void)kind, (in + 1) / 2 * PANEL; }
ALWAYS int64_t depth_at_once(int64_t rows, int64_t left) { return (void)rows, least(DEPTH_BLOCK, left); }
ALWAYS int64_t rows_at_once(int64_t left) { return spread(left, MAX_ROWS); }
/* The instruction flushes always; what stands between products shall at every level as well. */
ALWAYS uint64_t begin_products(void) { return flush_denormals(); }
ALWAYS void end_products(uint64_t before) { restore_denormals(before); }

#ifdef __AVX512BF16__
#include <immintrin.h>

#define ROW_BLOCK 96
#define PAIRED_PANELS 1
#define ROOM (ROW_BLOCK * DEPTH_UNIT) /* the last numbers of rows of an odd length */

ALWAYS int64_t panels_at_once(int64_t rows) { return rows == 1 ? 4 : rows <= 4 ? 2 : 1; }
ALWAYS const input *prepared(const real *x, int64_t *stride, int64_t rows, int64_t depth, input *room) {
    return depth % DEPTH_UNIT == 0 ? x : padded(x, stride, rows, depth, DEPTH_UNIT, room);
}

ALWAYS void dot_tile(const int rows, const int panels, const Group *g) {
    __m512 sum[MAX_ROWS][2 * MOST_PANELS];
    float *y = g->y;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < 2 * panels; v++) sum[r][v] = (__m512)load(y + r * g->y_stride + v * LANES);
    for (int64_t k = 0; k < g->depth; k += 2)
        UNROLL for (int v = 0; v < 2 * panels; v++) {
            const __m512bh own = (__m512bh) * (const bits *)(g->w + v / 2 * g->w_step + k / 2 * PANEL + v % 2 * LANES);
            UNROLL for (int r = 0; r < rows; r++) {
                uint32_t pair;
                memcpy(&pair, g->x + r * g->x_stride + k, sizeof pair);
                sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)_mm512_set1_epi32((int)pair), own);
            }
        }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < 2 * panels; v++) store(y + r * g->y_stride + v * LANES, (vec)sum[r][v]);
}

#define DOT_CASE(rows, panels)     \
    case rows:                     \
        dot_tile(rows, panels, g); \
        return;

static void multiply_once(const Group *g) {
    begin(g);
    if (g->panels == 4) dot_tile(1, 4, g);
    else if (g->panels == 2)
        switch (g->rows) { DOT_CASE(1, 2) DOT_CASE(2, 2) DOT_CASE(3, 2) DOT_CASE(4, 2) }
    else
        switch (g->rows) {
            DOT_CASE(1, 1) DOT_CASE(2, 1) DOT_CASE(3, 1) DOT_CASE(4, 1) DOT_CASE(5, 1) DOT_CASE(6, 1)
            DOT_CASE(7, 1) DOT_CASE(8, 1) DOT_CASE(9, 1) DOT_CASE(10, 1) DOT_CASE(11, 1) DOT_CASE(12, 1)
        }
}

/* `code_dot` by two fused multiply-adds in place of each pair's product, which are the same bits: of one row they are
 * less work than packing codes. */
ALWAYS void code_lone(const int form, const int panels, const Group *g) {
    vec sum[1][2 * MOST_PANELS];
    EACH_GROUP(&g->beside, g->depth) {
        UNROLL for (int v = 0; v < 2 * panels; v++) sum[0][v] = (vec){};
        for (; k < end; k += 2) {
            uint32_t pair;
            memcpy(&pair, g->x + k, sizeof pair);
            const bits both = (bits)_mm512_set1_epi32((int)pair);
            const vec odd = (vec)(both & 0xffff0000u), even = (vec)(both << 16);
            UNROLL for (int v = 0; v < 2 * panels; v++) {
                const uint32_t *w = g->w + v / 2 * g->w_step;
                sum[0][v] += odd * code_row(form, w, k + 1, 1, v % 2 * LANES);
                sum[0][v] += even * code_row(form, w, k, 0, v % 2 * LANES);
            }
        }
        add_group(&g->beside, i, 1, panels, sum, g->y, g->y_stride);
    }
}

/* LANES pairs of e4m3 as bfloat16: denormal ones by a table, others by their exponents. */
ALWAYS __m512bh float8_pair(const int8_t *p) {
    const __m256i half = _mm256_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i raw = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p)), sign = _mm512_set1_epi16((short)0x8000);
    const __m512i size = _mm512_and_si512(_mm512_slli_epi16(raw, 4), _mm512_set1_epi16(0x07f0));
    const __mmask32 is_small = _mm512_testn_epi16_mask(raw, _mm512_set1_epi16(0x78));
    const __m512i found = _mm512_mask_permutexvar_epi16(_mm512_add_epi16(size, _mm512_set1_epi16(0x3c00)), is_small, raw,
                                                        _mm512_broadcast_i64x4(half));
    return (__m512bh)_mm512_or_si512(found, _mm512_and_si512(raw, sign));
}

/* Four pairs of codes as their words have them, or the only one: pair `next` / 2 of a vector of them. */
ALWAYS __m512bh code_pair(const int form, const uint32_t *w, int64_t k, const int next, const int from) {
    if (form == NIBBLES) {
        const __m256i half = _mm256_setr_epi16(0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, (short)0xc100,
                                               (short)0xc0e0, (short)0xc0c0, (short)0xc0a0, (short)0xc080, (short)0xc040,
                                               (short)0xc000, (short)0xbf80); /* 0 to 7 and -8 to -1 in bfloat16 */
        const __m512i words = (__m512i) * (const bits *)(w + k / 8 * PANEL + from);
        return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 2 * next), _mm512_broadcast_i64x4(half));
    }
    if (form == FLOAT8S) return float8_pair((const int8_t *)w + (k + next) / 2 * PANEL * 2 + 2 * from);
    const bits low = (bits)code_row(form, w, k + next, 0, from), high = (bits)code_row(form, w, k + next + 1, 1, from);
    return (__m512bh)(low >> 16 | high); /* exact in bfloat16: the lower halves of the floats are zeros */
}

/* `code_tile` by the instruction. */
ALWAYS void code_dot(const int form, const int rows, const int panels, const Group *g) {
    vec sum[MAX_ROWS][2 * MOST_PANELS];
    const int at_once = form == NIBBLES ? 8 : 2;
    EACH_GROUP(&g->beside, g->depth) {
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < 2 * panels; v++) sum[r][v] = (vec){};
        for (; k < end; k += at_once)
            UNROLL for (int next = 0; next < at_once; next += 2) {
                __m512bh own[2 * MOST_PANELS];
                UNROLL for (int v = 0; v < 2 * panels; v++)
                    own[v] = code_pair(form, g->w + v / 2 * g->w_step, k, next, v % 2 * LANES);
                UNROLL for (int r = 0; r < rows; r++) {
                    uint32_t pair;
                    memcpy(&pair, g->x + r * g->x_stride + k + next, sizeof pair);
                    const __m512bh x = (__m512bh)_mm512_set1_epi32((int)pair);
                    UNROLL for (int v = 0; v < 2 * panels; v++)
                        sum[r][v] = (vec)_mm512_dpbf16_ps((__m512)sum[r][v], x, own[v]);
                }
            }
        add_group(&g->beside, i, rows, panels, sum, g->y, g->y_stride);
    }
}

#define CODE_DOT(form, rows, panels)                                      \
    case rows:                                                            \
        if (rows == 1 && form == BYTES) code_lone(form, panels, g);     \
        else code_dot(form, rows, panels, g);                             \
        return;

#define DEFINE_CODE_DOTS(name, form)                                                                         \
    APART static void name(const Group *g) {                                                                 \
        if (g->panels == 4)                                                                                  \
            switch (1) { CODE_DOT(form, 1, 4) }                                                              \
        else if (g->panels == 2)                                                                             \
            switch (g->rows) { CODE_DOT(form, 1, 2) CODE_DOT(form, 2, 2) CODE_DOT(form, 3, 2) CODE_DOT(form, 4, 2) } \
        else                                                                                                 \
            switch (g->rows) {                                                                               \
                CODE_DOT(form, 1, 1) CODE_DOT(form, 2, 1) CODE_DOT(form, 3, 1) CODE_DOT(form, 4, 1)          \
                CODE_DOT(form, 5, 1) CODE_DOT(form, 6, 1) CODE_DOT(form, 7, 1) CODE_DOT(form, 8, 1)          \
                CODE_DOT(form, 9, 1) CODE_DOT(form, 10, 1) CODE_DOT(form, 11, 1) CODE_DOT(form, 12, 1)       \
            }                                                                                                \
    }

DEFINE_CODE_DOTS(by_nibbles, NIBBLES)
DEFINE_CODE_DOTS(by_bytes, BYTES)
DEFINE_CODE_DOTS(by_float8s, FLOAT8S)

#else

#define ROW_BLOCK 48
#define PAIRED_PANELS 0
#define ROOM (ROW_BLOCK * DEPTH_BLOCK) /* x widened, odd one first */

ALWAYS int64_t panels_at_once(int64_t rows) { return rows == 1 ? 4 : 1; }
ALWAYS const input *prepared(const real *x, int64_t *stride, int64_t rows, int64_t depth, input *room) {
    const int64_t whole = (depth + 1) / 2 * 2;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < whole; k += 2) {
            room[r * whole + k] = k + 1 < depth ? float_of(x[r * *stride + k + 1]) : 0.0f;
            room[r * whole + k + 1] = float_of(x[r * *stride + k]);
        }
    *stride = whole;
    return room;
}

static void multiply_once(const Group *g) {
    begin(g);
    if (g->panels == 1) rows_of_depth_pairs(g->rows, g->x, g->x_stride, g->w, PANEL, g->depth, g->y, g->y_stride);
    else tile(DEPTH_PAIRS, 1, 4, g->x, 0, g->w, PANEL, g->w_step, g->depth, g->y, 0);
}

DEFINE_CODES(by_nibbles, NIBBLES, 1)
DEFINE_CODES(by_bytes, BYTES, 1)
DEFINE_CODES(by_float8s, FLOAT8S, 1)

#endif

#define EXPANDS_CODES 0
ALWAYS int64_t codes_at_once(int64_t wide, int64_t left) { return left >= wide ? wide : PAIRED_PANELS && wide > 1 && left > 1 ? 2 : 1; }

static void multiply_codes(const Group *g) {
    (FORM(g->kind) == NIBBLES ? by_nibbles : FORM(g->kind) == BYTES ? by_bytes : by_float8s)(g);
}

static void multiply(const Group *g) {
    for (; g; g = g->then) multiply_once(g);
}
