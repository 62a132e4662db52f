/* What stands between the products of a decoder layer, each in one pass over its numbers:
 *
 *     rms_norm      y = x / sqrt(mean(x^2) + epsilon) * (weight + offset)                (arXiv 1910.07467)
 *     gated         y = act(gate) * up            act: silu, or gelu by tanh             (arXiv 2002.05202)
 *     rotate_store  q, k = rotated by their positions (arXiv 2104.09864); k and v also into their places of the KV cache
 *
 * Inputs of products and the KV cache are `real`, outputs of products float sums; arithmetic is float32's, every row by
 * itself. Strides in elements.
 */
#include <math.h>

#include "kv_codes.h"
#include "exponential.h"

#define WORTH_A_TEAM 32768 /* numbers; fewer are done before a second thread wakes */

enum { SUMS, REALS }; /* what a pointer points at: float, or real */

ALWAYS vec load_as(const int type, const void *p, int64_t i) {
    return type == SUMS ? load((const float *)p + i) : load_real((const real *)p + i);
}
ALWAYS void store_as(const int type, void *p, int64_t i, vec v) {
    if (type == SUMS) store((float *)p + i, v);
    else store_real((real *)p + i, v);
}
ALWAYS float load_one_as(const int type, const void *p, int64_t i) {
    return type == SUMS ? ((const float *)p)[i] : float_of(((const real *)p)[i]);
}
ALWAYS void store_one_as(const int type, void *p, int64_t i, float value) {
    if (type == SUMS) ((float *)p)[i] = value;
    else ((real *)p)[i] = real_of(value);
}

ALWAYS void norm_row(const int type, const void *x, int64_t size, const float *weight, float offset, float epsilon, void *y) {
    sums squares = {};
    int64_t i = 0;
    for (; i + SUM_LANES <= size; i += SUM_LANES)
        UNROLL for (int v = 0; v < SUM_VECTORS; v++) {
            const vec own = load_as(type, x, i + v * LANES);
            squares.part[v] += own * own;
        }
    float sum = add_sums(squares);
    for (; i < size; i++) sum += load_one_as(type, x, i) * load_one_as(type, x, i);
    const float factor = 1.0f / sqrtf(sum / size + epsilon);
    for (i = 0; i + LANES <= size; i += LANES)
        store_as(type, y, i, load_as(type, x, i) * splat(factor) * (load(weight + i) + splat(offset)));
    for (; i < size; i++) store_one_as(type, y, i, load_one_as(type, x, i) * factor * (weight[i] + offset));
}

/* type: of x and of y, which may be one. */
void rms_norm(const void *x, int64_t x_stride, int64_t rows, int64_t size, const float *weight, float offset,
              float epsilon, int64_t type, void *y) {
#pragma omp parallel for if (rows * size > WORTH_A_TEAM)
    for (int64_t r = 0; r < rows; r++)
        if (type == SUMS)
            norm_row(SUMS, (const float *)x + r * x_stride, size, weight, offset, epsilon, (float *)y + r * size);
        else norm_row(REALS, (const real *)x + r * x_stride, size, weight, offset, epsilon, (real *)y + r * size);
}

/* 1 / (1 + e^-x), from e^-|x| so that nothing overflows. */
ALWAYS vec sigmoid(vec x) {
    const ints is_negative = x < (vec){};
    const vec e = exponential(choose(is_negative, x, -x));
    return choose(is_negative, e, splat(1.0f)) / (splat(1.0f) + e);
}

enum { SILU, GELU_TANH, CLAMPED };

typedef struct { /* of CLAMPED, as gpt-oss has it: g = min(gate, limit); (clamp(up, limit) + offset) * g * sigmoid(alpha * g) */
    float alpha, limit, offset;
} Clamps;

ALWAYS vec at_most(vec x, vec limit) { return choose(x > limit, limit, x); } /* NaN stays NaN */

ALWAYS vec gated_vector(const int kind, vec gate, vec up, const Clamps *c) {
    if (kind == SILU) return gate * sigmoid(gate) * up;
    if (kind == GELU_TANH) /* (1 + tanh u) / 2 = sigmoid(2 u) */
        return gate * sigmoid(splat(2.0f * 0.79788456f) * (gate + splat(0.044715f) * gate * gate * gate)) * up;
    const vec limit = splat(c->limit), low = at_most(gate, limit);
    return (-at_most(-at_most(up, limit), limit) + splat(c->offset)) * (low * sigmoid(splat(c->alpha) * low));
}

ALWAYS void gate_row(const int kind, const float *gate, const float *up, int64_t size, const Clamps *c, real *y) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store_real(y + i, gated_vector(kind, load(gate + i), load(up + i), c));
    if (i == size) return;
    float tail[2][LANES] = {{0.0f}};
    real done[LANES];
    memcpy(tail[0], gate + i, (size - i) * sizeof(float));
    memcpy(tail[1], up + i, (size - i) * sizeof(float));
    store_real(done, gated_vector(kind, load(tail[0]), load(tail[1]), c));
    memcpy(y + i, done, (size - i) * sizeof(real));
}

static void gate_one(int64_t kind, const float *gate, const float *up, int64_t size, const Clamps *c, real *y) {
    if (kind == SILU) gate_row(SILU, gate, up, size, c, y);
    else if (kind == GELU_TANH) gate_row(GELU_TANH, gate, up, size, c, y);
    else gate_row(CLAMPED, gate, up, size, c, y);
}

void gated(const float *gate, const float *up, int64_t stride, int64_t rows, int64_t size, int64_t kind, Clamps c,
           real *y) {
#pragma omp parallel for if (rows * size > WORTH_A_TEAM / 4)
    for (int64_t r = 0; r < rows; r++) gate_one(kind, gate + r * stride, up + r * stride, size, &c, y + r * size);
}

/* x[i], x[i + half] = x[i] cos[i] - x[i + half] sin[i], x[i + half] cos[i + half] + x[i] sin[i + half], i < half */
static void rotate(float *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float first = x[i], second = x[i + half];
        x[i] = first * cos[i] - second * sin[i];
        x[i + half] = second * cos[i + half] + first * sin[i + half];
    }
}

/* q, k, v: [tokens][heads or kv_heads][size], rows so many floats apart; cos, sin: [tokens][rotated];
 * places: of every token in the pools [...][kv_heads][row_reals], stored as codes.h says. q and k are rotated in place. */
void rotate_store(float *q, int64_t q_stride, float *k, int64_t k_stride, const float *v, int64_t v_stride,
                  int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size, const float *cos, const float *sin,
                  int64_t rotated, const int64_t *places, int64_t stored, real *key_pool, real *value_pool) {
#pragma omp parallel for if (tokens * heads * size > WORTH_A_TEAM)
    for (int64_t t = 0; t < tokens; t++) {
        const float *c = cos + t * rotated, *s = sin + t * rotated;
        const int64_t place = places[t] * kv_heads * row_reals(stored, size);
        for (int64_t h = 0; h < heads; h++) rotate(q + t * q_stride + h * size, c, s, rotated / 2);
        for (int64_t h = 0; h < kv_heads; h++) rotate(k + t * k_stride + h * size, c, s, rotated / 2);
        store_rows(stored, k + t * k_stride, kv_heads, size, key_pool + place);
        store_rows(stored, v + t * v_stride, kv_heads, size, value_pool + place);
    }
}

/* Pairs of neighbours, to halves: y[i], y[i + half] = x[2 i] cos[i] - x[2 i + 1] sin[i], x[2 i + 1] cos[i] + x[2 i] sin[i] */
static void rotate_pairs(const float *x, const float *cos, const float *sin, int64_t half, float *y) {
    for (int64_t i = 0; i < half; i++) {
        const float first = x[2 * i], second = x[2 * i + 1];
        y[i] = first * cos[i] - second * sin[i];
        y[i + half] = second * cos[i] + first * sin[i];
    }
}

#define MOST_ROTATED 512

/* The last `rotated` numbers of a head, by neighbours or by halves. */
static void rotate_end(float *x, const float *cos, const float *sin, int64_t rotated, int64_t by_pairs) {
    float own[MOST_ROTATED];
    if (!by_pairs) rotate(x, cos, sin, rotated / 2);
    else memcpy(own, x, rotated * sizeof(float)), rotate_pairs(own, cos, sin, rotated / 2, x);
}

/* Latent attention (arXiv 2405.04434): q [tokens][heads][own + rotated], each head's end rotated in place; kv
 * [tokens][heads][own + value], what every head has of its own; shared [tokens][rotated], the keys' end, which all heads
 * share. Keys, and values with zeros behind them, go to the pools [...][heads], as rows of own + rotated numbers. */
void latent_store(float *q, int64_t q_stride, const float *kv, int64_t kv_stride, float *shared, int64_t shared_stride,
                  int64_t tokens, int64_t heads, int64_t own, int64_t rotated, int64_t value, const float *cos,
                  const float *sin, int64_t by_pairs, const int64_t *places, int64_t stored, real *key_pool,
                  real *value_pool) {
    const int64_t size = own + rotated, row = row_reals(stored, size);
#pragma omp parallel for if (tokens * heads * size > WORTH_A_TEAM)
    for (int64_t t = 0; t < tokens; t++) {
        const float *c = cos + t * rotated, *s = sin + t * rotated;
        float *end = shared + t * shared_stride, key[size], own_value[size];
        const int64_t place = places[t] * heads * row;
        rotate_end(end, c, s, rotated, by_pairs);
        memcpy(key + own, end, rotated * sizeof(float));
        memset(own_value + value, 0, (size - value) * sizeof(float));
        for (int64_t h = 0; h < heads; h++) {
            const float *from = kv + t * kv_stride + h * (own + value);
            rotate_end(q + t * q_stride + h * size + own, c, s, rotated, by_pairs);
            memcpy(key, from, own * sizeof(float));
            memcpy(own_value, from + own, value * sizeof(float));
            store_rows(stored, key, 1, size, key_pool + place + h * row);
            store_rows(stored, own_value, 1, size, value_pool + place + h * row);
        }
    }
}

/* h += y, y rounded first: the sum's bits are those of adding a layer's stored output, as `h + layer(x)` does. */
void add_to(real *h, const float *y, int64_t count) {
    const int64_t whole = count / LANES * LANES;
#pragma omp parallel for if (count > WORTH_A_TEAM)
    for (int64_t i = 0; i < whole; i += LANES) {
        real stored[LANES];
        store_real(stored, load(y + i));
        store_real(h + i, load_real(h + i) + load_real(stored));
    }
    for (int64_t i = whole; i < count; i++) h[i] = real_of(float_of(h[i]) + float_of(real_of(y[i])));
}
