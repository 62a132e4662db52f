/* The calls that gcc makes of `#pragma omp`, for a process without an OpenMP runtime: everything on one thread.
 *
 * The kernels are linked with no runtime, as a second one would fight torch's own for the cores. Weak, and looked up
 * after the libraries that are loaded globally: where torch's runtime is loaded, its functions serve (library.py).
 */
#ifndef ONE_THREAD_H
#define ONE_THREAD_H

#include <stdbool.h>
#include <stdint.h>

#include "threads.h"

#if defined(_OPENMP) && !defined(__clang__)
#define WEAK __attribute__((weak, visibility("default")))

WEAK int omp_get_thread_num(void) { return 0; }
WEAK int omp_get_num_threads(void) { return 1; }
WEAK int omp_get_max_threads(void) { return 1; }
WEAK void GOMP_barrier(void) {}
WEAK void GOMP_loop_end(void) {}
WEAK void GOMP_loop_end_nowait(void) {}

WEAK void GOMP_parallel(void (*run)(void *), void *data, unsigned threads, unsigned flags) {
    (void)threads, (void)flags;
    run(data);
}

WEAK bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long *first, long *last) {
    (void)step, (void)chunk;
    *first = start, *last = end;
    return start < end;
}

WEAK bool GOMP_loop_nonmonotonic_dynamic_next(long *first, long *last) {
    (void)first, (void)last;
    return false;
}
#endif

int64_t num_threads(void) { return omp_get_max_threads(); }

#endif
