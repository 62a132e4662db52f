/* Causal attention of ragged rows over a paged KV cache, read where it lies:
 *
 *     out[t] = sum over visible keys p of softmax(scale * q[t] . K[p]) V[p]
 *
 * One token (decode) or many (a chunk of a prompt) per row, any number of cached tokens before them. A thread takes
 * a few tokens of a row and walks over KEYS keys at a time, with all query heads that share a KV head, keeping the
 * running maximum and sum of the softmax (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, Dao et al., 2022).
 * Stretches of keys begin at multiples of KEYS, so a token's result is the same bits however its prompt was cut and
 * whoever stands beside it. K and V of the step are in the cache already, and widened in registers where they are
 * bfloat16. Masked keys weigh exactly zero.
 */
#include <math.h>
#include <stdlib.h>

#include "exponential.h"
#include "threads.h"
#include "tile.h"

#define KEYS 32
#define QUERIES 24 /* query vectors that one thread takes at a time, unless a KV head has more */

typedef struct {
    const float *query;         /* [tokens], heads * size each, query_stride apart */
    const real *keys, *values;  /* pools [blocks][block_size][kv_heads][size] */
    real *out;
    const int32_t *tables; /* block numbers */
    int64_t query_stride, heads, kv_heads, size, block_size, window;
    float scale, softcap;
} Attention;

typedef struct {
    int32_t first, tokens, context, table; /* of a row: packed token, how many, cached before them, offset in tables */
} Piece;

/* Where in the pools `count` keys from `start` on lie: offsets in elements. */
static void places(const Attention *a, const int32_t *table, int64_t kv_head, int64_t start, int64_t count,
                   int64_t *offsets) {
    int64_t block = start / a->block_size, inside = start % a->block_size;
    for (int64_t j = 0; j < count; block++, inside = 0)
        for (; inside < a->block_size && j < count; inside++, j++)
            offsets[j] = ((table[block] * a->block_size + inside) * a->kv_heads + kv_head) * a->size;
}

#define WORDS (LANES * 4 / (int64_t)sizeof(real)) /* numbers of `real` in a vector */

/* LANES rows of WORDS numbers, turned round: to[d * stride + r] = from[r][d]. Words of four bytes are exchanged between
 * rows ever farther apart (Eklundh, 1972); one of bfloat16 holds two neighbours d. */
static void turn(const real *const *from, int64_t d, float *to, int64_t stride) {
    vec a[LANES];
    UNROLL for (int r = 0; r < LANES; r++) a[r] = load((const float *)(from[r] + d));
#define EXCHANGE(step, firsts, seconds)                                                   \
    UNROLL for (int r = 0; r < LANES; r++) if (!(r & step)) {                             \
        const vec one = a[r], other = a[r + step];                                        \
        a[r] = SHUFFLE(one, other, firsts), a[r + step] = SHUFFLE(one, other, seconds);   \
    }
    TURNS
#undef EXCHANGE
    UNROLL for (int w = 0; w < LANES; w++) {
        if (sizeof(real) == 4) {
            store(to + w * stride, a[w]);
        } else {
            store(to + 2 * w * stride, (vec)((bits)a[w] << 16));
            store(to + (2 * w + 1) * stride, (vec)((bits)a[w] & 0xffff0000u));
        }
    }
}

/* K of `count` keys, turned round: to [KEYS / PANEL][size][PANEL], zeros beyond count. `zeros`: `size` of them. */
static void turn_keys(const Attention *a, const int64_t *offsets, int64_t count, float *to, const real *zeros) {
    const real *rows[KEYS];
    for (int64_t j = 0; j < KEYS; j++) rows[j] = j < count ? a->keys + offsets[j] : zeros;
    for (int64_t p = 0; p < KEYS / LANES; p++) {
        float *panel = to + p / 2 * a->size * PANEL + p % 2 * LANES;
        int64_t d = 0;
        for (; d + WORDS <= a->size; d += WORDS) turn(rows + p * LANES, d, panel + d * PANEL, PANEL);
        for (; d < a->size; d++)
            for (int64_t j = 0; j < LANES; j++) panel[d * PANEL + j] = float_of(rows[p * LANES + j][d]);
    }
}

/* Rows of `real` in w, or of float. Of a panel of bfloat16 come the sums of its even columns, then of its odd ones: a word
 * is widened to both by two operations. */
static void many_rows(const int is_real, int64_t rows, const float *x, int64_t x_stride, const void *w, int64_t w_stride,
                      int64_t depth, float *y, int64_t y_stride) {
    const int64_t groups = (rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t r = rows * g / groups, end = rows * (g + 1) / groups;
        if (is_real && sizeof(real) == 2)
            rows_of_pairs(end - r, x + r * x_stride, x_stride, w, w_stride / 2, depth, y + r * y_stride, y_stride);
        else rows_of_floats(end - r, x + r * x_stride, x_stride, w, w_stride, depth, y + r * y_stride, y_stride);
    }
}

/* sums [queries][width] += weights [queries][KEYS] V of `count` keys; V is read in place where its rows are whole
 * panels, and through `line` [KEYS][width] elsewhere. */
static void add_values(const Attention *a, const int64_t *offsets, int64_t start, int64_t count, int64_t queries,
                       const float *weights, float *sums, int64_t width, real *line) {
    const int64_t in_place = a->size == width;
    for (int64_t j = 0, next; j < count; j = next) {
        next = in_place ? j + a->block_size - (start + j) % a->block_size : count;
        if (next > count) next = count;
        const real *values = in_place ? a->values + offsets[j] : line;
        const int64_t stride = in_place ? a->kv_heads * a->size : width;
        for (int64_t i = 0; i < count && !in_place; i++) {
            memcpy(line + i * width, a->values + offsets[i], a->size * sizeof(real));
            memset(line + i * width + a->size, 0, (width - a->size) * sizeof(real));
        }
        for (int64_t d = 0; d < width; d += PANEL)
            many_rows(1, queries, weights + j, KEYS, values + d, stride, next - j, sums + d, width);
    }
}

static void cap(float *scores, int64_t count, float softcap) {
    for (int64_t i = 0; i < count; i++) scores[i] = softcap * tanhf(scores[i] / softcap);
}

/* Scores of one query to weights, in place: first .. end (relative to this stretch) are visible. Returns the factor
 * by which what was summed before shrinks. */
static float weigh(float *scores, int64_t first, int64_t end, float *largest, float *sum) {
    vec top = splat(-INFINITY);
    sums total = {};
    for (int64_t j = 0; j < KEYS; j++)
        if (j < first || j >= end) scores[j] = -INFINITY;
    for (int64_t j = 0; j < KEYS; j += LANES) {
        const vec s = load(scores + j);
        top = choose(s > top, s, top);
    }
    float most = *largest;
    for (int i = 0; i < LANES; i++) most = most > top[i] ? most : top[i];
    const vec shift = splat(most);
    for (int64_t j = 0; j < KEYS; j += LANES) {
        const vec s = load(scores + j);
        const vec weight = choose(s == splat(-INFINITY), (vec){}, exponential(s - shift));
        store(scores + j, weight);
        total.part[j / LANES % SUM_VECTORS] += weight;
    }
    const float factor = *largest == -INFINITY ? 0.0f : expf(*largest - most);
    *largest = most;
    *sum = *sum * factor + add_sums(total);
    return factor;
}

typedef struct {
    float *q, *sums, *largest, *total; /* [queries][size], [queries][width], [queries], [queries] of each KV head */
    float *scores, *keys;              /* [queries][KEYS], [KEYS][size] of one at a time */
    real *line, *zeros;                /* [KEYS][width] of one at a time, [size] */
} Scratch;

static int64_t panels_wide(int64_t size) { return (size + PANEL - 1) / PANEL * PANEL; }

static Scratch scratch_of(const Attention *a, int64_t tokens, float *from) {
    const int64_t each = tokens * a->heads / a->kv_heads, all = tokens * a->heads, width = panels_wide(a->size);
    Scratch s = {.q = from};
    s.sums = s.q + all * a->size, s.largest = s.sums + all * width, s.total = s.largest + all;
    s.scores = s.total + all, s.keys = s.scores + each * KEYS, s.line = (real *)(s.keys + KEYS * a->size);
    s.zeros = s.line + KEYS * width;
    memset(s.zeros, 0, a->size * sizeof(real));
    return s;
}

static int64_t scratch_floats(const Attention *a, int64_t tokens) {
    const int64_t width = panels_wide(a->size);
    return tokens * a->heads * (a->size + width + 2 + KEYS) + KEYS * (a->size + width) + a->size;
}

/* One stretch of `count` keys from `start` on, for the queries of one KV head. */
static void stretch(const Attention *a, const Piece *piece, int64_t kv_head, const int32_t *table, int64_t start,
                    int64_t count, const Scratch *s) {
    const int64_t group = a->heads / a->kv_heads, queries = piece->tokens * group, size = a->size;
    const int64_t width = panels_wide(size), before = (kv_head * piece->tokens) * group;
    float *sums = s->sums + before * width;
    int64_t offsets[KEYS];
    places(a, table, kv_head, start, count, offsets);
    turn_keys(a, offsets, count, s->keys, s->zeros);
    memset(s->scores, 0, queries * KEYS * sizeof(float));
    for (int64_t p = 0; p < KEYS / PANEL; p++)
        many_rows(0, queries, s->q + before * size, size, s->keys + p * size * PANEL, PANEL, size, s->scores + p * PANEL, KEYS);
    if (a->softcap > 0) cap(s->scores, queries * KEYS, a->softcap);
    for (int64_t i = 0; i < queries; i++) {
        const int64_t position = piece->context + i / group, end = position + 1 - start;
        const int64_t first = a->window > 0 ? position + 1 - a->window - start : 0;
        float *own = s->scores + i * KEYS, *sum = sums + i * width;
        if (end <= 0 || first >= KEYS) {
            memset(own, 0, KEYS * sizeof(float));
            continue;
        }
        const float factor = weigh(own, first, end, s->largest + before + i, s->total + before + i);
        if (factor != 1.0f)
            for (int64_t d = 0; d < width; d++) sum[d] *= factor;
    }
    add_values(a, offsets, start, count, queries, s->scores, sums, width, s->line);
}

/* Sums as `many_rows` leaves them, put in order. */
static void order(float *sums, int64_t width) {
    for (int64_t d = 0; sizeof(real) == 2 && d < width; d += PANEL) {
        ZIP(load(sums + d), load(sums + d + LANES), low, high);
        store(sums + d, low);
        store(sums + d + LANES, high);
    }
}

static void attend(const Attention *a, const Piece *piece, int64_t first_head, int64_t end_head, const Scratch *s) {
    const int64_t group = a->heads / a->kv_heads, queries = piece->tokens * group, size = a->size;
    const int64_t width = panels_wide(size);
    const int32_t *table = a->tables + piece->table;
    for (int64_t h = first_head; h < end_head; h++)
        for (int64_t i = 0; i < queries; i++) {
            const int64_t at = h * queries + i, token = piece->first + i / group, head = h * group + i % group;
            const float *query = a->query + token * a->query_stride + head * size;
            for (int64_t d = 0; d < size; d++) s->q[at * size + d] = a->scale * query[d];
            memset(s->sums + at * width, 0, width * sizeof(float));
            s->largest[at] = -INFINITY, s->total[at] = 0.0f;
        }
    const int64_t end = piece->context + piece->tokens;
    const int64_t begin = a->window > 0 && piece->context + 1 > a->window ? piece->context + 1 - a->window : 0;
    for (int64_t start = begin / KEYS * KEYS; start < end; start += KEYS)
        for (int64_t h = first_head; h < end_head; h++)
            stretch(a, piece, h, table, start, end - start < KEYS ? end - start : KEYS, s);
    for (int64_t h = first_head; h < end_head; h++)
        for (int64_t i = 0; i < queries; i++) {
            const int64_t at = h * queries + i, token = piece->first + i / group, head = h * group + i % group;
            const float factor = 1.0f / s->total[at];
            order(s->sums + at * width, width);
            for (int64_t d = 0; d < size; d++) s->sums[at * width + d] *= factor;
            round_row(s->sums + at * width, size, a->out + (token * a->heads + head) * size);
        }
}

int64_t queries_together(void) { return QUERIES; }

/* window: keys a token sees, itself included; 0: all. softcap: 0 for none. */
void paged_attention(const float *query, int64_t query_stride, const real *keys, const real *values, real *out,
                     int64_t heads, int64_t kv_heads, int64_t size, int64_t block_size, const int32_t *tables,
                     const int32_t *pieces, int64_t num_pieces, int64_t most_tokens, float scale, int64_t window,
                     float softcap) {
    const Attention a = {query, keys, values, out, tables, query_stride, heads, kv_heads, size, block_size, window, scale, softcap};
    const int64_t enough = 2 * omp_get_max_threads();
    const int64_t parts = num_pieces >= enough ? 1 : kv_heads < enough ? kv_heads : enough; /* of the KV heads */
#pragma omp parallel
    {
        float *room = aligned_alloc(64, (scratch_floats(&a, most_tokens) * sizeof(float) + 63) / 64 * 64);
        const Scratch scratch = scratch_of(&a, most_tokens, room);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_pieces * parts; i++) {
            const int64_t part = i % parts;
            attend(&a, (const Piece *)pieces + i / parts, kv_heads * part / parts, kv_heads * (part + 1) / parts, &scratch);
        }
        free(room);
    }
}
