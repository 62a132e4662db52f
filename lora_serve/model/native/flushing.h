/* Denormal numbers as 0, going into float32 arithmetic and coming out, as the bfloat16 instructions have them: a mode of
 * the thread, for the time of a product. */
#ifndef FLUSHING_H
#define FLUSHING_H

#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
static inline uint64_t flush_denormals(void) {
    const uint64_t before = _mm_getcsr();
    _mm_setcsr((uint32_t)before | 0x8040u); /* FTZ, DAZ */
    return before;
}
static inline void restore_denormals(uint64_t before) {
    const uint32_t raised = _mm_getcsr() & 0x3fu;
    _mm_setcsr((uint32_t)before | raised);
}
#elif defined(__aarch64__)
static inline uint64_t flush_denormals(void) {
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" ::"r"(before | UINT64_C(1) << 24) : "memory"); /* FZ */
    return before;
}
static inline void restore_denormals(uint64_t before) { __asm__ volatile("msr fpcr, %0" ::"r"(before) : "memory"); }
#else
static inline uint64_t flush_denormals(void) { return 0; } /* denormal numbers are kept here */
static inline void restore_denormals(uint64_t before) { (void)before; }
#endif

#endif
