/* `real`: the type in which activations, K and V lie in memory, chosen when a variant is compiled: float, or bfloat16.
 *
 * Arithmetic is float32's in both. Rounding to bfloat16 is torch's: to the nearest, ties to even; denormal numbers are
 * kept (vcvtneps2bf16 would make them 0), NaN stays NaN. A variant of float32 rounds nothing.
 */
#ifndef REAL_H
#define REAL_H

#include "vectors.h"

/* PANEL bfloat16 numbers as those at even and those at odd places: two operations, where widening in order takes four. */
ALWAYS void load_pairs(const uint16_t *p, vec *even, vec *odd) {
    const bits pair = *(const bits *)p;
    *even = (vec)(pair << 16);
    *odd = (vec)(pair & 0xffff0000u);
}

ALWAYS vec load_bfloat16(const uint16_t *p) { return (vec)(__builtin_convertvector(*(const halves *)p, bits) << 16); }

ALWAYS void store_bfloat16(uint16_t *p, vec v) {
    const bits raw = (bits)v, rounded = raw + 0x7fffu + ((raw >> 16) & 1u);
    const bits is_nan = (bits)(v != v), kept = (is_nan & (raw | 0x400000u)) | (~is_nan & rounded);
    *(halves *)p = __builtin_convertvector(kept >> 16, halves);
}

ALWAYS float float_of_bfloat16(uint16_t x) {
    const uint32_t raw = (uint32_t)x << 16;
    float found;
    memcpy(&found, &raw, sizeof found);
    return found;
}

ALWAYS uint16_t bfloat16_of(float x) {
    uint32_t raw;
    memcpy(&raw, &x, sizeof raw);
    return (uint16_t)((x != x ? raw | 0x400000u : raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16);
}

#ifdef REAL_IS_BFLOAT16
typedef uint16_t real;
ALWAYS vec load_real(const real *p) { return load_bfloat16(p); }
ALWAYS void store_real(real *p, vec v) { store_bfloat16(p, v); }
/* Stored and returned as it was stored, for numbers or NaN that came out of arithmetic on bfloat16: such a NaN has no
 * bits in its lower half, which rounding might carry into a number. */
ALWAYS vec round_real(real *p, vec v) {
    const bits rounded = (bits)v + 0x7fffu + (((bits)v >> 16) & 1u);
    *(halves *)p = __builtin_convertvector(rounded >> 16, halves);
    return (vec)(rounded & 0xffff0000u);
}
ALWAYS float float_of(real x) { return float_of_bfloat16(x); }
ALWAYS real real_of(float x) { return bfloat16_of(x); }
#else
typedef float real;
ALWAYS vec load_real(const real *p) { return load(p); }
ALWAYS void store_real(real *p, vec v) { store(p, v); }
ALWAYS vec round_real(real *p, vec v) { return store(p, v), v; }
ALWAYS float float_of(real x) { return x; }
ALWAYS real real_of(float x) { return x; }
#endif

ALWAYS void round_row(const float *x, int64_t size, real *to) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store_real(to + i, load(x + i));
    for (; i < size; i++) to[i] = real_of(x[i]);
}

#endif
