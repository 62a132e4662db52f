/* Causal attention of ragged rows over a paged KV cache, read where it lies:
 *
 *     out[t] = sum over visible keys p of softmax(scale * q[t] . K[p]) V[p]
 *
 * One token (decode) or many (a chunk of a prompt) per row, any number of cached tokens before them. A thread takes
 * a few tokens of a row and walks over KEYS keys at a time, with all query heads that share a KV head, keeping the
 * running maximum and sum of the softmax (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, Dao et al., 2022).
 * Stretches of keys begin at multiples of KEYS, so a token's result is the same bits however its prompt was cut and
 * whoever stands beside it. K and V of the step are in the cache already. Masked keys weigh exactly zero.
 */
#include <math.h>
#include <stdlib.h>

#include "exponential.h"
#include "threads.h"
#include "tile.h"

#define KEYS 32
#define QUERIES 24 /* query vectors that one thread takes at a time, unless a KV head has more */

typedef struct {
    const void *query, *keys, *values; /* query [tokens], heads * size each, query_stride apart; pools [blocks][block_size][kv_heads][size] */
    void *out;
    const int32_t *tables; /* block numbers */
    int64_t query_stride, is_bfloat16, heads, kv_heads, size, block_size, window;
    float scale, softcap;
} Attention;

typedef struct {
    int32_t first, tokens, context, table; /* of a row: packed token, how many, cached before them, offset in tables */
} Piece;

static void widen(const Attention *a, const void *from, int64_t at, float *to, int64_t count, float factor) {
    if (a->is_bfloat16)
        for (int64_t i = 0; i < count; i++) {
            const uint32_t wide = (uint32_t)((const uint16_t *)from)[at + i] << 16;
            float value;
            memcpy(&value, &wide, 4);
            to[i] = factor * value;
        }
    else
        for (int64_t i = 0; i < count; i++) to[i] = factor * ((const float *)from)[at + i];
}

static void narrow(const Attention *a, const float *from, float factor, int64_t at, int64_t count) {
    if (!a->is_bfloat16) {
        for (int64_t i = 0; i < count; i++) ((float *)a->out)[at + i] = factor * from[i];
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        const float value = factor * from[i];
        uint32_t word;
        memcpy(&word, &value, 4);
        word = value == value ? word + 0x7fff + (word >> 16 & 1) : 0x7fc00000; /* to the nearest, ties to even */
        ((uint16_t *)a->out)[at + i] = word >> 16;
    }
}

/* Where in the pools `count` keys from `start` on lie: offsets in elements. */
static void places(const Attention *a, const int32_t *table, int64_t kv_head, int64_t start, int64_t count,
                   int64_t *offsets) {
    int64_t block = start / a->block_size, inside = start % a->block_size;
    for (int64_t j = 0; j < count; block++, inside = 0)
        for (; inside < a->block_size && j < count; inside++, j++)
            offsets[j] = ((table[block] * a->block_size + inside) * a->kv_heads + kv_head) * a->size;
}

#if LANES == 8
/* Eight rows of eight floats, turned round: to[c * stride + r] = from[r][c]. */
static void turn(const float *const *from, int64_t column, float *to, int64_t stride) {
    vec a[8], b[8];
    UNROLL for (int i = 0; i < 8; i++) a[i] = load(from[i] + column);
    UNROLL for (int i = 0; i < 8; i += 2) {
        b[i] = SHUFFLE(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        b[i + 1] = SHUFFLE(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    UNROLL for (int i = 0; i < 8; i += 4) UNROLL for (int j = 0; j < 2; j++) {
        a[i + j] = SHUFFLE(b[i + j], b[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        a[i + j + 2] = SHUFFLE(b[i + j], b[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    UNROLL for (int j = 0; j < 4; j++) {
        store(to + j * stride, SHUFFLE(a[j], a[j + 4], 0, 1, 2, 3, 8, 9, 10, 11));
        store(to + (j + 4) * stride, SHUFFLE(a[j], a[j + 4], 4, 5, 6, 7, 12, 13, 14, 15));
    }
}
#endif

/* K of `count` keys, turned round: to [KEYS / PANEL][size][PANEL], zeros beyond count. `line`: room for KEYS keys. */
static void turn_keys(const Attention *a, const int64_t *offsets, int64_t count, float *to, float *line) {
    const float *rows[KEYS];
    for (int64_t j = 0; j < KEYS; j++) {
        float *own = line + j * a->size;
        rows[j] = own;
        if (j >= count) memset(own, 0, a->size * sizeof(float));
        else if (a->is_bfloat16) widen(a, a->keys, offsets[j], own, a->size, 1.0f);
        else rows[j] = (const float *)a->keys + offsets[j];
    }
    for (int64_t p = 0; p < KEYS / PANEL; p++) {
        float *panel = to + p * a->size * PANEL;
        int64_t d = 0;
#if LANES == 8
        for (; d + 8 <= a->size; d += 8) {
            turn(rows + p * PANEL, d, panel + d * PANEL, PANEL);
            turn(rows + p * PANEL + 8, d, panel + d * PANEL + 8, PANEL);
        }
#endif
        for (; d < a->size; d++)
            for (int64_t j = 0; j < PANEL; j++) panel[d * PANEL + j] = rows[p * PANEL + j][d];
    }
}

static void many_rows(int64_t rows, const float *x, int64_t x_stride, const float *w, int64_t w_stride, int64_t depth,
                      float *y, int64_t y_stride) {
    const int64_t groups = (rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t r = rows * g / groups, end = rows * (g + 1) / groups;
        rows_of_floats(end - r, x + r * x_stride, x_stride, w, w_stride, depth, y + r * y_stride, y_stride);
    }
}

/* sums [queries][width] += weights [queries][KEYS] V of `count` keys; V is read in place where its rows are whole
 * panels of float32, and through `line` [KEYS][width] elsewhere. */
static void add_values(const Attention *a, const int64_t *offsets, int64_t start, int64_t count, int64_t queries,
                       const float *weights, float *sums, int64_t width, float *line) {
    const int64_t in_place = !a->is_bfloat16 && a->size == width;
    for (int64_t j = 0, next; j < count; j = next) {
        next = in_place ? j + a->block_size - (start + j) % a->block_size : count;
        if (next > count) next = count;
        const float *values = in_place ? (const float *)a->values + offsets[j] : line;
        const int64_t stride = in_place ? a->kv_heads * a->size : width;
        for (int64_t i = 0; i < count && !in_place; i++) {
            widen(a, a->values, offsets[i], line + i * width, a->size, 1.0f);
            memset(line + i * width + a->size, 0, (width - a->size) * sizeof(float));
        }
        for (int64_t d = 0; d < width; d += PANEL)
            many_rows(queries, weights + j, KEYS, values + d, stride, next - j, sums + d, width);
    }
}

static void cap(float *scores, int64_t count, float softcap) {
    for (int64_t i = 0; i < count; i++) scores[i] = softcap * tanhf(scores[i] / softcap);
}

/* Scores of one query to weights, in place: first .. end (relative to this stretch) are visible. Returns the factor
 * by which what was summed before shrinks. */
static float weigh(float *scores, int64_t first, int64_t end, float *largest, float *sum) {
    vec top = splat(-INFINITY), total = {};
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
        total += weight;
    }
    const float factor = *largest == -INFINITY ? 0.0f : expf(*largest - most);
    *largest = most;
    *sum = *sum * factor + add_lanes(total);
    return factor;
}

typedef struct {
    float *q, *sums, *largest, *total; /* [queries][size], [queries][width], [queries], [queries] of each KV head */
    float *scores, *keys, *line;       /* [queries][KEYS], [KEYS][size], [KEYS][width] of one at a time */
} Scratch;

static int64_t panels_wide(int64_t size) { return (size + PANEL - 1) / PANEL * PANEL; }

static Scratch scratch_of(const Attention *a, int64_t tokens, float *from) {
    const int64_t each = tokens * a->heads / a->kv_heads, all = tokens * a->heads, width = panels_wide(a->size);
    Scratch s = {.q = from};
    s.sums = s.q + all * a->size, s.largest = s.sums + all * width, s.total = s.largest + all;
    s.scores = s.total + all, s.keys = s.scores + each * KEYS, s.line = s.keys + KEYS * a->size;
    return s;
}

static int64_t scratch_floats(const Attention *a, int64_t tokens) {
    const int64_t width = panels_wide(a->size);
    return tokens * a->heads * (a->size + width + 2 + KEYS) + KEYS * (a->size + width);
}

/* One stretch of `count` keys from `start` on, for the queries of one KV head. */
static void stretch(const Attention *a, const Piece *piece, int64_t kv_head, const int32_t *table, int64_t start,
                    int64_t count, const Scratch *s) {
    const int64_t group = a->heads / a->kv_heads, queries = piece->tokens * group, size = a->size;
    const int64_t width = panels_wide(size), before = (kv_head * piece->tokens) * group;
    float *sums = s->sums + before * width;
    int64_t offsets[KEYS];
    places(a, table, kv_head, start, count, offsets);
    turn_keys(a, offsets, count, s->keys, s->line);
    memset(s->scores, 0, queries * KEYS * sizeof(float));
    for (int64_t p = 0; p < KEYS / PANEL; p++)
        many_rows(queries, s->q + before * size, size, s->keys + p * size * PANEL, PANEL, size, s->scores + p * PANEL, KEYS);
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

static void attend(const Attention *a, const Piece *piece, int64_t first_head, int64_t end_head, const Scratch *s) {
    const int64_t group = a->heads / a->kv_heads, queries = piece->tokens * group, size = a->size;
    const int64_t width = panels_wide(size);
    const int32_t *table = a->tables + piece->table;
    for (int64_t h = first_head; h < end_head; h++)
        for (int64_t i = 0; i < queries; i++) {
            const int64_t at = h * queries + i, token = piece->first + i / group, head = h * group + i % group;
            widen(a, a->query, token * a->query_stride + head * size, s->q + at * size, size, a->scale);
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
            narrow(a, s->sums + at * width, 1.0f / s->total[at], (token * a->heads + head) * size, size);
        }
}

int64_t queries_together(void) { return QUERIES; }

/* window: keys a token sees, itself included; 0: all. softcap: 0 for none. */
void paged_attention(const void *query, int64_t query_stride, const void *keys, const void *values, void *out, int64_t is_bfloat16,
                     int64_t heads, int64_t kv_heads, int64_t size, int64_t block_size, const int32_t *tables,
                     const int32_t *pieces, int64_t num_pieces, int64_t most_tokens, float scale, int64_t window,
                     float softcap) {
    const Attention a = {query, keys, values, out, tables, query_stride, is_bfloat16, heads, kv_heads, size, block_size, window, scale, softcap};
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
