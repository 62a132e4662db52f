/* What stands between the products of a decoder layer, each in one pass over its floats:
 *
 *     rms_norm      y = x / sqrt(mean(x^2) + epsilon) * (weight + offset)                (arXiv 1910.07467)
 *     gated         y = act(gate) * up            act: silu, or gelu by tanh             (arXiv 2002.05202)
 *     rotate_store  q, k = rotated by their positions (arXiv 2104.09864); k and v also into their places of the KV cache
 *
 * All float32; strides in floats; every row by itself.
 */
#include <math.h>

#include "exponential.h"
#include "tile.h"

#define WORTH_A_TEAM 32768 /* floats; fewer are done before a second thread wakes */

void rms_norm(const float *x, int64_t x_stride, int64_t rows, int64_t size, const float *weight, float offset,
              float epsilon, float *y) {
#pragma omp parallel for if (rows * size > WORTH_A_TEAM)
    for (int64_t r = 0; r < rows; r++) {
        const float *from = x + r * x_stride;
        float *to = y + r * size;
        vec squares = {};
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) squares += load(from + i) * load(from + i);
        float sum = add_lanes(squares);
        for (; i < size; i++) sum += from[i] * from[i];
        const float factor = 1.0f / sqrtf(sum / size + epsilon);
        for (i = 0; i < size; i++) to[i] = from[i] * factor * (weight[i] + offset);
    }
}

/* 1 / (1 + e^-x), from e^-|x| so that nothing overflows. */
ALWAYS vec sigmoid(vec x) {
    const ints is_negative = x < (vec){};
    const vec e = exponential(choose(is_negative, x, -x));
    return choose(is_negative, e, splat(1.0f)) / (splat(1.0f) + e);
}

enum { SILU, GELU_TANH };

ALWAYS vec activated(const int kind, vec x) {
    if (kind == SILU) return x * sigmoid(x);
    return x * sigmoid(splat(2.0f * 0.79788456f) * (x + splat(0.044715f) * x * x * x)); /* (1 + tanh u) / 2 = sigmoid(2 u) */
}

ALWAYS void gate_row(const int kind, const float *gate, const float *up, int64_t size, float *y) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(y + i, activated(kind, load(gate + i)) * load(up + i));
    if (i == size) return;
    float tail[2][LANES] = {{0.0f}};
    memcpy(tail[0], gate + i, (size - i) * sizeof(float));
    memcpy(tail[1], up + i, (size - i) * sizeof(float));
    store(tail[0], activated(kind, load(tail[0])) * load(tail[1]));
    memcpy(y + i, tail[0], (size - i) * sizeof(float));
}

void gated(const float *gate, const float *up, int64_t stride, int64_t rows, int64_t size, int64_t kind, float *y) {
#pragma omp parallel for if (rows * size > WORTH_A_TEAM / 4)
    for (int64_t r = 0; r < rows; r++)
        if (kind == SILU) gate_row(SILU, gate + r * stride, up + r * stride, size, y + r * size);
        else gate_row(GELU_TANH, gate + r * stride, up + r * stride, size, y + r * size);
}

/* to[i] = x[i] cos[i] - x[i + half] sin[i], to[i + half] = x[i + half] cos[i + half] + x[i] sin[i + half], i < half */
static void rotate(const float *x, const float *cos, const float *sin, int64_t half, int64_t size, float *to) {
    for (int64_t i = 0; i < half; i++) {
        const float first = x[i], second = x[i + half];
        to[i] = first * cos[i] - second * sin[i];
        to[i + half] = second * cos[i + half] + first * sin[i + half];
    }
    if (to != x)
        for (int64_t i = 2 * half; i < size; i++) to[i] = x[i];
}

/* q, k, v: [tokens][heads or kv_heads][size], rows so many floats apart; cos, sin: [tokens][rotated];
 * places: of every token in the pools [...][kv_heads][size]. q is rotated in place. */
void rotate_store(float *q, int64_t q_stride, const float *k, int64_t k_stride, const float *v, int64_t v_stride,
                  int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size, const float *cos, const float *sin,
                  int64_t rotated, const int64_t *places, float *key_pool, float *value_pool) {
#pragma omp parallel for if (tokens * heads * size > WORTH_A_TEAM)
    for (int64_t t = 0; t < tokens; t++) {
        const float *c = cos + t * rotated, *s = sin + t * rotated;
        const int64_t place = places[t] * kv_heads * size;
        for (int64_t h = 0; h < heads; h++) {
            float *own = q + t * q_stride + h * size;
            rotate(own, c, s, rotated / 2, size, own);
        }
        for (int64_t h = 0; h < kv_heads; h++)
            rotate(k + t * k_stride + h * size, c, s, rotated / 2, size, key_pool + place + h * size);
        memcpy(value_pool + place, v + t * v_stride, kv_heads * size * sizeof(float));
    }
}
