/* Adapters of bfloat16 on inputs of bfloat16 in the order of product_dot.h: x A^T has SUM_LANES sums, each of every
 * SUM_LANES-th pair of x, and is rounded; its product by B is one like the base's. */
#define UNIT (2 * SUM_LANES) /* numbers of x and A at a time, with zeros after their end */
#define TOKENS_DOT (LANES == 16 ? TOKENS : 2)
#define RANKS_DOT (LANES == 16 ? TOGETHER : 3)

/* sum + the pairs' products, those of the second numbers first. */
ALWAYS vec dot(vec sum, bits x, bits w) {
#if defined(__AVX512BF16__) && LANES == 16
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
#else
    sum += (vec)(x & 0xffff0000u) * (vec)(w & 0xffff0000u);
    sum += (vec)(x << 16) * (vec)(w << 16);
    return sum;
#endif
}

ALWAYS bits pairs_at(const real *p) { return *(const bits *)p; }

ALWAYS void dot_block(const int tokens, const int ranks, const Shrink *own, int64_t t, int64_t j, const real *x,
                      int64_t x_stride, int64_t in, const char *next) {
    const real *rows = own->a + j * in;
    const int64_t whole = in / UNIT * UNIT;
    real x_end[TOKENS][UNIT], a_end[STREAMS][UNIT];
    float total[TOKENS][STREAMS] = {};
    for (int i = 0; i < tokens && whole < in; i++) cut_out(x + i * x_stride, whole, in, UNIT, x_end[i]);
    for (int r = 0; r < ranks && whole < in; r++) cut_out(rows + r * in, whole, in, UNIT, a_end[r]);
    UNROLL for (int v = 0; v < SUM_VECTORS; v++) {
        const int64_t place = 2 * v * LANES;
        vec sum[TOKENS][STREAMS];
        UNROLL for (int i = 0; i < tokens; i++) UNROLL for (int r = 0; r < ranks; r++) sum[i][r] = (vec){};
        for (int64_t k = 0; k < whole; k += UNIT) {
            bits pairs[TOKENS];
            UNROLL for (int i = 0; i < tokens; i++) pairs[i] = pairs_at(x + i * x_stride + k + place);
            UNROLL for (int r = 0; r < ranks; r++) {
                if (tokens == 1 && v == 0) __builtin_prefetch(next + (r * in + k) * 2);
                const bits others = pairs_at(rows + r * in + k + place);
                UNROLL for (int i = 0; i < tokens; i++) sum[i][r] = dot(sum[i][r], pairs[i], others);
            }
        }
        UNROLL for (int i = 0; i < tokens; i++) UNROLL for (int r = 0; r < ranks; r++) {
            if (whole < in) sum[i][r] = dot(sum[i][r], pairs_at(x_end[i] + place), pairs_at(a_end[r] + place));
            UNROLL for (int lane = 0; lane < LANES; lane++) total[i][r] += sum[i][r][lane];
        }
    }
    UNROLL for (int i = 0; i < tokens; i++) UNROLL for (int r = 0; r < ranks; r++)
        own->s[(t + i) * own->s_stride + j + r] = real_of(own->scale * total[i][r]);
}

/* s = scale * x A^T; `after`: what is read next, perhaps. */
static void shrink_piece(const Shrink *own, int64_t tokens, const real *x, int64_t x_stride, int64_t in,
                         const real *after, int64_t after_row) {
    int64_t t = 0;
    (void)after_row;
    for (; t + TOKENS_DOT <= tokens; t += TOKENS_DOT) {
        int64_t j = 0;
        for (; j + RANKS_DOT <= own->rank; j += RANKS_DOT)
            dot_block(TOKENS_DOT, RANKS_DOT, own, t, j, x + t * x_stride, x_stride, in, NULL);
        for (; j < own->rank; j++) dot_block(TOKENS_DOT, 1, own, t, j, x + t * x_stride, x_stride, in, NULL);
    }
    for (; t < tokens; t++) {
        int64_t j = 0;
        for (; j + STREAMS <= own->rank; j += STREAMS)
            dot_block(1, STREAMS, own, t, j, x + t * x_stride, x_stride, in,
                      j + STREAMS < own->rank ? (const char *)(own->a + (j + STREAMS) * in) : (const char *)after);
        for (; j < own->rank; j++)
            dot_block(1, 1, own, t, j, x + t * x_stride, x_stride, in,
                      j + 1 < own->rank ? (const char *)(own->a + (j + 1) * in) : (const char *)after);
    }
}

static void shrink_together(const Shrink *own, int64_t count, int64_t tokens, const real *x, int64_t x_stride,
                            int64_t in) {
    for (int64_t n = 0; n < count; n++) shrink_piece(own + n, tokens, x, x_stride, in, NULL, 0);
}

/* y += s B of some pairs of ranks, one after another. */
ALWAYS void expand_pairs(const int ranks, const real *s, const real *b, int64_t out, float *y, const char *next) {
    static const real zeros[PANEL];
    int64_t o = 0;
    for (; o + PANEL <= out; o += PANEL) {
        UNZIP(load(y + o), load(y + o + LANES), even, odd);
        vec first = even, second = odd;
        UNROLL for (int r = 0; r < ranks; r += 2) {
            bits low, high, pair;
            pair_columns(b + r * out + o, r + 1 < ranks ? b + (r + 1) * out + o : zeros, &low, &high);
            fetch(BFLOAT16S, next + (r * out + o) * 2);
            if (r + 1 < ranks) fetch(BFLOAT16S, next + ((r + 1) * out + o) * 2);
            pair = (bits)((ints){} + (int32_t)(s[r] | (uint32_t)(r + 1 < ranks ? s[r + 1] : 0) << 16));
            first = dot(first, pair, low);
            second = dot(second, pair, high);
        }
        ZIP(first, second, low, high);
        store(y + o, low);
        store(y + o + LANES, high);
    }
    for (; o < out; o++)
        for (int r = 0; r < ranks; r += 2) {
            y[o] = fmaf(r + 1 < ranks ? float_of(s[r + 1]) : 0.0f, r + 1 < ranks ? float_of(b[(r + 1) * out + o]) : 0.0f,
                        y[o]);
            y[o] = fmaf(float_of(s[r]), float_of(b[r * out + o]), y[o]);
        }
}

static void expand_one(const real *s, const real *b, int64_t rank, int64_t out, float *y, const real *next,
                       int64_t next_row) {
    const char *after = (const char *)next;
    int64_t j = 0;
    (void)next_row;
    for (; j + STREAMS <= rank; j += STREAMS)
        expand_pairs(STREAMS, s + j, b + j * out, out, y,
                     j + STREAMS < rank ? (const char *)(b + (j + STREAMS) * out) : after);
    for (; j + 2 <= rank; j += 2)
        expand_pairs(2, s + j, b + j * out, out, y, j + 2 < rank ? (const char *)(b + (j + 2) * out) : after);
    if (j < rank) expand_pairs(1, s + j, b + j * out, out, y, after);
}
