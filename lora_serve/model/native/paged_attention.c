/* Causal attention of ragged rows over a paged KV cache, read where it lies:
 *
 *     out[t] = sum over visible keys p of softmax(scale * q[t] . K[p]) V[p]
 *
 * One token (decode) or many (a chunk of a prompt) per row, any number of cached tokens before them. A thread takes
 * a few tokens of a row and walks over KEYS keys at a time, with all query heads that share a KV head, keeping the
 * running maximum and sum of the softmax (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, Dao et al., 2022).
 * Stretches of keys begin at multiples of KEYS, so a token's result is the same bits however its prompt was cut and
 * whoever stands beside it. K and V of the step are in the cache already. Masked keys weigh exactly zero.
 *
 * Both products are those of the variant (order.h). In bfloat16 their inputs are rounded once, as transformers has them:
 * queries before they are scaled, and weights, whose total is that of the rounded ones: what is left then is a true
 * mean of V, exact where the V that matter are equal.
 */
#include <math.h>
#include <stdlib.h>

#include "kv_codes.h"
#include "exponential.h"
#include "threads.h"

#define KEYS 32
#define QUERIES (MOST_ROWS > 24 ? MOST_ROWS : 24) /* that one thread takes at a time, unless a KV head has more */

typedef struct {
    const float *query;         /* [tokens], heads * size each, query_stride apart */
    const real *keys, *values;  /* pools [blocks][block_size][kv_heads][row] */
    real *out;
    const int32_t *tables; /* block numbers */
    int64_t query_stride, heads, kv_heads, size, block_size, window, chunk;
    float query_scale, score_scale, softcap;
    const float *sinks; /* [heads], or NULL */
    int64_t stored, row; /* see codes.h */
} Attention;

/* The first key that a token at this position sees. */
ALWAYS int64_t first_seen(const Attention *a, int64_t position) {
    const int64_t in_chunk = a->chunk > 0 ? position / a->chunk * a->chunk : 0;
    return a->window > 0 && position + 1 - a->window > in_chunk ? position + 1 - a->window : in_chunk;
}

typedef struct {
    int32_t first, tokens, context, table; /* of a row: packed token, how many, cached before them, offset in tables */
} Piece;

typedef struct {
    int64_t kv_head, start, count, offsets[KEYS]; /* `count` keys from `start` on; elements into the pools */
} Stretch;

static Stretch stretch_of(const Attention *a, const int32_t *table, int64_t kv_head, int64_t start, int64_t end) {
    Stretch s = {kv_head, start, least(KEYS, end - start)};
    int64_t block = start / a->block_size, inside = start % a->block_size;
    for (int64_t j = 0; j < s.count; block++, inside = 0)
        for (; inside < a->block_size && j < s.count; inside++, j++)
            s.offsets[j] = ((table[block] * a->block_size + inside) * a->kv_heads + kv_head) * a->row;
    return s;
}

typedef struct { /* K or V of the keys that come next, of all heads at hand, line by line in the order in which they lie */
    const real *pool;
    Stretch keys;
    int64_t lines, token, line; /* of a token; which come next */
    int64_t at_once;
} Ahead;

/* `walks` times `pieces` calls of ask_for ask for all of it. */
static Ahead ahead_of(const Attention *a, const real *pool, Stretch keys, int64_t heads, int64_t walks, int64_t pieces) {
    const int64_t lines = (heads * a->row * (int64_t)sizeof(real) + 63) / 64, calls = walks * pieces;
    return (Ahead){pool, keys, lines, 0, 0, (KEYS * lines + calls - 1) / calls};
}

/* The next lines. Where little is computed, a few at a time between: the processor has only so many on their way at once.
 * NULL: they were asked for. */
ALWAYS void ask_for(Ahead *next) {
    if (!next) return;
    int64_t token = next->token, line = next->line;
    for (int64_t i = 0; i < next->at_once && token < next->keys.count; i++) {
        __builtin_prefetch(next->pool + next->keys.offsets[token] + line * (64 / (int64_t)sizeof(real)), 0, 2);
        if (++line == next->lines) line = 0, token++;
    }
    next->token = token, next->line = line;
}

/* Numbers of a query or key, with the zeros after them that products ask for; those that are turned together; words of a
 * panel of keys. */
static int64_t depth_of(const Attention *a) { return up_to(a->size, a->stored && DEPTH_UNIT < 4 ? 4 : DEPTH_UNIT); }
static int64_t turned_of(const Attention *a) { return a->stored ? CODES_AT_ONCE : WORDS; }
static int64_t key_words(const Attention *a) { return up_to(depth_of(a), turned_of(a)) / WORDS * LANES * PANEL; }
/* Columns of sums. */
static int64_t width_of(const Attention *a) { return up_to(a->size, a->stored ? CODES_AT_ONCE : PANEL); }

/* K of a stretch in panels, zeros beyond count. `zeros`: `size` of them. */
static void turn_keys(const Attention *a, const Stretch *s, uint32_t *to, const real *zeros, Ahead *next, Ahead *also) {
    const real *rows[KEYS];
    for (int64_t j = 0; j < KEYS; j++) rows[j] = j < s->count ? a->keys + s->offsets[j] : zeros;
    for (int64_t p = 0; p < KEYS / LANES; p++) {
        uint32_t *panel = to + p / 2 * key_words(a) + p % 2 * LANES;
        for (int64_t d = 0; d < depth_of(a); d += WORDS, panel += LANES * PANEL) {
            turn_rows(rows + p * LANES, d, a->size, WORDS, panel);
            ask_for(next);
            ask_for(also);
        }
    }
}

/* V of a stretch in panels of pairs of keys, zeros beyond count; PANEL columns as load_pairs has them: those at even
 * places first. */
static void pair_values(const Attention *a, const Stretch *s, uint32_t *to, const real *zeros, Ahead *next) {
    real end[2][PANEL];
    for (int64_t j = 0; j < KEYS; j += 2, to += PANEL) {
        const real *rows[2];
        for (int64_t i = 0; i < 2; i++) rows[i] = j + i < s->count ? a->values + s->offsets[j + i] : zeros;
        for (int64_t d = 0; d < a->size; d += PANEL) {
            const real *pair[2] = {rows[0] + d, rows[1] + d};
            for (int64_t i = 0; d + PANEL > a->size && i < 2; i++)
                cut_out(rows[i], d, a->size, PANEL, end[i]), pair[i] = end[i];
            uint32_t *panel = to + d * (KEYS / 2);
            pair_columns(pair[0], pair[1], (bits *)panel, (bits *)(panel + LANES));
            ask_for(next);
        }
    }
}

/* Likewise of codes: keys in panels, and values in panels of pairs, CODES_AT_ONCE columns as widen has them. */
ALWAYS void turn_codes(const int stored, const Attention *a, const Stretch *s, uint32_t *to, const real *zeros,
                       Ahead *next, Ahead *also) {
    const real *rows[KEYS];
    uint32_t turned[LANES * PANEL];
    for (int64_t j = 0; j < KEYS; j++) rows[j] = j < s->count ? a->keys + s->offsets[j] : zeros;
    for (int64_t p = 0; p < KEYS / LANES; p++) {
        uint32_t *panel = to + p / 2 * key_words(a) + p % 2 * LANES;
        for (int64_t d = 0; d < code_reals(a->size); d += WORDS) {
            turn_rows(rows + p * LANES, d, code_reals(a->size), WORDS, turned);
            UNROLL for (int i = 0; i < LANES; i++, panel += VECTORS * PANEL)
                widen(stored, *(const bits *)(turned + i * PANEL), panel, PANEL);
            ask_for(next);
            ask_for(also);
        }
    }
}

ALWAYS void pair_codes(const int stored, const Attention *a, const Stretch *s, uint32_t *to, const real *zeros, Ahead *next) {
    real end[2][PANEL];
    for (int64_t j = 0; j < KEYS; j += 2, to += PANEL) {
        const real *rows[2];
        for (int64_t i = 0; i < 2; i++) rows[i] = j + i < s->count ? a->values + s->offsets[j + i] : zeros;
        for (int64_t d = 0; d < code_reals(a->size); d += PANEL) {
            const real *pair[2] = {rows[0] + d, rows[1] + d};
            for (int64_t i = 0; d + PANEL > code_reals(a->size) && i < 2; i++)
                cut_out(rows[i], d, code_reals(a->size), PANEL, end[i]), pair[i] = end[i];
            uint32_t *panel = to + 2 * d * (KEYS / 2);
            bits even, odd;
            pair_columns(pair[0], pair[1], &even, &odd);
            widen(stored, even, panel, LANES);
            widen(stored, odd, panel + KEYS / 2 * PANEL, LANES);
            ask_for(next);
        }
    }
}

/* A value's codes as floats, in columns as widen has them. */
ALWAYS void widen_row(const int stored, const real *codes, int64_t size, real *to) {
    for (int64_t d = 0; d < code_reals(size); d += LANES, to += CODES_AT_ONCE) {
        real words[LANES];
        cut_out(codes, d, code_reals(size), LANES, words);
        widen(stored, *(const bits *)words, (uint32_t *)to, LANES);
    }
}

typedef struct { /* of a stretch's keys: what scores, and weights, are multiplied by, and weights once more for their total */
    float key[KEYS], value[KEYS], again[KEYS];
} Scales;

/* Read well before they are used as vectors: what was just written in parts is waited for. */
static void read_scales(const Attention *a, const Stretch *s, Scales *to) {
    for (int64_t j = 0; j < s->count; j++) {
        const int64_t at = s->offsets[j] + code_reals(a->size);
        memcpy(to->key + j, a->keys + at, sizeof(float));
        memcpy(to->value + j, a->values + at, sizeof(float));
    }
    for (int64_t j = s->count; j < KEYS; j++) to->key[j] = to->value[j] = 0.0f;
}

static void end_scales(const Attention *a, Scales *scales) {
    for (int64_t j = 0; j < KEYS; j += LANES) {
        const vec value = load(scales->value + j);
        store(scales->key + j, load(scales->key + j) * splat(step_of_codes(a->stored)));
        store(scales->again + j, choose(value > (vec){}, splat(1.0f) / value, (vec){}));
    }
}

/* V of float32 is read in place where its rows are whole panels, and through `line` [KEYS][width] elsewhere. */
static void add_floats(const Attention *a, const Stretch *s, int64_t queries, const input *weights, float *sums,
                       int64_t width, real *line) {
    const int64_t in_place = a->size == width && !a->stored;
    for (int64_t i = 0; i < s->count && !in_place; i++)
        if (!a->stored) cut_out(a->values + s->offsets[i], 0, a->size, width, line + i * width);
        else if (a->stored == INT8) widen_row(INT8, a->values + s->offsets[i], a->size, line + i * width);
        else widen_row(FLOAT8, a->values + s->offsets[i], a->size, line + i * width);
    for (int64_t j = 0, next; j < s->count; j = next) {
        next = in_place ? least(s->count, j + a->block_size - (s->start + j) % a->block_size) : s->count;
        multiply_by(weights + j, KEYS, queries, in_place ? a->values + s->offsets[j] : line,
                    in_place ? a->kv_heads * a->size : width, PANEL, width / PANEL, next - j, NULL, sums, width);
    }
}

static void cap(float *scores, int64_t count, float scale, float softcap) {
    for (int64_t i = 0; i < count; i++) scores[i] = softcap * tanhf(scale * scores[i] / softcap);
}

/* Scores before `first` and from `end` on: -INFINITY. */
static void hide(float *scores, int64_t first, int64_t end) {
    static const int32_t numbers[KEYS] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                          16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
    const int32_t from = first > 0 ? first : 0, to = least(end, KEYS);
    for (int64_t j = 0; j < KEYS; j += LANES) {
        const ints number = *(const ints *)(numbers + j);
        store(scores + j, choose((number < from) | (number >= to), splat(-INFINITY), load(scores + j)));
    }
}

/* In every lane. */
ALWAYS vec largest_lane(vec v) {
#define EXCHANGE(step, firsts, seconds) v = larger(SHUFFLE(v, v, firsts), SHUFFLE(v, v, seconds));
    TURNS
#undef EXCHANGE
    return v;
}

/* By what sums shrink as the largest score grows. */
ALWAYS float shrunk(float before, float now) {
    if (before == now) return before == -INFINITY ? 0.0f : 1.0f;
    if (before == -INFINITY) return 0.0f;
    return IS_BFLOAT16 ? exponential(splat(before - now))[0] : expf(before - now);
}

/* A total of weights: of bfloat16 in SUM_LANES lanes up to the end, of float32 one number. */
#define TOTAL_LANES (IS_BFLOAT16 ? SUM_LANES : 1)

ALWAYS void add_total(float *total, float factor, sums weights) {
    if (!IS_BFLOAT16) *total = *total * factor + add_sums(weights);
    UNROLL for (int v = 0; v < SUM_VECTORS && IS_BFLOAT16; v++)
        store(total + v * LANES, load(total + v * LANES) * splat(factor) + weights.part[v]);
}

ALWAYS float whole_total(const float *total) {
    if (!IS_BFLOAT16) return *total;
    sums lanes;
    UNROLL for (int v = 0; v < SUM_VECTORS; v++) lanes.part[v] = load(total + v * LANES);
    return add_sums(lanes);
}

/* Scores of one query, to be scaled, to weights: first .. end (relative to this stretch) are visible. Returns the factor
 * by which what was summed before shrinks. `by`: of codes. */
ALWAYS float weigh(float *scores, float scale, int64_t first, int64_t end, real *weights, float *largest, float *total,
                   const Scales *by) {
    vec top = splat(-INFINITY);
    sums all = {};
    if (first > 0 || end < KEYS) hide(scores, first, end);
    UNROLL for (int64_t j = 0; j < KEYS; j += LANES) top = larger(load(scores + j), top);
    const vec shift = larger(splat(scale) * largest_lane(top), splat(*largest));
    UNROLL for (int64_t j = 0; j < KEYS; j += LANES) {
        const vec s = load(scores + j);
        vec weight = exponential(splat(scale) * s - shift);
        if (by) weight *= load(by->value + j);
        weight = round_real(weights + j, (vec)((ints)weight & (s != splat(-INFINITY))));
        if (by) weight *= load(by->again + j);
        all.part[j / LANES % SUM_VECTORS] += weight;
    }
    const float factor = shrunk(*largest, shift[0]);
    *largest = shift[0];
    add_total(total, factor, all);
    return factor;
}

typedef struct {
    input *q;                      /* [queries][depth] of each KV head */
    float *sums, *largest, *total; /* [queries][width], [queries], [queries][TOTAL_LANES] likewise */
    float *scores;                 /* [queries][KEYS] of one at a time */
    real *weights, *rounded;       /* likewise; a query */
    input *room;                   /* weights as products read them */
    uint32_t *keys;                /* panels of one at a time */
    void *values;                  /* likewise, or [KEYS][width] */
    real *zeros;                   /* [size] */
} Scratch;

static void *take(char *from, int64_t *used, int64_t bytes) {
    void *found = from ? from + *used : NULL;
    *used += up_to(bytes, 64);
    return found;
}

/* Returns the bytes that pieces of so many tokens need, `from` on. */
static int64_t lay_out(const Attention *a, int64_t tokens, char *from, Scratch *s) {
    const int64_t each = tokens * a->heads / a->kv_heads, all = tokens * a->heads, width = width_of(a);
    int64_t used = 0;
    s->q = take(from, &used, all * depth_of(a) * sizeof(input));
    s->sums = take(from, &used, all * width * sizeof(float));
    s->largest = take(from, &used, all * sizeof(float));
    s->total = take(from, &used, all * TOTAL_LANES * sizeof(float));
    s->scores = take(from, &used, each * KEYS * sizeof(float));
    s->weights = take(from, &used, each * KEYS * sizeof(real));
    s->rounded = take(from, &used, depth_of(a) * sizeof(real));
    s->room = take(from, &used, each * KEYS * sizeof(input));
    s->keys = take(from, &used, KEYS / PANEL * key_words(a) * 4);
    s->values = take(from, &used, KEYS * width * sizeof(real));
    s->zeros = take(from, &used, a->size * sizeof(real));
    if (from) memset(s->zeros, 0, a->size * sizeof(real));
    return used;
}

/* Scores to weights; sums so far shrink to them. */
ALWAYS void weigh_all(const Attention *a, const Piece *piece, const Stretch *own, const Scratch *s, const Scales *by) {
    const int64_t group = a->heads / a->kv_heads, queries = piece->tokens * group, width = width_of(a);
    for (int64_t i = 0; by && i < queries * KEYS; i += LANES)
        store(s->scores + i, load(s->scores + i) * load(by->key + i % KEYS));
    if (a->softcap > 0) cap(s->scores, queries * KEYS, a->score_scale, a->softcap);
    const float scale = a->softcap > 0 ? 1.0f : a->score_scale;
    for (int64_t i = 0; i < queries; i++) {
        const int64_t at = own->kv_head * queries + i;
        const int64_t position = piece->context + i / group, end = position + 1 - own->start;
        const int64_t first = first_seen(a, position) - own->start;
        float *sum = s->sums + at * width;
        if (end <= 0 || first >= KEYS) {
            memset(s->weights + i * KEYS, 0, KEYS * sizeof(real));
            continue;
        }
        const float factor = weigh(s->scores + i * KEYS, scale, first, end, s->weights + i * KEYS, s->largest + at,
                                   s->total + at * TOTAL_LANES, by);
        if (factor != 1.0f)
            for (int64_t d = 0; d < width; d++) sum[d] *= factor;
    }
}

/* One stretch of keys, for the queries of its KV head. */
static void walk(const Attention *a, const Piece *piece, const Stretch *own, Ahead *keys, Ahead *values, const Scratch *s) {
    static const float nothing[MOST_PANELS * PANEL];
    const int64_t queries = piece->tokens * a->heads / a->kv_heads, depth = depth_of(a), width = width_of(a);
    float *sums = s->sums + own->kv_head * queries * width;
    if (piece->tokens > 1) ask_for(keys), ask_for(values), keys = values = NULL;
    Ahead *also = IS_BFLOAT16 ? NULL : values;
    Scales scales;
    if (a->stored) read_scales(a, own, &scales);
    if (!a->stored) turn_keys(a, own, s->keys, s->zeros, keys, also);
    else if (a->stored == INT8) turn_codes(INT8, a, own, s->keys, s->zeros, keys, also);
    else turn_codes(FLOAT8, a, own, s->keys, s->zeros, keys, also);
    multiply_by(s->q + own->kv_head * queries * depth, depth, queries, s->keys, PANEL, key_words(a), KEYS / PANEL, depth,
                nothing, s->scores, KEYS);
    if (a->stored) end_scales(a, &scales), weigh_all(a, piece, own, s, &scales);
    else weigh_all(a, piece, own, s, NULL);
    int64_t stride = KEYS;
    const input *weights = prepared(s->weights, &stride, queries, KEYS, s->room);
    if (IS_BFLOAT16) {
        if (!a->stored) pair_values(a, own, s->values, s->zeros, values);
        else if (a->stored == INT8) pair_codes(INT8, a, own, s->values, s->zeros, values);
        else pair_codes(FLOAT8, a, own, s->values, s->zeros, values);
        multiply_by(weights, stride, queries, s->values, PANEL, KEYS / 2 * PANEL, width / PANEL, KEYS, NULL, sums, width);
    } else {
        add_floats(a, own, queries, weights, sums, width, s->values);
    }
}

static void begin_query(const Attention *a, const float *query, const Scratch *s, int64_t at) {
    const int64_t depth = depth_of(a), width = width_of(a);
    int64_t stride = depth;
    for (int64_t d = 0; d < depth; d++)
        s->rounded[a->stored ? place_in_pairs(d) : d] = d < a->size ? real_of(a->query_scale * query[d]) : 0;
    memcpy(s->q + at * depth, prepared(s->rounded, &stride, 1, depth, s->q + at * depth), depth * sizeof(input));
    memset(s->sums + at * width, 0, width * sizeof(float));
    memset(s->total + at * TOTAL_LANES, 0, TOTAL_LANES * sizeof(float));
    s->largest[at] = -INFINITY;
}

static void end_query(const float *sums, float factor, int64_t size, real *out) {
    for (int64_t d = 0; d < size; d += PANEL) {
        /* -0 becomes 0, as it does where a token beside this one sees a further stretch. */
        const vec first = load(sums + d) * splat(factor) + (vec){};
        const vec second = load(sums + d + LANES) * splat(factor) + (vec){};
        ZIP(first, second, low, high); /* as pair_values has them */
        real both[PANEL];
        store_real(both, IS_BFLOAT16 ? low : first);
        store_real(both + LANES, IS_BFLOAT16 ? high : second);
        memcpy(out + d, both, least(PANEL, size - d) * sizeof(real));
    }
}

/* Of codes: a vector of every fourth column after the other. */
static void end_codes(const float *sums, float factor, int64_t size, real *out) {
    for (int64_t d = 0; d < size; d += CODES_AT_ONCE) {
        vec own[4];
        real all[CODES_AT_ONCE];
        UNROLL for (int i = 0; i < 4; i++) own[i] = load(sums + d + i * LANES) * splat(factor) + (vec){};
        ZIP(own[0], own[2], low_evens, high_evens);
        ZIP(own[1], own[3], low_odds, high_odds);
        ZIP(low_evens, low_odds, first, second);
        ZIP(high_evens, high_odds, third, fourth);
        store_real(all, first), store_real(all + LANES, second);
        store_real(all + 2 * LANES, third), store_real(all + 3 * LANES, fourth);
        memcpy(out + d, all, least(CODES_AT_ONCE, size - d) * sizeof(real));
    }
}

static void attend(const Attention *a, const Piece *piece, int64_t first_head, int64_t end_head, const Scratch *s) {
    const int64_t group = a->heads / a->kv_heads, queries = piece->tokens * group, size = a->size;
    const int64_t width = width_of(a), turned = turned_of(a);
    const int32_t *table = a->tables + piece->table;
    for (int64_t h = first_head; h < end_head; h++)
        for (int64_t i = 0; i < queries; i++)
            begin_query(a, a->query + (piece->first + i / group) * a->query_stride + (h * group + i % group) * size, s,
                        h * queries + i);
    const int64_t end = piece->context + piece->tokens;
    const int64_t begin = first_seen(a, piece->context);
    const int64_t heads = end_head - first_head, is_one = piece->tokens == 1;
    const int64_t tiles = is_one ? KEYS / LANES * up_to(depth_of(a), turned) / turned : 1;
    const int64_t pairs = is_one && IS_BFLOAT16 ? KEYS / 2 * width / (a->stored ? CODES_AT_ONCE : PANEL) : tiles;
    Stretch own = stretch_of(a, table, first_head, begin / KEYS * KEYS, end);
    Ahead keys = ahead_of(a, a->keys, own, heads, 1, 1), values = ahead_of(a, a->values, own, heads, 1, 1);
    if (is_one) ask_for(&keys), ask_for(&values);
    for (int64_t start = begin / KEYS * KEYS; start < end; start += KEYS) {
        const Stretch next = stretch_of(a, table, first_head, start + KEYS, end);
        keys = ahead_of(a, a->keys, next, heads, heads, tiles);
        values = ahead_of(a, a->values, next, heads, heads, pairs);
        for (; own.kv_head < end_head; own.kv_head++) {
            walk(a, piece, &own, &keys, &values, s);
            for (int64_t j = 0; j < KEYS; j++) own.offsets[j] += a->row;
        }
        own = next;
    }
    for (int64_t h = first_head; h < end_head; h++)
        for (int64_t i = 0; i < queries; i++) {
            const int64_t at = h * queries + i, token = piece->first + i / group, head = h * group + i % group;
            float total = whole_total(s->total + at * TOTAL_LANES);
            if (a->sinks) total += expf(a->sinks[head] - s->largest[at]);
            real *out = a->out + (token * a->heads + head) * size;
            if (a->stored) end_codes(s->sums + at * width, step_of_codes(a->stored) / total, size, out);
            else end_query(s->sums + at * width, 1.0f / total, size, out);
        }
}

int64_t queries_together(void) { return QUERIES; }

/* window: keys a token sees, itself included; 0: all. chunk: it sees none before the last multiple of that; 0: all.
 * softcap: 0 for none. sinks: scores of one more key of each head, which has no value; NULL for none. stored: PLAIN,
 * INT8 or FLOAT8. */
void paged_attention(const float *query, int64_t query_stride, const real *keys, const real *values, real *out,
                     int64_t heads, int64_t kv_heads, int64_t size, int64_t block_size, const int32_t *tables,
                     const int32_t *pieces, int64_t num_pieces, int64_t most_tokens, float scale, int64_t window,
                     int64_t chunk, float softcap, const float *sinks, int64_t stored) {
    Attention a = {query, keys, values, out, tables, query_stride, heads, kv_heads, size, block_size, window, chunk, scale,
                   1.0f, softcap, sinks, stored, row_reals(stored, size)};
    if (IS_BFLOAT16) a.query_scale = 1.0f, a.score_scale = scale;
    const int64_t enough = 2 * omp_get_max_threads();
    const int64_t parts = num_pieces >= enough ? 1 : kv_heads < enough ? kv_heads : enough; /* of the KV heads */
#pragma omp parallel
    {
        Scratch scratch;
        char *room = aligned_alloc(64, lay_out(&a, most_tokens, NULL, &scratch));
        lay_out(&a, most_tokens, room, &scratch);
        const uint64_t before = begin_products();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_pieces * parts; i++) {
            const int64_t part = i % parts;
            attend(&a, (const Piece *)pieces + i / parts, kv_heads * part / parts, kv_heads * (part + 1) / parts, &scratch);
        }
        end_products(before);
        free(room);
    }
}
