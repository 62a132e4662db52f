/* The LoRA delta for rows of one token each, every row with its own adapter:
 *
 *     y[i] = gain[s] * y[i] + t[i] * (shift[s] + scale[s] * (x[i] A[s]^T) B[s])      with s = slots[i] >= 0
 *
 * x [rows, in] and y [rows, out] are float32 with the given row strides. Slot s of a module has A [rank, in] and
 * B [rank, out] (transposed, so that the expand runs along contiguous outputs), both row-major and of one type, and
 * perhaps float32 vectors gain and shift [out]; all are found through tables of addresses: an adapter is read where it
 * lies, at its true rank, and nothing is copied, padded or multiplied by zero. Rows never touch each other's memory.
 * (The gathered matrix-vector form, BGMV, of Punica: Chen et al., MLSys 2024.)
 */
#include <stdint.h>
#include <string.h>

#define MAX_RANK 1024

static inline float widen(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

#define AS_FLOAT32(v) (v)
#define DEFINE_ROW(NAME, TYPE, LOAD)                                                                   \
    static void NAME(const float *restrict x, float *restrict y, int64_t in, int64_t out,              \
                     const TYPE *restrict a, const TYPE *restrict b, int32_t rank, float scale) {      \
        float h[MAX_RANK];                                                                             \
        for (int32_t j = 0; j < rank; j++) {                                                           \
            const TYPE *row = a + (int64_t)j * in;                                                     \
            float sum = 0.0f;                                                                          \
            for (int64_t k = 0; k < in; k++) sum += x[k] * LOAD(row[k]);                               \
            h[j] = scale * sum;                                                                        \
        }                                                                                              \
        int32_t j = 0;                                                                                 \
        for (; j + 4 <= rank; j += 4) {                                                                \
            const TYPE *b0 = b + (int64_t)j * out, *b1 = b0 + out, *b2 = b1 + out, *b3 = b2 + out;     \
            const float h0 = h[j], h1 = h[j + 1], h2 = h[j + 2], h3 = h[j + 3];                        \
            for (int64_t o = 0; o < out; o++)                                                          \
                y[o] += h0 * LOAD(b0[o]) + h1 * LOAD(b1[o]) + h2 * LOAD(b2[o]) + h3 * LOAD(b3[o]);     \
        }                                                                                              \
        for (; j < rank; j++) {                                                                        \
            const TYPE *b0 = b + (int64_t)j * out;                                                     \
            for (int64_t o = 0; o < out; o++) y[o] += h[j] * LOAD(b0[o]);                              \
        }                                                                                              \
    }

DEFINE_ROW(row_float32, float, AS_FLOAT32)
DEFINE_ROW(row_bfloat16, uint16_t, widen)

static inline void rescale(float *restrict y, int64_t out, const float *gain, const float *shift, float t) {
    if (gain)
        for (int64_t o = 0; o < out; o++) y[o] *= gain[o];
    if (shift)
        for (int64_t o = 0; o < out; o++) y[o] += t * shift[o];
}

/* The tables are one module's, indexed by slot; an address of 0: the slot has no such thing for it.
 * scales: t of every row, or NULL where all are 1. */
void lora_add(const float *x, int64_t x_stride, float *y, int64_t y_stride, int64_t rows, int64_t in, int64_t out,
              const int32_t *slots, const float *scales, const int64_t *a, const int64_t *b, const int64_t *gain,
              const int64_t *shift, const int32_t *rank, const float *scale, const int32_t *is_bfloat16) {
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1)
    for (int64_t i = 0; i < rows; i++) {
        const int32_t s = slots[i];
        if (s < 0) continue;
        const float t = scales ? scales[i] : 1.0f;
        const float *xi = x + i * x_stride;
        float *yi = y + i * y_stride;
        rescale(yi, out, (const float *)gain[s], (const float *)shift[s], t);
        if (a[s] == 0) continue;
        if (is_bfloat16[s])
            row_bfloat16(xi, yi, in, out, (const uint16_t *)a[s], (const uint16_t *)b[s], rank[s], t * scale[s]);
        else
            row_float32(xi, yi, in, out, (const float *)a[s], (const float *)b[s], rank[s], t * scale[s]);
    }
}
